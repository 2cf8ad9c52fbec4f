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

// slots returns what to ask for: the slots that f is about.
func (f *filter) slots(ctx context.Context, cmd *cobra.Command, admin gpreemptv1.AdminServiceClient) (*gpreemptv1.ListHqdsRequest, error) {
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
		Long: `Lists the hardware slots (HQDs) that hold queues now, and whose queues they are. On a
GPU of several XCCs a compute queue is in a slot of each. What is in no slot does not
run: so a suspension is verified.

Reading is slow and disturbs the GPU a little, so the daemon gives answers up to a
second old again. Pointers are in dwords, 16 to an AQL packet; those of SDMA are as the
register has them. --all shows the driver's own queues to the scheduler (hiq), too; the
answer in JSON always has them.`,
		Example: "  gpctl hqd list --target 4242\n  gpctl hqd list --gpu node:2 --all -o wide",
		Args:    operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.call(cmd, func(ctx context.Context, admin gpreemptv1.AdminServiceClient) error {
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
	cmd.Flags().BoolVar(&all, "all", false, "empty and stale slots and the driver's own, too")
	return cmd
}

func (a *app) printSlots(p *printer, resp *gpreemptv1.ListHqdsResponse, all bool) {
	shown := resp.GetHqds()
	if !all {
		shown = ofProcesses(shown)
	}
	if len(shown) > 0 {
		t := p.table("", columns{
			">GPU", "KIND", ">XCC", "+>MEC", ">PIPE", ">SLOT", "HOLDS", "TARGET", ">QUEUE", ">VMID", ">PRIO", "PIPE PRIO", ">ADDRESS", ">RING",
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
			t.row(text(h.GetGpuId()), text(h.GetKind()), text(h.GetXcc()), text(h.GetMec()), text(h.GetPipe()), text(h.GetSlot()), holds(h),
				text(or(h.GetTargetId(), "-")), text(slotQueue(h)), text(h.GetVmid()), text(h.GetQueuePriority()), text(pipePriority(h)),
				text(address(h.GetRingAddress())), text(where), text(h.GetReadPointer()), text(h.GetWritePointer()), text(h.GetNode()),
				text(h.GetQuantum()), text(fmt.Sprintf("0x%x", h.GetDoorbellOffset())), text(address(h.GetMqdAddress())), text(packets),
				text(or(h.GetMatch(), "-")))
		}
		t.flush()
		p.linef("")
	}
	for _, id := range resp.GetStoppedGpuIds() {
		p.line(cell{fmt.Sprintf("GPU %d: its scheduler is stopped, nothing can be read there", id), styleBad})
	}
	for _, note := range resp.GetNotes() {
		p.line(cell{"note: " + note, styleNote})
	}
	p.linef("%s, read %s ago in %s", slotCounts(resp.GetHqds(), all), a.age(resp.GetReadAt()), took(resp.GetTook()))
}

// ofProcesses leaves out the driver's own slots.
func ofProcesses(list []*gpreemptv1.Hqd) []*gpreemptv1.Hqd {
	return slices.DeleteFunc(slices.Clone(list), func(h *gpreemptv1.Hqd) bool { return h.GetKind() == "hiq" })
}

// slotCounts says how many slots of processes are in use.
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

// holds says what a slot holds; what nobody could be matched with stands out.
func holds(h *gpreemptv1.Hqd) cell {
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

// pipePriority writes CP_HQD_PIPE_PRIORITY, which only slots for compute have.
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

// leastWatch is how often the slots may be read: each reading is thousands of
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
		Long: `Reads the hardware slots every --interval until interrupted and shows those that a
queue came into or left, and those whose pointers moved. What a queue has written and
not read is the work that waits in it. -o json gives one object for each reading.`,
		Example: "  gpctl hqd watch --target 4242\n  gpctl hqd watch --gpu 34535 --interval 2s -o json",
		Args:    operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if interval < leastWatch {
				return usage(cmd, "--interval must be at least %s: a reading is thousands of registers", duration(leastWatch))
			}
			return a.stream(cmd.Context(), func(ctx context.Context, admin gpreemptv1.AdminServiceClient) error {
				req, err := within(ctx, a, func(ctx context.Context) (*gpreemptv1.ListHqdsRequest, error) { return f.slots(ctx, cmd, admin) })
				if err != nil {
					return err
				}
				t := a.printer().table("", columns{
					"TIME:12", "CHANGE:7", ">GPU:5", "KIND:4", ">XCC", ">PIPE", ">SLOT", "TARGET:16", ">QUEUE", ">ADDRESS:14", ">READ:10",
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
	cmd.Flags().DurationVar(&interval, "interval", leastWatch, "from one reading to the next, at least 1s")
	return cmd
}

// slotKey names a slot of the host.
type slotKey struct {
	gpu                  uint32
	kind                 string
	xcc, mec, pipe, slot uint32
}

func keyOfSlot(h *gpreemptv1.Hqd) slotKey {
	return slotKey{h.GetGpuId(), h.GetKind(), h.GetXcc(), h.GetMec(), h.GetPipe(), h.GetSlot()}
}

// bySlot returns the slots that hold a queue.
func bySlot(resp *gpreemptv1.ListHqdsResponse) map[slotKey]*gpreemptv1.Hqd {
	slots := make(map[slotKey]*gpreemptv1.Hqd, len(resp.GetHqds()))
	for _, h := range ofProcesses(resp.GetHqds()) {
		if h.GetState() == gpreemptv1.HqdState_HQD_STATE_LIVE {
			slots[keyOfSlot(h)] = h
		}
	}
	return slots
}

// printMoves writes what became of the slots since before, which is nil at first.
func printMoves(t *table, before, resp *gpreemptv1.ListHqdsResponse) {
	at := resp.GetReadAt().AsTime().Local().Format("15:04:05.000")
	line := func(what cell, h *gpreemptv1.Hqd) {
		t.row(text(at), what, text(h.GetGpuId()), text(h.GetKind()), text(h.GetXcc()), text(h.GetPipe()), text(h.GetSlot()),
			text(or(h.GetTargetId(), "-")), text(slotQueue(h)), text(address(h.GetRingAddress())), text(h.GetReadPointer()),
			text(h.GetWritePointer()), text(or(h.GetMatch(), "-")))
	}
	was, now := bySlot(before), bySlot(resp)
	for _, h := range before.GetHqds() {
		if key := keyOfSlot(h); was[key] != nil && now[key] == nil {
			line(cell{"left", styleNote}, h)
		}
	}
	for _, h := range resp.GetHqds() {
		switch was, now := was[keyOfSlot(h)], now[keyOfSlot(h)]; {
		case now == nil:
		case was == nil:
			line(cell{"came", styleGood}, h)
		case was.GetTargetId() != h.GetTargetId() || was.GetQueueId() != h.GetQueueId() || was.GetRingAddress() != h.GetRingAddress():
			line(cell{"other", styleNote}, h)
		case was.GetReadPointer() != h.GetReadPointer() || was.GetWritePointer() != h.GetWritePointer():
			line(cell{text: "moved"}, h)
		}
	}
	t.flush()
}
