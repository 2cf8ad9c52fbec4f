package discovery_test

import (
	"math"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/pkg/discovery"
)

func TestPaceBacksOffWhileNothingChanges(t *testing.T) {
	const ms = time.Millisecond
	p := discovery.NewPace(50*ms, time.Second)
	var got []time.Duration
	for _, changed := range []bool{true, false, false, false, false, false, false, true, true, false} {
		got = append(got, p.Next(changed, 100*time.Microsecond))
	}
	want := []time.Duration{50 * ms, 100 * ms, 200 * ms, 400 * ms, 800 * ms, time.Second, time.Second, 50 * ms, 50 * ms, 100 * ms}
	if !slices.Equal(got, want) {
		t.Errorf("pauses %v, want %v", got, want)
	}
	p.Set(10*ms, 20*ms)
	if a, b, c := p.Next(false, 0), p.Next(false, 0), p.Next(true, 0); a != 20*ms || b != 20*ms || c != 10*ms {
		t.Errorf("with other pauses: %v, %v, %v", a, b, c)
	}
}

func TestSlowReadingsArePacedToAHundredthOfTheTime(t *testing.T) {
	const ms = time.Millisecond
	p := discovery.NewPace(50*ms, time.Second)
	// One slow reading among many delays nothing.
	for n := range 100 {
		took := 100 * time.Microsecond
		if n == 50 {
			took = 10 * ms
		}
		if pause := p.Next(true, took); pause != 50*ms {
			t.Fatalf("reading %d: a pause of %v", n, pause)
		}
	}
	// Slow readings do.
	last := time.Duration(0)
	for range 100 {
		last = p.Next(true, 2*ms)
	}
	if last != 198*ms {
		t.Errorf("a pause of %v after readings of 2 ms each, want 198 ms", last)
	}
}

func TestOneVerySlowReadingHasAShortEffect(t *testing.T) {
	const ms = time.Millisecond
	p := discovery.NewPace(50*ms, time.Second)
	if a, b := p.Next(true, time.Minute), p.Next(true, 100*time.Microsecond); a != time.Second || b != 50*ms {
		t.Errorf("pauses of %v and %v after a reading that took a minute, want 1s and 50ms", a, b)
	}
}

func TestPaceKeepsItsBounds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		duration := func(name string, most time.Duration) time.Duration {
			return time.Duration(rapid.Int64Range(0, int64(most)).Draw(t, name))
		}
		shortest := duration("shortest", time.Second)
		longest := shortest + duration("more", time.Minute)
		p := discovery.NewPace(shortest, longest)
		most := longest / 99 / time.Duration(rapid.SampledFrom([]int{1, 10, 1000}).Draw(t, "quick"))
		slow := rapid.Bool().Draw(t, "slow")
		var read, paused time.Duration
		quiet := 0
		for range rapid.IntRange(1, 60).Draw(t, "readings") {
			changed, took := rapid.Bool().Draw(t, "changed"), duration("took", most)
			if slow && rapid.Bool().Draw(t, "slow now") {
				took = duration("took", time.Hour)
			}
			pause := p.Next(changed, took)
			read, paused = read+took, paused+pause
			if pause < shortest || pause > longest {
				t.Fatalf("a pause of %v, not within %v and %v", pause, shortest, longest)
			}
			if !slow && 99*read > paused+longest {
				t.Fatalf("%v of reading and %v of pauses, with %v allowed", read, paused, longest)
			}
			if changed {
				quiet = 0
			} else {
				quiet++
			}
			if 99*read <= longest && changed && pause != shortest {
				t.Fatalf("a pause of %v after a change, want %v", pause, shortest)
			}
			if quiet > 32 && pause < longest {
				t.Fatalf("a pause of %v after %d readings without a change, want %v", pause, quiet, longest)
			}
		}
	})
}

func TestPaceAcceptsAnyDuration(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		draw := func(name string) time.Duration {
			return time.Duration(rapid.OneOf(rapid.Int64(), rapid.SampledFrom([]int64{0, -1, math.MaxInt64, math.MinInt64})).Draw(t, name))
		}
		p := discovery.NewPace(draw("shortest"), draw("longest"))
		for range 5 {
			if pause := p.Next(rapid.Bool().Draw(t, "changed"), draw("took")); pause < 0 {
				t.Fatalf("a pause of %v", pause)
			}
			p.Set(draw("shortest"), draw("longest"))
		}
	})
}
