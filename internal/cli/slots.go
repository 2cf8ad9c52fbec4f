package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/pkg/discovery"
)

// slots returns the request for the slots that f selects.
func (f *filter) slots(ctx context.Context, cmd *cobra.Command, admin term.AdminClient) (*gpreemptv1.ListHqdsRequest, error) {
	if _, err := f.check(ctx, cmd, admin); err != nil {
		return nil, err
	}
	gpu, err := term.FindGPU(ctx, admin, f.gpu)
	return &gpreemptv1.ListHqdsRequest{GpuId: gpu, TargetId: f.target}, err
}

func queueSlots(a *term.App) *cobra.Command {
	var (
		f   filter
		all bool
	)
	cmd := showing(a, &cobra.Command{
		Use:   "slots",
		Short: "List the hardware slots that hold queues",
		Args:  term.Operands(),
	}, func(ctx context.Context, cmd *cobra.Command, admin term.AdminClient) (proto.Message, func(*term.Printer), error) {
		req, err := f.slots(ctx, cmd, admin)
		if err != nil {
			return nil, nil, err
		}
		req.All = all
		resp, err := admin.ListHqds(ctx, req)
		names := a.NameGPUs(ctx, admin)
		return resp, func(p *term.Printer) { printSlots(a, p, resp, names, all) }, err
	})
	filterFlags(a, cmd, &f, "gpu", "target")
	cmd.Flags().BoolVar(&all, "all", false, "include empty and stale slots and the driver's own queues")
	return cmd
}

func printSlots(a *term.App, p *term.Printer, resp *gpreemptv1.ListHqdsResponse, names term.GPUNames, all bool) {
	shown := resp.GetHqds()
	if !all {
		shown = ofProcesses(shown)
	}
	if len(shown) > 0 {
		t := p.Table("", term.Columns{
			">HIP", ">GPU", "+PRODUCT", "KIND", ">XCC", "+>MEC", ">PIPE", ">SLOT", "STATE", "TARGET", ">QUEUE", ">VMID", ">PRIO", "PIPE PRIO", ">ADDRESS", ">RING",
			">READ", ">WRITTEN", ">BEHIND", "+>NODE", "+>QUANTUM", "+>DOORBELL", "+>MQD", "+PACKETS", "+MATCH",
		})
		for _, h := range shown {
			packets, where := "-", "-"
			if h.GetState() != gpreemptv1.HqdState_HQD_STATE_EMPTY {
				packets = "PM4"
				switch {
				case h.GetAql():
					packets = "AQL"
				case h.GetKind() == "sdma":
					packets = "SDMA"
				}
			}
			read, written, behind := positions(h)
			quantum := "-"
			if h.GetKind() != "sdma" {
				quantum = discovery.DecodeQuantum(h.GetQuantum()).String()
			}
			if h.GetRingBytes() > 0 {
				where = term.Size(h.GetRingBytes())
			}
			t.Row(names.HIP(h.GetGpuId()), h.GetGpuId(), names.Product(h.GetGpuId()), h.GetKind(), h.GetXcc(), h.GetMec(), h.GetPipe(), h.GetSlot(), slotState(h),
				term.Or(h.GetTargetId(), "-"), slotQueue(h), h.GetVmid(), h.GetQueuePriority(), pipePriority(h),
				term.Address(h.GetRingAddress()), where, read, written, behind, h.GetNode(),
				quantum, term.DoorbellAt(h.GetDoorbellOffset()), term.Address(h.GetMqdAddress()), packets,
				term.Or(h.GetMatch(), "-"))
		}
		t.Flush()
		p.Linef("")
	}
	for _, id := range resp.GetStoppedGpuIds() {
		p.Line(term.Cell{Text: fmt.Sprintf("GPU %d: the scheduler is stopped; its slots cannot be read", id), Style: term.StyleBad})
	}
	for _, note := range resp.GetNotes() {
		p.Line(term.Cell{Text: "note: " + note, Style: term.StyleNote})
	}
	p.Linef("%s, read %s ago in %s", slotCounts(resp.GetHqds(), all), a.Age(resp.GetReadAt()), term.Took(resp.GetTook()))
}

// positions formats the positions in the ring of a slot's queue, and what is between them.
func positions(h *gpreemptv1.Hqd) (read, written uint64, behind string) {
	if h.GetKind() == "sdma" {
		return h.GetReadPointer(), h.GetWritePointer(), term.BytesBehind(h.GetReadPointer(), h.GetWritePointer())
	}
	return term.InRing(h.GetReadPointer(), h.GetWritePointer(), h.GetRingBytes(), h.GetAql())
}

// ofProcesses returns the slots except the driver's own.
func ofProcesses(list []*gpreemptv1.Hqd) []*gpreemptv1.Hqd {
	return slices.DeleteFunc(slices.Clone(list), func(h *gpreemptv1.Hqd) bool { return h.GetKind() == "hiq" })
}

// slotCounts formats how many slots are in use by processes.
func slotCounts(list []*gpreemptv1.Hqd, all bool) string {
	n := map[gpreemptv1.HqdState]int{}
	list = ofProcesses(list)
	for _, h := range list {
		n[h.GetState()]++
	}
	live := n[gpreemptv1.HqdState_HQD_STATE_LIVE]
	if !all {
		return term.Count(live, "slot") + " in use"
	}
	return fmt.Sprintf("%d of %s in use, %d stale", live, term.Count(len(list), "slot"), n[gpreemptv1.HqdState_HQD_STATE_STALE])
}

// slotState formats the state of a slot and highlights queues without a known owner.
func slotState(h *gpreemptv1.Hqd) term.Cell {
	c := term.Cell{Text: term.Or(api.EnumName(h.GetState()), "-")}
	if h.GetState() == gpreemptv1.HqdState_HQD_STATE_LIVE && h.GetKind() != "hiq" {
		c.Style = term.StyleGood
		if h.GetTargetId() == "" {
			c.Style = term.StyleNote
		}
	}
	return c
}

func slotQueue(h *gpreemptv1.Hqd) string {
	if h.GetTargetId() == "" {
		return "-"
	}
	return strconv.FormatUint(uint64(h.GetQueueId()), 10)
}

// pipePriority formats CP_HQD_PIPE_PRIORITY, which only compute slots have.
func pipePriority(h *gpreemptv1.Hqd) string {
	if h.GetKind() == "sdma" {
		return "-"
	}
	return term.PipePriorityName(h.GetPipePriority())
}

// leastWatch is the shortest interval for reading the slots, which are thousands of
// registers.
const leastWatch = time.Second

func queueMoves(a *term.App) *cobra.Command {
	var (
		f        filter
		interval time.Duration
	)
	cmd := &cobra.Command{
		Use:   "moves",
		Short: "Show how the hardware slots change",
		Args:  term.Operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if interval < leastWatch {
				return term.Usage(cmd, "--interval must be at least %s: each reading takes thousands of registers", term.Duration(leastWatch))
			}
			return a.Stream(cmd.Context(), func(ctx context.Context, admin term.AdminClient) error {
				req, err := within(ctx, a, func(ctx context.Context) (*gpreemptv1.ListHqdsRequest, error) { return f.slots(ctx, cmd, admin) })
				if err != nil {
					return err
				}
				t := a.Printer().Table("", term.Columns{
					"TIME:12", "CHANGE:8", ">GPU:5", "KIND:4", ">XCC", ">PIPE", ">SLOT", "TARGET:16", ">QUEUE", ">ADDRESS:14", ">READ:10",
					">WRITTEN:10", ">BEHIND:10", "+MATCH",
				})
				var before *gpreemptv1.ListHqdsResponse
				return repeat(ctx, a, interval, func() error {
					resp, err := within(ctx, a, func(ctx context.Context) (*gpreemptv1.ListHqdsResponse, error) { return admin.ListHqds(ctx, req) })
					if err != nil {
						return err
					}
					err = a.ShowLine(resp, func(*term.Printer) { printMoves(t, before, resp) })
					before = resp
					return errors.Join(err, t.P.Err)
				})
			})
		},
	}
	filterFlags(a, cmd, &f, "gpu", "target")
	cmd.Flags().DurationVar(&interval, "interval", leastWatch, "time between readings, at least 1s")
	return cmd
}

// within calls fn with --timeout.
func within[T any](ctx context.Context, a *term.App, fn func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, a.Timeout)
	defer cancel()
	return fn(ctx)
}

// slotKey identifies a slot of the host.
type slotKey struct {
	gpu                  uint32
	kind                 string
	xcc, mec, pipe, slot uint32
}

func keyOfSlot(h *gpreemptv1.Hqd) slotKey {
	return slotKey{h.GetGpuId(), h.GetKind(), h.GetXcc(), h.GetMec(), h.GetPipe(), h.GetSlot()}
}

// bySlot returns the slots in use by processes.
func bySlot(resp *gpreemptv1.ListHqdsResponse) map[slotKey]*gpreemptv1.Hqd {
	slots := make(map[slotKey]*gpreemptv1.Hqd, len(resp.GetHqds()))
	for _, h := range ofProcesses(resp.GetHqds()) {
		if h.GetState() == gpreemptv1.HqdState_HQD_STATE_LIVE {
			slots[keyOfSlot(h)] = h
		}
	}
	return slots
}

// printMoves writes the changes of the slots since before, which is nil at first.
func printMoves(t *term.Table, before, resp *gpreemptv1.ListHqdsResponse) {
	at := resp.GetReadAt().AsTime().Local().Format("15:04:05.000")
	line := func(change term.Cell, h *gpreemptv1.Hqd) {
		read, written, behind := positions(h)
		t.Row(at, change, h.GetGpuId(), h.GetKind(), h.GetXcc(), h.GetPipe(), h.GetSlot(),
			term.Or(h.GetTargetId(), "-"), slotQueue(h), term.Address(h.GetRingAddress()), read, written, behind, term.Or(h.GetMatch(), "-"))
	}
	was, now := bySlot(before), bySlot(resp)
	for _, h := range before.GetHqds() {
		if key := keyOfSlot(h); was[key] != nil && now[key] == nil {
			line(term.Cell{Text: "unmapped", Style: term.StyleNote}, h)
		}
	}
	for _, h := range resp.GetHqds() {
		switch was, now := was[keyOfSlot(h)], now[keyOfSlot(h)]; {
		case now == nil:
		case was == nil:
			line(term.Cell{Text: "mapped", Style: term.StyleGood}, h)
		case was.GetTargetId() != h.GetTargetId() || was.GetQueueId() != h.GetQueueId() || was.GetRingAddress() != h.GetRingAddress():
			line(term.Cell{Text: "replaced", Style: term.StyleNote}, h)
		case was.GetReadPointer() != h.GetReadPointer() || was.GetWritePointer() != h.GetWritePointer():
			line(term.Cell{Text: "moved"}, h)
		}
	}
	t.Flush()
}
