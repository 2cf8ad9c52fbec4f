package cli

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
	"github.com/gpreempt/gpreempt/pkg/discovery/registers"
)

// maxDump is the largest dump that decode reads, in bytes. Those of hosts are below
// 10 MiB.
const maxDump = 256 << 20

// readDump reads the file at path, or standard input for "-".
func readDump(a *term.App, path string) (name string, data []byte, err error) {
	name, in, err := open(a, path)
	if err != nil {
		if f, ok := errors.AsType[*term.Failure](err); ok && f.Code == term.ExitFailure && strings.HasPrefix(path, "/sys/kernel/debug/") {
			f.Next = "mount -t debugfs none /sys/kernel/debug; if it is mounted, the driver amdgpu is not loaded"
		}
		return name, nil, err
	}
	defer in.Close()
	data, err = io.ReadAll(io.LimitReader(in, maxDump+1))
	switch {
	case err != nil:
		return name, nil, unreadable(name, err)
	case len(data) > maxDump:
		return name, nil, &term.Failure{Code: term.ExitFailure, Message: fmt.Sprintf("%s is too large for a dump: more than %s", name, term.Size(maxDump))}
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
	f := &term.Failure{Code: term.ExitFailure, Message: fmt.Sprintf("%s: %v", name, err)}
	if at, ok := errors.AsType[*discovery.ParseError](err); ok {
		placed := *at
		placed.File = name
		f.Message = placed.Error()
	}
	switch {
	case bytes.HasPrefix(data, []byte("\x1f\x8b")):
		f.Next = "the file is compressed: gzip -dc FILE | gplab decode " + command + " -"
	case command == "mqd" && bytes.HasPrefix(data, []byte("Node ")):
		f.Next = "this looks like a dump of hqds: gplab decode hqd"
	case command == "hqd" && bytes.HasPrefix(data, []byte("Process ")):
		f.Next = "this looks like a dump of mqds: gplab decode mqd"
	}
	return f
}

// dumpWarning is a warning in JSON.
type dumpWarning struct {
	Line int    `json:"line"`
	Text string `json:"text"`
}

// warnDump writes a parser's warnings to standard error and returns them for JSON.
func warnDump(a *term.App, name string, list []debugfs.Warning) []dumpWarning {
	all := make([]dumpWarning, 0, len(list))
	for _, w := range list {
		fmt.Fprintf(a.Err, "gplab: warning: %s\n", term.Printable(fmt.Sprintf("%s:%d: %s", name, w.Line, w.Text)))
		all = append(all, dumpWarning(w))
	}
	return all
}

// jsonAddress is an address in JSON, a decimal string as in the messages of the API.
type jsonAddress uint64

// MarshalText writes it in decimal.
func (a jsonAddress) MarshalText() ([]byte, error) {
	return strconv.AppendUint(nil, uint64(a), 10), nil
}

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

// computeJSON is registers.Compute for programs. Fields that only an image has are absent in
// a slot.
type computeJSON struct {
	*registers.Compute
	MQD           jsonAddress `json:"mqd_address"`
	Priority      uint32      `json:"kfd_priority"`
	PriorityExact bool        `json:"kfd_priority_exact"`
	RingBase      jsonAddress `json:"ring_address"`
	Backlog       uint64      `json:"backlog_dwords"`
	ReadPointer   jsonAddress `json:"read_pointer_address"`
	WritePointer  jsonAddress `json:"write_pointer_address"`
	SaveArea      jsonAddress `json:"save_area_address"`
	EOPBase       jsonAddress `json:"eop_address"`
	CUMask        hexWords    `json:"cu_mask,omitempty"`
	Words         hexWords    `json:"words"`
}

// rank sets the priority. writes reports whether the kernel writes the queue priority.
func (c *computeJSON) rank(writes bool) {
	priority, exact := c.Compute.Priority(writes)
	c.Priority, c.PriorityExact = uint32(priority), exact
}

// computeForJSON converts c, without its priority.
func computeForJSON(c *registers.Compute) *computeJSON {
	v := &computeJSON{
		Compute: c, MQD: jsonAddress(c.MQD), RingBase: jsonAddress(c.RingBase),
		Backlog: c.BacklogDwords(), ReadPointer: jsonAddress(c.ReadPointer), WritePointer: jsonAddress(c.WritePointer),
		SaveArea: jsonAddress(c.SaveArea), EOPBase: jsonAddress(c.EOPBase), Words: c.Words,
	}
	if c.Image {
		v.CUMask = c.CUMask[:]
	}
	return v
}

// sdmaJSON is debugfs.SDMA for programs.
type sdmaJSON struct {
	*debugfs.SDMA
	RingBase     jsonAddress `json:"ring_address"`
	ReadPointer  jsonAddress `json:"read_pointer_address"`
	WritePointer jsonAddress `json:"write_pointer_address"`
	Context      *uint32     `json:"context_status,omitempty"`
	Idle         *bool       `json:"idle,omitempty"`
	MQD          jsonAddress `json:"mqd_address"`
	Engine       *int        `json:"engine,omitempty"`
	Queue        *int        `json:"engine_queue,omitempty"`
	Words        hexWords    `json:"words"`
}

func sdmaForJSON(s *debugfs.SDMA) *sdmaJSON {
	v := &sdmaJSON{
		SDMA: s, RingBase: jsonAddress(s.RingBase), ReadPointer: jsonAddress(s.ReadPointer), WritePointer: jsonAddress(s.WritePointer),
		MQD: jsonAddress(s.MQD), Words: s.Words,
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
var registerColumns = term.Columns{
	">ADDRESS", ">RING", ">READ", ">WRITTEN", ">BEHIND", ">VMID", ">DOORBELL", "PACKETS", "+QUANTUM", "+>MQD", "+>READ POINTER AT", "+>WRITE POINTER AT",
	"+>SAVE AREA",
}

func computeRegisters(c *registers.Compute) []any {
	packets, save := "PM4", "-"
	if c.AQL {
		packets = "AQL"
	}
	read, written, behind := term.InRing(uint64(c.ReadPosition), c.WritePosition, c.RingBytes, c.AQL)
	if c.SaveArea != 0 {
		save = term.Ring(c.SaveArea, c.SaveBytes)
	}
	return []any{
		term.Address(c.RingBase), ringSize(c.RingBase, c.RingBytes), read, written, behind, c.VMID, term.DoorbellAt(c.Doorbell),
		packets, c.Quantum, term.Address(c.MQD), term.Address(c.ReadPointer), term.Address(c.WritePointer), save,
	}
}

func sdmaRegisters(s *debugfs.SDMA) []any {
	return []any{
		term.Address(s.RingBase), ringSize(s.RingBase, s.RingBytes), s.ReadPosition, s.WritePosition, term.BytesBehind(s.ReadPosition, s.WritePosition), s.VMID, term.DoorbellAt(s.Doorbell),
		"SDMA", "-", term.Address(s.MQD), term.Address(s.ReadPointer), term.Address(s.WritePointer), "-",
	}
}

// ringSize formats the size of a ring, "-" without a ring.
func ringSize(at, bytes uint64) string {
	if at == 0 {
		return "-"
	}
	return term.Size(bytes)
}
