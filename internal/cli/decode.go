package cli

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
)

// maxDump is the largest dump that decode reads, in bytes. Those of hosts are below
// 10 MiB.
const maxDump = 256 << 20

// readDump reads the file at path, or standard input for "-".
func (a *app) readDump(path string) (name string, data []byte, err error) {
	name, in, err := a.open(path)
	if err != nil {
		if f, ok := errors.AsType[*failure](err); ok && f.code == ExitFailure && strings.HasPrefix(path, "/sys/kernel/debug/") {
			f.next = "mount -t debugfs none /sys/kernel/debug; if it is mounted, the driver amdgpu is not loaded"
		}
		return name, nil, err
	}
	defer in.Close()
	data, err = io.ReadAll(io.LimitReader(in, maxDump+1))
	switch {
	case err != nil:
		return name, nil, unreadable(name, err)
	case len(data) > maxDump:
		return name, nil, &failure{code: ExitFailure, message: fmt.Sprintf("%s is too large for a dump: more than %s", name, size(maxDump))}
	}
	return name, data, nil
}

// nothingIn returns the error of a text without any known line. An empty dump is valid.
func nothingIn(data []byte, warnings []debugfs.Warning) error {
	if len(bytes.TrimSpace(data)) == 0 {
		return nil
	}
	problem := "no known line"
	line := 1
	if len(warnings) > 0 {
		line, problem = warnings[0].Line, "no known line: "+warnings[0].Text
	}
	return &discovery.ParseError{Line: line, Column: 1, Problem: problem}
}

// notADump returns the failure for a text that is not the dump, with advice what it may be.
func notADump(name, command string, data []byte, err error) error {
	f := &failure{code: ExitFailure, message: fmt.Sprintf("%s: %v", name, err)}
	if at, ok := errors.AsType[*discovery.ParseError](err); ok {
		placed := *at
		placed.File = name
		f.message = placed.Error()
	}
	switch {
	case bytes.HasPrefix(data, []byte("\x1f\x8b")):
		f.next = "the file is compressed: gzip -dc FILE | gpctl " + command + " decode -"
	case command == "mqd" && bytes.HasPrefix(data, []byte("Node ")):
		f.next = "this looks like a dump of hqds: gpctl hqd decode"
	case command == "hqd" && bytes.HasPrefix(data, []byte("Process ")):
		f.next = "this looks like a dump of mqds: gpctl mqd decode"
	}
	return f
}

// dumpWarning is a warning in JSON.
type dumpWarning struct {
	Line int    `json:"line"`
	Text string `json:"text"`
}

// warnDump writes a parser's warnings to standard error and returns them for JSON.
func (a *app) warnDump(name string, list []debugfs.Warning) []dumpWarning {
	all := make([]dumpWarning, 0, len(list))
	for _, w := range list {
		fmt.Fprintf(a.Err, "gpctl: warning: %s\n", printable(fmt.Sprintf("%s:%d: %s", name, w.Line, w.Text)))
		all = append(all, dumpWarning(w))
	}
	return all
}

// hexAddress is an address in JSON, "0x7f41b5200000".
type hexAddress uint64

// MarshalText writes it in hex.
func (a hexAddress) MarshalText() ([]byte, error) { return fmt.Appendf(nil, "0x%x", uint64(a)), nil }

// hexWords are the decoded words, in JSON one string.
type hexWords []uint32

// MarshalText writes eight digits for each word.
func (w hexWords) MarshalText() ([]byte, error) {
	var b bytes.Buffer
	for i, word := range w {
		if i > 0 {
			b.WriteByte(' ')
		}
		fmt.Fprintf(&b, "%08x", word)
	}
	return b.Bytes(), nil
}

// computeJSON is debugfs.Compute for programs. Fields that only an image has are absent in
// a slot.
type computeJSON struct {
	Image         bool       `json:"image"`
	Valid         bool       `json:"valid"`
	MQD           hexAddress `json:"mqd_address"`
	Active        bool       `json:"active"`
	VMID          int        `json:"vmid"`
	PipePriority  uint32     `json:"pipe_priority"`
	QueuePriority uint32     `json:"queue_priority"`
	Priority      uint32     `json:"kfd_priority"`
	PriorityExact bool       `json:"kfd_priority_exact"`
	Quantum       string     `json:"quantum"`
	RingBase      hexAddress `json:"ring_address"`
	RingBytes     uint64     `json:"ring_bytes"`
	AQL           bool       `json:"aql"`
	Read          uint32     `json:"read_position_dwords"`
	Write         uint64     `json:"write_position_dwords"`
	Backlog       uint64     `json:"backlog_dwords"`
	Empty         bool       `json:"empty"`
	ReadPointer   hexAddress `json:"read_pointer_address"`
	WritePointer  hexAddress `json:"write_pointer_address"`
	NoReadUpdate  bool       `json:"no_read_pointer_update"`
	Doorbell      uint32     `json:"doorbell_dwords"`
	DoorbellOn    bool       `json:"doorbell_enabled"`
	SaveArea      hexAddress `json:"save_area_address"`
	SaveBytes     uint64     `json:"save_area_bytes"`
	StackBytes    uint32     `json:"control_stack_bytes"`
	StackOffset   uint32     `json:"control_stack_offset"`
	WaveOffset    uint32     `json:"wave_state_offset"`
	SaveWaves     bool       `json:"saves_waves"`
	EOPBase       hexAddress `json:"eop_address"`
	EOPBytes      uint64     `json:"eop_bytes"`
	Dequeue       uint32     `json:"dequeue_request"`
	Error         uint32     `json:"error"`
	*imageJSON
	Words hexWords `json:"words"`
}

type imageJSON struct {
	CUMask            hexWords  `json:"cu_mask"`
	DispatchInitiator uint32    `json:"dispatch_initiator"`
	Grid              [3]uint32 `json:"grid"`
	Workgroup         [3]uint32 `json:"workgroup"`
	Stride            uint64    `json:"stride"`
	LogicalXCC        uint32    `json:"logical_xcc"`
	Chunk             uint32    `json:"chunk"`
}

// computeForJSON converts c. writes reports whether the kernel writes the queue priority.
func computeForJSON(c *debugfs.Compute, writes bool) *computeJSON {
	priority, exact := c.Priority(writes)
	v := &computeJSON{
		Image: c.Image, Valid: c.Valid, MQD: hexAddress(c.MQD), Active: c.Active, VMID: c.VMID, PipePriority: c.PipePriority,
		QueuePriority: c.QueuePriority, Priority: uint32(priority), PriorityExact: exact, Quantum: c.Quantum.String(),
		RingBase: hexAddress(c.RingBase), RingBytes: c.RingBytes, AQL: c.AQL, Read: c.ReadPosition, Write: c.WritePosition,
		Backlog: c.BacklogDwords(), Empty: c.Empty, ReadPointer: hexAddress(c.ReadPointer), WritePointer: hexAddress(c.WritePointer),
		NoReadUpdate: c.NoUpdateReadPointer, Doorbell: c.Doorbell, DoorbellOn: c.DoorbellEnabled, SaveArea: hexAddress(c.SaveArea),
		SaveBytes: c.SaveBytes, StackBytes: c.ControlStackBytes, StackOffset: c.ControlStackOffset, WaveOffset: c.WaveStateOffset,
		SaveWaves: c.SaveWaves, EOPBase: hexAddress(c.EOPBase), EOPBytes: c.EOPBytes, Dequeue: c.DequeueRequest, Error: c.Error,
		Words: c.Words,
	}
	if c.Image {
		v.imageJSON = &imageJSON{
			CUMask: c.CUMask[:], DispatchInitiator: c.DispatchInitiator, Grid: c.Grid, Workgroup: c.Workgroup, Stride: c.Stride,
			LogicalXCC: c.LogicalXCC, Chunk: c.Chunk,
		}
	}
	return v
}

// sdmaJSON is debugfs.SDMA for programs.
type sdmaJSON struct {
	Image        bool       `json:"image"`
	Layout       string     `json:"layout"`
	Inferred     bool       `json:"layout_inferred"`
	Enabled      bool       `json:"enabled"`
	VMID         int        `json:"vmid"`
	RingBase     hexAddress `json:"ring_address"`
	RingBytes    uint64     `json:"ring_bytes"`
	Read         uint64     `json:"read_position_bytes"`
	Write        uint64     `json:"write_position_bytes"`
	ReadPointer  hexAddress `json:"read_pointer_address"`
	WritePointer hexAddress `json:"write_pointer_address"`
	Doorbell     uint32     `json:"doorbell_dwords"`
	DoorbellOn   bool       `json:"doorbell_enabled"`
	Context      *uint32    `json:"context_status,omitempty"`
	Idle         *bool      `json:"idle,omitempty"`
	MQD          hexAddress `json:"mqd_address"`
	Engine       *int       `json:"engine,omitempty"`
	Queue        *int       `json:"engine_queue,omitempty"`
	Words        hexWords   `json:"words"`
}

func sdmaForJSON(s *debugfs.SDMA) *sdmaJSON {
	v := &sdmaJSON{
		Image: s.Image, Layout: s.Layout.String(), Inferred: s.Inferred, Enabled: s.Enabled, VMID: s.VMID, RingBase: hexAddress(s.RingBase),
		RingBytes: s.RingBytes, Read: s.ReadPosition, Write: s.WritePosition, ReadPointer: hexAddress(s.ReadPointer),
		WritePointer: hexAddress(s.WritePointer), Doorbell: s.Doorbell, DoorbellOn: s.DoorbellEnabled, MQD: hexAddress(s.MQD), Words: s.Words,
	}
	if s.ContextKnown {
		v.Context, v.Idle = &s.Context, &s.Idle
	}
	if s.Engine >= 0 {
		v.Engine, v.Queue = &s.Engine, &s.Queue
	}
	return v
}

// registerColumns are what computeRegisters and sdmaRegisters return.
var registerColumns = columns{
	">ADDRESS", ">RING", ">READ", ">WRITTEN", ">BEHIND", ">VMID", ">DOORBELL", "PACKETS", "+QUANTUM", "+>MQD", "+>READ POINTER AT", "+>WRITE POINTER AT",
	"+>SAVE AREA",
}

func computeRegisters(c *debugfs.Compute) []any {
	behind, packets, save := count(c.BacklogDwords(), "dword"), "PM4", "-"
	if n, ok := c.BacklogPackets(); ok {
		behind, packets = count(n, "packet"), "AQL"
	}
	if c.SaveArea != 0 {
		save = ring(c.SaveArea, c.SaveBytes)
	}
	return []any{
		address(c.RingBase), ringSize(c.RingBase, c.RingBytes), c.ReadPosition, c.WritePosition, behind, c.VMID, fmt.Sprintf("0x%x", c.Doorbell*4),
		packets, c.Quantum, address(c.MQD), address(c.ReadPointer), address(c.WritePointer), save,
	}
}

func sdmaRegisters(s *debugfs.SDMA) []any {
	behind := "-"
	if s.WritePosition >= s.ReadPosition {
		behind = count(s.WritePosition-s.ReadPosition, "byte")
	}
	return []any{
		address(s.RingBase), ringSize(s.RingBase, s.RingBytes), s.ReadPosition, s.WritePosition, behind, s.VMID, fmt.Sprintf("0x%x", s.Doorbell*4),
		"SDMA", "-", address(s.MQD), address(s.ReadPointer), address(s.WritePointer), "-",
	}
}

// ringSize formats the size of a ring, "-" without a ring.
func ringSize(at, bytes uint64) string {
	if at == 0 {
		return "-"
	}
	return size(bytes)
}
