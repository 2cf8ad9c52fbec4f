package workload

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/emu/engine"
)

// mappingFlags are the flags of the mapping that begins at addr or before, as
// /proc/self/smaps has them.
func mappingFlags(addr uint64) (map[string]bool, error) {
	f, err := os.Open("/proc/self/smaps")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	inside := false
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var from, to uint64
		if n, _ := fmt.Sscanf(lines.Text(), "%x-%x ", &from, &to); n == 2 {
			inside = from <= addr && addr < to
		}
		if list, ok := strings.CutPrefix(lines.Text(), "VmFlags:"); ok && inside {
			flags := map[string]bool{}
			for flag := range strings.FieldsSeq(list) {
				flags[flag] = true
			}
			return flags, nil
		}
	}
	return nil, errors.New("no such mapping")
}

// A proof accepts only packets that ran once and in order.
func TestProofHoldsForWhatRanOnceAndInOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		window := rapid.IntRange(1, 8).Draw(t, "window")
		pushed := rapid.Uint64Range(0, 30).Draw(t, "pushed")
		p := newProof(window)
		var values []uint64
		for n := range pushed {
			values = append(values, packetValue(3, n))
			p.push(values[n])
		}
		hash := func(values []uint64) (h uint64) {
			for _, v := range values {
				h = engine.MixHash(h, v)
			}
			return h
		}
		ran := rapid.Uint64Range(pushed-min(pushed, uint64(window)), pushed).Draw(t, "ran")
		if err := p.check(ran, hash(values[:ran])); err != nil {
			t.Fatalf("%d of %d ran, as expected: %v", ran, pushed, err)
		}
		if err := p.checkAll(ran, hash(values[:ran])); (err == nil) != (ran == pushed) {
			t.Fatalf("%d of %d ran, want all: %v", ran, pushed, err)
		}
		if ran > 0 && p.check(ran-1, hash(values[:ran])) == nil || p.check(ran+1, hash(values[:ran])) == nil {
			t.Fatalf("the hash of %d packets is accepted for one less or more", ran)
		}
		if ran < 2 {
			return
		}
		i := rapid.IntRange(0, int(ran)-2).Draw(t, "swapped")
		values[i], values[i+1] = values[i+1], values[i]
		if p.check(ran, hash(values[:ran])) == nil {
			t.Fatalf("packets %d and %d were swapped, and the proof accepts it", i, i+1)
		}
	})
}

func TestTopologyMayBeIncomplete(t *testing.T) {
	gpus := func() []gpu {
		return []gpu{{ID: 7, ControlStack: 1, SaveArea: 2, XCCs: 1}, {ID: 9, ControlStack: 1, SaveArea: 2, XCCs: 1}}
	}
	root := t.TempDir()
	write := func(node, name, text string) {
		if err := os.MkdirAll(filepath.Join(root, node), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, node, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("0", "gpu_id", "0\n")
	write("0", "properties", "cpu_cores_count 4\n")
	write("1", "gpu_id", "9\n")
	write("1", "properties", "simd_count 304\ndrm_render_minor 129\ncwsr_size 40960\nctl_stack_size 8192\nnum_xcc 6\n")
	if err := os.Mkdir(filepath.Join(root, "2"), 0o755); err != nil { // a node the device cgroup hides
		t.Fatal(err)
	}
	got := gpus()
	if err := describe(root, got); err != nil {
		t.Fatal(err)
	}
	want := gpus()
	want[1] = gpu{ID: 9, ControlStack: 8192, SaveArea: 40960, XCCs: 6, RenderMinor: 129}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the GPUs (-want +got):\n%s", diff)
	}
	if err := describe(filepath.Join(root, "none"), got); err != nil {
		t.Errorf("a machine without a topology: %v", err)
	}
}

func FuzzProperties(f *testing.F) {
	f.Add("cwsr_size 40960\nctl_stack_size 8192\nnum_xcc 6\n")
	f.Add("cwsr_size 1")
	f.Add("cwsr_size 4294967296\nctl_stack_size 4294967296\nnum_xcc 4294967296")
	f.Add("cwsr_size -1\n\ncwsr_size\nnum_xcc 0\ndrm_render_minor 4294967296")
	f.Fuzz(func(t *testing.T, properties string) {
		g := gpu{SaveArea: minSaveArea, ControlStack: minControlStack, XCCs: 1}
		g.describe(properties)
		if g.SaveArea == 0 || g.ControlStack == 0 || g.XCCs == 0 {
			t.Errorf("%q changes what queues need: %+v", properties, g)
		}
	})
}
