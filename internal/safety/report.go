package safety

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"

	"google.golang.org/protobuf/encoding/protojson"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
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

// WriteReport writes a report as the API's JSON.
func WriteReport(w io.Writer, r *gpreemptv1.DiagnoseResponse) error {
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
