package kfdabi

import (
	"maps"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// The sizes are those of kfd_queue_ctx_save_restore_size of Linux 6.12, computed manually.
func TestSaveAreaIsComputedWhereTheTopologyHasNone(t *testing.T) {
	mi300x := map[string]uint64{
		"gfx_target_version": 90402, "simd_count": 1216, "simd_per_cu": 4, "num_xcc": 8, "array_count": 32, "simd_arrays_per_engine": 1,
	}
	listed := maps.Clone(mi300x)
	listed["cwsr_size"], listed["ctl_stack_size"] = 1<<20, 1<<14
	unknown := maps.Clone(mi300x)
	unknown["gfx_target_version"] = 90500
	for _, c := range []struct {
		name string
		node map[string]uint64
		want SaveArea
	}{
		{"an MI300X before 6.12", mi300x, SaveArea{Bytes: 38*610304 + 12288, Stack: 12288, Debug: 1520 * 32}},
		{"an RX 7900 XTX before 6.12", map[string]uint64{
			"gfx_target_version": 110000, "simd_count": 192, "simd_per_cu": 2, "array_count": 12, "simd_arrays_per_engine": 2,
		}, SaveArea{Bytes: 96*479232 + 36864 + 4096, Stack: 36864 + 4096, Debug: 3072 * 32}},
		{"a kernel that lists them", listed, SaveArea{Bytes: 1 << 20, Stack: 1 << 14, Debug: 1520 * 32}},
		{"a GPU that such kernels do not have", unknown, SaveArea{}},
		{"a kernel that lists one of them", map[string]uint64{"cwsr_size": 1 << 20}, SaveArea{}},
		{"no topology", nil, SaveArea{}},
	} {
		if diff := cmp.Diff(c.want, SaveAreaOf(c.node)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, diff)
		}
	}
}

func TestNodeValuesAreThoseOfTheGPU(t *testing.T) {
	const nodes = "sys/class/kfd/kfd/topology/nodes/"
	root := fstest.MapFS{
		nodes + "0/gpu_id":     {Data: []byte("0\n")},
		nodes + "3/gpu_id":     {Data: []byte("3183\n")},
		nodes + "3/properties": {Data: []byte("cwsr_size 4096\nctl_stack_size 18446744073709551615\n")},
		nodes + "4/gpu_id":     {Data: []byte("77\n")},
		nodes + "4/properties": {Data: []byte("cwsr_size many\n")},
	}
	for gpu, want := range map[gpreempt.GPUID]map[string]uint64{
		3183: {"cwsr_size": 4096, "ctl_stack_size": 1<<64 - 1},
		318:  nil,
	} {
		got, err := NodeValues(root, gpu)
		if err != nil {
			t.Error(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("GPU %d (-want +got):\n%s", gpu, diff)
		}
	}
	if got, err := NodeValues(root, 77); got != nil || err == nil || !strings.Contains(err.Error(), nodes+"4/properties") {
		t.Errorf("an invalid value: %v, %v", got, err)
	}
}
