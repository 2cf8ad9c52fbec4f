package kfdabi

import (
	"fmt"
	"io/fs"
	"strconv"
	"strings"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// NodeValues returns every value in the file "properties" of a GPU's topology node below root,
// by name; nil if the topology has no such GPU.
func NodeValues(root fs.FS, gpu gpreempt.GPUID) (map[string]uint64, error) {
	files, err := fs.Glob(root, "sys/class/kfd/kfd/topology/nodes/*/gpu_id")
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		id, err := fs.ReadFile(root, file)
		if err != nil || strings.TrimSpace(string(id)) != strconv.FormatUint(uint64(gpu), 10) {
			continue
		}
		path := strings.TrimSuffix(file, "gpu_id") + "properties"
		text, err := fs.ReadFile(root, path)
		if err != nil {
			return nil, err
		}
		values := map[string]uint64{}
		for line := range strings.Lines(string(text)) {
			name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
			if values[name], err = strconv.ParseUint(value, 10, 64); err != nil {
				return nil, fmt.Errorf("%s: %s: %w", path, name, err)
			}
		}
		return values, nil
	}
	return nil, nil
}

// SaveArea has the sizes of the memory to which the driver saves the waves of a compute queue, in
// bytes for each XCC.
type SaveArea struct {
	// Bytes is CtxSaveRestoreSize of CreateQueueArgs, of which the first Stack are CtlStackSize.
	Bytes, Stack uint64
	// Debug is a debugger's part, behind those of all XCCs.
	Debug uint64
}

// SaveAreaOf returns the sizes for a GPU with these properties of its topology node
// (kfd_queue_ctx_save_restore_size). Kernels before 6.12 do not list Bytes and Stack: they take
// what the caller computes by the same rule. The zero value means that they are not known.
func SaveAreaOf(node map[string]uint64) SaveArea {
	const page, header = 4096, 40
	up := func(n, to uint64) uint64 { return (n + to - 1) / to * to }
	cus := node["simd_count"] / max(node["simd_per_cu"], 1) / max(node["num_xcc"], 1)
	waves, bytesOfWave := cus*32, uint64(12)
	if node["gfx_target_version"] < 100100 {
		waves, bytesOfWave = min(cus*40, node["array_count"]/max(node["simd_arrays_per_engine"], 1)*512), 8
	}
	a := SaveArea{Bytes: node["cwsr_size"], Stack: node["ctl_stack_size"], Debug: up(waves*32, 64)}
	// kfd_get_vgpr_size_per_cu, for the GPUs of such kernels that the daemon may preempt.
	vector := map[uint64]uint64{90008: 0x80000, 90010: 0x80000, 90400: 0x80000, 90401: 0x80000, 90402: 0x80000, 110000: 0x60000, 110001: 0x60000}
	registers := vector[node["gfx_target_version"]]
	switch {
	case a.Bytes > 0 && a.Stack > 0:
		return a
	case registers == 0 || cus == 0:
		return SaveArea{}
	}
	const scalar, lds, hardware = 0x4000, 0x10000, 0x1000
	a.Stack = up(header+waves*bytesOfWave+8, page)
	a.Bytes = a.Stack + up(cus*(registers+scalar+lds+hardware), page)
	return a
}
