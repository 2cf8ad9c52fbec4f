package events_test

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/internal/events"
	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// record returns a record that differs for each n.
func record(n uint64) scheduler.Record {
	return scheduler.Record{
		Kind:    scheduler.RecordLease,
		Lease:   scheduler.LeaseID(n),
		ToLease: scheduler.LeaseHeld,
		Cause:   scheduler.CauseQuiet,
	}
}

func at(n uint64) time.Time { return time.Unix(int64(n), 0) }

func entry(n uint64) events.Entry {
	return events.Entry{Revision: n, At: at(n), Record: record(n)}
}

func appendN(l *events.Log, from, to uint64) {
	for n := from; n <= to; n++ {
		l.Append(at(n), record(n), "")
	}
}

func TestEmptyLogHasNothingToRead(t *testing.T) {
	l := events.NewLog(4)
	got, err := l.Read(0, nil)
	if err != nil || len(got) != 0 || l.Revision() != 0 || l.Oldest() != 0 {
		t.Errorf("Read(0) = %v, %v; Revision %d, Oldest %d; want nothing, nil, 0, 0", got, err, l.Revision(), l.Oldest())
	}
}

func TestReadAppendsInOrder(t *testing.T) {
	l := events.NewLog(4)
	appendN(l, 1, 2)
	l.AppendAdmin(at(3), "drain on by uid 0 pid 12", scheduler.Record{Kind: scheduler.RecordDrain, On: true})
	got, err := l.Read(1, []events.Entry{entry(1)})
	if err != nil {
		t.Fatal(err)
	}
	want := []events.Entry{
		entry(1),
		entry(2),
		{Revision: 3, At: at(3), Record: scheduler.Record{On: true}, Admin: "drain on by uid 0 pid 12"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("entries (-want +got):\n%s", diff)
	}
}

func TestReadRefusesRevisionsItCannotGoOnFrom(t *testing.T) {
	l := events.NewLog(4)
	appendN(l, 1, 10) // keeps 7..10
	tests := []struct {
		after uint64
		first uint64 // 0: refused
	}{
		{after: 0, first: 7},
		{after: 1},
		{after: 5},
		{after: 6, first: 7},
		{after: 9, first: 10},
		{after: 11}, // of an earlier run of the daemon
		{after: ^uint64(0)},
	}
	for _, test := range tests {
		t.Run(fmt.Sprint(test.after), func(t *testing.T) {
			got, err := l.Read(test.after, nil)
			if test.first == 0 {
				if !errors.Is(err, events.ErrCompacted) || gpreempt.ReasonOf(err) != gpreempt.ReasonRevisionCompacted {
					t.Errorf("error %v, want ErrCompacted", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var want []events.Entry
			for n := test.first; n <= 10; n++ {
				want = append(want, entry(n))
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("entries (-want +got):\n%s", diff)
			}
		})
	}
}

// A client with the right to announce wrote over the actions of admins within seconds.
func TestActionsOfAdminsOutliveStateChanges(t *testing.T) {
	l := events.NewLog(4)
	n := uint64(0)
	act := func() events.Entry {
		n++
		e := events.Entry{Revision: n, At: at(n), Admin: fmt.Sprint("action ", n)}
		l.AppendAdmin(e.At, e.Admin, e.Record)
		return e
	}
	change := func(count uint64) {
		appendN(l, n+1, n+count)
		n += count
	}
	read := func(want []events.Entry) {
		t.Helper()
		got, err := l.Read(0, nil)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("entries (-want +got):\n%s", diff)
		}
		if rest, err := l.Read(got[len(got)-1].Revision, nil); err != nil || len(rest) > 0 {
			t.Errorf("after them: %v, %v", rest, err)
		}
	}
	first := act()
	read([]events.Entry{first})
	change(2)
	second := act()
	read([]events.Entry{first, entry(2), entry(3), second})
	change(1)
	read([]events.Entry{first, entry(2), entry(3), second, entry(5)}) // once, although it is displaced
	change(1000)
	read([]events.Entry{first, second, entry(1002), entry(1003), entry(1004), entry(1005)})
	if _, err := l.Read(second.Revision, nil); !errors.Is(err, events.ErrCompacted) {
		t.Errorf("error %v, want ErrCompacted: state changes were displaced", err)
	}
	var last []events.Entry
	for range events.AdminsKept + 10 {
		last = append(last, act())
	}
	change(4)
	read(append(last[10:], entry(n-3), entry(n-2), entry(n-1), entry(n)))
}

func TestReadAgreesWithAnUnboundedList(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		capacity := rapid.IntRange(1, 600).Draw(t, "capacity")
		l := events.NewLog(capacity)
		var all []events.Entry
		t.Repeat(map[string]func(*rapid.T){
			"append": func(t *rapid.T) {
				for range rapid.IntRange(1, 100).Draw(t, "count") {
					n := uint64(len(all) + 1)
					l.Append(at(n), record(n), "")
					all = append(all, entry(n))
				}
			},
			"read": func(t *rapid.T) {
				after := rapid.IntRange(0, len(all)).Draw(t, "after")
				got, err := l.Read(uint64(after), nil)
				kept := max(0, len(all)-capacity)
				if after < kept && after != 0 {
					if !errors.Is(err, events.ErrCompacted) {
						t.Fatalf("Read(%d) with %d dropped: error %v, want ErrCompacted", after, kept, err)
					}
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				first := max(after, kept)
				want := all[first:min(len(all), first+inventory.ReadChunk)]
				if !slices.EqualFunc(want, got, func(a, b events.Entry) bool { return reflect.DeepEqual(a, b) }) { // cmp.Diff alone takes seconds
					t.Fatalf("Read(%d) (-want +got):\n%s", after, cmp.Diff(want, got))
				}
			},
			"": func(t *rapid.T) {
				oldest := uint64(0)
				if len(all) > 0 {
					oldest = uint64(max(0, len(all)-capacity) + 1)
				}
				if l.Revision() != uint64(len(all)) || l.Oldest() != oldest {
					t.Fatalf("Revision %d, Oldest %d; want %d, %d", l.Revision(), l.Oldest(), len(all), oldest)
				}
			},
		})
	})
}

func TestWaitReturnsWithTheNextAppend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := events.NewLog(4)
		appendN(l, 1, 1)
		if err := l.Wait(t.Context(), 0); err != nil {
			t.Fatalf("Wait behind the log: %v", err)
		}
		const waiters = 3
		woken := make(chan error, waiters)
		for range waiters {
			go func() { woken <- l.Wait(t.Context(), 2) }()
		}
		synctest.Wait()
		appendN(l, 2, 2)
		synctest.Wait()
		if len(woken) != 0 {
			t.Fatal("Wait(2) returned at revision 2")
		}
		appendN(l, 3, 3)
		for range waiters {
			if err := <-woken; err != nil {
				t.Error(err)
			}
		}
	})
}

func TestWaitEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := events.NewLog(4)
		stop := errors.New("the stream ended")
		ctx, cancel := context.WithCancelCause(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- l.Wait(ctx, 0) }()
		synctest.Wait()
		cancel(stop)
		if err := <-ended; !errors.Is(err, stop) {
			t.Errorf("Wait: %v, want the cause of its context", err)
		}
	})
}

func TestFollowersSeeEveryEntryOnce(t *testing.T) {
	const total, writers, followers = 4000, 2, 3
	l := events.NewLog(total)
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for n := range total / writers {
				l.Append(at(0), record(uint64(w*total+n)), "")
			}
		})
	}
	for range followers {
		wg.Go(func() {
			var chunk []events.Entry
			for seen := uint64(0); seen < total; {
				if err := l.Wait(t.Context(), seen); err != nil {
					t.Error(err)
					return
				}
				var err error
				if chunk, err = l.Read(seen, chunk[:0]); err != nil {
					t.Error(err)
					return
				}
				for _, e := range chunk {
					if e.Revision != seen+1 {
						t.Errorf("revision %d after %d", e.Revision, seen)
						return
					}
					seen++
				}
			}
		})
	}
	wg.Wait()
}

func TestAppendAllocatesNothing(t *testing.T) {
	l := events.NewLog(64)
	r := scheduler.Record{
		Kind: scheduler.RecordTarget, FromTarget: scheduler.TargetSuspending, ToTarget: scheduler.TargetSuspended,
		Cause: scheduler.CauseDone, Took: time.Millisecond,
	}
	now := time.Now()
	allocs := testing.AllocsPerRun(1000, func() {
		l.Append(now, r, "")
		l.Answered(scheduler.Answer{Quiesced: true, Waited: time.Millisecond}, events.Stages{})
	})
	if allocs != 0 {
		t.Errorf("%v allocations per append, want 0", allocs)
	}
}

func BenchmarkAppend(b *testing.B) {
	l := events.NewLog(65536)
	r := scheduler.Record{
		Kind: scheduler.RecordTarget, FromTarget: scheduler.TargetSuspending, ToTarget: scheduler.TargetSuspended,
		Cause: scheduler.CauseDone, Took: time.Millisecond,
	}
	now := time.Now()
	b.ReportAllocs()
	for b.Loop() {
		l.Append(now, r, "")
	}
}

func BenchmarkRead(b *testing.B) {
	l := events.NewLog(1024)
	appendN(l, 1, 1024)
	var chunk []events.Entry
	b.ReportAllocs()
	for b.Loop() {
		var err error
		if chunk, err = l.Read(0, chunk[:0]); err != nil {
			b.Fatal(err)
		}
	}
}
