package cli

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
)

func (a *app) hqdCommand() *cobra.Command {
	return noun("hqd", "The hardware slots for queues", a.hqdList(), a.hqdWatch(), a.hqdDecode())
}

// slots returns the request for the slots that f selects.
func (f *filter) slots(ctx context.Context, cmd *cobra.Command, admin adminClient) (*gpreemptv1.ListHqdsRequest, error) {
	if _, err := f.check(cmd); err != nil {
		return nil, err
	}
	gpu, err := findGPU(ctx, cmd, admin, f.gpu)
	return &gpreemptv1.ListHqdsRequest{GpuId: gpu, TargetId: f.target}, err
}

func (a *app) hqdList() *cobra.Command {
	var (
		f   filter
		all bool
	)
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the hardware slots that hold queues",
		Args:  operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.call(cmd, func(ctx context.Context, admin adminClient) error {
				req, err := f.slots(ctx, cmd, admin)
				if err != nil {
					return err
				}
				req.All = all
				resp, err := admin.ListHqds(ctx, req)
				if err != nil {
					return err
				}
				return a.show(resp, func(p *printer) { a.printSlots(p, resp, all) })
			})
		},
	}
	a.filterFlags(cmd, &f, "gpu", "target")
	cmd.Flags().BoolVar(&all, "all", false, "include empty and stale slots and the driver's own queues")
	return cmd
}

func (a *app) printSlots(p *printer, resp *gpreemptv1.ListHqdsResponse, all bool) {
	shown := resp.GetHqds()
	if !all {
		shown = ofProcesses(shown)
	}
	if len(shown) > 0 {
		t := p.table("", columns{
			">GPU", "KIND", ">XCC", "+>MEC", ">PIPE", ">SLOT", "STATE", "TARGET", ">QUEUE", ">VMID", ">PRIO", "PIPE PRIO", ">ADDRESS", ">RING",
			">READ", ">WRITTEN", "+>NODE", "+>QUANTUM", "+>DOORBELL", "+>MQD", "+PACKETS", "+MATCH",
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
			if h.GetRingBytes() > 0 {
				where = size(h.GetRingBytes())
			}
			t.row(h.GetGpuId(), h.GetKind(), h.GetXcc(), h.GetMec(), h.GetPipe(), h.GetSlot(), slotState(h),
				or(h.GetTargetId(), "-"), slotQueue(h), h.GetVmid(), h.GetQueuePriority(), pipePriority(h),
				address(h.GetRingAddress()), where, h.GetReadPointer(), h.GetWritePointer(), h.GetNode(),
				h.GetQuantum(), fmt.Sprintf("0x%x", h.GetDoorbellOffset()), address(h.GetMqdAddress()), packets,
				or(h.GetMatch(), "-"))
		}
		t.flush()
		p.linef("")
	}
	for _, id := range resp.GetStoppedGpuIds() {
		p.line(cell{fmt.Sprintf("GPU %d: the scheduler is stopped; its slots cannot be read", id), styleBad})
	}
	for _, note := range resp.GetNotes() {
		p.line(cell{"note: " + note, styleNote})
	}
	p.linef("%s, read %s ago in %s", slotCounts(resp.GetHqds(), all), a.age(resp.GetReadAt()), took(resp.GetTook()))
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
		return count(live, "slot") + " in use"
	}
	return fmt.Sprintf("%d of %s in use, %d stale", live, count(len(list), "slot"), n[gpreemptv1.HqdState_HQD_STATE_STALE])
}

// slotState formats the state of a slot and highlights queues without a known owner.
func slotState(h *gpreemptv1.Hqd) cell {
	c := cell{text: or(api.EnumName(h.GetState()), "-")}
	if h.GetState() == gpreemptv1.HqdState_HQD_STATE_LIVE && h.GetKind() != "hiq" {
		c.style = styleGood
		if h.GetTargetId() == "" {
			c.style = styleNote
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
	return pipePriorityName(h.GetPipePriority())
}

func pipePriorityName(n uint32) string {
	if names := []string{"low", "medium", "high"}; int(n) < len(names) {
		return names[n]
	}
	return strconv.FormatUint(uint64(n), 10)
}

// leastWatch is the shortest interval for reading the slots, which are thousands of
// registers.
const leastWatch = time.Second

func (a *app) hqdWatch() *cobra.Command {
	var (
		f        filter
		interval time.Duration
	)
	cmd := &cobra.Command{
		Use:   "watch",
		Short: "Show how the hardware slots change",
		Args:  operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if interval < leastWatch {
				return usage(cmd, "--interval must be at least %s: each reading takes thousands of registers", duration(leastWatch))
			}
			return a.stream(cmd.Context(), func(ctx context.Context, admin adminClient) error {
				req, err := within(ctx, a, func(ctx context.Context) (*gpreemptv1.ListHqdsRequest, error) { return f.slots(ctx, cmd, admin) })
				if err != nil {
					return err
				}
				t := a.printer().table("", columns{
					"TIME:12", "CHANGE:8", ">GPU:5", "KIND:4", ">XCC", ">PIPE", ">SLOT", "TARGET:16", ">QUEUE", ">ADDRESS:14", ">READ:10",
					">WRITTEN:10", "+MATCH",
				})
				var before *gpreemptv1.ListHqdsResponse
				for {
					resp, err := within(ctx, a, func(ctx context.Context) (*gpreemptv1.ListHqdsResponse, error) { return admin.ListHqds(ctx, req) })
					if err != nil {
						return err
					}
					if err := a.showLine(resp, func(*printer) { printMoves(t, before, resp) }); err != nil {
						return err
					}
					if t.p.err != nil {
						return t.p.err
					}
					before = resp
					if err := a.Sleep(ctx, interval); err != nil {
						return err
					}
				}
			})
		},
	}
	a.filterFlags(cmd, &f, "gpu", "target")
	cmd.Flags().DurationVar(&interval, "interval", leastWatch, "time between readings, at least 1s")
	return cmd
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
func printMoves(t *table, before, resp *gpreemptv1.ListHqdsResponse) {
	at := resp.GetReadAt().AsTime().Local().Format("15:04:05.000")
	line := func(change cell, h *gpreemptv1.Hqd) {
		t.row(at, change, h.GetGpuId(), h.GetKind(), h.GetXcc(), h.GetPipe(), h.GetSlot(),
			or(h.GetTargetId(), "-"), slotQueue(h), address(h.GetRingAddress()), h.GetReadPointer(),
			h.GetWritePointer(), or(h.GetMatch(), "-"))
	}
	was, now := bySlot(before), bySlot(resp)
	for _, h := range before.GetHqds() {
		if key := keyOfSlot(h); was[key] != nil && now[key] == nil {
			line(cell{"unmapped", styleNote}, h)
		}
	}
	for _, h := range resp.GetHqds() {
		switch was, now := was[keyOfSlot(h)], now[keyOfSlot(h)]; {
		case now == nil:
		case was == nil:
			line(cell{"mapped", styleGood}, h)
		case was.GetTargetId() != h.GetTargetId() || was.GetQueueId() != h.GetQueueId() || was.GetRingAddress() != h.GetRingAddress():
			line(cell{"replaced", styleNote}, h)
		case was.GetReadPointer() != h.GetReadPointer() || was.GetWritePointer() != h.GetWritePointer():
			line(cell{text: "moved"}, h)
		}
	}
	t.flush()
}
