package cli

import (
	"context"
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
	return noun("trace", "Record the driver's work, and export the daemon's history", a.traceExport(), a.traceKFD(thisHost()))
}

// thisHost is the host on which gpctl runs.
func thisHost() traceHost {
	return traceHost{
		root: os.DirFS("/"), symbols: "/proc/kallsyms",
		tracefs: func() (kfdtrace.FS, error) { return kfdtrace.Find() },
	}
}

// traceHost is the host on which a trace is recorded.
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

// longestTrace bounds --duration: a forgotten recording must not fill the disk.
const longestTrace = time.Hour

func (a *app) traceKFD(host traceHost) *cobra.Command {
	var (
		o   kfdtrace.Options
		dir string
	)
	cmd := &cobra.Command{
		Use:   "kfd",
		Short: "Record how long the driver's queue operations take",
		Args:  operands(),
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

// kfdRecording is the output for programs.
type kfdRecording struct {
	// Kernel is the kernel's release. Driver is the version of amdgpu where the module
	// has one, as in AMD's packages.
	Kernel string `json:"kernel"`
	Driver string `json:"driver_version,omitempty"`
	*kfdtrace.Report
}

// record records the driver, for a report with the host's kernel. The result is nil without a recording.
func (host traceHost) record(ctx context.Context, o kfdtrace.Options) (*kfdRecording, error) {
	var err error
	if o.FS, err = host.tracefs(); err != nil {
		return nil, err
	}
	o.Symbols = host.symbols
	report, err := kfdtrace.Record(ctx, o)
	if report == nil {
		return nil, err
	}
	return &kfdRecording{Kernel: firstLine(host.root, "proc/sys/kernel/osrelease"), Driver: firstLine(host.root, "sys/module/amdgpu/version"), Report: report}, err
}

func (a *app) recordKFD(ctx context.Context, host traceHost, o kfdtrace.Options, dir string) (err error) {
	if _, err := fs.Stat(host.root, "sys/class/kfd/kfd/proc"); err == nil {
		o.Host = discovery.NewFS(host.root)
	}
	var text *os.File
	made := missingDirs(dir)
	if dir != "" {
		if text, err = newFile(dir, traceText); err != nil {
			return err
		}
		o.Raw = text
	}
	o.Started = func() {
		fmt.Fprintf(a.Err, "Recording for %s; Ctrl-C ends it early.\n", duration(o.Duration))
	}
	recording, err := host.record(ctx, o)
	if text != nil {
		err = errors.Join(err, text.Close())
	}
	if recording == nil {
		if text != nil {
			err = errors.Join(err, os.Remove(text.Name())) // it is empty
		}
		for _, dir := range made {
			err = errors.Join(err, os.Remove(dir))
		}
		return traceFailure(err)
	}
	return errors.Join(traceFailure(err), a.keepRecording(dir, *recording), a.showRecording(*recording, dir))
}

// missingDirs returns the directories on the way to dir that do not exist, the deepest first.
func missingDirs(dir string) (missing []string) {
	for ; dir != ""; dir = filepath.Dir(dir) {
		if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
			break
		}
		missing = append(missing, dir)
	}
	return missing
}

// newFile creates a file that must not exist: it could be another recording, or a link.
func newFile(dir, name string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // G301: recordings are readable by everybody
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, name), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644) //nolint:gosec // G302: readable by everybody
	if errors.Is(err, fs.ErrExist) {
		return nil, &failure{code: ExitRefused, message: fmt.Sprintf("%s already contains a recording", dir), next: "name another directory with --output-dir"}
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
	raw, err := marshal(r)
	if err == nil {
		err = writeJSON(f, raw)
	}
	return errors.Join(err, f.Close())
}

func firstLine(root fs.FS, name string) string {
	text, err := fs.ReadFile(root, name)
	if err != nil {
		return ""
	}
	line, _, _ := strings.Cut(string(text), "\n")
	return line
}

// traceFailure returns the failure for an error of a recording.
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
	return a.show(r, func(p *printer) {
		printRecording(p, r)
		if dir != "" {
			p.linef("")
			p.linef("Written to %s: %s, %s", dir, traceText, traceReport)
		}
	})
}

func printRecording(p *printer, r kfdRecording) {
	early := ""
	if r.Interrupted {
		early = ", ended early"
	}
	p.linef("Recorded %s on Linux %s%s; %s followed.", duration(r.Duration), or(r.Kernel, "?"), early, count(r.Followed, "function"))
	printLoss(p, r)
	for _, w := range r.Warnings {
		p.line(cell{"warning: " + w, styleNote})
	}
	p.linef("")
	if len(r.Functions) > 0 {
		printCalls(p, r.Functions)
	} else {
		p.linef("No call of a followed function was recorded.")
	}
	if len(r.Events) > 0 {
		p.linef("")
		t := p.table("", columns{"EVENT", ">COUNT"})
		for _, e := range r.Events {
			t.row(e.Name, e.Count)
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
		p.linef("This kernel lacks %d of the events and functions (-o wide for their names).", n)
	}
}

// printLoss reports how complete the recording is.
func printLoss(p *printer, r kfdRecording) {
	buffer := fmt.Sprintf("the buffer was %s on each of %s", size(uint64(r.Buffer.PerCPUKiB)<<10), count(r.Buffer.CPUs, "CPU"))
	if r.Lost == 0 {
		p.linef("No events were lost; %s.", buffer)
		return
	}
	if r.Buffer.Limited {
		buffer += " and could not be enlarged further"
	}
	p.line(cell{fmt.Sprintf("Events lost: %d; calls are missing below; %s.", r.Lost, buffer), styleNote})
}

// createTarget is the longest time that the creation of a queue should take.
const createTarget = time.Millisecond

func printCalls(p *printer, list []kfdtrace.FunctionCalls) {
	t := p.table("", columns{"GROUP", "FUNCTION", ">CALLS", ">MIN", ">MEAN", ">P50", ">P95", ">P99", ">MAX", "+>TORN"})
	for _, f := range list {
		t.row(f.Group, f.Name, f.Count, duration(f.Min), duration(f.Mean), duration(f.P50),
			duration(f.P95), duration(f.P99), duration(f.Max), f.Torn)
	}
	t.flush()
	for _, f := range list {
		if f.Name == "kfd_ioctl_create_queue" && f.Count > 0 {
			result := cell{"within", styleGood}
			if f.P99 >= createTarget {
				result = cell{"over", styleNote}
			}
			p.linef("")
			p.line(fmt.Sprintf("Queue creation took %s at p99: ", duration(f.P99)), result, " the target of "+duration(createTarget)+".")
		}
	}
}

func printQueueChanges(p *printer, list []kfdtrace.QueueChange) {
	t := p.table("", columns{">AFTER", "CHANGE", ">PID", "COMMAND", ">QUEUE", "TYPE", ">GPU", "+CONTAINER", "+PIDS INSIDE"})
	for _, q := range list {
		t.row(duration(q.At), q.Change, q.PID, q.Comm, q.QueueID, q.Type, q.GPU,
			or(cut(q.ContainerID, 12), "-"), numbers(q.NamespacePIDs))
	}
	t.flush()
}
