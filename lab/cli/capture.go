package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/regular"
	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/lab/capture"
	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/lab/hiplog"
	"github.com/gpreempt/gpreempt/lab/kfdtrace"
	"github.com/gpreempt/gpreempt/lab/trial"
	"github.com/gpreempt/gpreempt/pkg/client"
)

// logMask has HIP log packets, queues and the kernels' names, and nothing else.
const logMask = "0x98"

// captured is a case to capture.
type captured struct {
	name, work string
	plan       trial.Plan
	logs       []string // made elsewhere
}

func captureCommand(a *term.App) *cobra.Command {
	var (
		duration       time.Duration
		level          int
		progress, unit string
		dir            string
		logs           []string
		kfdTrace       bool
	)
	cmd := &cobra.Command{
		Use:   "capture NAME=WORK [NAME=WORK]",
		Short: "Record the queues of one workload or two, and compare them",
		Args:  cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) < 1 || len(args) > 2 {
				return term.Usage(cmd, "%d cases are given: write one or two, each NAME=WORK", len(args))
			}
			var cases []captured
			for _, arg := range args {
				c, err := parseCase(arg)
				if err != nil {
					return term.Usage(cmd, "%v", err)
				}
				if len(cases) > 0 && cases[0].name == c.name {
					return term.Usage(cmd, "two cases are called %s", c.name)
				}
				c.plan.Duration, c.plan.HIPLog, c.plan.NoKFDTrace = duration, level, !kfdTrace
				c.plan.Offline.Progress, c.plan.Offline.Unit = progress, unit
				if err := checkPlan(&c.plan, false); err != nil {
					return err
				}
				cases = append(cases, c)
			}
			for _, log := range logs {
				name, path, _ := strings.Cut(log, "=")
				i := slices.IndexFunc(cases, func(c captured) bool { return c.name == name })
				if i < 0 || path == "" {
					return term.Usage(cmd, "--log %s: write NAME=FILE with the name of a case", log)
				}
				cases[i].logs = append(cases[i].logs, path)
			}
			return runCapture(a, cmd, cases, dir)
		},
	}
	flags := cmd.Flags()
	flags.DurationVar(&duration, "duration", time.Minute, "how long each is captured")
	flags.IntVar(&level, "hip-log", 4, "AMD_LOG_LEVEL of the commands, `1-5`")
	flags.StringArrayVar(&logs, "log", nil, "HIP log of a case that was made elsewhere, such as in a container, as `NAME=FILE`; may be repeated")
	flags.StringVar(&progress, "progress", "", "`REGEXP` of the lines with the progress of a case, with a group for the number (default: \"step N\")")
	flags.StringVar(&unit, "unit", "", "name of what --progress counts (default: steps)")
	flags.BoolVar(&kfdTrace, "kfd-trace", true, "record what the driver does, where the kernel's tracing allows it")
	flags.StringVar(&dir, "output-dir", "", "new `DIR` for the captures (default: named by the time)")
	return cmd
}

var caseForm = regexp.MustCompile(`^([A-Za-z0-9][A-Za-z0-9._-]{0,39})=(?s:(.+))$`)

// parseCase reads NAME=COMMAND, NAME=pid:PID or NAME=container:CONTAINER.
func parseCase(arg string) (captured, error) {
	m := caseForm.FindStringSubmatch(arg)
	if m == nil {
		return captured{}, fmt.Errorf("%q is not a case: write NAME=COMMAND, NAME=pid:PID or NAME=container:CONTAINER", arg)
	}
	c := captured{name: m[1], work: m[2]}
	c.plan = trial.Plan{Name: c.name, Arms: []trial.Arm{{Kind: evidence.OfflineAlone}}, Repeats: 1, Profile: evidence.NoProfile}
	o := &c.plan.Offline
	kind, rest, _ := strings.Cut(c.work, ":")
	switch kind {
	case "pid":
		pid, err := strconv.ParseInt(rest, 10, 32)
		if err != nil || pid < 1 {
			return c, fmt.Errorf("%q is not a process: write %s=pid:4242", arg, c.name)
		}
		o.PIDs = []int32{int32(pid)}
	case "container":
		o.Containers = []string{rest}
	default:
		command := c.work
		if os.Getenv("AMD_LOG_MASK") == "" {
			command = "export AMD_LOG_MASK=" + logMask + "\n" + command
		}
		o.Commands = []string{command}
	}
	return c, nil
}

// runCapture captures the cases one after the other, and shows and writes what they are.
func runCapture(a *term.App, cmd *cobra.Command, cases []captured, dir string) error {
	c, socket, err := dialHere(a, cmd)
	if err != nil {
		return err
	}
	defer c.Close()
	dir = term.Or(dir, "capture-"+a.Now().Format("20060102-150405"))
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	result := capture.Report{Dir: dir, Missing: []string{}}
	var all []capture.Case
	missing := map[string][]string{}
	for i := range cases {
		folder := filepath.Join(dir, cases[i].name)
		show, finish := trialProgress(a)
		readings := capture.Readings{}
		end := watchQueues(ctx, c.Admin(), readings)
		run, err := trial.Run(ctx, cases[i].plan, trial.Config{
			Dir: folder, Client: c, Socket: socket, Version: api.VersionString(), Command: "capture", Progress: show, TraceKFD: recordBeside(thisHost()),
		})
		unread := end()
		finish()
		if err != nil {
			failed := trialFailed(ctx, a, err, run != nil)
			failed.Message = fmt.Sprintf("case %s: %s", cases[i].name, failed.Message)
			failed.Next = term.Or(failed.Next, "the work must use a GPU queue; its output is in "+filepath.Join(folder, evidence.LogsDir))
			return failed
		}
		if _, err := reportIn(folder, run); err != nil {
			return err
		}
		recorded, summary, err := readCase(&cases[i], folder, run, readings)
		if err != nil {
			return err
		}
		for _, what := range slices.Sorted(maps.Keys(run.Missing)) {
			if what == "HIP logs" && recorded.Log != nil {
				continue
			}
			reason := what + ": " + run.Missing[what]
			missing[reason] = append(missing[reason], cases[i].name)
		}
		if unread != nil {
			reason := "queue states: " + client.FromStatus(unread).Error()
			missing[reason] = append(missing[reason], cases[i].name)
		}
		all, result.Cases = append(all, recorded), append(result.Cases, summary)
		result.Origin, result.Backend = string(run.Origin), run.Backend
	}
	for _, reason := range slices.Sorted(maps.Keys(missing)) {
		of := ""
		if len(missing[reason]) < len(cases) {
			of = " of " + strings.Join(missing[reason], ", ")
		}
		what, why, _ := strings.Cut(reason, ": ")
		result.Missing = append(result.Missing, "no "+what+of+": "+why)
	}
	result.Figures = capture.Figures(all)
	result.Learn = capture.Learning(result.Figures, result.Origin)
	if len(all) == 2 && all[0].Log != nil && all[1].Log != nil {
		result.Comparison = hiplog.Compare(all[0].Log, all[1].Log)
	}
	page := filepath.Join(dir, "report.md")
	err = errors.Join(
		evidence.WriteJSON(dir, "capture.json", result),
		writeForms([]reportForm{{"output-dir", page, result.Markdown}}),
		a.Show(result, func(p *term.Printer) { printCapture(p, &result, page) }),
	)
	if err != nil {
		return err
	}
	if slices.ContainsFunc(result.Figures, func(f capture.Figure) bool { return f.Result == capture.Missed }) {
		return &term.Failure{Code: term.ExitFailure}
	}
	return nil
}

// watchQueues adds the daemon's readings of queues and slots, about once a second, until end, which
// returns why the slots could not be read, if they never were.
func watchQueues(ctx context.Context, admin gpreemptv1.AdminServiceClient, into capture.Readings) (end func() error) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() {
		var failed error
		read := false
		for ctx.Err() == nil {
			queues, err := admin.ListQueues(ctx, &gpreemptv1.ListQueuesRequest{Backlog: true})
			slots, slotsErr := admin.ListHqds(ctx, &gpreemptv1.ListHqdsRequest{})
			if err = errors.Join(err, slotsErr); err != nil && ctx.Err() == nil {
				failed = err
			}
			read = read || slotsErr == nil
			into.Add(queues.GetQueues(), slots.GetHqds())
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
		}
		if read {
			failed = nil
		}
		done <- failed
	}()
	return func() error { cancel(); return <-done }
}

// readCase reads the recordings of a case.
func readCase(c *captured, folder string, run *evidence.Run, readings capture.Readings) (capture.Case, capture.Summary, error) {
	recorded, summary := capture.Case{Name: c.name}, capture.Summary{Name: c.name, Work: c.work}
	for _, r := range run.Arms[0].Repeats {
		summary.Seconds, summary.Steps, summary.Unit = r.Seconds, r.Work, r.WorkUnit
	}
	for _, f := range run.Faults {
		summary.Faults = append(summary.Faults, f.What)
	}
	var rows []struct {
		PID    int32  `json:"pid"`
		Target string `json:"target"`
	}
	if err := readJSON(filepath.Join(folder, evidence.PIDsFile), &rows); err != nil {
		return recorded, summary, err
	}
	var targets []string
	for _, row := range rows {
		targets, summary.PIDs = append(targets, row.Target), append(summary.PIDs, row.PID)
	}
	summary.Device = deviceLine(filepath.Join(folder, evidence.LogsDir))
	recorded.Seen = readings.Of(targets)
	summary.Seen = recorded.Seen
	traces, err := filepath.Glob(filepath.Join(folder, evidence.KFDDir, "*.json"))
	if err != nil {
		return recorded, summary, err
	}
	for _, path := range traces {
		recorded.Trace = &kfdtrace.Report{}
		if err := readJSON(path, recorded.Trace); err != nil {
			return recorded, summary, err
		}
	}
	made, err := filepath.Glob(filepath.Join(folder, evidence.LogsDir, "*.hip_*"))
	if err == nil {
		recorded.Log, err = readLogs(append(made, c.logs...))
	}
	return recorded, summary, err
}

// deviceLine returns how a command says on which device it runs, as the workloads do first; "" if none does.
func deviceLine(dir string) string {
	const most = 64 << 10
	paths, err := filepath.Glob(filepath.Join(dir, "offline-alone-*-job-*.log"))
	if err != nil {
		return ""
	}
	for _, path := range paths {
		f, err := regular.Open(path, mostHIPLog)
		if err != nil {
			return ""
		}
		text, readErr := io.ReadAll(io.LimitReader(f, most))
		if errors.Join(readErr, f.Close()) != nil {
			return ""
		}
		for line := range strings.Lines(string(text)) {
			if strings.HasPrefix(line, "device ") {
				return term.Printable(strings.TrimSpace(line))
			}
		}
	}
	return ""
}

func readJSON(path string, into any) error {
	text, err := regular.Read(path, evidence.MaxFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = json.Unmarshal(text, into)
	}
	if err != nil {
		return fmt.Errorf("cannot read %s: %w", path, err)
	}
	return nil
}

// mostHIPLog bounds a HIP log, in bytes: a minute at level 5 can be gigabytes.
const mostHIPLog = 64 << 30

// readLogs reads the HIP logs of a case as one. The result is nil without a record in them.
func readLogs(paths []string) (analysis *hiplog.Analysis, err error) {
	var readers []io.Reader
	for _, path := range paths {
		f, openErr := regular.Open(path, mostHIPLog)
		if openErr != nil {
			return nil, unreadable(path, openErr)
		}
		defer f.Close()
		readers = append(readers, f)
	}
	if len(readers) == 0 {
		return nil, nil
	}
	analysis, err = hiplog.Analyze(io.MultiReader(readers...))
	if err != nil {
		return nil, err
	}
	if analysis.Records == 0 {
		return nil, nil
	}
	return analysis, nil
}

func printCapture(p *term.Printer, r *capture.Report, page string) {
	p.Linef("%s", capture.Verdict(r.Figures, r.Cases))
	p.Linef("capture on %s: %s", r.Backend, strings.ToUpper(r.Origin))
	for i := range r.Cases {
		c := &r.Cases[i]
		p.Linef("%s: %s, %.0f s, %s", c.Name, c.Work, c.Seconds, c.Rate())
		if c.Device != "" {
			p.Linef("  %s", c.Device)
		}
		for _, fault := range c.Faults {
			p.Line(term.Cell{Text: "  " + fault, Style: term.StyleNote})
		}
	}
	p.Linef("")
	var columns term.Columns
	for _, header := range r.Headers() {
		columns = append(columns, strings.ToUpper(header))
	}
	t := p.Table("", columns)
	styles := map[capture.Result]term.Style{capture.Met: term.StyleGood, capture.Missed: term.StyleBad, capture.Unknown: term.StyleNote}
	for i := range r.Figures {
		cells := []any{}
		for _, cell := range r.Figures[i].Row() {
			cells = append(cells, cell)
		}
		cells[len(cells)-1] = term.Cell{Text: fmt.Sprint(cells[len(cells)-1]), Style: styles[r.Figures[i].Result]}
		t.Row(cells...)
	}
	t.Flush()
	p.Linef("")
	for _, line := range append(slices.Clone(r.Missing), r.Learn...) {
		p.Linef("%s", line)
	}
	if r.Comparison != nil {
		p.Linef("")
		printComparison(p, &comparedLogs{r.Cases[0].Name, r.Cases[1].Name, r.Comparison})
	}
	p.Linef("")
	p.Linef("recordings: %s", r.Dir)
	p.Linef("report: %s", page)
}
