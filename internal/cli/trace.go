package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpreempt/gpreempt/internal/kfdtrace"
	"github.com/gpreempt/gpreempt/pkg/discovery"
)

func (a *app) traceCommand() *cobra.Command {
	return noun("trace", "Record what the driver does, and export what the daemon did", a.traceExport(), a.traceKFD(traceHost{
		root: os.DirFS("/"), symbols: "/proc/kallsyms",
		tracefs: func() (kfdtrace.FS, error) { return kfdtrace.Find() },
	}))
}

// traceHost is the host that a trace is recorded on.
type traceHost struct {
	root    fs.FS
	symbols string
	tracefs func() (kfdtrace.FS, error)
}

// The files of a recording.
const (
	traceText   = "trace.txt"
	traceReport = "report.json"
)

// longestTrace bounds --duration: somebody who forgets it should find a disk that
// is not full.
const longestTrace = time.Hour

func (a *app) traceKFD(host traceHost) *cobra.Command {
	var (
		o   kfdtrace.Options
		dir string
	)
	cmd := &cobra.Command{
		Use:   "kfd",
		Short: "Record how long the driver's queue operations take",
		Long: `Has the kernel record what its KFD driver does with queues: the calls that create,
destroy, suspend and resume them and write their MQDs, the driver's trace events, and
the queues that are born and die meanwhile. It needs root, on the host, and no daemon.

The recording is made in an instance of tracefs of its own, so that nobody else's
tracing changes, and nothing is left of it: not after Ctrl-C, which ends it early, nor
after an error; what a killed gpctl left is cleared away by the next. All times are
those of the clock CLOCK_MONOTONIC; the logs of HIP have another.

--output-dir keeps the text of the trace, ` + traceText + `, and ` + traceReport + `, the same as -o json.
--events and --functions record others instead; * and ? are wildcards in functions.`,
		Example: `  gpctl trace kfd --duration 30s --output-dir /var/tmp/kfd-trace
  gpctl trace kfd --events amdgpu,gpu_scheduler:drm_run_job --functions 'kfd_ioctl_*'`,
		Args: operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.Duration <= 0 || o.Duration > longestTrace {
				return usage(cmd, "--duration must be more than 0 and at most %s", duration(longestTrace))
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
			defer stop()
			return a.recordKFD(ctx, host, o, dir)
		},
	}
	cmd.Flags().DurationVar(&o.Duration, "duration", 10*time.Second, "how long to record")
	cmd.Flags().StringVar(&dir, "output-dir", "", "write "+traceText+" and "+traceReport+" here")
	cmd.Flags().StringSliceVar(&o.Events, "events", nil, "record these trace events instead: SYSTEM:EVENT or SYSTEM")
	cmd.Flags().StringSliceVar(&o.Functions, "functions", nil, "follow these kernel functions instead")
	return cmd
}

// kfdRecording is what is written for programs.
type kfdRecording struct {
	// Kernel is the kernel's release, Driver the version of amdgpu where it has its
	// own, as AMD's packages do.
	Kernel string `json:"kernel"`
	Driver string `json:"driver_version,omitempty"`
	*kfdtrace.Report
}

func (a *app) recordKFD(ctx context.Context, host traceHost, o kfdtrace.Options, dir string) error {
	tracing, err := host.tracefs()
	if err != nil {
		return traceFailure(err)
	}
	o.FS, o.Symbols, o.PID = tracing, host.symbols, os.Getpid()
	if _, err := fs.Stat(host.root, "sys/class/kfd/kfd/proc"); err == nil {
		o.Host = discovery.NewFS(host.root)
	}
	var text *os.File
	if dir != "" {
		if text, err = newFile(dir, traceText); err != nil {
			return err
		}
		o.Raw = text
	}
	o.Started = func(string) {
		fmt.Fprintf(a.Err, "Recording for %s; Ctrl-C ends it early.\n", duration(o.Duration))
	}
	report, err := kfdtrace.Record(ctx, o)
	if text != nil {
		err = errors.Join(err, text.Close())
	}
	if report == nil {
		if text != nil {
			err = errors.Join(err, os.Remove(text.Name())) // there is nothing in it
		}
		return traceFailure(err)
	}
	recording := kfdRecording{Kernel: firstLine(host.root, "proc/sys/kernel/osrelease"), Driver: firstLine(host.root, "sys/module/amdgpu/version"), Report: report}
	return errors.Join(traceFailure(err), a.keepRecording(dir, recording), a.showRecording(recording, dir))
}

// newFile makes a file that must not be there: another recording may be in it, or a
// link to elsewhere.
func newFile(dir, name string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // G301: recordings for everybody, as their files
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, name), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644) //nolint:gosec // G302: for everybody
	if errors.Is(err, fs.ErrExist) {
		return nil, &failure{code: ExitRefused, message: fmt.Sprintf("%s holds a recording already", dir), next: "name another directory with --output-dir"}
	}
	return f, err
}

func (a *app) keepRecording(dir string, r kfdRecording) error {
	if dir == "" {
		return nil
	}
	f, err := newFile(dir, traceReport)
	if err != nil {
		return err
	}
	return errors.Join(encode(f, r), f.Close())
}

func firstLine(root fs.FS, name string) string {
	text, err := fs.ReadFile(root, name)
	if err != nil {
		return ""
	}
	line, _, _ := strings.Cut(string(text), "\n")
	return line
}

// traceFailure makes an error of a recording what gpctl ends with.
func traceFailure(err error) error {
	if err == nil {
		return nil
	}
	f := &failure{code: ExitFailure, message: err.Error()}
	if e, ok := errors.AsType[*kfdtrace.Error](err); ok {
		f.next = e.Next
		if e.Request {
			f.code = ExitUsage
		}
	}
	switch {
	case errors.Is(err, kfdtrace.ErrNoDriver):
		f.code = ExitNoGPU
	case errors.Is(err, fs.ErrPermission):
		f.code = ExitDenied
	}
	return f
}

func (a *app) showRecording(r kfdRecording, dir string) error {
	switch a.output {
	case formatJSON:
		return encode(a.Out, r)
	case formatYAML:
		data, err := json.Marshal(r)
		if err != nil {
			return err
		}
		return layoutYAML(a.Out, data)
	}
	p := a.printer()
	printRecording(p, r)
	if dir != "" {
		p.linef("")
		p.linef("Written to %s: %s, %s", dir, traceText, traceReport)
	}
	return p.err
}

func printRecording(p *printer, r kfdRecording) {
	how := "functions were not followed"
	if r.FunctionsBy != kfdtrace.ByNone {
		how = fmt.Sprintf("%s followed by %s", count(r.Followed, "function"), r.FunctionsBy)
	}
	early := ""
	if r.Interrupted {
		early = ", ended early"
	}
	p.linef("Recorded %s on Linux %s%s; %s.", duration(r.Duration), or(r.Kernel, "?"), early, how)
	printLoss(p, r)
	for _, w := range r.Warnings {
		p.line(cell{"warning: " + w, styleNote})
	}
	p.linef("")
	if len(r.Functions) > 0 {
		printCalls(p, r.Functions)
	} else {
		p.linef("No function that is followed was called.")
	}
	if len(r.Events) > 0 {
		p.linef("")
		t := p.table("", columns{"EVENT", ">COUNT"})
		for _, e := range r.Events {
			t.row(text(e.Name), text(e.Count))
		}
		t.flush()
	}
	if len(r.Queues) > 0 {
		p.linef("")
		printQueueChanges(p, r.Queues)
	}
	if p.wide {
		for _, name := range r.MissingEvents {
			p.linef("This kernel has no event %s.", name)
		}
		for _, name := range r.MissingFunctions {
			p.linef("This kernel has no function %s.", name)
		}
	} else if n := len(r.MissingEvents) + len(r.MissingFunctions); n > 0 {
		p.linef("")
		p.linef("%d of the events and functions are not in this kernel; -o wide names them.", n)
	}
}

// printLoss says how whole the recording is.
func printLoss(p *printer, r kfdRecording) {
	buffer := fmt.Sprintf("the buffer was %s on each of %s", size(uint64(r.Buffer.PerCPUKiB)<<10), count(r.Buffer.CPUs, "CPU"))
	if r.Lost == 0 {
		p.linef("Nothing was lost; %s.", buffer)
		return
	}
	switch r.Buffer.Grown {
	case 0:
	case 1:
		buffer += ", grown once"
	default:
		buffer += fmt.Sprintf(", grown %d times", r.Buffer.Grown)
	}
	if r.Buffer.Limited {
		buffer += " and could not grow further"
	}
	p.line(cell{fmt.Sprintf("%d events were lost, so calls are missing below; %s.", r.Lost, buffer), styleNote})
}

// The design aims at less than this for the creation of a queue.
const createTarget = time.Millisecond

func printCalls(p *printer, list []kfdtrace.FunctionCalls) {
	t := p.table("", columns{"GROUP", "FUNCTION", ">CALLS", ">MIN", ">MEAN", ">P50", ">P95", ">P99", ">MAX", "+>TORN"})
	for _, f := range list {
		t.row(text(f.Group), text(f.Name), text(f.Count), text(duration(f.Min)), text(duration(f.Mean)), text(duration(f.P50)),
			text(duration(f.P95)), text(duration(f.P99)), text(duration(f.Max)), text(f.Torn))
	}
	t.flush()
	for _, f := range list {
		if f.Name == "kfd_ioctl_create_queue" && f.Count > 0 {
			verdict := cell{"within", styleGood}
			if f.P99 >= createTarget {
				verdict = cell{"over", styleNote}
			}
			p.linef("")
			p.line(text(fmt.Sprintf("Creating a queue took %s at p99: ", duration(f.P99))), verdict, text(" the design's target of "+duration(createTarget)+"."))
		}
	}
}

func printQueueChanges(p *printer, list []kfdtrace.QueueChange) {
	t := p.table("", columns{">AFTER", "CHANGE", ">PID", "COMMAND", ">QUEUE", "TYPE", ">GPU", "+CONTAINER", "+PIDS INSIDE"})
	for _, q := range list {
		inside := strings.Trim(fmt.Sprint(q.NamespacePIDs), "[]")
		t.row(text(duration(q.At)), text(q.Change), text(q.PID), text(q.Comm), text(q.QueueID), text(q.Type), text(q.GPU),
			text(or(cut(q.ContainerID, 12), "-")), text(or(inside, "-")))
	}
	t.flush()
}
