package debugfs

import "github.com/gpreempt/gpreempt/pkg/gpreempt"

// SlotKind is the kind of a hardware queue.
type SlotKind uint8

// The kinds.
const (
	// SlotCP is a compute queue of the first MEC.
	SlotCP SlotKind = iota
	// SlotHIQ is the queue by which the driver passes runlists to the firmware. MES has
	// none, and the content of the slot has no meaning.
	SlotHIQ
	// SlotSDMA is a queue of a DMA engine.
	SlotSDMA
)

// String returns the name in the output.
func (k SlotKind) String() string { return gpreempt.Word(k, "kind", "cp", "hiq", "sdma") }

// HQDDump is the content of hqds.
type HQDDump struct {
	Nodes    []HQDNode
	Warnings []Warning
}

// HQDNode is one GPU node.
type HQDNode struct {
	// Node is the topology node number; CPU nodes count too.
	Node int
	GPU  gpreempt.GPUID
	// Line is where the node begins.
	Line int
	// Stopped reports that the driver does not schedule on it: it has no slots then.
	Stopped bool
	// Slots are in the order of the text: for each XCC the HIQ and the CP slots, then
	// SDMA.
	Slots []HQD
}

// HQD is one slot as dumped.
type HQD struct {
	Kind SlotKind
	// XCC is Inst in the text: logical, and not from 0 in a partition; 0 for SDMA and on
	// kernels before 6.5, which do not print it.
	XCC int
	// MEC counts from 1: 1 for CP slots, which the text does not contain, 0 for SDMA.
	MEC int
	// Pipe and Queue are the position within the MEC; for SDMA the engine and its queue.
	Pipe, Queue int
	// Line is where the slot begins.
	Line int
	// Address is the byte address of the first register. It differs between GPUs and
	// XCCs: registers are identified by their position in Registers.
	Address uint32
	// Registers are shared and must not be changed.
	Registers []uint32
}

// hqdRegisters is the number of registers of a CP or HIQ slot on gfx9 and later.
const hqdRegisters = 56

// ParseHQDs parses hqds (kfd_debugfs_hqds_by_device, dqm_debugfs_hqds,
// seq_reg_dump) of kernels 6.1 to 7.2 and of AMD's own driver. The error is a
// *discovery.ParseError.
//
// For a text that ends early it returns what is complete, with a warning. An unknown line
// is a warning too; where a slot is expected, the data after it is skipped.
func ParseHQDs(b []byte) (HQDDump, error) {
	p := hqdParser{parser: parser{lines: lines{rest: b}, words: make([]uint32, 0, len(b)/10)}}
	if err := p.run(); err != nil {
		return HQDDump{}, err
	}
	return HQDDump{Nodes: p.nodes, Warnings: p.all(p.line)}, nil
}

type hqdParser struct {
	parser
	slots []HQD
	nodes []HQDNode

	// Where the open node and slot begin in the slices above.
	firstSlot, firstWord int
	// last is the number of words in the last row of the open slot, 0 without a row; after
	// is the address that follows it.
	last  int
	after uint32
}

func (p *hqdParser) run() error {
	if err := p.each(p.row, p.header); err != nil {
		return err
	}
	p.endSlot(true)
	p.endNode()
	return nil
}

func (p *hqdParser) header(line []byte) error {
	n, at, err := p.head(line,
		"Node %d, gpu_id %x:",
		"   Inst %d, HIQ on MEC %d Pipe %d Queue %d",
		" Inst %d,  CP Pipe %d, Queue %d",
		"  SDMA Engine %d, RLC %d",
		"  HIQ on MEC %d Pipe %d Queue %d", // the last two are of 6.1
		"  CP Pipe %d, Queue %d",
	)
	if err != nil {
		return err
	}
	switch n {
	case 0:
		p.endSlot(false)
		p.endNode()
		p.nodes = append(p.nodes, HQDNode{Node: at[0], GPU: gpreempt.GPUID(at[1]), Line: p.line})
		return nil
	case 1:
		return p.slot(HQD{Kind: SlotHIQ, XCC: at[0], MEC: at[1], Pipe: at[2], Queue: at[3]})
	case 2:
		return p.slot(HQD{Kind: SlotCP, XCC: at[0], MEC: 1, Pipe: at[1], Queue: at[2]})
	case 3:
		return p.slot(HQD{Kind: SlotSDMA, Pipe: at[0], Queue: at[1]})
	case 4:
		return p.slot(HQD{Kind: SlotHIQ, MEC: at[0], Pipe: at[1], Queue: at[2]})
	case 5:
		return p.slot(HQD{Kind: SlotCP, MEC: 1, Pipe: at[0], Queue: at[1]})
	}
	switch {
	case string(line) == " Device is stopped":
		return p.stopped()
	case indented(line, 1), indented(line, 2), indented(line, 3):
		p.endSlot(false)
		p.rows = unknown
		p.skipped(p.line, "the slot is skipped", line)
	default:
		p.skipped(p.line, "the line is skipped", line)
	}
	return nil
}

func (p *hqdParser) stopped() error {
	if len(p.nodes) == 0 {
		return malformed(p.line, 1, "a device before any node")
	}
	p.endSlot(false)
	p.nodes[len(p.nodes)-1].Stopped = true
	return nil
}

func (p *hqdParser) slot(d HQD) error {
	if len(p.nodes) == 0 {
		return malformed(p.line, 1, "a slot before any node")
	}
	p.endSlot(false)
	d.Line = p.line
	p.slots = append(p.slots, d)
	p.firstWord, p.rows, p.last = len(p.words), aQueue, 0
	return nil
}

// row takes a row whose words are already in p.words' array. The kernel begins a row after
// 8 registers or after a gap in the addresses.
func (p *hqdParser) row(address uint32, words []uint32) error {
	switch p.rows {
	case nothing:
		return malformed(p.line, 1, "data outside a slot")
	case unknown:
		return nil
	case aQueue:
	}
	if address%4 != 0 {
		return malformed(p.line, rowIndent+1, "want an address that is a multiple of 4")
	}
	switch {
	case p.last == 0:
		p.slots[len(p.slots)-1].Address = address
	case address < p.after:
		return malformed(p.line, rowIndent+1, "want an address from "+hex8(p.after)+" on")
	case address == p.after && p.last != rowWords:
		return malformed(p.line, rowIndent+1, "want an address above "+hex8(p.after)+": a row continues until it has 8 words")
	}
	p.last = len(words) - len(p.words)
	p.words, p.after = words, address+4*uint32(p.last)
	return nil
}

// endSlot completes the open slot. atEnd reports that the text ends here.
func (p *hqdParser) endSlot(atEnd bool) {
	open := p.rows == aQueue
	p.rows = nothing
	if !open {
		return
	}
	d := &p.slots[len(p.slots)-1]
	n := len(p.words)
	whole := p.whole(d.Kind, n-p.firstWord)
	if n == p.firstWord || atEnd && !whole {
		p.add(d.Line, "the slot is skipped: it has only %d registers", n-p.firstWord)
		p.words = p.words[:p.firstWord]
		p.slots = p.slots[:len(p.slots)-1]
		return
	}
	if !whole {
		p.add(d.Line, "%d registers are not decoded: unknown GPU", n-p.firstWord)
	}
	d.Registers = p.words[p.firstWord:n:n]
}

// whole reports whether a slot of its kind can have this number of registers.
func (p *hqdParser) whole(kind SlotKind, n int) bool {
	if kind != SlotSDMA {
		return n == hqdRegisters
	}
	return sdmaRegisters(n) != SDMAUnknown
}

func (p *hqdParser) endNode() {
	if len(p.nodes) == 0 {
		return
	}
	n := len(p.slots)
	if n > p.firstSlot {
		p.nodes[len(p.nodes)-1].Slots = p.slots[p.firstSlot:n:n]
	}
	p.firstSlot = n
}
