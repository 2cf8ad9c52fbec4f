package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/internal/cmdline"
	"github.com/gpreempt/gpreempt/internal/config"
	"github.com/gpreempt/gpreempt/internal/daemon"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func serveSimCommand() *cobra.Command {
	var (
		opts    daemon.Options
		cfg     Config
		machine string
		jobs    []string
		ttl     time.Duration
	)
	cmd := &cobra.Command{
		Use:   "serve-sim [flags]",
		Short: "Run gpreemptd on a simulated machine in the same process",
		Long: `Runs the daemon as gpreemptd serve does, on a machine that is simulated in this process:
its GPUs, driver and processes. The API, the scheduler and the mechanism dbgtrap are the
daemon's own. Nothing on the host is touched, and everything it reports is SIMULATED.

Jobs are processes that are always busy. Others are started and stopped by lines on
standard input, each of which is answered by a line of JSON:

  start train:10:25ms     a job; the answer has its pid
  stop PID                ends a job; the answer has its counters
  counters                the answer has the counters of every process and GPU`,
		Args: cmdline.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			opts.ConfigGiven = cmd.Flags().Changed("config")
			if cfg.Spec, err = gpumodel.PresetByName(machine); err != nil {
				return err
			}
			m, err := New(cfg)
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, m.Close()) }()
			c := control{machine: m, jobs: map[int32]*Process{}}
			for _, text := range jobs {
				if _, err := c.start(text); err != nil {
					return err
				}
			}
			go c.serve(cmd.InOrStdin(), cmd.OutOrStdout()) // ends with the process or its input
			opts.Host = m.Host()
			if ttl > 0 {
				opts.Tune = func(c *config.Config) { c.Policy.DefaultTTL = ttl }
			}
			if err := daemon.Run(ctx, opts); err != nil {
				text := err.Error()
				if refusal, ok := errors.AsType[*gpreempt.Error](err); ok && refusal.Next != "" {
					text = refusal.Message + "\n  try: " + refusal.Next
				}
				fmt.Fprintln(cmd.ErrOrStderr(), "kfdemu:", text)
				return exitStatus(1) // as gpreemptd
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&opts.ConfigPath, "config", config.DefaultPath, "config file; a missing file is an error only with this flag")
	f.StringVar(&opts.Socket, "socket", "", "path of the Unix socket, instead of that in the config file")
	f.StringVar(&machine, "machine", "mi300x", "the kind of GPU: "+strings.Join(presets(), ", "))
	f.IntVar(&cfg.GPUs, "gpus", 1, "how many of them")
	f.StringVar(&cfg.Profile, "profile", "6.12", "whose driver's rules: "+strings.Join(append(driver.Profiles(), driver.KmapProfile), ", "))
	f.Uint64Var(&cfg.Seed, "seed", 1, "decides the jitter of modelled durations")
	f.DurationVar(&ttl, "default-ttl", 0, "time to live of leases without one, instead of a second: for clients on a busy host, which may renew late")
	f.StringArrayVar(&jobs, "job", nil, "a job to start, as COMMAND:QUEUES:KERNEL-DURATION[:GPUS], such as train:10:25ms; repeat for more")
	return cmd
}

// jobOccupancy is the share of a GPU that each kernel of a job fills.
const jobOccupancy = 0.5

// parseJob reads a job such as train:10:25ms, or train:10:25ms:2 for two of gpus.
func parseJob(text string, gpus []gpreempt.GPU) (Job, error) {
	parts := strings.Split(text, ":")
	if len(parts) == 3 {
		parts = append(parts, "1")
	}
	if len(parts) != 4 {
		return Job{}, fmt.Errorf("%q is not a job: use COMMAND:QUEUES:KERNEL-DURATION[:GPUS], such as train:10:25ms", text)
	}
	queues, err := strconv.Atoi(parts[1])
	duration, err2 := time.ParseDuration(parts[2])
	n, err3 := strconv.Atoi(parts[3])
	wrong := ""
	switch {
	case parts[0] == "":
		wrong = "COMMAND is empty"
	case err != nil || queues <= 0:
		wrong = fmt.Sprintf("QUEUES %q: use a number of queues, 1 or more", parts[1])
	case err2 != nil || duration <= 0:
		wrong = fmt.Sprintf("KERNEL-DURATION %q: use a number with its unit, such as 25ms", parts[2])
	case err3 != nil || n <= 0 || n > len(gpus):
		wrong = fmt.Sprintf("GPUS %q: use how many GPUs it has, 1 to %d (--gpus)", parts[3], len(gpus))
	}
	if wrong != "" {
		return Job{}, fmt.Errorf("%q is not a job: %s", text, wrong)
	}
	job := Job{Comm: parts[0], Queues: queues, Kernel: gpumodel.Packet{Duration: duration, Occupancy: jobOccupancy}}
	for _, gpu := range gpus[:n] {
		job.GPUs = append(job.GPUs, gpu.ID)
	}
	return job, nil
}

// control starts and stops jobs of a machine.
type control struct {
	machine *Machine
	jobs    map[int32]*Process // by pid
}

// answer is what a line of input is answered with.
type answer struct {
	Error     string                     `json:"error,omitempty"`
	PID       int32                      `json:"pid,omitempty"`
	Now       time.Duration              `json:"now,omitempty"` // nanoseconds of the machine's time
	Processes []gpumodel.ProcessCounters `json:"processes,omitempty"`
	GPUs      []gpumodel.GPUCounters     `json:"gpus,omitempty"`
}

func (c *control) serve(in io.Reader, out io.Writer) {
	encoder := json.NewEncoder(out)
	for lines := bufio.NewScanner(in); lines.Scan(); {
		a, err := c.do(lines.Text())
		if err != nil {
			a.Error = err.Error()
		}
		if encoder.Encode(a) != nil {
			return // nobody reads the answers
		}
	}
}

func (c *control) do(line string) (answer, error) {
	verb, operand, _ := strings.Cut(line, " ")
	switch verb {
	case "start":
		pid, err := c.start(operand)
		return answer{PID: pid}, err
	case "stop":
		pid, err := strconv.ParseInt(operand, 10, 32)
		job := c.jobs[int32(pid)]
		if err != nil || job == nil {
			return answer{}, fmt.Errorf("there is no job %q", operand)
		}
		delete(c.jobs, int32(pid))
		counters, err := job.End()
		return answer{Processes: []gpumodel.ProcessCounters{counters}}, err
	case "counters":
		now, processes, gpus := c.machine.Counters()
		return answer{Now: now, Processes: processes, GPUs: gpus}, nil
	}
	return answer{}, fmt.Errorf("unknown command %q: use start, stop or counters", verb)
}

func (c *control) start(text string) (int32, error) {
	job, err := parseJob(text, c.machine.GPUs())
	if err != nil {
		return 0, err
	}
	p, err := c.machine.StartJob(job)
	if err != nil {
		return 0, err
	}
	c.jobs[p.Key().PID] = p
	return p.Key().PID, nil
}
