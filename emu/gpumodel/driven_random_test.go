package gpumodel

import (
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// herd drives a machine at random, as no driver would.
type herd struct {
	*crowd
	// runs is what is to run when all that was asked is done.
	runs map[QueueRef]bool
	// packets are those of living queues, in order.
	packets map[QueueRef][]*ordered
	// offs counts what OnUnmap told.
	offs  int
	wrong string
}

type ordered struct {
	*given
	overlap bool
}

func newHerd(spec Spec, gpus int, seed uint64) *herd {
	h := &herd{crowd: newCrowd(spec, gpus, seed), runs: map[QueueRef]bool{}, packets: map[QueueRef][]*ordered{}}
	h.m.OnUnmap(func(ref QueueRef) {
		h.offs++
		if _, ok := h.m.Progress(ref); !ok {
			h.wrong = fmt.Sprintf("%v was taken off with nothing in flight", ref)
		}
	})
	return h
}

// done is to be called once.
func (h *herd) done() func() {
	h.asked++
	calls := 0
	return func() {
		h.answers++
		if calls++; calls > 1 {
			h.wrong = "a change of the schedule was done twice"
		}
	}
}

func (h *herd) refs(gpu int) []QueueRef {
	var all []QueueRef
	for _, key := range h.procs {
		for _, q := range h.m.byKey[key].queues {
			if q.gpu.index == gpu {
				all = append(all, QueueRef{key, q.id})
			}
		}
	}
	return all
}

// put has some of the queues of a GPU run, or not run.
func (h *herd) put(gpu int, refs []QueueRef, run bool) {
	id := h.m.facts[gpu].ID
	var err error
	switch {
	case h.m.spec.MES:
		for _, ref := range refs {
			step := h.m.RemoveQueue
			if run {
				step = h.m.AddQueue
			}
			if err = step(ref, h.done()); err != nil {
				break
			}
			h.runs[ref] = run
		}
	case run:
		for _, ref := range h.refs(gpu) {
			h.runs[ref] = slices.Contains(refs, ref)
		}
		err = h.m.Map(id, refs, h.done())
	default:
		for _, ref := range h.refs(gpu) {
			h.runs[ref] = false
		}
		err = h.m.Unmap(id, 0, h.done())
	}
	if err != nil {
		panic(err)
	}
}

func (h *herd) forget(ref QueueRef) {
	delete(h.runs, ref)
	delete(h.packets, ref)
}

// step does one random thing.
func (h *herd) step(pick pick) {
	what := pick(24, "what")
	if len(h.procs) == 0 || what == 0 && len(h.procs) < 8 {
		h.start()
		return
	}
	gpu := pick(len(h.m.gpus), "gpu")
	refs := h.refs(gpu)
	some := slices.DeleteFunc(slices.Clone(refs), func(QueueRef) bool { return pick(3, "without") == 0 })
	switch {
	case what < 4 || len(refs) == 0:
		h.attach(gpu, pick)
	case what == 4 && pick(4, "end") == 0:
		h.end(refs[pick(len(refs), "queue")].Process)
	case what == 5:
		ref := refs[pick(len(refs), "queue")]
		if err := h.m.DetachQueue(ref.Process, ref.ID); err != nil {
			panic(err)
		}
		h.forget(ref)
	case what == 6 && pick(3, "clear") == 0:
		for _, ref := range refs {
			h.runs[ref] = false
		}
		if err := h.m.ClearGPU(h.m.facts[gpu].ID); err != nil {
			panic(err)
		}
	case what < 9:
		h.put(gpu, some, false)
	case what < 14:
		h.put(gpu, some, true)
	case what == 14 && h.faults:
		if err := h.m.SetFault(h.m.facts[gpu].ID, FaultLosePacket+FaultKind(pick(2, "fault"))); err != nil {
			panic(err)
		}
	case what < 20:
		h.give(refs[pick(len(refs), "queue")], pick)
	default:
		h.m.AdvanceTo(h.m.Now() + time.Duration(pick(4000, "advance"))*us)
	}
}

func (h *herd) start() {
	key, err := h.m.StartProcess(ProcSpec{Comm: "p"})
	if err != nil {
		panic(err)
	}
	h.procs = append(h.procs, key)
}

func (h *herd) end(key gpreempt.ProcessKey) {
	if err := h.m.EndProcess(key); err != nil {
		panic(err)
	}
	h.procs = slices.DeleteFunc(h.procs, func(o gpreempt.ProcessKey) bool { return o == key })
	for ref := range h.runs {
		if ref.Process == key {
			h.forget(ref)
		}
	}
}

func (h *herd) attach(gpu int, pick pick) {
	key := h.procs[pick(len(h.procs), "process")]
	typ := []gpreempt.QueueType{gpreempt.QueueCompute, gpreempt.QueueCompute, gpreempt.QueueSDMA}[pick(3, "type")]
	spec := h.m.queueSpec(uint32(pick(1000, "id")), h.m.facts[gpu].ID, typ, minRingPackets)
	// It may have one of that id, and there may be no more of SDMA.
	if h.m.AttachQueue(key, spec) == nil {
		h.runs[QueueRef{key, spec.ID}] = false
	}
}

func (h *herd) give(ref QueueRef, pick pick) {
	before := len(h.given[ref.Process])
	overlap := false
	h.submit(ref.Process, ref.ID, func(n int, label string) int {
		v := pick(n, label)
		overlap = overlap || label == "overlap" && v == 0
		return v
	})
	if all := h.given[ref.Process]; len(all) > before {
		h.packets[ref] = append(h.packets[ref], &ordered{all[before], overlap})
	}
}

// still notes how far the queues are that must not move, as nothing about their GPU is
// under way.
func (h *herd) still() map[QueueRef]float64 {
	all := map[QueueRef]float64{}
	for ref, run := range h.runs {
		q, err := h.m.queue(ref.Process, ref.ID)
		if err != nil {
			panic(err)
		}
		if done, ok := h.m.Progress(ref); ok && !run && q.gpu.op == nil {
			all[ref] = done
		}
	}
	return all
}

// check reports what is wrong.
func (h *herd) check() string {
	if wrong := h.crowd.check(); wrong != "" || h.wrong != "" {
		return wrong + h.wrong
	}
	for ref, run := range h.runs {
		q, err := h.m.queue(ref.Process, ref.ID)
		switch {
		case err != nil:
			return err.Error()
		case q.gpu.op == nil && q.suspended == run:
			return fmt.Sprintf("%v is to run: %v, and does the contrary", ref, run)
		case q.gpu.op == nil && run && !q.mapped && !q.gpu.crowded:
			return fmt.Sprintf("%v is not mapped, though there is room", ref)
		}
	}
	for ref, all := range h.packets {
		ended := time.Duration(0)
		for i, k := range all {
			if k.calls > 0 && !k.overlap && k.started < ended {
				return fmt.Sprintf("packet %d of %v started at %v, before those ahead of it were over at %v", i, ref, k.started, ended)
			}
			ended = max(ended, k.ended)
		}
	}
	return ""
}

// finish has everything run, and checks what came of it.
func (h *herd) finish() string {
	for gpu := range h.m.gpus {
		h.put(gpu, h.refs(gpu), true)
	}
	if wrong := h.audit(); wrong != "" {
		return wrong
	}
	for ref, all := range h.packets {
		for i, k := range all {
			if k.calls != 1 {
				return fmt.Sprintf("packet %d of %v ended %d times", i, ref, k.calls)
			}
		}
	}
	return h.check()
}

// TestNothingIsLostOrRepeatedWhateverADriverDoes does 100 times 120 random things.
func TestNothingIsLostOrRepeatedWhateverADriverDoes(t *testing.T) {
	offs := 0
	rapid.Check(t, func(t *rapid.T) {
		spec := rapid.SampledFrom(crowdSpecs()).Draw(t, "spec")
		h := newHerd(spec, rapid.IntRange(1, 3).Draw(t, "gpus"), rapid.Uint64().Draw(t, "seed"))
		draw := func(n int, label string) int { return rapid.IntRange(0, n-1).Draw(t, label) }
		for range 120 {
			before, then := h.still(), h.m.Now()
			h.step(draw)
			if h.m.Now() > then {
				for ref, done := range before {
					if now, ok := h.m.Progress(ref); !ok || now != done {
						t.Fatalf("%v is not to run, but its packet went from %v to %v", ref, done, now)
					}
				}
			}
			if wrong := h.check(); wrong != "" {
				t.Fatal(wrong)
			}
		}
		if wrong := h.finish(); wrong != "" {
			t.Fatal(wrong)
		}
		offs += h.offs
	})
	if offs == 0 && !t.Failed() {
		t.Error("OnUnmap told nothing")
	}
}

// TestMovesFollowTheFiles: a reader that reads a file again only when the number has grown
// misses nothing.
func TestMovesFollowTheFiles(t *testing.T) {
	for i, spec := range crowdSpecs() {
		spec.XCCs = 1
		h := newHerd(spec, 1, 1)
		rng := rand.New(rand.NewPCG(uint64(i), 1))
		type look struct {
			number uint64
			text   string
		}
		view := func() look {
			text := read(t, h.m, "mqds") + tree(t, h.m.FS(), "sys/class")
			for _, g := range h.m.Truth().GPUs {
				for _, s := range g.Slots {
					text += fmt.Sprintln(s.Live, s.Owner, s.ID)
				}
			}
			return look{h.m.Moves(), text}
		}
		var last look
		same, grew := 0, 0
		for range 90 {
			h.step(func(n int, _ string) int { return rng.IntN(n) })
			switch now := view(); {
			case now.number == last.number && now.text != last.text:
				t.Fatalf("spec %d: the number stayed, and what is shown changed", i)
			case now.number == last.number:
				same++
			case now.number > last.number:
				grew++
				last = now
			default:
				t.Fatalf("spec %d: the number went from %d to %d", i, last.number, now.number)
			}
		}
		if same == 0 || grew == 0 {
			t.Errorf("spec %d: the number stayed %d times and grew %d times", i, same, grew)
		}
		h.m.SetKernel(Linux72)
		if now := view(); now.number == last.number && now.text != last.text {
			t.Errorf("spec %d: another kernel's files have the same number", i)
		}
	}
}

func read(t *testing.T, m *Machine, name string) string {
	t.Helper()
	text, err := fs.ReadFile(m.FS(), "sys/kernel/debug/kfd/"+name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// tree is all there is below a directory.
func tree(t *testing.T, fsys fs.FS, root string) string {
	t.Helper()
	files := map[string]string{}
	err := fs.WalkDir(fsys, root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() || strings.Contains(path, "/topology/") {
			return err
		}
		b, err := fs.ReadFile(fsys, path)
		files[path] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	for _, path := range slices.Sorted(maps.Keys(files)) {
		fmt.Fprintf(&b, "%s: %s\n", path, files[path])
	}
	return b.String()
}
