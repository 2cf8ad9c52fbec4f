package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
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
	"github.com/gpreempt/gpreempt/internal/term"
)

func doctorCommand(a *term.App) *cobra.Command {
	var daemon string
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check whether this host is supported",
		Args:  term.Operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			report, instead, denied, err := examine(a, cmd, daemon)
			if err != nil {
				return err
			}
			if err := a.Show(report, func(p *term.Printer) { printReport(p, report, instead, denied) }); err != nil {
				return err
			}
			return verdictFailure(report)
		},
	}
	cmd.Flags().StringVar(&daemon, "daemon", "", "the gpreemptd program for when no daemon runs (default: next to gpctl, or in PATH)")
	return cmd
}

// examine asks the daemon, or a process of its program when none runs on this host, or it does not
// answer this user: instead is why, and denied the refusal.
func examine(a *term.App, cmd *cobra.Command, daemon string) (report *gpreemptv1.DiagnoseResponse, instead string, denied *term.Failure, err error) {
	ctx, cancel := context.WithTimeout(cmd.Context(), a.Timeout)
	defer cancel()
	instead = "no daemon answers on " + a.Socket
	if probed := a.Probe(ctx); a.Address != "" || !errors.Is(probed, fs.ErrNotExist) && !errors.Is(probed, syscall.ECONNREFUSED) {
		err := a.Stream(ctx, func(ctx context.Context, admin term.AdminClient) (err error) {
			report, err = admin.Diagnose(ctx, &gpreemptv1.DiagnoseRequest{})
			return err
		})
		denied, _ = errors.AsType[*term.Failure](err)
		if err == nil || a.Address != "" || denied == nil || denied.Code != term.ExitDenied {
			return report, "", nil, err
		}
		instead = denied.Message
	}
	path, err := findDaemon(daemon)
	f, ok := errors.AsType[*term.Failure](err)
	switch {
	case err != nil && denied != nil:
		return nil, "", nil, denied
	case ok:
		return nil, "", nil, &term.Failure{Code: term.ExitUnreachable, Message: instead + ": " + f.Message, Next: f.Next}
	case err != nil:
		return nil, "", nil, err
	}
	report, why := runDiagnosis(ctx, a, path)
	if why != "" {
		return nil, "", nil, &term.Failure{
			Code: term.ExitFailure, Message: fmt.Sprintf("%s; %s diagnose failed: %s", instead, path, why),
			Next: "compare gpreemptd version with gpctl version; --daemon selects another program",
		}
	}
	return report, instead, denied, nil
}

// runDiagnosis runs gpreemptd diagnose, because gpctl itself does not open the driver. It returns why
// there is no report.
func runDiagnosis(ctx context.Context, a *term.App, path string) (*gpreemptv1.DiagnoseResponse, string) {
	var stdout, stderr bytes.Buffer
	diagnose := exec.CommandContext(ctx, path, "diagnose")
	diagnose.Stdout, diagnose.Stderr = &stdout, &stderr
	diagnose.WaitDelay = time.Second
	report := &gpreemptv1.DiagnoseResponse{}
	switch err := diagnose.Run(); {
	case ctx.Err() != nil:
		return nil, "no result within " + term.Duration(a.Timeout)
	case err != nil:
		return nil, term.Or(strings.Join(strings.Fields(stderr.String()), " "), err.Error())
	case protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(stdout.Bytes(), report) != nil:
		return nil, "invalid output"
	}
	return report, ""
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
		return "", &term.Failure{Code: term.ExitFailure, Message: "gpreemptd not found next to gpctl or in PATH", Next: "use --daemon"}
	}
	return path, err
}

// verdictFailure returns the exit code for the verdict. The report contains the reasons.
func verdictFailure(r *gpreemptv1.DiagnoseResponse) error {
	switch r.GetVerdict() {
	case gpreemptv1.Verdict_VERDICT_NO_GPU:
		return &term.Failure{Code: term.ExitNoGPU}
	case gpreemptv1.Verdict_VERDICT_NOT_READY:
		return &term.Failure{Code: term.ExitNotReady}
	default:
		return nil
	}
}

func printReport(p *term.Printer, r *gpreemptv1.DiagnoseResponse, instead string, denied *term.Failure) {
	if denied != nil {
		p.Line(term.Cell{Text: "The daemon refused this user: " + instead, Style: term.StyleBad})
		p.Linef("  try: %s", denied.Next)
		p.Linef("Without the daemon, gpreemptd diagnose says:")
	}
	verdict := term.StyleBad
	switch r.GetVerdict() {
	case gpreemptv1.Verdict_VERDICT_READY:
		verdict = term.StyleGood
	case gpreemptv1.Verdict_VERDICT_LIMITED, gpreemptv1.Verdict_VERDICT_SIMULATED:
		verdict = term.StyleNote
	default:
	}
	p.Line(term.Cell{Text: r.GetSummary(), Style: verdict})
	if r.GetRemedy() != "" {
		p.Linef("  try: %s", r.GetRemedy())
	}
	if instead != "" && denied == nil {
		p.Linef("From gpreemptd diagnose: %s", instead)
	}
	// Without a GPU all other checks are skipped.
	if r.GetVerdict() != gpreemptv1.Verdict_VERDICT_NO_GPU || p.Wide {
		printChecks(p, r.GetChecks())
	}
	if len(r.GetGpus()) > 0 {
		p.Linef("")
		printDiagnosedGPUs(p, r.GetGpus())
	}
	if len(r.GetProcesses()) > 0 {
		p.Linef("")
		printDiagnosedProcesses(p, r.GetProcesses())
	}
}

// printChecks lists the checks; those that do not apply in wide output only.
func printChecks(p *term.Printer, checks []*gpreemptv1.Check) {
	width := 0
	for _, c := range checks {
		width = max(width, len(term.Printable(c.GetTitle())))
	}
	p.Linef("")
	skipped := 0
	for _, c := range checks {
		if c.GetStatus() == gpreemptv1.CheckStatus_CHECK_STATUS_SKIP && c.GetRemedy() == "" && !p.Wide {
			skipped++
			continue
		}
		found := c.GetFound()
		if c.GetStatus() == gpreemptv1.CheckStatus_CHECK_STATUS_OK && !p.Wide {
			found = term.Cut(found, 100)
		}
		status := term.Cell{Text: fmt.Sprintf("%-4s", term.Or(api.EnumName(c.GetStatus()), "?")), Style: checkStyles[c.GetStatus()]}
		p.Line(status, fmt.Sprintf("  %-*s  ", width, c.GetTitle()), found)
		if c.GetRemedy() != "" {
			p.Linef("  try: %s", c.GetRemedy())
		}
	}
	if skipped > 0 {
		p.Linef("%s skipped (-o wide for reasons)", term.Count(skipped, "check"))
	}
}

var checkStyles = map[gpreemptv1.CheckStatus]term.Style{
	gpreemptv1.CheckStatus_CHECK_STATUS_OK: term.StyleGood, gpreemptv1.CheckStatus_CHECK_STATUS_WARN: term.StyleNote,
	gpreemptv1.CheckStatus_CHECK_STATUS_FAIL: term.StyleBad,
}

var hazardStyles = map[gpreemptv1.HazardAction]term.Style{
	gpreemptv1.HazardAction_HAZARD_ACTION_DENY: term.StyleBad, gpreemptv1.HazardAction_HAZARD_ACTION_LIMIT: term.StyleNote,
}

func printDiagnosedGPUs(p *term.Printer, list []*gpreemptv1.DiagnosedGpu) {
	t := p.Table("", term.Columns{">GPU", "NAME", "GFX", "BDF", "SCHEDULER", ">XCC", "DEBUG", "DEBUGGED", ">QUEUES", "HAZARD", "+REASON"})
	for _, g := range list {
		scheduler, debug := "HWS", term.Cell{Text: "yes"}
		if g.GetMes() {
			scheduler = "MES"
		}
		if !g.GetDebugFirmware() {
			debug = term.Cell{Text: "no", Style: term.StyleBad}
		}
		queues := term.Cell{Text: fmt.Sprint(g.GetComputeQueues())}
		if slots := g.GetQueueSlots(); slots > 0 {
			queues.Text += fmt.Sprintf("/%d", slots)
			if g.GetComputeQueues() > slots {
				queues.Style = term.StyleNote
			}
		}
		hazard := term.Cell{Text: term.Or(api.EnumName(g.GetHazard()), "-"), Style: hazardStyles[g.GetHazard()]}
		t.Row(g.GetGpuId(), g.GetName(), gfx(g.GetGfxTargetVersion()), term.Or(g.GetBdf(), "-"), scheduler,
			g.GetXccCount(), debug, term.Or(api.EnumName(g.GetDebugSharing()), "?"), queues, hazard, term.Or(g.GetHazardReason(), "-"))
	}
	t.Flush()
}

func printDiagnosedProcesses(p *term.Printer, list []*gpreemptv1.DiagnosedProcess) {
	t := p.Table("", term.Columns{">PID", "COMMAND", "MECHANISM", "REASON"})
	for _, g := range list {
		mechanism := term.Cell{Text: term.Or(g.GetMechanism(), "none")}
		if g.GetMechanism() == "" && g.GetOffline() {
			mechanism.Style = term.StyleNote
		}
		t.Row(g.GetPid(), g.GetComm(), mechanism, term.Or(g.GetWhy(), "-"))
		for _, no := range g.GetRejected() {
			why := no.GetWhy()
			if no.GetRemedy() != "" {
				why += " (" + no.GetRemedy() + ")"
			}
			t.Row("", "", "not "+no.GetMechanism(), why)
		}
	}
	t.Flush()
}
