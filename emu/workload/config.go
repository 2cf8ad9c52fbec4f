package workload

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Config says what work a client makes.
type Config struct {
	// GPUs are the GPUs to work on; none means all.
	GPUs []gpreempt.GPUID
	// Queues is the number of compute queues on each GPU.
	Queues int
	// SDMA asks for one queue more on each GPU, which copies memory.
	SDMA bool
	// Runtime asks for RUNTIME_ENABLE before the first queue, without which queues
	// cannot be suspended.
	Runtime bool
	// Packets is how many packets each queue gets; 0: until it is stopped.
	Packets uint64
	// Kernel is how long a kernel runs, and Occupancy how much of the GPU it takes, in
	// millionths. 0 leaves either to the emulator.
	Kernel    time.Duration
	Occupancy uint32
	// Rate is the packets each queue is to get in a second; 0: as many as run. Latency
	// counts from when a packet was due.
	Rate float64
	// Depth is how many packets a queue holds at most.
	Depth int
	// Churn destroys queues all the time, half of them with work in them, and makes
	// new ones.
	Churn bool
	// Poll looks at memory to find out whether a packet is over, instead of waiting for
	// the driver's event.
	Poll bool
}

// The most that can be asked for. A process has no more queues than maxQueues on all
// GPUs (KFD_MAX_NUM_OF_QUEUES_PER_PROCESS), and a GPU takes fewer.
const (
	maxQueues = 1024
	maxDepth  = 4096
)

// ParseArgs reads a command line. It writes what is wrong with it, or how to use it,
// to help; the error is flag.ErrHelp if that was asked for.
func ParseArgs(args []string, help io.Writer) (Config, error) {
	var c Config
	flags := flag.NewFlagSet("", flag.ContinueOnError)
	flags.SetOutput(help)
	gpus := flags.String("gpus", "all", "the `IDS` of the GPUs to work on, with commas between, or all")
	flags.IntVar(&c.Queues, "queues", 1, "compute queues on each GPU")
	flags.BoolVar(&c.SDMA, "sdma", false, "one more queue on each GPU, which copies memory")
	flags.BoolVar(&c.Runtime, "runtime", false, "RUNTIME_ENABLE first")
	flags.Uint64Var(&c.Packets, "packets", 0, "packets for each queue, or for each answer; 0: until told to stop")
	kernel := flags.Uint64("duration", 0, "how long a kernel runs, in `US`; 0: the emulator's own")
	occupancy := flags.Uint("occupancy", 0, "how much of the GPU a kernel takes, in `MILLIONTHS`; 0: all")
	flags.Float64Var(&c.Rate, "rate", 0, "packets for each queue in a second; 0: as many as run")
	flags.IntVar(&c.Depth, "depth", 4, "packets a queue holds at most")
	flags.BoolVar(&c.Churn, "churn", false, "destroy and make queues all the time")
	wait := flags.String("wait", "event", "how to wait for a packet: event or poll")
	if err := flags.Parse(args); err != nil {
		return Config{}, err
	}
	c.Kernel, c.Occupancy, c.Poll = time.Duration(*kernel)*time.Microsecond, uint32(*occupancy), *wait == "poll"
	err := c.validate(flags.Args(), *kernel, *occupancy, *wait)
	if err == nil {
		c.GPUs, err = parseGPUs(*gpus)
	}
	if err != nil {
		fmt.Fprintln(help, err)
		return Config{}, err
	}
	return c, nil
}

func (c *Config) validate(rest []string, kernel uint64, occupancy uint, wait string) error {
	const hour = 3_600_000_000
	switch {
	case len(rest) > 0:
		return fmt.Errorf("%q: there are flags only", rest[0])
	case c.Queues < 0 || c.Queues > maxQueues:
		return fmt.Errorf("--queues %d: 0 to %d", c.Queues, maxQueues)
	case c.Depth < 1 || c.Depth > maxDepth:
		return fmt.Errorf("--depth %d: 1 to %d", c.Depth, maxDepth)
	case kernel > hour:
		return fmt.Errorf("--duration %d: at most %d, an hour", kernel, hour)
	case occupancy > 1_000_000:
		return fmt.Errorf("--occupancy %d: at most 1000000", occupancy)
	case !(c.Rate == 0 || c.Rate >= 0.001 && c.Rate <= 1e6):
		return fmt.Errorf("--rate %v: 0, or 0.001 to 1000000", c.Rate)
	case wait != "event" && wait != "poll":
		return fmt.Errorf("--wait %s: event or poll", wait)
	}
	return nil
}

// parseGPUs reads ids with commas between; "all" gives none.
func parseGPUs(s string) ([]gpreempt.GPUID, error) {
	if s == "all" {
		return nil, nil
	}
	var ids []gpreempt.GPUID
	for field := range strings.SplitSeq(s, ",") {
		id, err := strconv.ParseUint(field, 10, 32)
		if err != nil || id == 0 {
			return nil, fmt.Errorf("--gpus %s: %q is no GPU's id", s, field)
		}
		ids = append(ids, gpreempt.GPUID(id))
	}
	return ids, nil
}

// pick returns those of the GPUs that are to be worked on.
func (c *Config) pick(gpus []gpu) ([]gpu, error) {
	if len(c.GPUs) == 0 {
		return gpus, nil
	}
	var picked []gpu
	var errs []error
	for _, id := range c.GPUs {
		before := len(picked)
		for _, g := range gpus {
			if g.ID == id {
				picked = append(picked, g)
			}
		}
		if len(picked) == before {
			errs = append(errs, fmt.Errorf("this process sees no GPU %d", id))
		}
	}
	return picked, errors.Join(errs...)
}
