package main

import "strconv"

// state is what gpctl status and gpctl gpu list print.
type state struct {
	Policy     string   `json:"policy"`
	Draining   bool     `json:"draining"`
	Mechanisms []string `json:"mechanisms"`
	GPUs       []gpu    `json:"gpus"`
}

type gpu struct {
	LeaseCount  int  `json:"lease_count"`
	BreakerOpen bool `json:"breaker_open"`
}

// facts are what is published about a node; the zero value is nothing.
type facts struct {
	// Mechanism is the best one by which the daemon can suspend, "" for none.
	Mechanism string
	// Policy is the name of its preset.
	Policy string
	// FreeShare is the share of time without leases, the average of the GPUs, in percent, a multiple
	// of 10; "" if nothing is known.
	FreeShare string
	// Offline is how many offline pods the node takes: those that request the resource.
	Offline int
}

// facts returns what to publish. No offline pod is taken where none would be suspended: without a
// mechanism, while the daemon drains, with the preset shadow, and on GPUs with an open breaker.
func (s state) facts(perGPU, free int) facts {
	f := facts{Policy: s.Policy, FreeShare: strconv.Itoa((free + 5) / 10 * 10)}
	if len(s.Mechanisms) == 0 || s.Draining {
		return f
	}
	f.Mechanism = s.Mechanisms[0]
	if s.Policy == "shadow" {
		return f
	}
	for _, g := range s.GPUs {
		if !g.BreakerOpen {
			f.Offline += perGPU
		}
	}
	return f
}

// free returns the share of GPUs without a lease now, in percent, 100 without GPUs.
func (s state) free() int {
	if len(s.GPUs) == 0 {
		return 100
	}
	without := 0
	for _, g := range s.GPUs {
		if g.LeaseCount == 0 {
			without++
		}
	}
	return 100 * without / len(s.GPUs)
}

// sampler averages the last size samples.
type sampler struct {
	size    int
	samples []int
}

// add returns the average with one more sample.
func (s *sampler) add(sample int) int {
	s.samples = append(s.samples, sample)
	if len(s.samples) > s.size {
		s.samples = s.samples[1:]
	}
	sum := 0
	for _, v := range s.samples {
		sum += v
	}
	return sum / len(s.samples)
}

func (s *sampler) forget() { s.samples = nil }
