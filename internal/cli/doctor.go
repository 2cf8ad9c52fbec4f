package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
)

func (a *app) doctorCommand() *cobra.Command {
	var daemon string
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check whether this host is supported",
		Args:  operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			report, err := a.examine(cmd, daemon)
			if err != nil {
				return err
			}
			if err := a.show(report, func(p *printer) { a.printReport(p, report) }); err != nil {
				return err
			}
			return verdictFailure(report)
		},
	}
	cmd.Flags().StringVar(&daemon, "daemon", "", "the gpreemptd program for when no daemon runs (default: next to gpctl, or in PATH)")
	return cmd
}

// examine asks the daemon, or a process of its program when none runs on this host.
func (a *app) examine(cmd *cobra.Command, daemon string) (*gpreemptv1.DiagnoseResponse, error) {
	ctx, cancel := context.WithTimeout(cmd.Context(), a.timeout)
	defer cancel()
	if err := a.probe(ctx); a.address == "" && (errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED)) {
		return a.runDiagnosis(ctx, daemon)
	}
	var report *gpreemptv1.DiagnoseResponse
	err := a.stream(ctx, func(ctx context.Context, admin adminClient) (err error) {
		report, err = admin.Diagnose(ctx, &gpreemptv1.DiagnoseRequest{})
		return err
	})
	return report, err
}

// probe connects to the daemon's socket and returns the error.
func (a *app) probe(ctx context.Context) error {
	d := net.Dialer{Timeout: time.Second}
	conn, err := d.DialContext(ctx, "unix", a.socket)
	if err != nil {
		return err
	}
	return conn.Close()
}

// runDiagnosis runs gpreemptd diagnose: gpctl itself does not open the driver.
func (a *app) runDiagnosis(ctx context.Context, daemon string) (*gpreemptv1.DiagnoseResponse, error) {
	path, err := findDaemon(daemon)
	if err != nil {
		f, ok := errors.AsType[*failure](err)
		if !ok {
			return nil, err
		}
		return nil, &failure{
			code: ExitUnreachable, message: fmt.Sprintf("no daemon answers on %s: %s", a.socket, f.message), next: f.next,
		}
	}
	var stdout, stderr bytes.Buffer
	diagnose := exec.CommandContext(ctx, path, "diagnose", "--json") //nolint:gosec // G204: the program that the operator named, or the installed one
	diagnose.Stdout, diagnose.Stderr = &stdout, &stderr
	diagnose.WaitDelay = time.Second
	report := &gpreemptv1.DiagnoseResponse{}
	var why string
	switch err := diagnose.Run(); {
	case ctx.Err() != nil:
		why = "no result within " + duration(a.timeout)
	case err != nil:
		why = or(strings.Join(strings.Fields(stderr.String()), " "), err.Error())
	case protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(stdout.Bytes(), report) != nil:
		why = "invalid output"
	default:
		return report, nil
	}
	return nil, &failure{
		code: ExitFailure, message: fmt.Sprintf("no daemon answers on %s; %s diagnose failed: %s", a.socket, path, why),
		next: "compare gpreemptd version with gpctl version; --daemon selects another program",
	}
}

// findDaemon returns the path of gpreemptd: what was given, or the program beside gpctl,
// or that in PATH.
func findDaemon(given string) (string, error) {
	if given != "" {
		return given, nil
	}
	if self, err := os.Executable(); err == nil {
		beside := filepath.Join(filepath.Dir(self), "gpreemptd")
		if _, err := os.Stat(beside); err == nil {
			return beside, nil
		}
	}
	path, err := exec.LookPath("gpreemptd")
	if errors.Is(err, exec.ErrNotFound) {
		return "", &failure{code: ExitFailure, message: "gpreemptd not found next to gpctl or in PATH", next: "use --daemon"}
	}
	return path, err
}

// verdictFailure returns the exit code for the verdict. The report contains the reasons.
func verdictFailure(r *gpreemptv1.DiagnoseResponse) error {
	switch r.GetVerdict() {
	case gpreemptv1.Verdict_VERDICT_NO_GPU:
		return &failure{code: ExitNoGPU}
	case gpreemptv1.Verdict_VERDICT_NOT_READY:
		return &failure{code: ExitNotReady}
	default:
		return nil
	}
}

func (a *app) printReport(p *printer, r *gpreemptv1.DiagnoseResponse) {
	verdict := styleBad
	switch r.GetVerdict() {
	case gpreemptv1.Verdict_VERDICT_READY:
		verdict = styleGood
	case gpreemptv1.Verdict_VERDICT_LIMITED, gpreemptv1.Verdict_VERDICT_SIMULATED:
		verdict = styleNote
	default:
	}
	p.line(cell{r.GetSummary(), verdict})
	if r.GetRemedy() != "" {
		p.linef("  try: %s", r.GetRemedy())
	}
	if !r.GetByDaemon() {
		p.linef("No daemon answers on %s; the results are from gpreemptd diagnose.", a.socket)
	}
	// Without a GPU all other checks are skipped.
	if r.GetVerdict() != gpreemptv1.Verdict_VERDICT_NO_GPU || p.wide {
		a.printChecks(p, r.GetChecks())
	}
	if len(r.GetGpus()) > 0 {
		p.linef("")
		printDiagnosedGPUs(p, r.GetGpus())
	}
	if len(r.GetProcesses()) > 0 {
		p.linef("")
		printDiagnosedProcesses(p, r.GetProcesses())
	}
}

// printChecks lists the checks; skipped ones in wide output only.
func (a *app) printChecks(p *printer, checks []*gpreemptv1.Check) {
	width := 0
	for _, c := range checks {
		width = max(width, len(printable(c.GetTitle())))
	}
	p.linef("")
	skipped := 0
	for _, c := range checks {
		if c.GetStatus() == gpreemptv1.CheckStatus_CHECK_STATUS_SKIP && !p.wide {
			skipped++
			continue
		}
		found := c.GetFound()
		if c.GetStatus() == gpreemptv1.CheckStatus_CHECK_STATUS_OK && !p.wide {
			found = cut(found, 100)
		}
		p.line(a.mark(c.GetStatus()), fmt.Sprintf("  %-*s  ", width, c.GetTitle()), found)
		if c.GetRemedy() != "" {
			p.linef("  try: %s", c.GetRemedy())
		}
	}
	if skipped > 0 {
		p.linef("%s skipped (-o wide for reasons)", count(skipped, "check"))
	}
}

// marks are the styles of statuses, and their symbols on a terminal with UTF-8.
var marks = map[gpreemptv1.CheckStatus]cell{
	gpreemptv1.CheckStatus_CHECK_STATUS_OK: {"✓", styleGood}, gpreemptv1.CheckStatus_CHECK_STATUS_WARN: {"!", styleNote},
	gpreemptv1.CheckStatus_CHECK_STATUS_FAIL: {"✗", styleBad}, gpreemptv1.CheckStatus_CHECK_STATUS_SKIP: {"-", styleNone},
}

// mark returns the mark of a status: a word, or its symbol.
func (a *app) mark(s gpreemptv1.CheckStatus) cell {
	c := marks[s]
	if c.text == "" || !a.Terminal || a.Getenv("TERM") == "dumb" || !unicodeLocale(a.Getenv) {
		c.text = fmt.Sprintf("%-4s", or(api.EnumName(s), "?"))
	}
	return c
}

// unicodeLocale reports whether the locale's encoding is UTF-8. The first variable that is
// set decides (locale(7)).
func unicodeLocale(getenv func(string) string) bool {
	for _, name := range []string{"LC_ALL", "LC_CTYPE", "LANG"} {
		if v := strings.ToLower(getenv(name)); v != "" {
			return strings.Contains(v, "utf-8") || strings.Contains(v, "utf8")
		}
	}
	return false
}

var hazardStyles = map[gpreemptv1.HazardAction]style{
	gpreemptv1.HazardAction_HAZARD_ACTION_DENY: styleBad, gpreemptv1.HazardAction_HAZARD_ACTION_LIMIT: styleNote,
}

func printDiagnosedGPUs(p *printer, list []*gpreemptv1.DiagnosedGpu) {
	t := p.table("", columns{">GPU", "NAME", "GFX", "BDF", "SCHEDULER", ">XCC", "DEBUG", "DEBUGGED", ">QUEUES", "HAZARD", "+REASON"})
	for _, g := range list {
		scheduler, debug := "HWS", cell{text: "yes"}
		if g.GetMes() {
			scheduler = "MES"
		}
		if !g.GetDebugFirmware() {
			debug = cell{"no", styleBad}
		}
		queues := cell{text: fmt.Sprint(g.GetComputeQueues())}
		if slots := g.GetQueueSlots(); slots > 0 {
			queues.text += fmt.Sprintf("/%d", slots)
			if g.GetComputeQueues() > slots {
				queues.style = styleNote
			}
		}
		hazard := cell{or(api.EnumName(g.GetHazard()), "-"), hazardStyles[g.GetHazard()]}
		t.row(g.GetGpuId(), g.GetName(), gfx(g.GetGfxTargetVersion()), or(g.GetBdf(), "-"), scheduler,
			g.GetXccCount(), debug, or(api.EnumName(g.GetDebugSharing()), "?"), queues, hazard, or(g.GetHazardReason(), "-"))
	}
	t.flush()
}

func printDiagnosedProcesses(p *printer, list []*gpreemptv1.DiagnosedProcess) {
	t := p.table("", columns{">PID", "COMMAND", "MECHANISM", "REASON"})
	for _, g := range list {
		mechanism := cell{text: or(g.GetMechanism(), "none")}
		if g.GetMechanism() == "" && g.GetOffline() {
			mechanism.style = styleNote
		}
		t.row(g.GetPid(), g.GetComm(), mechanism, or(g.GetWhy(), "-"))
		for _, no := range g.GetRejected() {
			why := no.GetWhy()
			if no.GetRemedy() != "" {
				why += " (" + no.GetRemedy() + ")"
			}
			t.row("", "", "not "+no.GetMechanism(), why)
		}
	}
	t.flush()
}
