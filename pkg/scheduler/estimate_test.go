package scheduler

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestEstimateSmoothsMeanAndDeviation(t *testing.T) {
	type state struct{ Mean, Dev, Likely time.Duration }
	var e estimate
	var got []state
	for _, sample := range []time.Duration{800, 800, 1600, 0} {
		e.learn(sample)
		got = append(got, state{e.mean, e.dev, e.likely()})
	}
	want := []state{
		{800, 400, 1600}, // the first sample whole, half of it as deviation
		{800, 300, 1400}, // dev + (0-400)/4
		{900, 425, 1750}, // mean + 800/8, dev + (800-300)/4
		{788, 543, 1874}, // mean - 900/8, dev + (900-425)/4
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(uint64(4), e.samples); diff != "" {
		t.Error(diff)
	}
}

func TestEstimateSettlesOnAConstant(t *testing.T) {
	e := estimate{}
	e.learn(time.Second)
	for range 200 {
		e.learn(time.Millisecond)
	}
	if e.mean < time.Millisecond || e.likely() > 1001*time.Microsecond {
		t.Errorf("mean %v, likely %v after 200 samples of 1ms", e.mean, e.likely())
	}
}

func TestEstimateNeverExpectsLessThanNothing(t *testing.T) {
	roll := rand.New(rand.NewPCG(1, 1)).IntN
	e := estimate{}
	for range 10_000 {
		e.learn(time.Duration(roll(1 << (1 + roll(40)))))
		if e.mean < 0 || e.dev < 0 {
			t.Fatalf("mean %v, deviation %v", e.mean, e.dev)
		}
	}
}
