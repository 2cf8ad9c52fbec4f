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

	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/lab/kfdtrace"
	"github.com/gpreempt/gpreempt/pkg/discovery"
)

func traceCommand(a *term.App) *cobra.Command {
	return term.Noun("trace", "Record the driver's work, and export the daemon's history", traceExport(a), traceKFD(a, thisHost()))
}

// thisHost is the host on which gplab runs.
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

func traceKFD(a *term.App, host traceHost) *cobra.Command {
	var (
		o   kfdtrace.Options
		dir string
	)
	cmd := &cobra.Command{
		Use:   "kfd",
		Short: "Record how long the driver's queue operations take",
		Args:  term.Operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.Duration <= 0 || o.Duration > longestTrace {
				return term.Usage(cmd, "--duration must be more than 0 and at most %s", term.Duration(longestTrace))
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
			defer stop()
			return recordKFD(ctx, a, host, o, dir)
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

func recordKFD(ctx context.Context, a *term.App, host traceHost, o kfdtrace.Options, dir string) (err error) {
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
		fmt.Fprintf(a.Err, "Recording for %s; Ctrl-C ends it early.\n", term.Duration(o.Duration))
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
	return errors.Join(traceFailure(err), keepRecording(dir, *recording), showRecording(a, *recording, dir))
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
		return nil, &term.Failure{Code: term.ExitRefused, Message: fmt.Sprintf("%s already contains a recording", dir), Next: "name another directory with --output-dir"}
	}
	return f, err
}

func keepRecording(dir string, r kfdRecording) error {
	if dir == "" {
		return nil
	}
	f, err := newFile(dir, traceReport)
	if err != nil {
		return err
	}
	raw, err := term.Marshal(r)
	if err == nil {
		err = term.WriteJSON(f, raw)
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
	f := &term.Failure{Code: term.ExitFailure, Message: err.Error()}
	if e, ok := errors.AsType[*kfdtrace.Error](err); ok {
		f.Next = e.Next
		if e.Request {
			f.Code = term.ExitUsage
		}
	}
	switch {
	case errors.Is(err, kfdtrace.ErrNoDriver):
		f.Code = term.ExitNoGPU
	case errors.Is(err, fs.ErrPermission):
		f.Code = term.ExitDenied
	}
	return f
}

func showRecording(a *term.App, r kfdRecording, dir string) error {
	return a.Show(r, func(p *term.Printer) {
		printRecording(p, r)
		if dir != "" {
			p.Linef("")
			p.Linef("Written to %s: %s, %s", dir, traceText, traceReport)
		}
	})
}

func printRecording(p *term.Printer, r kfdRecording) {
	early := ""
	if r.Interrupted {
		early = ", ended early"
	}
	p.Linef("Recorded %s on Linux %s%s; %s followed.", term.Duration(r.Duration), term.Or(r.Kernel, "?"), early, term.Count(r.Followed, "function"))
	printLoss(p, r)
	for _, w := range r.Warnings {
		p.Line(term.Cell{Text: "warning: " + w, Style: term.StyleNote})
	}
	p.Linef("")
	if len(r.Functions) > 0 {
		printCalls(p, r.Functions)
	} else {
		p.Linef("No call of a followed function was recorded.")
	}
	if len(r.Events) > 0 {
		p.Linef("")
		t := p.Table("", term.Columns{"EVENT", ">COUNT"})
		for _, e := range r.Events {
			t.Row(e.Name, e.Count)
		}
		t.Flush()
	}
	if len(r.Queues) > 0 {
		p.Linef("")
		printQueueChanges(p, r.Queues)
	}
	if p.Wide {
		for _, name := range r.MissingEvents {
			p.Linef("This kernel has no event %s.", name)
		}
		for _, name := range r.MissingFunctions {
			p.Linef("This kernel has no function %s.", name)
		}
	} else if n := len(r.MissingEvents) + len(r.MissingFunctions); n > 0 {
		p.Linef("")
		p.Linef("This kernel lacks %d of the events and functions (-o wide for their names).", n)
	}
}

// printLoss reports how complete the recording is.
func printLoss(p *term.Printer, r kfdRecording) {
	buffer := fmt.Sprintf("the buffer was %s on each of %s", term.Size(uint64(r.Buffer.PerCPUKiB)<<10), term.Count(r.Buffer.CPUs, "CPU"))
	if r.Lost == 0 {
		p.Linef("No events were lost; %s.", buffer)
		return
	}
	if r.Buffer.Limited {
		buffer += " and could not be enlarged further"
	}
	p.Line(term.Cell{Text: fmt.Sprintf("Events lost: %d; calls are missing below; %s.", r.Lost, buffer), Style: term.StyleNote})
}

// createTarget is the longest time that the creation of a queue should take.
const createTarget = time.Millisecond

func printCalls(p *term.Printer, list []kfdtrace.FunctionCalls) {
	t := p.Table("", term.Columns{"GROUP", "FUNCTION", ">CALLS", ">MIN", ">MEAN", ">P50", ">P95", ">P99", ">MAX", "+>TORN"})
	for _, f := range list {
		t.Row(f.Group, f.Name, f.Count, term.Duration(f.Min), term.Duration(f.Mean), term.Duration(f.P50),
			term.Duration(f.P95), term.Duration(f.P99), term.Duration(f.Max), f.Torn)
	}
	t.Flush()
	for _, f := range list {
		if f.Name == "kfd_ioctl_create_queue" && f.Count > 0 {
			result := term.Cell{Text: "within", Style: term.StyleGood}
			if f.P99 >= createTarget {
				result = term.Cell{Text: "over", Style: term.StyleNote}
			}
			p.Linef("")
			p.Line(fmt.Sprintf("Queue creation took %s at p99: ", term.Duration(f.P99)), result, " the target of "+term.Duration(createTarget)+".")
		}
	}
}

func printQueueChanges(p *term.Printer, list []kfdtrace.QueueChange) {
	t := p.Table("", term.Columns{">AFTER", "CHANGE", ">PID", "COMMAND", ">QUEUE", "TYPE", ">GPU", "+CONTAINER", "+PIDS INSIDE"})
	for _, q := range list {
		t.Row(term.Duration(q.At), q.Change, q.PID, q.Comm, q.QueueID, q.Type, q.GPU,
			term.Or(term.Cut(q.ContainerID, 12), "-"), term.Numbers(q.NamespacePIDs))
	}
	t.Flush()
}
