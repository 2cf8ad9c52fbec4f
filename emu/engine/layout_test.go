package engine

import (
	"encoding/binary"
	"errors"
	"math"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// whole returns a packet with its first four bytes.
func whole(p interface{ Put(slot []byte) uint32 }) []byte {
	b := make([]byte, PacketBytes)
	for i := range b {
		b[i] = 0xee // a slot that was used
	}
	binary.LittleEndian.PutUint32(b, p.Put(b))
	return b
}

// The expected offset, size and value of each field are those of a C compiler with the
// headers of the HSA runtime.
func TestLayouts(t *testing.T) {
	const h = Header(0x1502)
	type field struct {
		Offset, Size int
		Value        uint64
	}
	signal := make([]byte, SignalBytes)
	Signal{Kind: 1, Value: -2, Mailbox: 3, Event: 4, Start: 5, End: 6}.Put(signal)
	kernel := make([]byte, KernelBytes)
	Kernel{Op: OpMix, Occupancy: 2, Duration: 3}.Put(kernel)
	tests := map[string]struct {
		got  []byte
		want []field
	}{
		"hsa_kernel_dispatch_packet_t": {
			whole(Dispatch{
				Header: h, Dimensions: 3, Workgroup: [3]uint16{1, 2, 3}, Grid: [3]uint32{4, 5, 6},
				Private: 7, Group: 8, Kernel: 9, Kernarg: 10, Completion: 11,
			}),
			[]field{
				{0, 2, 0x1502},
				{2, 2, 3},
				{4, 2, 1},
				{6, 2, 2},
				{8, 2, 3},
				{10, 2, 0},
				{12, 4, 4},
				{16, 4, 5},
				{20, 4, 6},
				{24, 4, 7},
				{28, 4, 8},
				{32, 8, 9},
				{40, 8, 10},
				{48, 8, 0},
				{56, 8, 11},
			},
		},
		"hsa_barrier_and_packet_t": {
			whole(Barrier{Header: h, Deps: [5]uint64{1, 2, 3, 4, 5}, Completion: 6}),
			[]field{{0, 2, 0x1502}, {2, 2, 0}, {4, 4, 0}, {8, 8, 1}, {16, 8, 2}, {24, 8, 3}, {32, 8, 4}, {40, 8, 5}, {48, 8, 0}, {56, 8, 6}},
		},
		"hsa_amd_barrier_value_packet_t": {
			whole(BarrierValue{Header: h, Signal: 1, Value: 2, Mask: 3, Condition: ConditionGTE, Completion: 4}),
			[]field{{0, 2, 0x1502}, {2, 1, 2}, {3, 1, 0}, {4, 4, 0}, {8, 8, 1}, {16, 8, 2}, {24, 8, 3}, {32, 4, 3}, {36, 4, 0}, {40, 8, 0}, {48, 8, 0}, {56, 8, 4}},
		},
		"amd_aql_pm4_ib": {
			whole(PM4{Header: h, Buffer: 0x7f_1234_5678, Dwords: 9, Completion: 4}),
			[]field{{0, 2, 0x1502}, {2, 2, 1}, {4, 4, 0xc002_3f00}, {8, 4, 0x1234_5678}, {12, 4, 0x7f}, {16, 4, 9 | 1<<23}, {20, 4, 10}, {24, 8, 0}, {56, 8, 4}},
		},
		"amd_signal_t": {
			signal,
			[]field{{0, 8, 1}, {8, 8, math.MaxUint64 - 1}, {16, 8, 3}, {24, 4, 4}, {28, 4, 0}, {32, 8, 5}, {40, 8, 6}, {48, 8, 0}, {56, 8, 0}},
		},
		"emulated kernel": {
			kernel,
			[]field{{0, 8, 0x314b_554d_4544_464b}, {8, 4, 1}, {12, 4, 2}, {16, 8, 3}},
		},
	}
	for name, test := range tests {
		var got []field
		for _, f := range test.want {
			var b [8]byte
			copy(b[:], test.got[f.Offset:][:f.Size])
			got = append(got, field{f.Offset, f.Size, binary.LittleEndian.Uint64(b[:])})
		}
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	if got := string(kernel[:8]); got != "KFDEMUK1" {
		t.Errorf("the magic in memory is %q", got)
	}
}

func TestHeaders(t *testing.T) {
	type facts struct {
		Header  Header
		Type    PacketType
		Barrier bool
		Ready   bool
	}
	of := func(b ...byte) facts {
		b = append(b, make([]byte, PacketBytes-len(b))...)
		h := HeaderOf(b)
		return facts{h, h.Type(), h.Barrier(), Ready(b)}
	}
	want := []facts{
		{0x1502, PacketDispatch, true, true},
		{0x1403, PacketBarrierAnd, false, true},
		{0, PacketVendor, false, false},
		{0, PacketVendor, false, true},
		{1, PacketInvalid, false, false},
	}
	dispatch, barrier := MakeHeader(PacketDispatch, true), MakeHeader(PacketBarrierAnd, false)
	got := []facts{
		of(byte(dispatch), byte(dispatch>>8)), of(byte(barrier), byte(barrier>>8)),
		of(0, 0, byte(VendorNone)), of(0, 0, byte(VendorPM4)), of(byte(PacketInvalid)),
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestDecodeReturnsWhatPutWrote(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		same := func(what string, want, got any) {
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s (-want +got):\n%s", what, diff)
			}
		}
		dispatch, barrier := rapid.Make[Dispatch]().Draw(t, "dispatch"), rapid.Make[Barrier]().Draw(t, "barrier")
		value, signal := rapid.Make[BarrierValue]().Draw(t, "value"), rapid.Make[Signal]().Draw(t, "signal")
		mix := rapid.Make[Mix]().Draw(t, "mix")
		kernel := Kernel{
			Op: Op(rapid.Uint32().Draw(t, "op")), Occupancy: rapid.Uint32Max(WholeGPU).Draw(t, "occupancy"),
			Duration: time.Duration(rapid.Int64Range(0, int64(MaxKernelTime)).Draw(t, "ns")),
		}
		same("dispatch", dispatch, DecodeDispatch(whole(dispatch)))
		same("barrier", barrier, DecodeBarrier(whole(barrier)))
		same("barrier value", value, DecodeBarrierValue(whole(value)))
		b := make([]byte, SignalBytes)
		signal.Put(b)
		same("signal", signal, DecodeSignal(b))
		mix.Put(b)
		same("mix", mix, DecodeMix(b))
		kernel.Put(b)
		got, ok := DecodeKernel(b)
		same("kernel", kernel, got)
		same("is a kernel", true, ok)
	})
}

func TestKernelsAreLimited(t *testing.T) {
	b := make([]byte, KernelBytes)
	Kernel{Occupancy: math.MaxUint32, Duration: -1}.Put(b)
	got, ok := DecodeKernel(b)
	if diff := cmp.Diff(Kernel{Occupancy: WholeGPU, Duration: MaxKernelTime}, got); diff != "" || !ok {
		t.Errorf("(-want +got):\n%s", diff)
	}
	b[0]++
	if got, ok := DecodeKernel(b); ok {
		t.Errorf("%v was decoded as an emulated kernel", got)
	}
}

func TestMixHashDependsOnOrder(t *testing.T) {
	// FNV-1a of the two bytes 1 and 2, with another start value.
	const want = (0x100000001b3*1 ^ 2) * 0x100000001b3 % (1 << 64)
	if got := MixHash(MixHash(0, 1), 2); got != want&math.MaxUint64 {
		t.Errorf("hash = %#x, want %#x", got, uint64(want&math.MaxUint64))
	}
	if MixHash(MixHash(0, 1), 2) == MixHash(MixHash(0, 2), 1) {
		t.Error("the order does not change the hash")
	}
}

func TestConditions(t *testing.T) {
	type row struct{ Below, Equal, Above bool }
	want := map[Condition]row{
		ConditionEQ: {false, true, false}, ConditionNE: {true, false, true}, ConditionLT: {true, false, false}, ConditionGTE: {false, true, true},
		9: {},
	}
	got := map[Condition]row{}
	for c := range want {
		got[c] = row{c.Holds(-1, 0), c.Holds(0, 0), c.Holds(1, 0)}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("conditions (-want +got):\n%s", diff)
	}
	polls := map[PollFunc]row{
		PollAlways: {true, true, true}, PollLT: {true, false, false}, PollLE: {true, true, false}, PollEQ: {false, true, false},
		PollNE: {true, false, true}, PollGE: {false, true, true}, PollGT: {false, false, true}, 7: {},
	}
	held := map[PollFunc]row{}
	for f := range polls {
		p := Poll{Func: f, Value: 5, Mask: 0xf}
		held[f] = row{p.Holds(0x14), p.Holds(0xf5), p.Holds(0xf6)}
	}
	if diff := cmp.Diff(polls, held); diff != "" {
		t.Errorf("polls (-want +got):\n%s", diff)
	}
}

// The expected dwords of each command are those of ROCr.
func TestCommandLayouts(t *testing.T) {
	const from, to = 0x7f12_3456_7000, 0x7fab_cdef_0000
	tests := map[string]struct {
		command Command
		want    []uint32
	}{
		"NOP":       {NOP{Skip: 2}, []uint32{2 << 16, 0, 0}},
		"copy":      {Copy{Source: from, Target: to, Bytes: MaxCopyBytes}, []uint32{1, 0x3fffdf, 0, 0x34567000, 0x7f12, 0xcdef0000, 0x7fab}},
		"write":     {Write{Target: to, Data: []byte{1, 0, 0, 0, 2, 0, 0, 0}}, []uint32{2, 0xcdef0000, 0x7fab, 1, 1, 2}},
		"fence":     {Fence{Address: to, Value: 7}, []uint32{5, 0xcdef0000, 0x7fab, 7}},
		"trap":      {Trap{Event: 7}, []uint32{6, 7}},
		"poll":      {Poll{Memory: true, Func: PollEQ, Address: to, Value: 7, Mask: 15}, []uint32{0xb0000008, 0xcdef0000, 0x7fab, 7, 15, 0xfff0004}},
		"atomic":    {Atomic{Address: to, Add: math.MaxUint64}, []uint32{0x5e00000a, 0xcdef0000, 0x7fab, math.MaxUint32, math.MaxUint32, 0, 0, 0}},
		"fill":      {Fill{Target: to, Value: 7, Size: 2, Bytes: 64}, []uint32{0x8000000b, 0xcdef0000, 0x7fab, 7, 60}},
		"timestamp": {Timestamp{Address: to}, []uint32{0x20d, 0xcdef0000, 0x7fab}},
		"flush":     {CacheFlush{}, []uint32{0x111, 0, 0, 0, 0}},
		"rect": {
			CopyRect{
				Source: Plane{from, 1, 2, 3, 4, 5}, Target: Plane{to, 6, 7, 8, 9, 10}, Element: 2, Width: 11, Height: 12, Depth: 13,
			},
			[]uint32{
				0x40000401, 0x34567000, 0x7f12, 0x20001, 3<<13 | 3, 4, 0xcdef0000, 0x7fab, 0x70006, 8<<13 | 8, 9, 0xb000a, 12,
			},
		},
	}
	for name, test := range tests {
		b := appendCommand(nil, test.command)
		var got []uint32
		for i := 0; i < len(b); i += 4 {
			got = append(got, binary.LittleEndian.Uint32(b[i:]))
		}
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		decoded, n, err := DecodeCommand(append(b, 1, 2, 3, 4))
		if diff := cmp.Diff(test.command, decoded); diff != "" || n != len(b) || err != nil {
			t.Errorf("%s decoded: %d of %d bytes, %v (-want +got):\n%s", name, n, len(b), err, diff)
		}
		for short := range b {
			if _, _, err := DecodeCommand(b[:short]); !errors.Is(err, ErrShort) {
				t.Errorf("%s of %d bytes: %v", name, short, err)
			}
		}
	}
}

// The count of a fill is the number of bytes less one, or less one element.
func TestFillAcceptsTheCountsOfBothDrivers(t *testing.T) {
	b := Fill{Size: 2, Bytes: 64}.Append(nil)
	for _, count := range []uint32{60, 61, 62, 63} {
		binary.LittleEndian.PutUint32(b[16:], count)
		c, _, err := DecodeCommand(b)
		if diff := cmp.Diff(Fill{Size: 2, Bytes: 64}, c); diff != "" || err != nil {
			t.Errorf("count %d: %v (-want +got):\n%s", count, err, diff)
		}
	}
}

func FuzzDecodeCommand(f *testing.F) {
	for _, c := range []Command{
		NOP{Skip: 1},
		Copy{Source: 1, Target: 2, Bytes: 3},
		CopyRect{Element: 1, Width: 1, Height: 1, Depth: 1, Source: Plane{Pitch: 1, Slice: 1}, Target: Plane{Pitch: 1, Slice: 1}},
		Write{Data: make([]byte, 8)},
		Fence{Value: 1},
		Trap{1},
		Poll{Memory: true},
		Atomic{Add: 1},
		Fill{Size: 1, Bytes: 2},
		Timestamp{1},
		CacheFlush{},
	} {
		f.Add(appendCommand(nil, c))
	}
	f.Add([]byte{0xff, 0, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		c, n, err := DecodeCommand(b)
		if err != nil {
			if c != nil || n != 0 || !errors.Is(err, ErrShort) && !errors.Is(err, ErrIllegal) {
				t.Fatalf("%v of %d bytes with error %v", c, n, err)
			}
			return
		}
		if n < 4 || n%4 != 0 || n > len(b) {
			t.Fatalf("%T has %d of %d bytes", c, n, len(b))
		}
		// Apart from ignored bits, it is the same command.
		again, m, err := DecodeCommand(appendCommand(nil, c))
		if diff := cmp.Diff(c, again); diff != "" || m != n || err != nil {
			t.Fatalf("%T of %d bytes put again: %d bytes, %v (-want +got):\n%s", c, n, m, err, diff)
		}
	})
}
