package safety

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"

	"google.golang.org/protobuf/encoding/protojson"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// hazardActions are the actions of the hazard table in the API.
var hazardActions = map[Action]gpreemptv1.HazardAction{
	Allow: gpreemptv1.HazardAction_HAZARD_ACTION_ALLOW,
	Limit: gpreemptv1.HazardAction_HAZARD_ACTION_LIMIT,
	Deny:  gpreemptv1.HazardAction_HAZARD_ACTION_DENY,
}

func (h *host) gpuMessages() (all []*gpreemptv1.DiagnosedGpu) {
	for _, g := range h.gpus {
		m := &gpreemptv1.DiagnosedGpu{
			GpuId: uint32(g.ID), Node: uint32(g.Node), Name: g.Name, GfxTargetVersion: g.GFX, Bdf: g.BDF, XccCount: uint32(g.XCCs),
			Mes: g.MES, DebugFirmware: g.DebugFirmware, DebugSharing: g.sharing,
			QueueSlots: uint32(g.QueueSlots), ComputeQueues: uint32(g.computeQueues),
		}
		if result, known := h.cfg.Hazards[g.ID]; known {
			m.Hazard, m.HazardReason = hazardActions[result.Action], gpreempt.Printable(result.Reason)
			if noted := result.Noted(); noted != "" && result.Action != Deny {
				m.HazardReason += " " + gpreempt.Printable(noted)
			}
		}
		all = append(all, m)
	}
	return all
}

// WriteReportJSON writes a report as the API's JSON.
func WriteReportJSON(w io.Writer, r *gpreemptv1.DiagnoseResponse) error {
	data, err := protojson.MarshalOptions{UseProtoNames: true, EmitDefaultValues: true}.Marshal(r)
	if err != nil {
		return fmt.Errorf("cannot write the report as JSON: %w", err)
	}
	var out bytes.Buffer
	if err := json.Indent(&out, data, "", "  "); err != nil { // protojson varies its layout on purpose
		return fmt.Errorf("cannot write the report as JSON: %w", err)
	}
	out.WriteByte('\n')
	_, err = out.WriteTo(w)
	return err
}

// WriteReport writes a report as text.
func WriteReport(w io.Writer, r *gpreemptv1.DiagnoseResponse) error {
	var b bytes.Buffer
	next := func(indent, remedy string) {
		if remedy != "" {
			fmt.Fprintf(&b, "%s  try: %s\n", indent, remedy)
		}
	}
	fmt.Fprintln(&b, r.GetSummary())
	next("", r.GetRemedy())
	for i, c := range r.GetChecks() {
		if r.GetVerdict() == gpreemptv1.Verdict_VERDICT_NO_GPU {
			break // the summary says it, and the other checks were skipped
		}
		if i == 0 {
			b.WriteByte('\n')
		}
		fmt.Fprintf(&b, "%-4s  %-18s  %s\n", api.EnumName(c.GetStatus()), c.GetTitle(), c.GetFound())
		next("    ", c.GetRemedy())
	}
	for i, p := range r.GetProcesses() {
		if i == 0 {
			fmt.Fprintln(&b, "\nHow each process of the driver would be suspended:")
		}
		fmt.Fprintf(&b, "  %d %s: by %s", p.GetPid(), p.GetComm(), cmp.Or(p.GetMechanism(), "no mechanism"))
		if p.GetWhy() != "" {
			fmt.Fprintf(&b, "; %s", p.GetWhy())
		}
		b.WriteByte('\n')
		for _, no := range p.GetRejected() {
			fmt.Fprintf(&b, "    not by %s: %s\n", no.GetMechanism(), no.GetWhy())
			next("    ", no.GetRemedy())
		}
	}
	_, err := b.WriteTo(w)
	return err
}
