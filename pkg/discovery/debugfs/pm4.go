package debugfs

import "strconv"

// Opcode is what a packet of a runlist asks of the scheduler firmware
// (kfd_pm4_opcodes.h).
type Opcode uint8

// The opcodes that a runlist has.
const (
	// OpMapProcess returns the address space and the resources of a process; the queues
	// that follow are its.
	OpMapProcess Opcode = 0xa1
	// OpMapQueues returns a queue.
	OpMapQueues Opcode = 0xa2
	// OpRunList leads to another runlist, or back to the same one when there are more
	// queues than slots.
	OpRunList Opcode = 0xa5
)

// String returns the name of the opcode, or its number.
func (o Opcode) String() string {
	switch o {
	case OpMapProcess:
		return "MAP_PROCESS"
	case OpMapQueues:
		return "MAP_QUEUES"
	case OpRunList:
		return "RUN_LIST"
	}
	return "0x" + strconv.FormatUint(uint64(o), 16)
}

// Packet is one PM4 packet of type 3.
type Packet struct {
	// Offset is where it begins in the runlist, in dwords.
	Offset int
	// Opcode is 0 for what could not be split into packets: all the words from there.
	Opcode Opcode
	// Words are the packet with its header: shared, not to be changed.
	Words []uint32
}

// pm4Type3 is the type of packet of a runlist, in the top two bits of its header.
const pm4Type3 = 3

// Packets splits a runlist. Zeros behind the last packet are left out: the driver
// clears more than it fills. What is no packet of type 3, or would end behind the
// runlist, is given as it is, and is the last.
func (r *Runlist) Packets() []Packet {
	words := r.Words
	for len(words) > 0 && words[len(words)-1] == 0 {
		words = words[:len(words)-1]
	}
	var packets []Packet
	for at := 0; at < len(words); {
		header := words[at]
		// The count is that of the words behind the header, less one.
		n := int(header>>16&0x3fff) + 2
		if header>>30 != pm4Type3 || at+n > len(r.Words) {
			return append(packets, Packet{Offset: at, Words: words[at:len(words):len(words)]})
		}
		packets = append(packets, Packet{Offset: at, Opcode: Opcode(header >> 8), Words: r.Words[at : at+n : at+n]})
		at += n
	}
	return packets
}

// MapProcess is a MAP_PROCESS packet of gfx9 to gfx10.3
// (pm4_mes_map_process, and pm4_mes_map_process_aldebaran, which goes on behind).
type MapProcess struct {
	// PASID is that of the process, from 7.x on that of the process on this GPU.
	PASID uint16
	// Quantum is process_quantum, 0 to 127. The driver writes 10; no public text says
	// of what.
	Quantum uint8
	// DebugVMID is the VMID kept for debugging, where NewDebug is set.
	DebugVMID uint8
	NewDebug  bool
	// DebugQueue tells that the process has a DIQ (6.12 and before).
	DebugQueue bool
	// CleanerShader tells that what the process leaves on the GPU is wiped.
	CleanerShader bool
	// SingleMemoryOps is a setting of the debugger, of gfx90a and later; elsewhere
	// reserved and false.
	SingleMemoryOps bool
	// PageTable is the base of the page table, with flags in its lower bits.
	PageTable uint64
	// TrapHandler and TrapMemory are GPU addresses; 0 for none. The flag TRAP_EN above
	// the former's address is left out.
	TrapHandler, TrapMemory uint64
	// Queues is the number of queues that follow, 0 to 1023, at the time of writing.
	Queues int
	// SDMA tells that queues of SDMA may be among them.
	SDMA bool
	// GWS is the number of global wave sync entries.
	GWS int
	// DebugControl is spi_gdbg_per_vmid_cntl and Watch the address watches, where the
	// packet is of gfx90a or later: Extended.
	Extended     bool
	DebugControl uint32
	Watch        [4]uint32
}

// The sizes of a MAP_PROCESS packet in words, with its header.
const (
	mapProcessWords         = 16
	mapProcessWordsExtended = 21
)

// MapProcess tells the meaning of a MAP_PROCESS packet. ok is false for other
// packets and for one of a size not known.
func (p *Packet) MapProcess() (m MapProcess, ok bool) {
	w := p.Words
	if p.Opcode != OpMapProcess || len(w) != mapProcessWords && len(w) != mapProcessWordsExtended {
		return MapProcess{}, false
	}
	m = MapProcess{
		PASID:           uint16(w[1]),
		SingleMemoryOps: w[1]&(1<<16) != 0,
		CleanerShader:   w[1]&(1<<17) != 0,
		DebugVMID:       uint8(w[1] >> 18 & 0xf),
		NewDebug:        w[1]&(1<<22) != 0,
		DebugQueue:      w[1]&(1<<24) != 0,
		Quantum:         uint8(w[1] >> 25),
		PageTable:       wide(w, 2),
		TrapHandler:     wide(w, 6) << 8,
		TrapMemory:      wide(w, 8) << 8,
		GWS:             int(w[13] & 0x7f),
		SDMA:            w[13]&(1<<7) != 0,
		Queues:          int(w[13] >> 22),
	}
	if len(w) == mapProcessWordsExtended {
		m.Extended, m.DebugControl, m.Watch = true, w[14], [4]uint32(w[15:])
	}
	return m, true
}

// MapQueues is a MAP_QUEUES packet of gfx9 to gfx10.3 (pm4_mes_map_queues).
type MapQueues struct {
	// SDMA tells that the queue is of the DMA engine numbered Engine; else it is of
	// compute.
	SDMA   bool
	Engine int
	// Static tells that the queue keeps its slot: those of a process being debugged
	// on old GPUs.
	Static bool
	// Type is queue_type as it stands: 0 normal, 1 debug interface, 2 and 3 static.
	Type uint8
	// Queues is num_queues; the driver writes 1.
	Queues int
	// GWS tells that the queue uses global wave sync.
	GWS bool
	// Doorbell is the doorbell's place in the GPU's doorbells, in dwords.
	Doorbell uint32
	// MQD is the GPU address of its MQD, the first XCC's where there are several.
	MQD uint64
	// WritePointer is the virtual address in the owner of the position written to.
	WritePointer uint64
}

const mapQueuesWords = 7

// MapQueues tells the meaning of a MAP_QUEUES packet. ok is false for other
// packets and for one of a size or for an engine not known.
func (p *Packet) MapQueues() (m MapQueues, ok bool) {
	w := p.Words
	if p.Opcode != OpMapQueues || len(w) != mapQueuesWords {
		return MapQueues{}, false
	}
	engine, extended := int(w[1]>>26&7), w[1]>>2&3
	m = MapQueues{
		Type:         uint8(w[1] >> 21 & 7),
		Queues:       int(w[1] >> 29),
		GWS:          w[1]&(1<<12) != 0,
		Doorbell:     w[2] & 0x0ffffffc >> 2,
		MQD:          wide(w, 3),
		WritePointer: wide(w, 5),
	}
	m.Static = m.Type == 2 || m.Type == 3
	switch {
	case extended == 0 && engine == 0:
	case extended == 0 && (engine == 2 || engine == 3):
		m.SDMA, m.Engine = true, engine-2
	case extended == 1:
		m.SDMA, m.Engine = true, engine
	case extended == 2:
		m.SDMA, m.Engine = true, engine+8
	default:
		return MapQueues{}, false
	}
	return m, true
}

// RunList is a RUN_LIST packet (pm4_mes_runlist).
type RunList struct {
	// Base is the GPU address of the runlist it leads to, Dwords its size.
	Base   uint64
	Dwords int
	// Chain tells that the firmware goes there when it is through with this one.
	Chain bool
	// Valid is as it stands.
	Valid bool
	// Processes is how many may be on the GPU at a time, 0 to 15.
	Processes int
}

const runListWords = 4

// RunList tells the meaning of a RUN_LIST packet. ok is false for other packets
// and for one of a size not known.
func (p *Packet) RunList() (r RunList, ok bool) {
	w := p.Words
	if p.Opcode != OpRunList || len(w) != runListWords {
		return RunList{}, false
	}
	return RunList{
		Base: wide(w, 1) &^ 3, Dwords: int(w[3] & 0xfffff), Chain: w[3]&(1<<20) != 0, Valid: w[3]&(1<<23) != 0, Processes: int(w[3] >> 24 & 0xf),
	}, true
}
