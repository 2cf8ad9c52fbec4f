package debugfs

import (
	"strconv"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Kind is the kind of queue of an MQD.
type Kind uint8

// The kinds.
const (
	KindCompute Kind = iota
	// KindSDMA includes SDMA over xGMI: the text does not distinguish them.
	KindSDMA
	// KindDIQ is the driver's queue for debugging, up to 6.12. It does not belong to the
	// process.
	KindDIQ
)

// String returns the name in the output.
func (k Kind) String() string { return gpreempt.Word(k, "kind", "compute", "sdma", "diq") }

// MQDDump is the content of mqds.
type MQDDump struct {
	Processes []MQDProcess
	Warnings  []Warning
}

// MQDProcess is one block of mqds. A pid may occur more than once: kernels from 7.x print
// each secondary context of a process as a process.
type MQDProcess struct {
	// PID is in the first pid namespace of the host; 0 is unknown: the text begins after its line.
	PID int32
	// PASID is one up to 6.12. Later kernels print the pid in its place, so it is
	// good for nothing but looking at.
	PASID uint32
	// Line is where the block begins.
	Line int
	// Queues are newest first, as the driver lists them.
	Queues []MQD
}

// MQD is the memory image of one queue. The text has no queue id.
type MQD struct {
	Kind Kind
	GPU  gpreempt.GPUID
	// Line is where the queue begins.
	Line int
	// XCCs are the dumps, one or more for the XCCs of a compute queue and one for others, and none
	// where the text lacks a part of the first. The only dump of a compute queue may end after the
	// registers, where the text ends.
	// Their words are shared and must not be changed; DecodeCompute and DecodeSDMA decode
	// them.
	XCCs [][]uint32
}

// The sizes of the dumps, in words. The compute MQD of gfx12.1 is the larger one,
// and so is the SDMA MQD of gfx10.
const (
	computeMQDWords, computeMQDWordsLarge = 512, 1024
	sdmaMQDWords, sdmaMQDWordsLarge       = 128, 130
)

// ParseMQDs parses mqds (kfd_debugfs_mqds_by_process, pqm_debugfs_mqds) of kernels
// 6.1 to 7.2 and of AMD's own driver. The error is a *discovery.ParseError.
//
// Of a text that begins late or ends early it returns each queue whose line is there, with its complete
// dumps, and a warning for each part that is missing. An unknown line is a warning too; where a queue is expected, the data after it is skipped. Of a queue
// that is not of compute only the first dump is kept: after a compute queue with several
// XCCs the kernel repeats the dump as many times, each with the memory after the previous.
func ParseMQDs(b []byte) (MQDDump, error) {
	// A row of n words takes 14+9n bytes: no word takes fewer than 10.
	p := mqdParser{parser: parser{lines: lines{rest: b}, words: make([]uint32, 0, len(b)/10)}}
	if err := p.run(); err != nil {
		return MQDDump{}, err
	}
	return MQDDump{Processes: p.processes, Warnings: p.all(p.line)}, nil
}

type mqdParser struct {
	parser
	dumps     [][]uint32
	queues    []MQD
	processes []MQDProcess

	// Where the open process, queue and dump begin in the slices above.
	firstQueue, firstDump, firstWord int
	// last is the number of words in the last row of the open dump.
	last int
	// open reports whether the open dump has rows.
	open bool
}

func (p *mqdParser) run() error {
	if err := p.each(p.row, p.header); err != nil {
		return err
	}
	p.endQueue(true)
	p.endProcess()
	return nil
}

func (p *mqdParser) header(line []byte) error {
	n, numbers, err := p.head(line, "Process %d PASID %i:",
		"  Compute queue on device %x", "  SDMA queue on device %x", "  DIQ on device %x") // in the order of the kinds
	switch {
	case err != nil:
		return err
	case n == 0:
		return p.process(numbers[0], numbers[1])
	case n > 0:
		p.queue(Kind(n-1), gpreempt.GPUID(numbers[0]))
	case indented(line, 2):
		// "Bad user queue type", "Queue node with bad user queue type", "Bad kernel queue
		// type" and "Weird: Queue node with neither kernel nor user queue", or a line of a
		// future kernel.
		p.endQueue(false)
		p.rows = unknown
		p.skipped(p.line, "the queue is skipped", line)
	default:
		p.skipped(p.line, "the line is skipped", line)
	}
	return nil
}

func (p *mqdParser) process(pid, pasid int) error {
	if pid == 0 {
		return malformed(p.line, len("Process ")+1, "want a positive pid")
	}
	p.endQueue(false)
	p.endProcess()
	p.processes = append(p.processes, MQDProcess{PID: int32(pid), PASID: uint32(pasid), Line: p.line})
	return nil
}

func (p *mqdParser) queue(kind Kind, gpu gpreempt.GPUID) {
	p.endQueue(false)
	if len(p.processes) == 0 {
		p.add(p.line, "the process is unknown: its line is missing")
		p.processes = append(p.processes, MQDProcess{Line: p.line})
	}
	p.queues = append(p.queues, MQD{Kind: kind, GPU: gpu, Line: p.line})
	p.firstDump, p.firstWord, p.rows = len(p.dumps), len(p.words), aQueue
}

// row takes a row whose words follow p.words in the same array.
func (p *mqdParser) row(offset uint32, words []uint32) error {
	switch p.rows {
	case nothing:
		p.add(p.line, "data is skipped: the line of its queue is missing")
		p.rows = unknown
		return nil
	case unknown:
		return nil
	case aQueue:
	}
	added := words[len(p.words):]
	if offset == 0 {
		p.endDump()
		p.open, p.last = true, rowWords
	}
	switch want := 4 * (len(p.words) - p.firstWord); {
	case !p.open:
		p.add(p.queues[len(p.queues)-1].Line, "the data of the queue is skipped: its first rows are missing, it begins at offset %s", hex8(offset))
		p.rows = unknown
		return nil
	case p.last != rowWords:
		return malformed(p.line, rowIndent+1, "want offset 00000000 of the next dump: the row above ended this one")
	case int64(offset) != int64(want):
		return malformed(p.line, rowIndent+1, "want offset "+hex8(uint32(want))+", or 00000000 of the next dump")
	}
	p.last = len(added)
	if len(p.words)+len(added) == len(words) {
		p.words = words
	} else { // endDump dropped words: the row moves to their beginning
		p.words = append(p.words, added...)
	}
	return nil
}

// endDump completes the open dump, or drops it when the queue already has its dumps.
func (p *mqdParser) endDump() {
	if !p.open {
		return
	}
	p.open = false
	q := &p.queues[len(p.queues)-1]
	if !p.whole(q.Kind) {
		p.add(q.Line, "a dump of %d bytes has an unknown size", 4*(len(p.words)-p.firstWord))
	}
	if q.Kind != KindCompute && len(p.dumps) > p.firstDump {
		p.words = p.words[:p.firstWord]
		return
	}
	n := len(p.words)
	p.dumps = append(p.dumps, p.words[p.firstWord:n:n])
	p.firstWord = n
}

// endQueue completes the open queue. atEnd reports that the text ends here.
func (p *mqdParser) endQueue(atEnd bool) {
	if p.rows != aQueue {
		p.rows = nothing
		return
	}
	p.rows = nothing
	q := &p.queues[len(p.queues)-1]
	if atEnd && p.open && !p.whole(q.Kind) {
		n := len(p.words)
		if q.Kind != KindSDMA && len(p.dumps) == p.firstDump && n-p.firstWord >= mqdWords {
			p.add(p.line, "the text ends within the dump of the queue of line %d, after its registers", q.Line)
			p.dumps = append(p.dumps, p.words[p.firstWord:n:n])
			p.firstWord = n
		} else {
			p.add(p.line, "the text ends within a dump of the queue of line %d, which is skipped", q.Line)
			p.words = p.words[:p.firstWord]
		}
		p.open = false
	}
	p.endDump()
	n := len(p.dumps)
	if n == p.firstDump {
		p.add(q.Line, "the queue has no complete dump")
		return
	}
	q.XCCs = p.dumps[p.firstDump:n:n]
	if atEnd && p.shorter(q) {
		p.add(q.Line, "the queue has fewer or shorter dumps than another on the same GPU: the text may end early")
	}
}

// whole reports whether the open dump has a valid size for its kind.
func (p *mqdParser) whole(kind Kind) bool {
	n := len(p.words) - p.firstWord
	if kind == KindSDMA {
		return n == sdmaMQDWords || n == sdmaMQDWordsLarge
	}
	return n == computeMQDWords || n == computeMQDWordsLarge
}

// shorter reports whether q, the last queue, has fewer dumps than another of its kind.
func (p *mqdParser) shorter(q *MQD) bool {
	last := q.XCCs[len(q.XCCs)-1]
	for i := range p.queues {
		o := &p.queues[i]
		if o.GPU == q.GPU && o.Kind == q.Kind && (len(o.XCCs) > len(q.XCCs) || len(o.XCCs) > 0 && len(o.XCCs[0]) > len(last)) {
			return true
		}
	}
	return false
}

func (p *mqdParser) endProcess() {
	if len(p.processes) == 0 {
		return
	}
	n := len(p.queues)
	if n > p.firstQueue {
		p.processes[len(p.processes)-1].Queues = p.queues[p.firstQueue:n:n]
	}
	p.firstQueue = n
}

func hex8(v uint32) string {
	s := strconv.FormatUint(uint64(v), 16)
	return "00000000"[len(s):] + s
}
