package cli

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/term"
)

// described returns the comments of the Python file.
func described(a *term.App, f *finding) []string {
	lines := []string{fmt.Sprintf("written   %s", a.Now().UTC().Format("2006-01-02T15:04:05Z"))}
	g := f.target
	lines = append(lines, fmt.Sprintf("process   %s %s, %s", g.GetTargetId(), g.GetComm(), api.EnumName(g.GetClass())))
	if g.GetContainer() != nil {
		lines = append(lines, fmt.Sprintf("container %s, pid %s inside", term.ContainerName(g.GetContainer()), term.OwnPID(g)))
	}
	if f.simulated != "" {
		lines = append(lines, "simulated "+f.simulated+": no hardware is involved")
	}
	for _, note := range f.notes {
		lines = append(lines, "note      "+note)
	}
	for _, note := range f.unknowns() {
		lines = append(lines, "note      "+note)
	}
	return append(lines, "", "addr: virtual address of the ring in the process.", "is_active: the queue was mapped to a hardware slot of the GPU.",
		"None means unknown.")
}

// data returns the finding for programs: messages, with the joined data after the fields
// of each queue.
func (f *finding) data() (any, error) {
	type joined struct {
		Active *bool  `json:"active"`
		Why    string `json:"active_note"`
		Slots  int    `json:"active_slots"`
	}
	out := struct {
		PID       int32             `json:"pid"`
		Target    json.RawMessage   `json:"target"`
		Queues    []json.RawMessage `json:"queues"`
		Revision  uint64            `json:"revision,string,omitempty"`
		Notes     []string          `json:"notes"`
		Simulated string            `json:"simulated,omitempty"`
		File      string            `json:"python_config,omitempty"`
	}{PID: f.target.GetPid(), Revision: f.revision, Notes: f.notes, Simulated: f.simulated, File: f.file}
	raw, err := term.Marshal(f.target)
	if err != nil {
		return nil, fmt.Errorf("cannot write the answer as JSON: %w", err)
	}
	out.Target = raw
	for _, q := range f.queues {
		raw, err := term.Extend(q.queue, joined{q.active, q.why, q.slots})
		if err != nil {
			return nil, err
		}
		out.Queues = append(out.Queues, raw)
	}
	return out, nil
}

// box writes a title in a box.
func box(p *term.Printer, title string) {
	bar := "+" + strings.Repeat("-", len(title)+8) + "+"
	p.Linef("%s", bar)
	p.Line("|    ", term.Cell{Text: title, Style: term.StyleBold}, "    |")
	p.Linef("%s", bar)
}

func printFinding(a *term.App, p *term.Printer, f *finding) {
	box(p, "queue info summary")
	printTarget(p, f.target, f.names)
	if f.simulated != "" {
		p.Line("  simulated    ", term.Cell{Text: f.simulated + ": no hardware is involved", Style: term.StyleNote})
	}
	p.Linef("")

	t := p.Table("", term.Columns{
		">#", "ADDRESS", ">QUEUE ID", ">PID", "ACTIVE", "TYPE", ">HIP", ">GPU", ">RING", ">HWPRIO", ">AGE", "+FIRST SEEN", "+>SLOTS",
		"+>DOORBELL", "+>MQD", "+>READ POINTER AT", "+>WRITE POINTER AT", "+PACKETS", "+SOURCE", "+NOTE",
	})
	active := 0
	for i, found := range f.queues {
		q := found.queue
		at, gpu, first, ring := "unknown", "-", "-", "-"
		if q.GetRingAddress() != 0 {
			at = fmt.Sprintf("0x%016x", q.GetRingAddress())
		}
		if q.GetGpuId() != 0 {
			gpu = fmt.Sprint(q.GetGpuId())
		}
		if q.GetFirstSeen() != nil {
			first = q.GetFirstSeen().AsTime().Local().Format("2006-01-02 15:04:05")
		}
		if q.GetRingBytes() != 0 {
			ring = term.Size(q.GetRingBytes())
		}
		if found.active != nil && *found.active {
			active++
		}
		t.Row(i+1, at, q.GetQueueId(), q.GetPid(), found.activity(), q.GetType(), f.names.HIP(q.GetGpuId()), gpu, ring,
			hardwarePriority(q), a.Age(q.GetFirstSeen()), first,
			found.slots, doorbell(q), term.Address(q.GetMqdAddress()), term.Address(q.GetReadPointerAddress()),
			term.Address(q.GetWritePointerAddress()), packets(q), term.Or(q.GetSource(), "-"), term.Or(term.Cut(q.GetSourceNote(), 120), "-"))
	}
	t.Flush()
	p.Linef("")
	printTotals(p, f, active)
}

// activity formats whether the queue is mapped to a slot.
func (q *foundQueue) activity() term.Cell {
	switch {
	case q.active == nil:
		return term.Cell{Text: "unknown", Style: term.StyleNote}
	case *q.active:
		return term.Cell{Text: "yes", Style: term.StyleGood}
	}
	return term.Cell{Text: "no"}
}

func printTotals(p *term.Printer, f *finding, active int) {
	unknown := 0
	for _, q := range f.queues {
		if q.active == nil {
			unknown++
		}
	}
	total := fmt.Sprintf("total  %s, %d active", term.Count(len(f.queues), "queue"), active)
	if unknown > 0 {
		total += fmt.Sprintf(", %d unknown", unknown)
	}
	p.Linef("%s", total)
	for _, note := range f.notes {
		p.Linef("note   %s", note)
	}
	for _, note := range f.unknowns() {
		p.Linef("note   %s", note)
	}
	if f.file != "" {
		p.Linef("file   %s", f.file)
	}
}
