package debugfs

import "github.com/gpreempt/gpreempt/pkg/gpreempt"

// RunlistDump is what rls holds.
type RunlistDump struct {
	Runlists []Runlist
	Warnings []Warning
}

// Runlist is what the driver last handed to the scheduler firmware of one GPU
// node. Under MES there is never one.
type Runlist struct {
	// Node is the topology node number; CPU nodes count too.
	Node int
	GPU  gpreempt.GPUID
	// Line is where the node begins.
	Line int
	// Active tells that there is a runlist.
	Active bool
	// Words are the packets, and zeros behind them: shared, not to be changed. Packets
	// splits them.
	Words []uint32
}

// ParseRunlists reads rls (kfd_debugfs_rls_by_device, pm_debugfs_runlist) of
// kernels 6.1 to 7.2 and of AMD's own driver. The error is a
// *discovery.ParseError. A text that ends early gives the runlists that are
// complete, as far as that can be told, with a warning; so does a line that is in
// no kernel known to us.
func ParseRunlists(b []byte) (RunlistDump, error) {
	p := rlsParser{lines: lines{rest: b}, words: make([]uint32, 0, len(b)/10)}
	if err := p.run(); err != nil {
		return RunlistDump{}, err
	}
	return RunlistDump{Runlists: p.runlists, Warnings: p.all(p.line)}, nil
}

type rlsParser struct {
	lines
	warnings
	words    []uint32
	runlists []Runlist
	// firstWord is where the words of the last runlist begin, last the number of words
	// in its last row.
	firstWord, last int
}

// rlsIndent is how far rows are indented.
const rlsIndent = 2

func (p *rlsParser) run() error {
	if err := p.each(p.read, p.torn); err != nil {
		return err
	}
	p.endRunlist()
	return nil
}

// torn reads a last line that was cut, if it is whole by its length.
func (p *rlsParser) torn(line []byte) error {
	if len(line) != fullRow(rlsIndent) || !isRow(line, rlsIndent) {
		p.skipped(p.line, "the text ends within a line, which is passed over", line)
		return nil
	}
	return p.read(line)
}

func (p *rlsParser) read(line []byte) error {
	if indented(line, rlsIndent) {
		offset, words, ok := row(line, rlsIndent, p.words)
		if ok {
			return p.row(offset, words)
		}
		if isRow(line, rlsIndent) {
			return badRow(p.line, line, rlsIndent)
		}
	}
	s := scan{line: line}
	switch {
	case s.has("Node "):
		node := s.decimal()
		s.text(", gpu_id ")
		gpu := s.hex()
		s.text(":")
		if err := s.end(p.line); err != nil {
			return err
		}
		p.endRunlist()
		p.runlists = append(p.runlists, Runlist{Node: node, GPU: gpreempt.GPUID(gpu), Line: p.line})
		p.last = rowWords
	case string(line) == "  No active runlist":
		if len(p.runlists) == 0 {
			return malformed(p.line, 1, "a runlist before any node")
		}
		if len(p.words) > p.firstWord {
			return malformed(p.line, rlsIndent+1, "want more of the runlist, or another node")
		}
	default:
		p.skipped(p.line, "the line is passed over", line)
	}
	return nil
}

func (p *rlsParser) row(offset uint32, words []uint32) error {
	if len(p.runlists) == 0 {
		return malformed(p.line, 1, "a runlist before any node")
	}
	if p.last != rowWords {
		return malformed(p.line, rlsIndent+1, "want another node: the row above ended the runlist")
	}
	if want := 4 * (len(p.words) - p.firstWord); int64(offset) != int64(want) {
		return malformed(p.line, rlsIndent+1, "want offset "+hex8(uint32(want)))
	}
	p.last = len(words) - len(p.words)
	p.words = words
	return nil
}

func (p *rlsParser) endRunlist() {
	if len(p.runlists) == 0 {
		return
	}
	r := &p.runlists[len(p.runlists)-1]
	if n := len(p.words); n > p.firstWord {
		r.Active, r.Words = true, p.words[p.firstWord:n:n]
		p.firstWord = n
	}
}
