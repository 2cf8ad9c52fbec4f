package accept

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"github.com/gpreempt/gpreempt/accept/workload"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// neighbours returns the other partitions of the GPU: the function of their address is the number
// of the partition (kfd_topology_add_device).
func (b *bench) neighbours() (others []gpreempt.GPU) {
	slot, _, _ := strings.Cut(b.gpu.BDF, ".")
	for _, g := range b.gpus {
		if at, _, _ := strings.Cut(g.BDF, "."); at == slot && g.ID != b.gpu.ID {
			others = append(others, g)
		}
	}
	return others
}

// unpartitioned returns why the GPU has no neighbours; "" if it has.
func unpartitioned(b *bench) string {
	if len(b.neighbours()) > 0 {
		return ""
	}
	mode, err := fs.ReadFile(b.cfg.Root, fmt.Sprintf("sys/class/drm/renderD%d/device/current_compute_partition", b.gpu.RenderMinor))
	if err != nil {
		return "the driver offers no partitions of this GPU"
	}
	return fmt.Sprintf("the GPU is in mode %s: write CPX to its current_compute_partition, and run the acceptance on a partition", strings.TrimSpace(string(mode)))
}

// partitions suspends a process on this partition while another one runs on a neighbour, and the
// reverse.
func partitions(ctx context.Context, r *result) error {
	var cycles, attaches [][]float64
	for _, other := range r.b.neighbours() {
		for _, pair := range [][2]gpreempt.GPU{{r.b.gpu, other}, {other, r.b.gpu}} {
			cycle, attach, err := r.beside(ctx, pair[0], pair[1])
			if err != nil {
				return fmt.Errorf("suspending on GPU %d, beside GPU %d: %w", pair[0].ID, pair[1].ID, err)
			}
			cycles, attaches = append(cycles, cycle), append(attaches, attach)
		}
	}
	r.samples("gap of a neighbour at ENABLE and DISABLE", attaches)
	return r.judge(r.samples("gap of a neighbour at SUSPEND and RESUME", cycles))
}

// beside suspends and resumes a process on one partition while another one runs on its neighbour.
// It returns the longest gaps of the neighbour in each cycle, and while the process is attached to.
func (r *result) beside(ctx context.Context, on, neighbour gpreempt.GPU) (cycles, attaches []float64, err error) {
	n, err := r.b.start(ctx, workload.Config{GPU: uint(neighbour.ID), Queues: 1, Poll: true})
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, n.Kill()) }()
	window, err := r.control(ctx, n)
	if err != nil {
		return nil, nil, err
	}
	if err := r.notices(ctx, n, window); err != nil {
		return nil, nil, err
	}
	gapOf := func() (float64, error) {
		g, err := gap(ctx, n)
		if err != nil {
			return 0, fmt.Errorf("the neighbour: %w", err)
		}
		return g, nil
	}
	if _, err := gapOf(); err != nil { // what was before
		return nil, nil, err
	}
	h, err := r.hold(ctx, workload.Config{GPU: uint(on.ID), Queues: 2})
	if err != nil {
		return nil, nil, err
	}
	defer h.drop(&err)
	g, err := gapOf()
	if err != nil {
		return nil, nil, err
	}
	attaches = append(attaches, g)
	for range r.cycles(1000) {
		if err := h.session.Suspend(ctx, nil); err != nil {
			return nil, nil, fmt.Errorf("SUSPEND: %w", err)
		}
		during, err := gapOf() // while the other one is suspended
		if err != nil {
			return nil, nil, err
		}
		still, then, err := stands(ctx, h, window)
		if err == nil && !still {
			err = errors.New("the job went on after SUSPEND")
		}
		if err = errors.Join(err, h.session.Resume(ctx)); err != nil {
			return nil, nil, err
		}
		if err := runs(ctx, h, then); err != nil {
			return nil, nil, fmt.Errorf("after RESUME: %w", err)
		}
		after, err := gapOf()
		if err != nil {
			return nil, nil, err
		}
		cycles = append(cycles, max(during, after))
	}
	err = h.session.Close()
	if err == nil {
		g, err = gapOf()
	}
	return cycles, append(attaches, g), err
}

// notices checks that a neighbour that is suspended itself is found to stand still.
func (r *result) notices(ctx context.Context, n job, window time.Duration) (err error) {
	s, err := r.b.attach(ctx, n.Key())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	if err := s.Suspend(ctx, nil); err != nil {
		return fmt.Errorf("SUSPEND: %w", err)
	}
	still, _, err := stands(ctx, n, window)
	if err == nil && !still {
		err = errors.New("the check cannot fail: the neighbour went on when it was suspended itself")
	}
	if err != nil {
		return err
	}
	r.controls = append(r.controls, "the neighbour suspended itself: noticed")
	return s.Resume(ctx)
}
