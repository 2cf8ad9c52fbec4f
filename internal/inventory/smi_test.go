package inventory_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

func (w *fakeHost) openSMI(id gpreempt.GPUID) (inventory.Stream, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.smiErr != nil {
		return nil, w.smiErr
	}
	w.open++
	return &stream{w, id}, nil
}

// stream is the events of a GPU of the world.
type stream struct {
	w   *fakeHost
	gpu gpreempt.GPUID
}

func (s *stream) Read() ([]kfd.SMIEvent, error) {
	s.w.mu.Lock()
	defer s.w.mu.Unlock()
	events := s.w.events[s.gpu]
	delete(s.w.events, s.gpu)
	return events, nil
}

func (s *stream) Close() error { s.w.with(func() { s.w.open-- }); return nil }

func eviction(trigger int) kfd.SMIEvent {
	return kfd.SMIEvent{ID: kfd.SMIQueueEviction, Text: fmt.Sprintf("5123456789012 -4211 %x %d", uint32(gpu), trigger)}
}

func TestEvictionsForLackOfMemoryAreCountedAndAWarning(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeHost(t)
		w.run()
		time.Sleep(time.Second)
		if n, known := w.MemoryEvictions(gpu); n != 0 || !known {
			t.Errorf("evictions %d, known %v; want 0, true", n, known)
		}
		w.with(func() {
			w.events[gpu] = []kfd.SMIEvent{eviction(2), eviction(3), {ID: kfdabi.SMIVMFault, Text: "1:a"}, {ID: kfd.SMIQueueEviction, Text: "nonsense"}, eviction(2)}
		})
		time.Sleep(time.Second)
		if n, _ := w.MemoryEvictions(gpu); n != 2 {
			t.Errorf("%d evictions, want 2", n)
		}
		if got := locked(w, func() []gpreempt.Warning { return w.warnings["memory"] }); len(got) != 1 || got[0].Code != "GPU_MEMORY_SHORT" {
			t.Errorf("warnings %+v, want GPU_MEMORY_SHORT", got)
		}
		time.Sleep(time.Minute)
		if got := locked(w, func() []gpreempt.Warning { return w.warnings["memory"] }); len(got) != 0 {
			t.Errorf("warnings %+v a minute later", got)
		}
	})
}

func TestEventsThatCannotBeOpenedAreAWarning(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeHost(t)
		w.smiErr = errors.New("operation not permitted")
		w.run()
		time.Sleep(time.Second)
		if n, known := w.MemoryEvictions(gpu); n != 0 || known {
			t.Errorf("evictions %d, known %v; want 0, false", n, known)
		}
		if got := locked(w, func() []gpreempt.Warning { return w.warnings["smi"] }); len(got) != 1 || got[0].Code != "SMI_UNAVAILABLE" {
			t.Errorf("warnings %+v, want SMI_UNAVAILABLE", got)
		}
	})
}

func TestSlotsAreReadAgainWhenTheLastReadingIsTooOld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeHost(t)
		const file = "sys/kernel/debug/kfd/hqds"
		w.put(file, "Node 1, gpu_id f7bc:\n Device is stopped\n")
		w.with(func() { w.slow[file] = 100 * time.Millisecond })
		read := func(notBefore time.Time, want int) {
			t.Helper()
			h, err := w.HQDs(t.Context(), notBefore)
			if err != nil {
				t.Fatal(err)
			}
			if n := locked(w, func() int { return w.opened[file] }); n != want || !slices.Equal(h.Stopped, []gpreempt.GPUID{gpu}) {
				t.Errorf("read %d times, want %d; stopped %v", n, want, h.Stopped)
			}
		}
		read(time.Time{}, 1)
		read(time.Time{}, 1)
		read(time.Now(), 2)
		time.Sleep(time.Second)
		read(time.Time{}, 3)
		// A reading in progress began before.
		go func() { _, _ = w.HQDs(t.Context(), time.Now()) }()
		synctest.Wait()
		time.Sleep(50 * time.Millisecond)
		read(time.Now(), 5)
	})
}
