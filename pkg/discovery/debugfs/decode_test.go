package debugfs_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
	"github.com/gpreempt/gpreempt/pkg/discovery/registers"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// words ignores the words of decoded values.
var words = cmpopts.IgnoreFields(debugfs.Compute{}, "Words", "Registers")

func decodeCompute(t *testing.T, w []uint32) registers.Compute {
	t.Helper()
	c, err := registers.DecodeCompute(w)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// The rows of a gfx90a queue on 6.12 after it was unmapped, as of kfd_mqd_manager_v9.c:
// synthesised.
func TestImageOfAQueueIsDecoded(t *testing.T) {
	w := make([]uint32, 512)
	copy(w, []uint32{0xc0310800, 1, 1024, 2, 3, 0, 0, 0, 64, 4, 5})
	w[23], w[24], w[26], w[27] = 0xff, 0xffffffff, 0xf, 0x3
	copy(w[0x200/4:], []uint32{0x00120000, 0x00000081, 0, 0x303, 0x4be05301, 2, 0x0b, 0x111})
	copy(w[0x220/4:], []uint32{0x0b5a2000, 0x7f, 0x3a40, 0x0c100080, 0x7f0b, 0x0c100038, 0x7f0b, 0x40001000})
	copy(w[0x240/4:], []uint32{0, 0x1401c511})
	w[0x260/4] = 1 // dequeue request
	copy(w[0x294/4:], []uint32{0x0000fcc8, 0x1, 0x9})
	copy(w[0x2ac/4:], []uint32{0xa4000000, 0x7f41, 0, 0x1f00, 0x2000, 0x2100, 0x00ba6000, 0, 0x5, 0, 1, 0x3b80, 0})
	want := registers.Compute{
		Compute: debugfs.Compute{
			Valid: true, MQD: 0x8100120000, VMID: 3, PipePriority: 2, QueuePriority: 11,
			RingBase: 0x7f0b5a200000, RingBytes: 1 << 20, AQL: true, ReadPosition: 0x3a40, WritePosition: 0x3b80,
			ReadPointer: 0x7f0b0c100080, WritePointer: 0x7f0b0c100038, Doorbell: 0x400, SaveArea: 0x7f41a4000000, SaveBytes: 0xba6000,
		},
		Image: true, Quantum: discovery.Quantum{Enabled: true, Scale: 1, Duration: 1}, Empty: true, DoorbellEnabled: true,
		ControlStackBytes: 0x2000, ControlStackOffset: 0x1f00, WaveStateOffset: 0x2100,
		SaveWaves: true, EOPBase: 0x10000fcc800, EOPBytes: 8 << 9, DequeueRequest: 1, Error: 5,
		CUMask: [4]uint32{0xff, 0xffffffff, 0xf, 0x3}, DispatchInitiator: 1, Grid: [3]uint32{1024, 2, 3}, Workgroup: [3]uint32{64, 4, 5},
	}
	got := decodeCompute(t, w)
	if diff := cmp.Diff(want, got, words); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if dwords := got.BacklogDwords(); dwords != 0x140 {
		t.Errorf("backlog of %d dwords, want %d", dwords, 0x140)
	}
	if packets, ok := got.BacklogPackets(); packets != 20 || !ok {
		t.Errorf("backlog of %d packets, %t, want 20", packets, ok)
	}
	// Its slot decodes to the same, except the fields of an image.
	slot := decodeCompute(t, w[128:184])
	want.Image, want.CUMask, want.DispatchInitiator, want.Grid, want.Workgroup = false, [4]uint32{}, 0, [3]uint32{}, [3]uint32{}
	if diff := cmp.Diff(want, slot, words); diff != "" {
		t.Errorf("registers (-want +got):\n%s", diff)
	}
	// The larger image of gfx12.1, and one cut after its registers, decode to the same.
	for _, n := range []int{184, 1024} {
		other := decodeCompute(t, append(w, make([]uint32, 512)...)[:n])
		if diff := cmp.Diff(got, other, words); diff != "" {
			t.Errorf("%d words (-want +got):\n%s", n, diff)
		}
	}
}

func TestInvalidImagesAreReported(t *testing.T) {
	for _, n := range []int{0, 1, 55, 57, 128, 183} {
		if _, err := registers.DecodeCompute(make([]uint32, n)); err == nil {
			t.Errorf("%d words were accepted as a queue", n)
		}
	}
	if c := decodeCompute(t, make([]uint32, 512)); c.Valid {
		t.Error("an image without a header is valid")
	}
}

func TestXCCFieldsAreThoseOfQueuesOnSeveral(t *testing.T) {
	w := queue{stride: 0x3000}.image()
	w[39], w[41] = 2, 1
	c := decodeCompute(t, w)
	if c.Stride != 0x3000 || c.LogicalXCC != 2 || c.Chunk != 1 {
		t.Errorf("stride %#x, XCC %d, chunk %d", c.Stride, c.LogicalXCC, c.Chunk)
	}
	w[226], w[39], w[41] = 0, 0xffffffff, 0xffffffff // masks of compute units
	if c = decodeCompute(t, w); c.Stride != 0 || c.LogicalXCC != 0 || c.Chunk != 0 {
		t.Errorf("of one XCC: stride %#x, XCC %d, chunk %d", c.Stride, c.LogicalXCC, c.Chunk)
	}
}

func TestBacklogWraps(t *testing.T) {
	for _, tc := range []struct {
		name           string
		bytes          uint64
		rptr           uint32
		wptr           uint64
		dwords, behind uint64
	}{
		{"empty and never used", 4096, 0, 0, 0, 0},
		{"HIQ: the read position wraps, the write position does not", 2048, 0x77, 0xa77, 0, 0},
		{"the write position has wrapped, the read position not yet", 4096, 1008, 1040, 32, 2},
		{"both are absolute and beyond 32 bits", 4096, 0xfffffff0, 1 << 32, 16, 1},
		{"all but one packet", 4096, 16, 1024, 1008, 63},
		{"full: as if empty", 4096, 16, 1040, 0, 0},
	} {
		c := decodeCompute(t, queue{ringBytes: tc.bytes, rptr: tc.rptr, wptr: tc.wptr, aql: true}.registers())
		packets, _ := c.BacklogPackets()
		if got := c.BacklogDwords(); got != tc.dwords || packets != tc.behind {
			t.Errorf("%s: %d dwords, %d packets, want %d, %d", tc.name, got, packets, tc.dwords, tc.behind)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		size := uint64(1) << rapid.IntRange(4, 26).Draw(t, "log2 dwords")
		read := rapid.Uint64Range(0, 1<<60).Draw(t, "read")
		behind := rapid.Uint64Range(0, size-1).Draw(t, "behind")
		rptr := uint32(read)
		if rapid.Bool().Draw(t, "wrapped") {
			rptr = uint32(read % size)
		}
		c, err := registers.DecodeCompute(queue{ringBytes: 4 * size, rptr: rptr, wptr: read + behind}.registers())
		if err != nil {
			t.Fatal(err)
		}
		if got := c.BacklogDwords(); got != behind {
			t.Errorf("%d dwords, want %d", got, behind)
		}
	})
	pm4 := decodeCompute(t, queue{ringBytes: 4096, wptr: 64}.registers())
	if packets, ok := pm4.BacklogPackets(); ok {
		t.Errorf("a PM4 queue has a backlog of %d packets", packets)
	}
}

func TestRingSizesOfAnyControlWord(t *testing.T) {
	for f := range uint32(64) {
		r := make([]uint32, 56)
		r[17], r[39], r[37] = f, f, 1
		c := decodeCompute(t, r)
		want := uint64(0)
		if f < 61 {
			want = 1 << (f + 3)
		}
		if c.RingBytes != want || c.BacklogDwords() != 0 {
			t.Errorf("size field %d: %d bytes, want %d", f, c.RingBytes, want)
		}
	}
}

func TestPriorityIsExactOnlyWhereTheKernelWritesIt(t *testing.T) {
	for _, tc := range []struct {
		pipe, queue uint32
		writes      bool
		want        gpreempt.Priority
		exact       bool
	}{
		{0, 3, false, 3, true}, // 6.12
		{1, 7, false, 7, true},
		{1, 10, false, 10, true},
		{2, 11, false, 11, true},
		{2, 15, false, 15, true},
		{0, 0, true, 0, true},   // 6.12, by another of its queues
		{0, 0, false, 0, false}, // either
		{1, 0, false, 7, false}, // 7.2
		{2, 0, false, 11, false},
		{1, 0, true, 7, false}, // does not fit: the class decides
		{0, 11, false, 0, false},
		{2, 99, false, 11, false},
		{3, 0, false, 0, false}, // unknown class
	} {
		c := decodeCompute(t, queue{pipe: tc.pipe, priority: tc.queue}.registers())
		if p, exact := c.Priority(tc.writes); p != tc.want || exact != tc.exact {
			t.Errorf("pipe %d, queue %d, writes %t: %d, %t, want %d, %t", tc.pipe, tc.queue, tc.writes, p, exact, tc.want, tc.exact)
		}
		if want := tc.exact && tc.queue > 0; c.WritesPriority() != want {
			t.Errorf("pipe %d, queue %d proves %t, want %t", tc.pipe, tc.queue, !want, want)
		}
	}
}

func TestQuantumIsFormatted(t *testing.T) {
	for word, want := range map[uint32]string{0x111: "1 ms", 0xa11: "10 ms", 0x110: "off", 0x101: "1 of scale 0"} {
		r := make([]uint32, 56)
		r[7] = word
		if got := decodeCompute(t, r).Quantum.String(); got != want {
			t.Errorf("%#x: %q, want %q", word, got, want)
		}
	}
}

func TestSDMAOfEachGenerationIsDecoded(t *testing.T) {
	d := dma{
		ring: 0x7f0b0c200000, ringBytes: 1 << 20, read: 0x7f0b2c000080, write: 0x7f0b2c000038, rptr: 0x1234567890, wptr: 0x1234567990,
		doorbell: 0x284, vmid: 3, engine: 1, queue: 6, enabled: true, listens: true, idle: true,
	}
	base := debugfs.SDMA{
		Enabled: true, VMID: 3, RingBase: d.ring, RingBytes: d.ringBytes, ReadPosition: d.rptr, WritePosition: d.wptr,
		ReadPointer: d.read, WritePointer: d.write, Doorbell: d.doorbell, DoorbellEnabled: true,
		Context: 4, ContextKnown: true, Idle: true, Engine: -1, Queue: -1,
	}
	image := func(s debugfs.SDMA) debugfs.SDMA {
		s.Image, s.Engine, s.Queue = true, 1, 6
		return s
	}
	with := func(s debugfs.SDMA, l debugfs.SDMALayout) debugfs.SDMA {
		s.Layout = l
		return s
	}
	without := func(s debugfs.SDMA) debugfs.SDMA {
		s.Context, s.ContextKnown, s.Idle = 0, false, false
		return s
	}
	for _, tc := range []struct {
		name   string
		layout [8]int
		n      int
		gfx    uint32
		want   debugfs.SDMA
	}{
		{"gfx90a, registers", gfx9, 42, 90010, with(base, debugfs.SDMAGFX9)},
		{"gfx942, registers", gfx9, 44, 90402, with(base, debugfs.SDMAGFX9)},
		{"gfx942, image", gfx9, 128, 90402, image(with(base, debugfs.SDMAGFX9))},
		{"gfx1030, image", gfx9, 130, 100300, image(with(base, debugfs.SDMAGFX9))},
		{"gfx1100, registers", gfx11, 43, 110000, with(base, debugfs.SDMAGFX11)},
		{"gfx1100, image", gfx11, 128, 110000, image(with(base, debugfs.SDMAGFX11))},
		{"gfx1201, registers", gfx12, 49, 120001, with(base, debugfs.SDMAGFX12)},
		{"gfx1201, image", gfx12, 128, 120001, without(image(with(base, debugfs.SDMAGFX12)))},
	} {
		w := d.words(tc.layout, tc.n)
		got, err := debugfs.DecodeSDMA(w, tc.gfx)
		if err != nil {
			t.Errorf("%s: %v", tc.name, err)
			continue
		}
		ignore := cmpopts.IgnoreFields(debugfs.SDMA{}, "Words")
		if diff := cmp.Diff(tc.want, got, ignore); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tc.name, diff)
		}
		// The same without gfx: by the dummy register or the size.
		tc.want.Inferred = true
		got, err = debugfs.DecodeSDMA(w, 0)
		if diff := cmp.Diff(tc.want, got, ignore); diff != "" || err != nil {
			t.Errorf("%s, inferred: %v (-want +got):\n%s", tc.name, err, diff)
		}
	}
}

func TestSDMAOfAnUnknownGeneration(t *testing.T) {
	d := dma{ring: 0x7f0b0c200000, ringBytes: 1 << 16, read: 0x7f0b2c000080, rptr: 64, wptr: 128, vmid: 5}
	want := debugfs.SDMA{
		Image: true, VMID: 5, RingBase: d.ring, RingBytes: d.ringBytes, ReadPosition: 64, WritePosition: 128, Engine: 0, Queue: 0,
	}
	for _, tc := range []struct {
		name                 string
		dummy9, dummy11, gfx uint32
	}{
		{"no dummy register", 0, 0, 0},
		{"two that could be it", 0xf, 0xf, 0},
		{"told to be of gfx13", 0xf, 0, 130000},
	} {
		w := d.words(gfx9, 128)
		w[gfx9[6]], w[gfx11[6]] = tc.dummy9, tc.dummy11
		want.Inferred = tc.gfx == 0
		got, err := debugfs.DecodeSDMA(w, tc.gfx)
		if diff := cmp.Diff(want, got, cmpopts.IgnoreFields(debugfs.SDMA{}, "Words")); diff != "" || err != nil {
			t.Errorf("%s: %v (-want +got):\n%s", tc.name, err, diff)
		}
	}
	for _, tc := range []struct {
		n   int
		gfx uint32
	}{{0, 0}, {29, 90402}, {128, 80003}, {43, 90402}, {49, 110000}, {44, 120000}} {
		if got, err := debugfs.DecodeSDMA(make([]uint32, tc.n), tc.gfx); err == nil {
			t.Errorf("%d words of gfx %d: %+v, want an error", tc.n, tc.gfx, got)
		}
	}
}

// Flags in the low bits of an address are not a part of it: the register of the
// MI308X capture is 31304011.
func TestSDMAPointersAreWithoutTheirFlags(t *testing.T) {
	w := dma{read: 0x7f5731304011}.words(gfx9, 44)
	if s, err := debugfs.DecodeSDMA(w, 90402); err != nil || s.ReadPointer != 0x7f5731304010 {
		t.Errorf("%#x, %v", s.ReadPointer, err)
	}
}
