package doctor

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"

	"google.golang.org/protobuf/encoding/protojson"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

// Message returns the report as the API does.
func (r *Report) Message() *gpreemptv1.DiagnoseResponse {
	m := &gpreemptv1.DiagnoseResponse{
		Verdict: gpreemptv1.Verdict(r.Verdict), Summary: r.Summary, Remedy: r.Remedy, ByDaemon: r.ByDaemon,
		Backend: r.Backend, Version: r.Version,
	}
	for _, c := range r.Checks {
		m.Checks = append(m.Checks, &gpreemptv1.Check{
			Id: c.ID, Title: c.Title, Status: gpreemptv1.CheckStatus(c.Status), Found: c.Found, Remedy: c.Remedy,
		})
	}
	for _, g := range r.GPUs {
		m.Gpus = append(m.Gpus, &gpreemptv1.DiagnosedGpu{
			GpuId: uint32(g.ID), Node: uint32(g.Node), Name: g.Name, GfxTargetVersion: g.GFX, Bdf: g.BDF, XccCount: uint32(g.XCCs),
			Mes: g.MES, DebugFirmware: g.DebugFirmware, DebugSharing: gpreemptv1.DebugSharing(g.Sharing),
			QueueSlots: uint32(g.QueueSlots), ComputeQueues: uint32(g.ComputeQueues),
			Hazard: gpreemptv1.HazardAction(g.Hazard.Action), HazardReason: g.Hazard.Reason,
		})
	}
	for _, p := range r.Processes {
		pm := &gpreemptv1.DiagnosedProcess{
			TargetId: p.Key.String(), Pid: p.Key.PID, Comm: p.Comm, Offline: p.Offline, Mechanism: p.Mechanism, Why: p.Why,
		}
		for _, no := range p.Rejected {
			pm.Rejected = append(pm.Rejected, &gpreemptv1.Rejection{Mechanism: no.Mechanism, Why: no.Why, Remedy: no.Remedy})
		}
		m.Processes = append(m.Processes, pm)
	}
	return m
}

// WriteJSON writes the report as the API's JSON.
func (r *Report) WriteJSON(w io.Writer) error {
	data, err := protojson.MarshalOptions{UseProtoNames: true, EmitDefaultValues: true}.Marshal(r.Message())
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

// Write writes the report as text.
func (r *Report) Write(w io.Writer) error {
	var b bytes.Buffer
	next := func(indent, remedy string) {
		if remedy != "" {
			fmt.Fprintf(&b, "%s  try: %s\n", indent, remedy)
		}
	}
	fmt.Fprintln(&b, r.Summary)
	next("", r.Remedy)
	for i, c := range r.Checks {
		if r.Verdict == NoGPU {
			break // the summary says it, and the other checks were skipped
		}
		if i == 0 {
			b.WriteByte('\n')
		}
		fmt.Fprintf(&b, "%-4s  %-18s  %s\n", c.Status, c.Title, c.Found)
		next("    ", c.Remedy)
	}
	for i, p := range r.Processes {
		if i == 0 {
			fmt.Fprintln(&b, "\nHow each process of the driver would be suspended:")
		}
		fmt.Fprintf(&b, "  %d %s: by %s", p.Key.PID, p.Comm, cmp.Or(p.Mechanism, "no mechanism"))
		if p.Why != "" {
			fmt.Fprintf(&b, "; %s", p.Why)
		}
		b.WriteByte('\n')
		for _, no := range p.Rejected {
			fmt.Fprintf(&b, "    not by %s: %s\n", no.Mechanism, no.Why)
			next("    ", no.Remedy)
		}
	}
	_, err := b.WriteTo(w)
	return err
}
