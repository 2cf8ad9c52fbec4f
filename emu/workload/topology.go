package workload

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// topologyNodes is where the driver describes its nodes.
const topologyNodes = "/sys/class/kfd/kfd/topology/nodes"

// The sizes, in bytes, that a queue gets if the topology has none.
const (
	minControlStack = 4096
	minSaveArea     = 1 << 20
	minDebugArea    = 1 << 19
)

// gpu is what a client needs to know of a GPU.
type gpu struct {
	ID gpreempt.GPUID
	// ControlStack and SaveArea are the bytes that a compute queue needs, for each XCC, to
	// be unmapped in the middle of a kernel. SaveArea includes ControlStack.
	ControlStack, SaveArea uint32
	// DebugArea is the bytes for a debugger behind it, for each XCC.
	DebugArea uint32
	XCCs      uint32
	// RenderMinor is the number of the render node, 0 without one.
	RenderMinor uint32
	// HasVM: the process has acquired an address space on the GPU.
	HasVM bool
}

// saveBytes returns the size of the save area of a compute queue. The driver wants exactly
// this size (kfd_queue_acquire_buffers).
func (g *gpu) saveBytes() int { return int(g.XCCs) * int(g.SaveArea+g.DebugArea) }

// describe sets the fields of gpus from the topology at root. GPUs without a node there
// keep their values: a container may hide the topology.
func describe(root string, gpus []gpu) error {
	entries, err := os.ReadDir(root)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list the nodes of the topology: %w", err)
	}
	for _, entry := range entries {
		dir := filepath.Join(root, entry.Name())
		id, err := os.ReadFile(filepath.Join(dir, "gpu_id"))
		if errors.Is(err, fs.ErrPermission) || errors.Is(err, fs.ErrNotExist) {
			continue // the device cgroup hides it
		}
		if err != nil {
			return fmt.Errorf("read a node's id: %w", err)
		}
		for i := range gpus {
			if strings.TrimSpace(string(id)) != gpus[i].ID.String() {
				continue
			}
			text, err := os.ReadFile(filepath.Join(dir, "properties"))
			if err != nil {
				return fmt.Errorf("read the properties of GPU %d: %w", gpus[i].ID, err)
			}
			gpus[i].describe(string(text))
		}
	}
	return nil
}

// describe sets fields from a node's properties: lines of a name and a number.
func (g *gpu) describe(properties string) {
	var simds, perCU, arrays, perEngine, gfx uint32
	fields := map[string]*uint32{
		"cwsr_size": &g.SaveArea, "ctl_stack_size": &g.ControlStack, "num_xcc": &g.XCCs, "drm_render_minor": &g.RenderMinor,
		"simd_count": &simds, "simd_per_cu": &perCU, "array_count": &arrays, "simd_arrays_per_engine": &perEngine, "gfx_target_version": &gfx,
	}
	for line := range strings.Lines(properties) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		n, err := strconv.ParseUint(value, 10, 32)
		if field := fields[name]; field != nil && err == nil && n > 0 {
			*field = uint32(n)
		}
	}
	if perCU == 0 || perEngine == 0 {
		return
	}
	// As the driver does, which does not export it (kfd_queue_ctx_save_restore_size).
	const bytesPerWave, alignment = 32, 64
	cus := simds / perCU / g.XCCs
	waves := cus * 32
	if gfx < 100100 {
		waves = min(cus*40, arrays/perEngine*512)
	}
	g.DebugArea = (waves*bytesPerWave + alignment - 1) &^ (alignment - 1)
}
