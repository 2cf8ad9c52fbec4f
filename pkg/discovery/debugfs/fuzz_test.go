package debugfs_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
	"github.com/gpreempt/gpreempt/pkg/discovery/registers"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// wellRefused checks that an error has a position in the text.
func wellRefused(t *testing.T, b []byte, err error) {
	t.Helper()
	at, ok := errors.AsType[*discovery.ParseError](err)
	if !ok {
		t.Fatalf("%v is not a *discovery.ParseError", err)
	}
	lines := bytes.Split(b, []byte("\n"))
	if at.Line < 1 || at.Line > len(lines) || at.Column < 1 || at.Column > len(lines[at.Line-1])+1 || at.Problem == "" {
		t.Fatalf("%v is not a position in the text", err)
	}
}

// wellWarned checks that warnings are few, in order, and of existing lines.
func wellWarned(t *testing.T, b []byte, warnings []debugfs.Warning) {
	t.Helper()
	last := 1
	for _, w := range warnings {
		if w.Line < last || w.Line > bytes.Count(b, []byte("\n"))+1 || w.Text == "" {
			t.Fatalf("warnings %+v", warnings)
		}
		last = w.Line
	}
	if len(warnings) > 33 {
		t.Fatalf("%d warnings", len(warnings))
	}
}

// fuzzTexts adds texts of all forms.
func fuzzTexts(f *testing.F) {
	f.Helper()
	// Short ones: complete dumps are not needed for the form.
	texts := []string{"", "\n", "hello\n", "Process 1 PASID 0x8001:\n", "Node 0, gpu_id 0:\n", " Device is stopped\n"}
	var b text
	b.linef("Process 4211 PASID 0x8003:")
	b.linef("  SDMA queue on device 8a31")
	b.dump(4, s(1).gfx942())
	b.linef("  Weird: Queue node with neither kernel nor user queue")
	b.linef("  DIQ on device 8a31")
	b.dump(4, q(1).image()[:12])
	b.linef("Process 4211 PASID 4211:")
	b.linef("  Compute queue on device 8a31")
	b.dump(4, q(2).image()[:16])
	b.dump(4, q(3).image()[:16])
	texts = append(texts, b.String(), b.String()[:b.Len()-100])
	b.Reset()
	b.linef("Node 2, gpu_id f7bc:")
	b.linef("   Inst 0, HIQ on MEC 2 Pipe 0 Queue 0")
	b.at(4, 0xc914, q(1).registers())
	b.linef(" Inst 1,  CP Pipe 0, Queue 2")
	b.at(4, 0xcc914, q(1).registers())
	b.linef("  CP Pipe 0, Queue 2")
	b.at(4, 0xc914, q(2).registers())
	b.linef("  SDMA Engine 0, RLC 0")
	b.sdmaRegisters(0x4e40, s(1).words(gfx9, 44), runs94...)
	b.linef("Node 3, gpu_id f05b:")
	b.linef(" Device is stopped")
	texts = append(texts, b.String(), b.String()[:500])
	for _, text := range texts {
		f.Add([]byte(text))
	}
}

func FuzzParseMQDs(f *testing.F) {
	fuzzTexts(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		d, err := debugfs.ParseMQDs(b)
		if err != nil {
			wellRefused(t, b, err)
			return
		}
		wellWarned(t, b, d.Warnings)
		var again text
		words := 0
		var known []debugfs.Known
		for _, p := range d.Processes {
			if p.PID != 0 {
				again.linef("Process %d PASID %d:", p.PID, p.PASID)
			}
			for _, q := range p.Queues {
				name := []string{"Compute queue", "SDMA queue", "DIQ"}[q.Kind]
				again.linef("  %s on device %x", name, uint32(q.GPU))
				if len(q.XCCs) == 0 && len(d.Warnings) == 0 || q.Kind != debugfs.KindCompute && len(q.XCCs) > 1 {
					t.Fatalf("%d dumps of a queue of %s", len(q.XCCs), q.Kind)
				}
				for _, x := range q.XCCs {
					again.dump(4, x)
					words += len(x)
					_, _ = debugfs.DecodeCompute(x)
					_, _ = debugfs.DecodeSDMA(x, 0)
				}
				known = append(known, debugfs.Known{GPU: q.GPU, Type: gpreempt.QueueCompute})
			}
			for i, info := range debugfs.MatchQueues(known, p.Queues, nil) {
				if info.Source == 0 && info.Note == "" {
					t.Fatalf("queue %d has neither a dump nor a note", i)
				}
			}
		}
		if words > len(b)/10 {
			t.Fatalf("%d words from %d bytes", words, len(b))
		}
		// The result, printed like the kernel does, is parsed to the same; but a last dump
		// of an unknown size ends early.
		e, err := debugfs.ParseMQDs([]byte(again.String()))
		if err != nil {
			t.Fatalf("%v in a text that was parsed before", err)
		}
		forget := func(d *debugfs.MQDDump) {
			d.Warnings = nil
			for i := range d.Processes {
				p := &d.Processes[i]
				p.Line = 0
				p.Queues = slices.Clone(p.Queues)
				for j := range p.Queues {
					p.Queues[j].Line = 0
				}
			}
		}
		ended := slices.ContainsFunc(e.Warnings, func(w debugfs.Warning) bool { return bytes.HasPrefix([]byte(w.Text), []byte("the text ends")) })
		forget(&d)
		forget(&e)
		if diff := cmp.Diff(d, e); diff != "" && !ended {
			t.Fatalf("parsed again (-first +second):\n%s", diff)
		}
	})
}

func FuzzParseHQDs(f *testing.F) {
	fuzzTexts(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		d, err := debugfs.ParseHQDs(b)
		if err != nil {
			wellRefused(t, b, err)
			return
		}
		wellWarned(t, b, d.Warnings)
		words := 0
		for _, n := range d.Nodes {
			for _, h := range n.Slots {
				words += len(h.Registers)
				if len(h.Registers) == 0 {
					t.Fatal("a slot without registers")
				}
			}
		}
		if words > len(b)/10 {
			t.Fatalf("%d words from %d bytes", words, len(b))
		}
		slots := d.Slots()
		var owners []gpreempt.QueueEntry
		for i := range slots {
			c := &slots[i].Compute
			owners = append(owners, gpreempt.QueueEntry{Queue: gpreempt.Queue{Process: gpreempt.ProcessKey{PID: int32(i%2 + 1)}, GPU: slots[i].GPU}, Info: gpreempt.QueueInfo{
				MQD: c.MQD, RingBase: c.RingBase,
			}})
		}
		for i, m := range debugfs.MatchSlots(slots, owners) {
			if m.How == "" || m.Owner < -1 || m.Owner >= len(owners) || m.Owner >= 0 && slots[i].State != debugfs.Live {
				t.Fatalf("slot %d: %+v", i, m)
			}
		}
	})
}

func bytesOf(words []uint32) []byte {
	var b []byte
	for _, w := range words {
		b = binary.LittleEndian.AppendUint32(b, w)
	}
	return b
}

func wordsOf(b []byte) []uint32 {
	var words []uint32
	for ; len(b) >= 4; b = b[4:] {
		words = append(words, binary.LittleEndian.Uint32(b))
	}
	return words
}

func FuzzDecode(f *testing.F) {
	for _, w := range [][]uint32{nil, q(1).registers(), q(1).image(), s(1).gfx942(), s(1).words(gfx9, 130), s(1).words(gfx11, 43), s(1).words(gfx12, 49)} {
		f.Add(bytesOf(w), uint32(0))
		f.Add(bytesOf(w), uint32(90402))
		f.Add(bytesOf(w), uint32(120001))
	}
	f.Fuzz(func(t *testing.T, b []byte, gfx uint32) {
		w := wordsOf(b)
		if c, err := registers.DecodeCompute(w); err == nil {
			if len(c.Registers) != 56 {
				t.Fatalf("%d registers", len(c.Registers))
			}
			if packets, _ := c.BacklogPackets(); c.RingBytes > 0 && (c.BacklogDwords() >= c.RingBytes/4 || packets > c.BacklogDwords()) {
				t.Fatalf("a backlog of %d dwords, %d packets, in %d bytes", c.BacklogDwords(), packets, c.RingBytes)
			}
			if p, exact := c.Priority(true); p > gpreempt.MaxPriority || exact && uint32(p) != c.QueuePriority {
				t.Fatalf("priority %d, exact %t", p, exact)
			}
			_ = c.Quantum.String()
		}
		if s, err := debugfs.DecodeSDMA(w, gfx); err == nil && s.Layout == debugfs.SDMAUnknown && (s.ReadPointer != 0 || s.Doorbell != 0) {
			t.Fatalf("too many fields for an unknown layout: %+v", s)
		}
	})
}

// FuzzMatchQueues converts each 8 bytes to a queue: its common properties with others, and
// its known properties.
func FuzzMatchQueues(f *testing.F) {
	f.Add([]byte("\x01\x01\x01\x01\x01\x01\x01\x01\x02\x02\x02\x02\x02\x02\x02\x02"))
	f.Add([]byte("\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01"))
	f.Add([]byte("\x01\x00\x00\x00\x00\x00\x00\x00\x01\x01\x00\x00\x00\x00\x00\x00\x02\x01\x00\x00\x00\x00\x00\x00"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var known []debugfs.Known
		var dumps []debugfs.MQD
		for id := uint32(0); len(b) >= 8 && id < 64; id, b = id+1, b[8:] {
			c := q(int(b[0] % 8))
			c.read += uint64(b[1]%2) * 64
			c.write += uint64(b[2]%2) * 64
			c.ringBytes <<= b[3] % 2
			c.doorbell = 0x1000 + 2*id // identifies the dump
			k := c.known(id, gpu+gpreempt.GPUID(b[4]%2))
			k.Type = gpreempt.QueueType(b[5] % 5)
			if b[6]&1 != 0 {
				k = bare(k)
			}
			if b[6]&2 != 0 {
				k.RingBytes = 0
			}
			known = append(known, k)
			switch b[7] % 4 {
			case 0:
				dumps = append(dumps, c.dump(int(id), k.GPU, 1))
			case 1:
				d := s(int(b[0] % 8))
				d.doorbell = c.doorbell
				dumps = append([]debugfs.MQD{d.dump(int(id), k.GPU)}, dumps...)
			case 2:
				dumps = append(dumps, debugfs.MQD{Kind: debugfs.Kind(b[1] % 4), GPU: k.GPU, XCCs: [][]uint32{{1}}})
			}
		}
		used := map[uint32]bool{}
		infos := debugfs.MatchQueues(known, dumps, gfx942)
		if len(infos) != len(known) {
			t.Fatalf("%d answers to %d queues", len(infos), len(known))
		}
		for i, info := range infos {
			if info.Source&gpreempt.FromMQD == 0 {
				if info.Note == "" {
					t.Fatalf("queue %d has neither a dump nor a note", i)
				}
				continue
			}
			if s := known[i].Snapshot; s != nil && s.RingBase != info.RingBase {
				t.Fatalf("queue %d: ring %#x, want %#x", i, info.RingBase, s.RingBase)
			}
			if used[info.Doorbell] {
				t.Fatalf("queue %d has the dump of another", i)
			}
			used[info.Doorbell] = true
		}
	})
}
