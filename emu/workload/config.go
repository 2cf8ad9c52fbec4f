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

// Config describes the work of a client.
type Config struct {
	// GPUs are the GPUs to use; empty means all.
	GPUs []gpreempt.GPUID
	// Queues is the number of compute queues on each GPU.
	Queues int
	// SDMA adds a queue on each GPU that copies memory.
	SDMA bool
	// Runtime calls RUNTIME_ENABLE before the first queue, without which queues cannot be
	// suspended.
	Runtime bool
	// Packets is the number of packets of each queue; 0 means no limit.
	Packets uint64
	// Kernel is the duration of a kernel, and Occupancy its share of the GPU in
	// millionths. For 0 the emulator decides.
	Kernel    time.Duration
	Occupancy uint32
	// Rate is the packets per second and queue; 0 means as many as run. Latency counts
	// from the time at which a packet was due.
	Rate float64
	// Depth is the most packets in a queue.
	Depth int
	// Priority is that of HIP's streams whose queues the compute queues are like: low, normal or
	// high; "" is normal.
	Priority string
	// Churn destroys queues continuously, half of them with work in them, and creates new
	// ones.
	Churn bool
	// Steps prints a line "step N" ten times a second, with the number of packets that have run, as
	// a training job prints its progress.
	Steps bool
	// Poll reads memory to find out whether a packet has completed, instead of waiting for
	// the driver's event.
	Poll bool
}

// Limits of the configuration. A process has at most maxQueues queues on all GPUs
// (KFD_MAX_NUM_OF_QUEUES_PER_PROCESS), and fewer on one GPU.
const (
	maxQueues = 1024
	maxDepth  = 4096
)

// ParseArgs reads a command line. It writes errors or usage to help. The error is
// flag.ErrHelp if help was requested.
func ParseArgs(args []string, help io.Writer) (Config, error) {
	var c Config
	flags := flag.NewFlagSet("", flag.ContinueOnError)
	flags.SetOutput(help)
	gpus := flags.String("gpus", "all", "the `IDS` of the GPUs to use, separated by commas, or all")
	flags.IntVar(&c.Queues, "queues", 1, "compute queues on each GPU")
	flags.BoolVar(&c.SDMA, "sdma", false, "another queue on each GPU that copies memory")
	flags.BoolVar(&c.Runtime, "runtime", false, "call RUNTIME_ENABLE first")
	flags.Uint64Var(&c.Packets, "packets", 0, "packets of each queue, or of each answer; 0: no limit")
	kernel := flags.Uint64("duration", 0, "duration of a kernel in `US`; 0: the emulator's default")
	occupancy := flags.Uint("occupancy", 0, "share of the GPU that a kernel fills, in `MILLIONTHS`; 0: all")
	flags.Float64Var(&c.Rate, "rate", 0, "packets per second and queue; 0: no limit")
	flags.IntVar(&c.Depth, "depth", 4, "most packets in a queue")
	flags.BoolVar(&c.Churn, "churn", false, "destroy and create queues continuously")
	flags.StringVar(&c.Priority, "priority", "", "priority of the queues, as of HIP's streams: low, normal or high (default normal)")
	flags.BoolVar(&c.Steps, "steps", false, "print \"step N\" ten times a second: how many packets have run")
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
		return fmt.Errorf("unexpected argument %q", rest[0])
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
	case c.priority() < 0:
		return fmt.Errorf("--priority %s: low, normal or high", c.Priority)
	case wait != "event" && wait != "poll":
		return fmt.Errorf("--wait %s: event or poll", wait)
	}
	return nil
}

// priority returns the driver's priority of the queues, -1 for an unknown name.
func (c *Config) priority() int {
	switch c.Priority {
	case "low":
		return lowPriority
	case "", "normal":
		return normalPriority
	case "high":
		return highPriority
	}
	return -1
}

// parseGPUs reads IDs separated by commas; for "all" it returns nil.
func parseGPUs(s string) ([]gpreempt.GPUID, error) {
	if s == "all" {
		return nil, nil
	}
	var ids []gpreempt.GPUID
	for field := range strings.SplitSeq(s, ",") {
		id, err := strconv.ParseUint(field, 10, 32)
		if err != nil || id == 0 {
			return nil, fmt.Errorf("--gpus %s: invalid GPU ID %q", s, field)
		}
		ids = append(ids, gpreempt.GPUID(id))
	}
	return ids, nil
}

// pick returns the GPUs to use.
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
			errs = append(errs, fmt.Errorf("this process cannot use GPU %d", id))
		}
	}
	return picked, errors.Join(errs...)
}
