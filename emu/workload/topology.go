package workload

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
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
	// HasVM: the process has acquired an address space on the GPU, with the descriptor Render
	// of its render node.
	HasVM  bool
	Render int
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
	node := map[string]uint64{}
	for line := range strings.Lines(properties) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if n, err := strconv.ParseUint(value, 10, 32); err == nil {
			node[name] = n
		}
	}
	g.RenderMinor, g.XCCs = uint32(node["drm_render_minor"]), uint32(max(node["num_xcc"], 1))
	if a := kfdabi.SaveAreaOf(node); 0 < a.Bytes && a.Bytes <= math.MaxUint32 {
		g.SaveArea, g.ControlStack = uint32(a.Bytes), uint32(a.Stack)
		g.DebugArea = cmp.Or(uint32(a.Debug), g.DebugArea)
	}
}
