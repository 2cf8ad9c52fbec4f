// Package accept runs the acceptance of a GPU: it suspends processes of its own in every way
// that the daemon does, from harmless to harsh, and writes a report.
package accept

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"strings"
	"time"

	"github.com/gpreempt/gpreempt/internal/safety"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Config is what an acceptance needs.
type Config struct {
	GPU gpreempt.GPUID
	// Out is the path of the report.
	Out string
	// Quick runs fewer cycles.
	Quick bool
	// Soak is the duration of the last stage; 0 leaves it out.
	Soak time.Duration
	Seed uint64
	// Root has the files of the host, KernelLog is the path of its log.
	Root      fs.FS
	KernelLog string
	// Version is that of the program.
	Version string
	// Log gets a line for each stage.
	Log io.Writer
}

// hardware is the machine of a real GPU.
const hardware = "hardware"

// softgpu exists where the driver has nodes without a GPU (emu/softgpu).
const softgpu = "sys/kernel/debug/softgpu"

// machine returns what executes the work of the GPUs.
func machine(root fs.FS) string {
	if backend := discovery.Backend(root); backend != "kfd" {
		return backend
	}
	if _, err := fs.Stat(root, softgpu); err == nil {
		return "the real driver without a GPU (softgpu)"
	}
	return hardware
}

// grace is the time in which a stage that has reached its limit must end. A call of the
// driver may need it.
const grace = 30 * time.Second

// Run runs every stage that the machine allows, and returns the verdict. It refuses to begin
// while other processes use the driver. The report exists, with the row of each stage that
// was not reached, from before the first stage on. An error is of the acceptance itself.
func Run(ctx context.Context, cfg Config) (Verdict, error) {
	b, err := newBench(cfg)
	if err != nil {
		return NotRun, err
	}
	defer b.close()
	return b.run(ctx, stages(), func(ctx context.Context, alarm func(safety.Alarm)) error {
		host, _, _ := safety.Read(cfg.Root, nil)
		return safety.NewKernelLog(cfg.KernelLog, func() []gpreempt.GPU { return []gpreempt.GPU{b.gpu} }, alarm).Watch(ctx, host.Driver)
	})
}

// run runs stages until one fails or the kernel log has an alarm, and the report is written.
func (b *bench) run(ctx context.Context, stages []stage, watch func(context.Context, func(safety.Alarm)) error) (Verdict, error) {
	for _, s := range stages {
		b.out.report.Rows = append(b.out.report.Rows, Row{
			Stage: s.name, Verdict: NotRun, Why: notReached, Criteria: s.criteria, Limit: s.limit.Seconds(),
		})
	}
	b.out.files["dmesg-before.txt"] = b.dmesg()
	if _, err := b.out.save(); err != nil {
		return NotRun, fmt.Errorf("write the report: %w", err)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		err := watch(ctx, func(a safety.Alarm) {
			if a.Doubt == "" { // the others are in dmesg-after.txt
				cancel(fmt.Errorf("the kernel log reports %s: %s", a.Pattern, a.Line))
			}
		})
		if err != nil && b.machine() == hardware {
			cancel(err) // an alarm would not be noticed
		}
	}()
	var stopped string
	for i, s := range stages {
		row := &b.out.report.Rows[i]
		why := ""
		if s.need != nil {
			why = s.need(b)
		}
		if stopped == "" && ctx.Err() != nil {
			stopped = context.Cause(ctx).Error()
		}
		why = cmp.Or(why, stopped)
		if why != "" {
			row.Why = why
			fmt.Fprint(b.cfg.Log, row.line())
			continue
		}
		if err := b.stage(ctx, s, row); err != nil {
			return NotRun, err
		}
		fmt.Fprint(b.cfg.Log, row.line())
		if row.Verdict == Fail {
			stopped = "stopped after " + s.name
			if ctx.Err() != nil {
				stopped += ": " + context.Cause(ctx).Error()
			}
		}
	}
	b.out.files["dmesg-after.txt"] = b.dmesg()
	digest, err := b.out.save()
	if err != nil {
		return NotRun, fmt.Errorf("write the report: %w", err)
	}
	fmt.Fprintf(b.cfg.Log, "\n%s: %s (%s)\n%s  %s\n", b.machine(), b.out.report.Verdict, counts(b.out.report.Rows), digest, b.cfg.Out)
	return b.out.report.Verdict, nil
}

// stage runs a stage, within its limit. A stage that does not end, because a call of the
// driver does not, is abandoned.
func (b *bench) stage(ctx context.Context, s stage, row *Row) error {
	row.Verdict, row.Why = Interrupted, "the program or the host ended in this stage"
	if _, err := b.out.save(); err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	fmt.Fprintf(b.cfg.Log, "%-11s %-22s at most %v\n", "begins", s.name, s.limit)
	limited, cancel := context.WithTimeoutCause(ctx, s.limit, fmt.Errorf("the limit of %v is over", s.limit))
	defer cancel()
	began := time.Now()
	r := &result{b: b, stage: s.name, files: map[string][]byte{}}
	done := make(chan error, 1)
	go func(r *result) { done <- s.run(limited, r) }(r)
	var err error
	select {
	case err = <-done:
	case <-limited.Done():
		select {
		case err = <-done:
		case <-time.After(grace):
			err = errors.New("it did not end: a call of the driver hangs")
			r = &result{} // the stage may still write to the other
		}
	}
	if cause := context.Cause(limited); cause != nil && err == nil {
		err = cause
	}
	row.Took = time.Since(began).Seconds()
	row.Notes, row.Controls, row.Measures = r.notes, r.controls, r.measures
	maps.Copy(b.out.files, r.files)
	switch skip, isSkip := errors.AsType[skipped](err); {
	case isSkip:
		row.Verdict, row.Why = NotRun, string(skip)
	case err != nil:
		row.Verdict, row.Why = Fail, err.Error()
		if cause := context.Cause(limited); cause != nil && !errors.Is(err, cause) {
			row.Why += " (" + cause.Error() + ")"
		}
	case b.machine() != hardware:
		row.Verdict, row.Why = Emulated, ""
	default:
		row.Verdict, row.Why = Pass, ""
	}
	if _, err := b.out.save(); err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	return nil
}

// notReached is the reason of a stage that the acceptance has not come to.
const notReached = "not reached"

// skipped is the error of a stage that finds out that it cannot run.
type skipped string

func (s skipped) Error() string { return string(s) }

// counts returns how many rows have each verdict.
func counts(rows []Row) string {
	n := map[Verdict]int{}
	for _, r := range rows {
		n[r.Verdict]++
	}
	var words []string
	for _, v := range []Verdict{Pass, Emulated, Fail, Interrupted, NotRun} {
		if n[v] > 0 {
			words = append(words, fmt.Sprintf("%d %s", n[v], v))
		}
	}
	return strings.Join(words, ", ")
}
