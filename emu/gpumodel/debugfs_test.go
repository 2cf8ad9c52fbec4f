package gpumodel

import (
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

var update = flag.Bool("update", false, "write the files of debugfs into testdata")

// small is a GPU with little to dump: two XCCs, a slot on each, two SDMA engines.
func small(gfx uint32) Spec {
	s := hws()
	s.Name, s.GFX, s.XCCs = "small", gfx, 2
	if gfx >= 110000 {
		s = mes()
		s.Name = "small"
	}
	s.Slots, s.SDMAEngines, s.XGMIEngines, s.SDMAQueuesPerEngine = 1, 1, 1, 1
	return s
}

func (r rig) text(name string) string {
	r.Helper()
	b, err := fs.ReadFile(r.FS(), "sys/kernel/debug/kfd/"+name)
	r.ok(err)
	return string(b)
}

// elide leaves out rows of nothing but zeros, saying how many.
func elide(text string) string {
	var b strings.Builder
	zeros := 0
	flush := func() {
		if zeros > 0 {
			fmt.Fprintf(&b, "    ... %d rows of zeros\n", zeros)
		}
		zeros = 0
	}
	for line := range strings.Lines(text) {
		_, row, ok := strings.Cut(line, ": ")
		if ok && strings.Trim(row, "0 \n") == "" {
			zeros++
			continue
		}
		flush()
		b.WriteString(line)
	}
	flush()
	return b.String()
}

// TestDebugfsTexts compares the files with those in testdata, which are for people to
// look at: -update writes them.
func TestDebugfsTexts(t *testing.T) {
	for _, c := range []struct {
		kernel Kernel
		gfx    uint32
	}{
		{Linux61, 90402},
		{Linux612, 90402},
		{Linux72, 90402},
		{DKMS, 90402},
		{Linux612, 110000},
	} {
		name := fmt.Sprintf("%v-gfx%d.txt", c.kernel, c.gfx)
		t.Run(name, func(t *testing.T) {
			r := newRig(t, small(c.gfx), 1)
			r.SetKernel(c.kernel)
			gone := r.start("gone", 1, 0)
			key := r.start("p", 1, 0)
			r.queue(key, 0, gpreempt.QueueSDMA)
			r.ok(r.EndProcess(gone))
			r.kernel(key, 0, ms, 0.5)
			r.kernel(key, 0, ms, 0.5)
			r.AdvanceTo(r.Now() + ms/2)
			r.AdvanceTo(r.Now() + ms)
			r.queue(key, 0, gpreempt.QueueCompute)
			r.AdvanceTo(r.Now() + ms/4)

			var b strings.Builder
			for _, file := range []string{"mqds", "hqds"} {
				fmt.Fprintf(&b, "==> %s <==\n%s", file, elide(r.text(file)))
			}
			golden := filepath.Join("testdata", name)
			if *update {
				r.ok(os.WriteFile(golden, []byte(b.String()), 0o644))
			}
			want, err := os.ReadFile(golden)
			r.ok(err)
			if diff := cmp.Diff(string(want), b.String()); diff != "" {
				t.Errorf("run go test ./emu/gpumodel -update; %s (-want +got):\n%s", golden, diff)
			}
		})
	}
}

// dumps counts the dumps below each line that begins a queue.
func dumps(text string) []string {
	var all []string
	n := 0
	for line := range strings.Lines(text) {
		switch {
		case strings.HasPrefix(line, "    00000000:"):
			n++
			all[len(all)-1] = fmt.Sprint(strings.Fields(all[len(all)-1])[0], " ", n)
		case strings.Contains(line, " queue on device "):
			n = 0
			all = append(all, strings.Fields(line)[0])
		}
	}
	return all
}

func TestSDMAQueuesBehindAComputeQueueAreDumpedForEveryXCC(t *testing.T) {
	r := newRig(t, hws(), 1)
	key := r.start("p", 0, 0)
	r.queue(key, 0, gpreempt.QueueSDMA)
	r.queue(key, 0, gpreempt.QueueCompute)
	r.queue(key, 0, gpreempt.QueueSDMA)
	r.rest()
	for kernel, want := range map[Kernel][]string{
		Linux61:  {"SDMA 1", "Compute 1", "SDMA 1"},
		Linux612: {"SDMA 1", "Compute 8", "SDMA 8"},
		Linux72:  {"SDMA 1", "Compute 8", "SDMA 8"},
		Linux73:  {"SDMA 1", "Compute 8", "SDMA 8"},
	} {
		r.SetKernel(kernel)
		if diff := cmp.Diff(want, dumps(r.text("mqds"))); diff != "" {
			t.Errorf("%v: newest first (-want +got):\n%s", kernel, diff)
		}
	}

	// The oldest is in slot 0 of engine 0. The second dump is of the memory of slot 1,
	// where nobody was; after somebody was, it stays.
	r.SetKernel(Linux612)
	second := func() string {
		text := r.text("mqds")
		text = text[strings.LastIndex(text, "SDMA queue"):]
		return elide(strings.Split(text, "    00000000:")[2])
	}
	before := second()
	for range 4 {
		r.queue(key, 0, gpreempt.QueueSDMA)
	}
	r.rest()
	r.ok(r.DestroyQueue(key, 4))
	r.rest()
	if after := second(); strings.Count(before, "\n") >= strings.Count(after, "\n") {
		t.Errorf("memory behind an SDMA MQD, before a queue had it:\n%s\nand after:\n%s", before, after)
	}
}

// TestAddressesAreReused: a process has a queue where it had one before, and other
// processes have theirs at the same addresses, but not their MQDs.
func TestAddressesAreReused(t *testing.T) {
	r := newRig(t, hws(), 1)
	a, b := r.start("a", 2, 0), r.start("b", 2, 0)
	facts := func(key gpreempt.ProcessKey, id uint32) gpreempt.QueueInfo {
		q, _ := r.byKey[key].queue(id)
		return q.truth().Info
	}
	before := facts(a, 1)
	r.ok(r.DestroyQueue(a, 1))
	r.rest()
	r.queue(a, 0, gpreempt.QueueCompute)
	if diff := cmp.Diff(before, facts(a, 1)); diff != "" {
		t.Errorf("queue made anew (-before +after):\n%s", diff)
	}
	other := facts(b, 1)
	if other.MQD == before.MQD {
		t.Errorf("two queues have their MQD at %#x", other.MQD)
	}
	if other.Doorbell == before.Doorbell {
		t.Errorf("two processes have a queue at doorbell %#x", other.Doorbell)
	}
	other.MQD, other.Doorbell = before.MQD, before.Doorbell
	if diff := cmp.Diff(before, other); diff != "" {
		t.Errorf("another process's queue (-one +other):\n%s", diff)
	}
	if facts(a, 0).RingBase == before.RingBase {
		t.Error("two queues of one process have one ring")
	}
}

func TestSlotKeepsWhatItsLastQueueLeft(t *testing.T) {
	for _, spec := range []Spec{hws(), mes()} {
		r := newRig(t, spec, 1)
		key := r.start("p", 1, 0)
		for range 5 {
			r.kernel(key, 0, ms, 1)
		}
		r.AdvanceTo(r.Now() + 5*ms/2)
		slot := func() SlotTruth { return r.Truth().GPUs[0].Slots[0] }
		want := slot()
		if !want.Live || want.At.Read != 2 || want.At.Write != 5 {
			t.Fatalf("%s: slot %+v", spec.Name, want)
		}
		r.ok(r.EndProcess(key))
		r.rest()
		want.Live, want.Owner, want.ID = false, gpreempt.ProcessKey{}, 0
		if diff := cmp.Diff(want, slot()); diff != "" {
			t.Errorf("%s: slot after its queue left (-want +got):\n%s", spec.Name, diff)
		}
	}
}
