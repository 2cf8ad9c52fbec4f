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
)

// gpu is what a client needs to know of a GPU.
type gpu struct {
	ID gpreempt.GPUID
	// ControlStack and SaveArea are the bytes that a compute queue needs, for each XCC, to
	// be unmapped in the middle of a kernel. SaveArea includes ControlStack.
	ControlStack, SaveArea uint32
	XCCs                   uint32
	// RenderMinor is the number of the render node, 0 without one.
	RenderMinor uint32
}

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
	fields := map[string]*uint32{
		"cwsr_size": &g.SaveArea, "ctl_stack_size": &g.ControlStack, "num_xcc": &g.XCCs, "drm_render_minor": &g.RenderMinor,
	}
	for line := range strings.Lines(properties) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		n, err := strconv.ParseUint(value, 10, 32)
		if field := fields[name]; field != nil && err == nil && n > 0 {
			*field = uint32(n)
		}
	}
}
