package debugfs_test

import (
	"fmt"
	"slices"
	"sort"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// fullMQDs is a text of two compute queues of two XCCs and an SDMA queue.
func fullMQDs() string {
	var b text
	b.linef("Process 4211 PASID 4211:")
	for i := range 2 {
		b.linef("  Compute queue on device f7bc")
		b.dump(4, some(512, uint32(i)))
		b.dump(4, some(512, uint32(i)+7))
	}
	b.linef("  SDMA queue on device f7bc")
	b.dump(4, some(128, 3))
	b.dump(4, some(128, 4))
	return b.String()
}

// sameMQD compares like cmp.Diff, faster.
func sameMQD(a, b debugfs.MQD) bool {
	return a.Kind == b.Kind && a.GPU == b.GPU && a.Line == b.Line && slices.EqualFunc(a.XCCs, b.XCCs, slices.Equal[[]uint32])
}

// A text may begin and end anywhere: each queue whose line is there is kept, with its process if
// that line is there, too, and its complete dumps; nothing else is.
func TestPartsOfMQDsKeepEachQueueWhoseLineIsThere(t *testing.T) {
	texts := map[string]string{"made": fullMQDs() + strings.Replace(fullMQDs(), "4211", "77", 2)}
	t.Run("capture", func(t *testing.T) {
		var truth truthMQDs
		texts["captured"] = string(capture(t, "mqds_active_16streams.txt", &truth))
	})
	for name, text := range texts {
		whole := parseMQDs(t, text)
		if len(whole.Warnings) != 0 {
			t.Fatal(name, whole.Warnings)
		}
		for _, cut := range cuts(text) {
			for _, part := range [][2]int{{0, cut}, {cut, len(text)}} {
				from, to := part[0], part[1]
				got := parseMQDs(t, text[from:to])
				want := partOf(whole, text, from, to)
				if !slices.EqualFunc(want, got.Processes, sameProcess) {
					t.Fatalf("%s, from %d to %d (-want +got):\n%s", name, from, to, cmp.Diff(want, got.Processes))
				}
				inLine := cut > 0 && cut < len(text) && text[cut-1] != '\n' && text[cut] != '\n'
				if inLine && len(got.Warnings) == 0 {
					t.Fatalf("%s, from %d to %d, within a line: no warning", name, from, to)
				}
			}
		}
	}
}

// cuts returns where to cut a text: at each end of a line and beside it, everywhere in the lines
// about processes and queues, and in one row of each 64; all positions within a row are equivalent.
func cuts(text string) []int {
	var cuts []int
	at, row := 0, 0
	for line := range strings.Lines(text) {
		row++
		data := strings.HasPrefix(line, "    ")
		for i := range line {
			if !data || row%64 == 0 || i < 2 || i > len(line)-2 {
				cuts = append(cuts, at+i)
			}
		}
		at += len(line)
	}
	return append(cuts, at)
}

// partOf returns what a part of a text contains of the whole.
func partOf(whole debugfs.MQDDump, text string, from, to int) []debugfs.MQDProcess {
	starts := []int{0, 0} // by line, from 1
	for line := range strings.Lines(text) {
		starts = append(starts, starts[len(starts)-1]+len(line))
	}
	first := sort.SearchInts(starts[1:], from) // the lines before the first whole one
	if from > 0 && starts[first+1] > from {
		first-- // the rest of a line counts as one
	}
	has := func(line int) bool { return starts[line] >= from && starts[line+1] <= to }
	var part []debugfs.MQDProcess
	for _, p := range whole.Processes {
		known := has(p.Line)
		if known {
			part = append(part, debugfs.MQDProcess{PID: p.PID, PASID: p.PASID, Line: p.Line - first})
		}
		for _, q := range p.Queues {
			if !has(q.Line) {
				continue
			}
			if len(part) == 0 {
				part = append(part, debugfs.MQDProcess{Line: q.Line - first})
			}
			last := &part[len(part)-1]
			kept := debugfs.MQD{Kind: q.Kind, GPU: q.GPU, Line: q.Line - first}
			line := q.Line + 1
			for x, words := range q.XCCs {
				rows := 0
				for rows < len(words)/8 && starts[line+rows+1]-1 <= to { // a whole row needs no newline
					rows++
				}
				line += len(words) / 8
				if 8*rows == len(words) || x == 0 && q.Kind == debugfs.KindCompute && 8*rows >= 184 {
					kept.XCCs = append(kept.XCCs, words[:8*rows])
				}
			}
			last.Queues = append(last.Queues, kept)
		}
	}
	return part
}

func sameProcess(a, b debugfs.MQDProcess) bool {
	return a.PID == b.PID && a.PASID == b.PASID && a.Line == b.Line && slices.EqualFunc(a.Queues, b.Queues, sameMQD)
}

// Between two dumps nothing is cut, but the other queue of the GPU has more dumps.
func TestQueueWithFewerDumpsThanAnotherIsSuspected(t *testing.T) {
	lines := strings.SplitAfter(fullMQDs(), "\n")
	text := strings.Join(lines[:1+129+65], "")
	want := []debugfs.Warning{{131, "the queue has fewer or shorter dumps than another on the same GPU: the text may end early"}}
	if diff := cmp.Diff(want, parseMQDs(t, text).Warnings); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// Of a dump that ends after the registers, the queue is known; of a shorter one, only its kind.
func TestQueuesOfPartsAreMatched(t *testing.T) {
	const gpu = 0x8a31
	whole, cut := q(1), q(2)
	var b text
	b.linef("Process 4211 PASID 4211:")
	b.linef("  Compute queue on device %x", gpu)
	b.dump(4, whole.image())
	b.linef("  Compute queue on device %x", gpu)
	b.dump(4, cut.image())
	rows := func(n int) string { return strings.Join(strings.SplitAfter(b.String(), "\n")[:1+1+64+1+n], "") }
	d, err := debugfs.DecodeCompute(cut.image())
	if err != nil {
		t.Fatal(err)
	}
	known := []debugfs.Known{{ID: 7, GPU: gpu, Type: gpreempt.QueueCompute, RingBytes: d.RingBytes, Snapshot: &gpreempt.QueueInfo{RingBase: d.RingBase}}}
	match := func(text string) gpreempt.QueueInfo {
		return debugfs.MatchQueues(known, parseMQDs(t, text).Processes[0].Queues, nil)[0]
	}
	if got := match(rows(23)); got.Source != gpreempt.FromMQD || got.MQD != d.MQD || got.Note != "" {
		t.Errorf("with its registers: %+v", got)
	}
	got := match(rows(22))
	want := fmt.Sprintf("no dump has its ring %#x (the dump of line 67 cannot be used: it is not complete)", d.RingBase)
	if got.Source != 0 || got.Note != want {
		t.Errorf("without: %+v, want the note %q", got, want)
	}
}
