package main

import (
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/internal/stat"
)

// summary describes the samples of one repeat, in nanoseconds.
type summary struct {
	N    int
	Mean float64
	P50  float64
	P99  float64
}

// The statistics of a repeat that are compared.
func p50(s summary) float64 { return s.P50 }
func p99(s summary) float64 { return s.P99 }

func summarize(samples []time.Duration) summary {
	if len(samples) == 0 {
		return summary{}
	}
	sorted := slices.Sorted(slices.Values(samples))
	return summary{len(sorted), stat.Mean(sorted), float64(stat.Quantile(sorted, 0.5)), float64(stat.Quantile(sorted, 0.99))}
}

// series is one side of a comparison: what is called, and how long it took.
type series struct {
	// Section is the letter of the section it belongs to.
	Section string
	// Name is the name of a Go benchmark, without its prefix Benchmark.
	Name string
	// Repeats has one summary of the samples for each repeat.
	Repeats []summary

	samples []time.Duration
}

// time makes a call and records its duration.
func (s *series) time(call func() error) error {
	began := time.Now()
	err := call()
	s.add(time.Since(began))
	return err
}

func (s *series) add(d time.Duration) { s.samples = append(s.samples, d) }

// last returns the last sample.
func (s *series) last() time.Duration { return s.samples[len(s.samples)-1] }

// endRepeat summarises the samples since the last repeat.
func (s *series) endRepeat() {
	s.Repeats = append(s.Repeats, summarize(s.samples))
	s.samples = s.samples[:0]
}

// each returns a statistic of each repeat.
func each(of func(summary) float64, s *series) []float64 {
	all := make([]float64, len(s.Repeats))
	for i, r := range s.Repeats {
		all[i] = of(r)
	}
	return all
}

// quotients divides repeat by repeat.
func quotients(over, under []float64) []float64 {
	all := make([]float64, len(over))
	for i := range all {
		all[i] = over[i] / under[i]
	}
	return all
}

// ratios compares a statistic of two series, repeat by repeat; times multiplies the
// lower side.
func ratios(of func(summary) float64, over, under *series, times float64) []float64 {
	return quotients(each(of, over), each(func(s summary) float64 { return times * of(s) }, under))
}

// micros returns a statistic of each repeat in microseconds.
func micros(of func(summary) float64, s *series) []float64 {
	return each(func(s summary) float64 { return of(s) / 1e3 }, s)
}
