package scenario

import (
	"cmp"
	"math"
	"math/rand/v2"
	"time"
)

// MaxRequests bounds the requests of one service, and the lines of a trace.
const MaxRequests = 10_000_000

// Arrival is one request.
type Arrival struct {
	// At is when it arrives, from the beginning of the scenario.
	At time.Duration
	// Prompt and Output are its tokens, 0 if only the service says how many.
	Prompt, Output int
}

// Times returns the requests that arrive before d, in order. It returns nil for Closed, whose
// arrivals depend on the answers, and for Trace before Load has read the file.
func (a Arrivals) Times(seed uint64, d time.Duration) []Arrival {
	rng := rand.New(rand.NewPCG(seed, arrivalStream)) //nolint:gosec // G404: the same seed must return the same arrivals
	switch a.Kind {
	case Constant:
		// The phase is random, so that repeats sample how two services that are equally fast
		// meet.
		return collect(d, rng.Float64()/a.Rate, func(int) float64 { return 1 / a.Rate })
	case Poisson:
		gap := func(int) float64 { return rng.ExpFloat64() / a.Rate }
		return collect(d, gap(0), gap)
	case Gamma:
		gap := func(int) float64 { return gammaGap(rng, 1/a.Rate, a.CV) }
		return collect(d, gap(0), gap)
	case Bursts:
		inside := a.BurstGap.Seconds()
		between := a.pause().Seconds()
		return collect(d, gammaGap(rng, between, a.CV), func(n int) float64 {
			if n%a.Burst != 0 {
				return inside
			}
			return gammaGap(rng, between, a.CV)
		})
	case Trace:
		return replay(a.Points, cmp.Or(a.Speed, 1), d)
	default: // Closed
		return nil
	}
}

// The streams of random numbers that are drawn from one seed.
const (
	arrivalStream = 1
	kernelStream  = 2
)

// pause returns the mean time from the last request of a burst to the first of the next.
func (a Arrivals) pause() time.Duration {
	return time.Duration(float64(a.Burst)/a.Rate*float64(time.Second)) - time.Duration(a.Burst-1)*a.BurstGap
}

// collect returns the requests before d. first is when the first one arrives, and gap returns
// the time after the nth, in seconds.
func collect(d time.Duration, first float64, gap func(n int) float64) []Arrival {
	var all []Arrival
	for at := first; at < d.Seconds() && len(all) < MaxRequests; at += gap(len(all)) {
		all = append(all, Arrival{At: time.Duration(math.Round(at * float64(time.Second)))})
	}
	return all
}

func replay(points []Arrival, speed float64, d time.Duration) []Arrival {
	var all []Arrival
	for _, p := range points {
		p.At = time.Duration(float64(p.At) / speed)
		if p.At >= d {
			break
		}
		all = append(all, p)
	}
	return all
}

// gammaGap draws from the gamma distribution with a mean and a coefficient of variation.
func gammaGap(rng *rand.Rand, mean, cv float64) float64 {
	if cv == 0 {
		return mean
	}
	shape := 1 / (cv * cv)
	return mean / shape * gamma(rng, shape)
}

// gamma draws from the gamma distribution with scale 1: Marsaglia and Tsang, A Simple Method
// for Generating Gamma Variables, 2000.
func gamma(rng *rand.Rand, shape float64) float64 {
	if shape < 1 {
		u := 1 - rng.Float64() // above 0
		return gamma(rng, shape+1) * math.Pow(u, 1/shape)
	}
	d := shape - 1.0/3
	c := 1 / math.Sqrt(9*d)
	for {
		x := rng.NormFloat64()
		v := 1 + c*x
		if v <= 0 {
			continue
		}
		v *= v * v
		u := 1 - rng.Float64()
		if math.Log(u) < x*x/2+d-d*v+d*math.Log(v) {
			return d * v
		}
	}
}
