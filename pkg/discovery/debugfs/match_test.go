package debugfs_test

import (
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

const gpu, gpu2 = gpreempt.GPUID(0xf7bc), gpreempt.GPUID(0xf05b)

// q is the i-th queue of a process, with its own addresses.
func q(i int) queue {
	n := uint64(i)
	return queue{
		mqd: 0x100000 + n*0x10000, ring: 0x7f0000000000 + n<<24, ringBytes: 1 << 20, read: 0x7f1000000080 + n*4096, write: 0x7f1000000038 + n*4096,
		save: 0x7f2000000000 + n<<28, saveBytes: 0xba6000, stride: 0x3000, doorbell: 0x1000 + 2*uint32(i), pipe: 1, priority: 7, aql: true,
	}
}

// s is the i-th SDMA queue of a process.
func s(i int) dma {
	n := uint64(i)
	return dma{ring: 0x7f8000000000 + n<<24, ringBytes: 1 << 20, read: 0x7f9000000080 + n*4096, write: 0x7f9000000038 + n*4096, doorbell: 0x280 + uint32(i)}
}

// gfx942 omits the write pointer, like the driver.
func (d dma) gfx942() []uint32 {
	d.write = 0
	return d.words(gfx9, 128)
}

func (q queue) dump(line int, gpu gpreempt.GPUID, xccs int) debugfs.MQD {
	return debugfs.MQD{Kind: debugfs.KindCompute, GPU: gpu, Line: line, XCCs: q.images(xccs)}
}

func (d dma) dump(line int, gpu gpreempt.GPUID) debugfs.MQD {
	return debugfs.MQD{Kind: debugfs.KindSDMA, GPU: gpu, Line: line, XCCs: [][]uint32{d.gfx942()}}
}

// known is the queue in sysfs and in the snapshot.
func (q queue) known(id uint32, gpu gpreempt.GPUID) debugfs.Known {
	return debugfs.Known{ID: id, GPU: gpu, Type: gpreempt.QueueCompute, RingBytes: q.ringBytes, Snapshot: q.snapshot()}
}

func (q queue) snapshot() *gpreempt.QueueInfo {
	return &gpreempt.QueueInfo{Source: gpreempt.FromSnapshot, RingBase: q.ring, ReadPointer: q.read, WritePointer: q.write, SaveArea: q.save}
}

// info are all its properties.
func (q queue) info() gpreempt.QueueInfo {
	i := *q.snapshot()
	i.Source |= gpreempt.FromMQD
	i.AQL, i.MQD, i.Doorbell, i.Priority, i.PriorityKnown, i.PriorityExact = true, q.mqd, q.doorbell, gpreempt.Priority(q.priority), true, true
	return i
}

func (d dma) known(id uint32) debugfs.Known {
	return debugfs.Known{ID: id, GPU: gpu, Type: gpreempt.QueueSDMA, RingBytes: d.ringBytes, Snapshot: &gpreempt.QueueInfo{
		Source: gpreempt.FromSnapshot, RingBase: d.ring, ReadPointer: d.read, WritePointer: d.write,
	}}
}

func (d dma) info() gpreempt.QueueInfo {
	return gpreempt.QueueInfo{
		Source: gpreempt.FromSnapshot | gpreempt.FromMQD, RingBase: d.ring, ReadPointer: d.read, WritePointer: d.write,
		Doorbell: d.doorbell,
	}
}

func gfx942(gpreempt.GPUID) uint32 { return 90402 }

// bare is a queue in sysfs only.
func bare(k debugfs.Known) debugfs.Known {
	k.Snapshot = nil
	return k
}

// born is a queue in sysfs only, with its place in the order of creation.
func born(n uint64, k debugfs.Known) debugfs.Known {
	k = bare(k)
	k.Born = n
	return k
}

// unmatched are the properties of a queue without a dump.
func unmatched(k debugfs.Known, note string) gpreempt.QueueInfo {
	var i gpreempt.QueueInfo
	if k.Snapshot != nil {
		i = *k.Snapshot
	}
	i.Note = note
	return i
}

// only are the properties of the dump alone.
func only(i gpreempt.QueueInfo) gpreempt.QueueInfo {
	i.Source = gpreempt.FromMQD
	return i
}

func TestQueuesAreMatchedToTheirDumps(t *testing.T) {
	type (
		knowns = []debugfs.Known
		dumps  = []debugfs.MQD
		infos  = []gpreempt.QueueInfo
	)
	moved := func(change func(*queue)) queue { q := q(1); change(&q); return q }
	sized := func(i int, bytes uint64) queue { q := q(i); q.ringBytes = bytes; return q }
	sdmaOnly := only(s(3).info())
	sdmaOnly.WritePointer = 0 // the image of gfx9 has none
	broken := q(1).dump(11, gpu, 1)
	broken.XCCs[0][0] = 0
	torn := q(1).dump(11, gpu, 2)
	torn.XCCs[1] = q(2).image()
	cut := debugfs.MQD{Kind: debugfs.KindCompute, GPU: gpu, Line: 11, XCCs: [][]uint32{{1, 2, 3}}}
	for _, tc := range []struct {
		name  string
		known knowns
		dumps dumps
		want  infos
	}{
		{
			"by ring and pointers, in any order, with a DIQ among them",
			knowns{q(1).known(0, gpu), s(3).known(1), q(2).known(2, gpu2)},
			dumps{q(2).dump(20, gpu2, 4), {Kind: debugfs.KindDIQ, GPU: gpu, XCCs: q(1).images(1)}, s(3).dump(15, gpu), q(1).dump(10, gpu, 4)},
			infos{q(1).info(), s(3).info(), q(2).info()},
		},
		{
			"of SDMA over xGMI the text says SDMA; of a type not known the ring says enough",
			knowns{
				func() debugfs.Known { k := s(3).known(1); k.Type = gpreempt.QueueSDMAXGMI; return k }(),
				func() debugfs.Known { k := q(1).known(2, gpu); k.Type = gpreempt.QueueUnknown; return k }(),
			},
			dumps{q(1).dump(10, gpu, 1), s(3).dump(11, gpu)},
			infos{s(3).info(), q(1).info()},
		},
		{
			"the ring of one GPU is not that of another, nor that of another kind",
			knowns{q(1).known(0, gpu2), func() debugfs.Known { k := q(2).known(1, gpu); k.Type = gpreempt.QueueSDMA; return k }()},
			dumps{q(2).dump(12, gpu, 1), q(1).dump(11, gpu, 1)},
			infos{
				unmatched(q(1).known(0, gpu2), "no dump has its ring 0x7f0001000000"),
				unmatched(q(2).known(1, gpu), "no dump has its ring 0x7f0002000000"),
			},
		},
		{
			"another queue at the same address: the read pointer is not the same",
			knowns{q(1).known(0, gpu)},
			dumps{moved(func(q *queue) { q.read += 64 }).dump(11, gpu, 1)},
			infos{unmatched(q(1).known(0, gpu), "the dump of line 11 has its ring 0x7f0001000000, but it has read pointer 0x7f10000010c0 instead of 0x7f1000001080: another queue may have replaced it")},
		},
		{
			"... nor the write pointer",
			knowns{q(1).known(0, gpu)},
			dumps{moved(func(q *queue) { q.write += 64 }).dump(11, gpu, 1)},
			infos{unmatched(q(1).known(0, gpu), "the dump of line 11 has its ring 0x7f0001000000, but it has write pointer 0x7f1000001078 instead of 0x7f1000001038: another queue may have replaced it")},
		},
		{
			"... nor the save area",
			knowns{q(1).known(0, gpu)},
			dumps{moved(func(q *queue) { q.save += 4096 }).dump(11, gpu, 1)},
			infos{unmatched(q(1).known(0, gpu), "the dump of line 11 has its ring 0x7f0001000000, but it has save area 0x7f2010001000 instead of 0x7f2010000000: another queue may have replaced it")},
		},
		{
			"... nor the size",
			knowns{q(1).known(0, gpu)},
			dumps{moved(func(q *queue) { q.ringBytes /= 2 }).dump(11, gpu, 1)},
			infos{unmatched(q(1).known(0, gpu), "the dump of line 11 has its ring 0x7f0001000000, but it has a ring of 524288 bytes instead of 1048576: another queue may have replaced it")},
		},
		{
			"two dumps with one ring, told apart by a pointer",
			knowns{q(1).known(0, gpu)},
			dumps{q(1).dump(11, gpu, 1), moved(func(q *queue) { q.read += 64 }).dump(12, gpu, 1)},
			infos{q(1).info()},
		},
		{
			"two dumps with the same ring and pointers",
			knowns{q(1).known(0, gpu)},
			dumps{q(1).dump(11, gpu, 1), q(1).dump(12, gpu, 1)},
			infos{unmatched(q(1).known(0, gpu), "the dumps of lines 11, 12 have its ring 0x7f0001000000 and cannot be distinguished")},
		},
		{
			"two queues with the same ring and pointers",
			knowns{q(1).known(0, gpu), q(1).known(4, gpu)},
			dumps{q(1).dump(11, gpu, 1)},
			infos{
				unmatched(q(1).known(0, gpu), "the dump of line 11 fits queues 0, 4 equally"),
				unmatched(q(1).known(4, gpu), "the dump of line 11 fits queues 0, 4 equally"),
			},
		},
		{
			"no dump at all",
			knowns{q(1).known(0, gpu)},
			nil,
			infos{unmatched(q(1).known(0, gpu), "no dump has its ring 0x7f0001000000")},
		},
		{
			"a dump that is no MQD",
			knowns{q(1).known(0, gpu)},
			dumps{broken},
			infos{unmatched(q(1).known(0, gpu), "no dump has its ring 0x7f0001000000 (the dump of line 11 cannot be used: it begins with 00000000 instead of c0310800)")},
		},
		{
			"an SDMA dump of an old GPU",
			knowns{s(3).known(0)},
			dumps{{Kind: debugfs.KindSDMA, GPU: gpu, Line: 11, XCCs: [][]uint32{{1, 2}}}},
			infos{unmatched(s(3).known(0), "no dump has its ring 0x7f8003000000 (the dump of line 11 cannot be used: 2 words are neither the registers of an SDMA slot nor an SDMA MQD of 128 words)")},
		},
		{
			"a dump of which an XCC's is cut",
			knowns{q(1).known(0, gpu)},
			dumps{{Kind: debugfs.KindCompute, GPU: gpu, Line: 11, XCCs: [][]uint32{q(1).image(), {1}}}},
			infos{unmatched(q(1).known(0, gpu), "no dump has its ring 0x7f0001000000 (the dump of line 11 cannot be used: 1 words are neither the 56 registers of a slot nor an MQD of 512 words)")},
		},
		{
			"a dump whose XCCs are not of one queue",
			knowns{q(1).known(0, gpu)},
			dumps{torn},
			infos{unmatched(q(1).known(0, gpu), "no dump has its ring 0x7f0001000000 (the dump of line 11 cannot be used: its XCCs have different rings, 0x7f0001000000 and 0x7f0002000000)")},
		},
		{
			"in the order of a snapshot after a destroy: the dumps are in the same",
			knowns{q(5).known(1, gpu), q(3).known(2, gpu), q(1).known(0, gpu)},
			dumps{q(5).dump(11, gpu, 1), q(3).dump(12, gpu, 1), q(1).dump(13, gpu, 1)},
			infos{q(5).info(), q(3).info(), q(1).info()},
		},
		{
			"in another order than that of a snapshot",
			knowns{q(5).known(2, gpu), q(3).known(1, gpu), q(1).known(0, gpu)},
			dumps{q(3).dump(11, gpu, 1), q(5).dump(12, gpu, 1), q(1).dump(13, gpu, 1)},
			infos{q(5).info(), q(3).info(), q(1).info()},
		},
		{
			"without a snapshot: one of each size",
			knowns{bare(sized(1, 4096).known(0, gpu)), bare(q(2).known(1, gpu)), bare(s(3).known(2))},
			dumps{s(3).dump(12, gpu), q(2).dump(11, gpu, 1), sized(1, 4096).dump(10, gpu, 1)},
			infos{only(sized(1, 4096).info()), only(q(2).info()), sdmaOnly},
		},
		{
			"without a snapshot: two of a size, though the ids have no gap",
			knowns{bare(q(1).known(0, gpu)), bare(q(2).known(1, gpu)), bare(q(4).known(2, gpu2))},
			dumps{q(4).dump(12, gpu2, 1), q(2).dump(11, gpu, 1), q(1).dump(10, gpu, 1)},
			infos{
				{Note: "only the size of the ring is known, and the dumps of lines 11, 10 could be that of queues 0, 1", Priority: 7, PriorityKnown: true, PriorityExact: true},
				{Note: "only the size of the ring is known, and the dumps of lines 11, 10 could be that of queues 0, 1", Priority: 7, PriorityKnown: true, PriorityExact: true},
				only(q(4).info()),
			},
		},
		{
			"without a snapshot: two of a size, by the order in which they were created, not by their ids",
			knowns{born(8, q(1).known(0, gpu)), born(5, q(2).known(1, gpu)), born(9, s(3).known(2)), born(7, q(4).known(3, gpu2))},
			dumps{s(3).dump(13, gpu), q(1).dump(12, gpu, 1), q(4).dump(11, gpu2, 1), q(2).dump(10, gpu, 1)},
			infos{only(q(1).info()), only(q(2).info()), sdmaOnly, only(q(4).info())},
		},
		{
			"by order and a snapshot that contradicts it",
			knowns{born(8, q(1).known(0, gpu)), func() debugfs.Known { k := q(2).known(1, gpu); k.Born = 9; return k }()},
			dumps{q(1).dump(11, gpu, 1), q(2).dump(10, gpu, 1)},
			infos{only(q(1).info()), q(2).info()},
		},
		{
			"by order, but a queue is missing",
			knowns{born(8, q(1).known(0, gpu)), born(9, q(2).known(1, gpu))},
			dumps{q(2).dump(11, gpu, 1)},
			infos{{Note: "2 queues of its kind on its GPU, but 1 dumps"}, {Note: "2 queues of its kind on its GPU, but 1 dumps"}},
		},
		{
			"without a snapshot: two of a size and of different priority, of which that is not known either",
			knowns{bare(q(1).known(0, gpu)), bare(q(2).known(1, gpu))},
			dumps{func() debugfs.MQD { high := q(2); high.priority, high.pipe = 11, 2; return high.dump(11, gpu, 1) }(), q(1).dump(10, gpu, 1)},
			infos{
				{Note: "only the size of the ring is known, and the dumps of lines 11, 10 could be that of queues 0, 1"},
				{Note: "only the size of the ring is known, and the dumps of lines 11, 10 could be that of queues 0, 1"},
			},
		},
		{
			"without a snapshot: more dumps than queues, of a secondary context",
			knowns{bare(sized(1, 4096).known(0, gpu))},
			dumps{q(2).dump(11, gpu, 1), sized(1, 4096).dump(10, gpu, 1)},
			infos{{Note: "1 queues of its kind on its GPU, but 2 dumps"}},
		},
		{
			"without a snapshot: no such size",
			knowns{bare(sized(1, 4096).known(0, gpu))},
			dumps{q(2).dump(11, gpu, 1)},
			infos{{Note: "no dump has a ring of its 4096 bytes"}},
		},
		{
			"without a snapshot or a size: it is the only one",
			knowns{func() debugfs.Known { k := bare(q(1).known(0, gpu)); k.RingBytes = 0; return k }()},
			dumps{q(1).dump(11, gpu, 1)},
			infos{only(q(1).info())},
		},
		{
			"without a snapshot or a size: it may be any",
			knowns{func() debugfs.Known { k := bare(q(1).known(0, gpu)); k.RingBytes = 0; return k }(), bare(sized(2, 4096).known(1, gpu))},
			dumps{sized(2, 4096).dump(12, gpu, 1), q(1).dump(11, gpu, 1)},
			infos{
				{Note: "only the size of the ring is known, and the dumps of lines 12, 11 could be that of queues 0, 1", Priority: 7, PriorityKnown: true, PriorityExact: true},
				{Note: "only the size of the ring is known, and the dump of line 12 could be that of queues 0, 1", Priority: 7, PriorityKnown: true, PriorityExact: true},
			},
		},
		{
			"what snapshots leave over: one of the rest",
			knowns{q(1).known(0, gpu), bare(q(2).known(1, gpu))},
			dumps{q(2).dump(12, gpu, 1), q(1).dump(11, gpu, 1)},
			infos{q(1).info(), only(q(2).info())},
		},
		{
			"of neither a type nor a ring",
			knowns{func() debugfs.Known { k := bare(q(1).known(0, gpu)); k.Type = gpreempt.QueueUnknown; return k }()},
			dumps{q(1).dump(11, gpu, 1)},
			infos{{Note: "its type and its ring are unknown"}},
		},
		{
			"a dump too short to tell",
			knowns{func() debugfs.Known { k := bare(q(1).known(0, gpu)); k.RingBytes = 0; return k }()},
			dumps{cut},
			infos{{Note: "no dump remains (the dump of line 11 cannot be used: 3 words are neither the 56 registers of a slot nor an MQD of 512 words)"}},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, debugfs.MatchQueues(tc.known, tc.dumps, gfx942)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestNoteOfTheSnapshotIsKept(t *testing.T) {
	k := s(1).known(0)
	k.Snapshot.Note = "taken a second ago"
	got := debugfs.MatchQueues([]debugfs.Known{k}, []debugfs.MQD{s(1).dump(3, gpu)}, nil)[0].Note
	if want := "taken a second ago"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if k.Snapshot.Note != "taken a second ago" {
		t.Error("the caller's snapshot was changed")
	}
}

// On a kernel that does not write the queue priority only the class is known; the other
// queues of the process may show which kernel it is.
func TestPriorityByTheOtherQueuesOfTheProcess(t *testing.T) {
	low := q(1)
	low.pipe, low.priority = 0, 0
	later := q(2)
	later.priority = 0
	match := func(others ...queue) gpreempt.QueueInfo {
		known, dumps := []debugfs.Known{low.known(0, gpu)}, []debugfs.MQD{low.dump(10, gpu, 1)}
		for i, o := range others {
			known, dumps = append(known, o.known(uint32(i+1), gpu)), append(dumps, o.dump(11+i, gpu, 1))
		}
		return debugfs.MatchQueues(known, dumps, nil)[0]
	}
	for _, tc := range []struct {
		name  string
		got   gpreempt.QueueInfo
		exact bool
	}{{"alone", match(), false}, {"beside one of 6.12", match(q(3)), true}, {"beside one of 7.2", match(later), false}} {
		if tc.got.Priority != 0 || tc.got.PriorityExact != tc.exact {
			t.Errorf("%s: %d, exact %t, want 0, %t", tc.name, tc.got.Priority, tc.got.PriorityExact, tc.exact)
		}
	}
}

// In any order of both sides a queue is matched to its own dump or to none, and to its own
// when no other queue has its ring: also not to that of a queue which has replaced it since.
func TestNoQueueIsMatchedToTheDumpOfAnother(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, 8).Draw(t, "queues")
		var known []debugfs.Known
		var dumps []debugfs.MQD
		var all []queue
		lost := map[uint32]bool{}
		for i := range n {
			a := q(rapid.IntRange(0, 6).Draw(t, "ring")) // some share a ring
			replaced := rapid.Bool().Draw(t, "replaced")
			if replaced {
				a = q(7 + i)
			}
			a.mqd = uint64(i+1) << 20
			if rapid.Bool().Draw(t, "pointers") {
				a.read += uint64(i) * 64
			}
			a.ringBytes >>= rapid.IntRange(0, 2).Draw(t, "size")
			k := a.known(uint32(i), gpu)
			dumped := a
			if replaced {
				dumped.mqd++
				if rapid.Bool().Draw(t, "of another size") {
					dumped.ringBytes >>= 3
				} else {
					dumped.save += 4096
				}
			} else if rapid.Bool().Draw(t, "sysfs only") {
				k = bare(k)
			}
			all, known, dumps = append(all, a), append(known, k), append(dumps, dumped.dump(i+1, gpu, 1))
			lost[k.ID] = replaced
		}
		r := rand.New(rand.NewPCG(1, rapid.Uint64().Draw(t, "order")))
		r.Shuffle(n, func(i, j int) { dumps[i], dumps[j] = dumps[j], dumps[i] })
		r.Shuffle(n, func(i, j int) { known[i], known[j] = known[j], known[i] })
		for i, info := range debugfs.MatchQueues(known, dumps, nil) {
			own := all[known[i].ID]
			if certain := info.Source&gpreempt.FromMQD != 0; certain && info.MQD != own.mqd {
				t.Fatalf("queue %d has the dump of another: %+v", known[i].ID, info)
			} else if !certain && info.Note == "" {
				t.Fatalf("queue %d has neither a dump nor a note", known[i].ID)
			}
			alone := known[i].Snapshot != nil && !lost[known[i].ID]
			for j, o := range all {
				alone = alone && (uint32(j) == known[i].ID || o.ring != own.ring)
			}
			if alone && info.Source&gpreempt.FromMQD == 0 {
				t.Fatalf("queue %d alone has its ring, and no dump: %s", known[i].ID, info.Note)
			}
		}
	})
}

func TestNotesAreBounded(t *testing.T) {
	var known []debugfs.Known
	var dumps []debugfs.MQD
	for i := range 100 {
		known, dumps = append(known, bare(q(1).known(uint32(i), gpu))), append(dumps, q(1).dump(i, gpu, 1))
	}
	got := debugfs.MatchQueues(known, dumps, nil)[7].Note
	if want := "could be that of queues 0, 1, 2, 3, 4, 5, 6, 7, 92 more"; !strings.HasSuffix(got, want) {
		t.Errorf("%s, want ... %s", got, want)
	}
}
