package sim

import (
	"fmt"
	"time"

	"github.com/gpreempt/gpreempt/lab/scenario"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// sets returns the publications that the model is compared with.
func sets() ([]*set, error) {
	g := gpreemptSet()
	x, err := xschedSet()
	if err != nil {
		return nil, err
	}
	m, err := mi308xSet()
	return []*set{g, x, m}, err
}

// validationSeed is the seed of all runs of the validation.
const validationSeed = 1

// theirs is a daemon without a way to it that suspends at the request and resumes at its end: the
// loop in the process of GPreempt's benchmark. One call suspends all queues there; here one for
// each process, at once and without a cycle that stops others.
func theirs() Scheme {
	p := scheduler.DefaultPolicy()
	p.Linger, p.ShareFloor, p.MaxSuspend = 0, 0, time.Minute
	return Scheme{Kind: GPreempt, Policy: p.Normalize()}
}

// gpreemptScenarios are those whose mean is published.
var gpreemptScenarios = []string{"gpreempt-a", "gpreempt-b", "gpreempt-c", "gpreempt-d", "gpreempt-e"}

// gpreemptMachine is the work of the paper on an MI100: that of an MI50, faster and filling a part of it.
func gpreemptMachine(values map[string]float64) ([]scenario.Scenario, error) {
	all, err := named(gpreemptScenarios...)
	for i := range all {
		all[i].Duration = 5 * time.Second // as 60 s: nothing grows with time when clients wait for answers
		all[i] = scaled(all[i], 1/values["speed"], values["occupancy"])
	}
	return all, err
}

func named(names ...string) ([]scenario.Scenario, error) {
	var all []scenario.Scenario
	for _, name := range names {
		s, err := scenario.ByName(name)
		if err != nil {
			return nil, err
		}
		all = append(all, s)
	}
	return all, nil
}

func gpreemptSet() *set {
	none, alone := Scheme{Kind: None}, Scheme{Kind: OnlineAlone}
	const scenarios, latency, throughput = "A to E, mean", "mean latency / online alone", "requests per second / no preemption"
	s := &set{
		name:   "GPreempt, MI100",
		source: "GPreempt, ATC 2025, section 5.2",
		parameters: []parameter{
			{"speed", "of the MI100, relative to the MI50 whose kernels are known", "", 1, 4, "alone-rate", true},
			{"occupancy", "the part of the GPU that a kernel of batch 1 fills", "", 0.3, 1, "none-latency", false},
			{"reset", "time to kill the kernels in flight", "ms", 0, 3, "reset-latency", false},
			{"suspend", "time of a suspend and of a resume", "ms", 0, 3, "gpreempt-latency", false},
		},
		rows: []published{
			{"none-latency", scenarios, none, latency, "x", 2.701, fitted, ""},
			{"sequential-latency", scenarios, Scheme{Kind: Sequential}, latency, "x", 3.979, heldOut, "first come first served here; the order in the paper is not published"},
			{"block-latency", scenarios, Scheme{Kind: BlockWait}, latency, "x", 1.435, heldOut, "one kernel of each queue is in flight here; 28 would meet the row, and how many the benchmark launches ahead is not published"},
			{"reset-latency", scenarios, Scheme{Kind: Reset}, latency, "x", 1.132, fitted, ""},
			{"gpreempt-latency", scenarios, theirs(), latency, "x", 1.10, fitted, ""},
			{"alone-rate", scenarios, alone, throughput, "", 0.388, fitted, ""},
			{"sequential-rate", scenarios, Scheme{Kind: Sequential}, throughput, "", 0.531, heldOut, ""},
			{"block-rate", scenarios, Scheme{Kind: BlockWait}, throughput, "", 0.657, heldOut, "queues go on at once here when they may launch again; more kernels in flight do not explain it"},
			{"reset-rate", scenarios, Scheme{Kind: Reset}, throughput, "", 0.724, heldOut, ""},
			{"gpreempt-rate", scenarios, theirs(), throughput, "", 0.822, heldOut, ""},
		},
	}
	known := map[string]Figures{}
	s.figure = func(values map[string]float64, row published) (float64, error) {
		all, err := gpreemptMachine(values)
		if err != nil {
			return 0, err
		}
		o := Options{Seed: validationSeed, Paced: true}
		o.Costs.Reset = time.Duration(values["reset"] * float64(time.Millisecond))
		o.Costs.Suspend = time.Duration(values["suspend"] * float64(time.Millisecond))
		o.Costs.Resume = o.Costs.Suspend
		base := alone
		if row.figure == throughput {
			base = none
		}
		sum := 0.0
		for i, sc := range all {
			key := fmt.Sprint(i, values["speed"], values["occupancy"], row.scheme.Kind)
			switch row.scheme.Kind {
			case Reset:
				key += fmt.Sprint(o.Costs.Reset)
			case GPreempt:
				key += fmt.Sprint(o.Costs.Suspend)
			default:
			}
			got, err := remember(known, key, sc, row.scheme, o)
			if err != nil {
				return 0, err
			}
			than, err := remember(known, fmt.Sprint(i, values["speed"], values["occupancy"], base.Kind), sc, base, o)
			if err != nil {
				return 0, err
			}
			if row.figure == throughput {
				sum += got.Rate / than.Rate
			} else {
				sum += got.Mean / than.Mean
			}
		}
		return sum / float64(len(all)), nil
	}
	return s
}

// remember runs a scheme unless it has.
func remember(known map[string]Figures, key string, s scenario.Scenario, scheme Scheme, o Options) (Figures, error) {
	if f, ok := known[key]; ok {
		return f, nil
	}
	f, err := measured(s, scheme, o)
	known[key] = f
	return f, err
}

func xschedSet() (*set, error) {
	all, err := named("xsched-fig7-mi50", "xsched-case1-training", "xsched-case1-blackscholes")
	if err != nil {
		return nil, err
	}
	fig7, training, scholes := all[0], all[1], all[2]
	both := fig7 // two closed loops
	both.Online = append([]scenario.Service(nil), fig7.Online...)
	both.Online[0].Arrivals = scenario.Arrivals{Kind: scenario.Closed, Clients: 1}
	both.Online[0].Request.Total = 39936 * time.Microsecond // 25.04 iterations per second
	both.Offline = append([]scenario.Job(nil), fig7.Offline...)
	both.Offline[0].Step.Total = both.Online[0].Request.Total

	// The artifact's scripts set 16 commands in flight for the background.
	none, level1 := Scheme{Kind: None}, Scheme{Kind: Throttle, InFlight: 16}
	const fixed, partition, case1, case2 = "figure 7, 7 requests/s", "two equal loops", "case 1, trainings", "case 1, BlackScholes"
	const latencyP50, latencyP90, latencyP95, latencyP99 = "p50", "p90", "p95", "p99"
	const tail = "the kernels in flight are all that is modelled; a server's messages to each process, which stops launching then, are not"
	s := &set{
		name:   "XSched, MI50",
		source: "XpuOS/xsched-artifacts, HIP, raw data",
		parameters: []parameter{
			{"gain", "how much more two loops do together than one", "", -0.3, 0.5, "native-p99", true},
		},
		rows: []published{
			{"native-p99", fixed, none, latencyP99, "ms", 52.23, fitted, ""},
			{"alone-p99", fixed, Scheme{Kind: OnlineAlone}, latencyP99, "ms", 29.24, heldOut, ""},
			{"level1-p50", fixed, level1, latencyP50, "ms", 33.87, heldOut, tail},
			{"level1-p90", fixed, level1, latencyP90, "ms", 42.7, heldOut, tail},
			{"level1-p95", fixed, level1, latencyP95, "ms", 45.9, heldOut, tail},
			{"level1-p99", fixed, level1, latencyP99, "ms", 48.78, heldOut, tail},
			{"loops-online", partition, none, "first loop", "it/s", 13.35, heldOut, ""},
			{"loops-offline", partition, none, "second loop", "it/s", 13.33, heldOut, ""},
			{"training-none-online", case1, none, "production / alone", "", 0.582, heldOut, ""},
			{"training-none-offline", case1, none, "opportunistic / alone", "", 0.582, heldOut, ""},
			{"training-level1-online", case1, level1, "production / alone", "", 0.942, heldOut, ""},
			{"training-level1-offline", case1, level1, "opportunistic / alone", "", 0.137, heldOut, "the production job never leaves the GPU here; its gaps on the CPU are not published"},
			{"scholes-none-p99", case2, none, latencyP99, "ms", 361.9, heldOut, "sharing is even here; CFD got far more than half of the GPU, as products on the MI308X do"},
			{"scholes-none-offline", case2, none, "opportunistic / alone", "", 0.753, heldOut, ""},
			{"scholes-level1-p99", case2, level1, latencyP99, "ms", 78.2, heldOut, ""},
			{"scholes-level1-offline", case2, level1, "opportunistic / alone", "", 0.451, heldOut, "the time to stop and start a queue by messages is not modelled"},
		},
	}
	known := map[string]Figures{}
	scenarios := map[string]scenario.Scenario{fixed: fig7, partition: both, case1: training, case2: scholes}
	s.figure = func(values map[string]float64, row published) (float64, error) {
		sc := scenarios[row.scenario]
		got, err := remember(known, fmt.Sprint(row.scenario, row.scheme.Kind, values), sc, row.scheme, Options{Seed: validationSeed, Sharing: Sharing{Gain: values["gain"]}})
		if err != nil {
			return 0, err
		}
		requests := float64(got.Requests-got.Unfinished) / sc.Duration.Seconds()
		work := got.Work / sc.Duration.Seconds()
		switch row.figure {
		case "first loop":
			return requests, nil
		case "second loop":
			return work / sc.Offline[0].Step.Total.Seconds(), nil
		case "production / alone":
			return requests * sc.Online[0].Request.Total.Seconds(), nil
		case "opportunistic / alone":
			return work, nil
		}
		return got.percentile(row.figure), nil
	}
	return s, nil
}

// percentile returns a latency by the name of its percentile.
func (f Figures) percentile(name string) float64 {
	switch name {
	case "mean":
		return f.Mean
	case "p50":
		return f.P50
	case "p90":
		return f.P90
	case "p95":
		return f.P95
	case "p99":
		return f.P99
	default:
		panic("sim: no percentile " + name)
	}
}

func mi308xSet() (*set, error) {
	all, err := named("mi308x-matmul", "mi308x-threads", "mi308x-t4", "mi308x-t3")
	if err != nil {
		return nil, err
	}
	matmul, threads, t4, t3 := all[0], all[1], all[2], all[3]
	const products, tasks, equal, heavy, light = "products, 20 requests/s", "1 high, 15 low", "16 equal", "test 4, batch 1024", "test 3, batch 8"
	none, level1 := Scheme{Kind: None}, Scheme{Kind: Throttle, InFlight: 1}
	const narrow = "all requests share alike here; what spreads them is not modelled"
	s := &set{
		name:   "MI308X, two models",
		source: "zhenhantech/amdgpudriver, logs and tables of 2026-01",
		parameters: []parameter{
			{"weight", "the share of an offline kernel beside an online one", "", 0.2, 20, "products-none-p50", false},
		},
		rows: []published{
			{"products-none-p50", products, none, "p50", "ms", 24.82, fitted, ""},
			{"products-none-p95", products, none, "p95", "ms", 25.65, heldOut, narrow},
			{"products-none-p99", products, none, "p99", "ms", 29.63, heldOut, narrow},
			{"products-none-offline", products, none, "offline", "it/s", 3.16, heldOut, ""},
			{"products-level1-p50", products, level1, "p50", "ms", 17.45, heldOut, "one kernel is in flight here; a launch on its way to the GPU is not modelled"},
			{"products-level1-p95", products, level1, "p95", "ms", 23.95, heldOut, ""},
			{"products-level1-p99", products, level1, "p99", "ms", 24.55, heldOut, ""},
			{"products-level1-offline", products, level1, "offline", "it/s", 2.90, heldOut, "the time to stop and start a queue by messages is not modelled"},
			{"equal-none-mean", equal, none, "mean", "ms", 8079.5, heldOut, ""},
			{"tasks-level1-mean", tasks, level1, "mean", "ms", 727.94, heldOut, "the next task follows at once here, and the low threads stay stopped; there they launched between the kernels of the high one"},
			{"heavy-none-p50", heavy, none, "p50", "ms", 7.59, heldOut, "the time alone was measured with another batch, and the weight is that of the products"},
			{"heavy-none-p99", heavy, none, "p99", "ms", 19.62, heldOut, narrow},
			{"heavy-none-offline", heavy, none, "offline", "it/s", 1.97, assumed, ""},
			{"light-none-p50", light, none, "p50", "ms", 2.25, assumed, "both models fill the GPU here; there they shared it without slowing down, and how far they fill it is not published"},
			{"light-none-p99", light, none, "p99", "ms", 2.67, heldOut, "both models fill the GPU here; there they shared it without slowing down, and how far they fill it is not published"},
			{"light-none-offline", light, none, "offline", "it/s", 165.9, assumed, ""},
		},
	}
	known := map[string]Figures{}
	scenarios := map[string]scenario.Scenario{products: matmul, tasks: threads, equal: threads, heavy: t4, light: t3}
	s.figure = func(values map[string]float64, row published) (float64, error) {
		sc := scenarios[row.scenario]
		o := Options{Seed: validationSeed, Sharing: Sharing{Weight: values["weight"]}}
		if row.scenario == equal || row.scenario == tasks {
			o.Sharing.Weight = 1 // the kernels of all threads are the same
		}
		got, err := remember(known, fmt.Sprint(row.scenario, row.scheme.Kind, values), sc, row.scheme, o)
		if err != nil {
			return 0, err
		}
		if row.figure == "offline" {
			return got.Work / sc.Duration.Seconds() / sc.Offline[0].Step.Alone().Seconds(), nil
		}
		return got.percentile(row.figure), nil
	}
	return s, nil
}
