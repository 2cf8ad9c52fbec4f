package workload

import (
	"encoding/binary"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The numbers are those that AqlQueue::InitScratchSRD of ROCm's runtime computes for a queue
// that is created with 388 bytes for each lane.
func TestScratchIsDescribedAsByTheRuntime(t *testing.T) {
	const at = 0x7f12_3456_0000
	for name, c := range map[string]struct {
		node map[string]uint64
		want []uint32
	}{
		"MI300X, 8 XCCs": {
			map[string]uint64{"simd_count": 1216, "simd_per_cu": 4, "num_xcc": 8, "max_slots_scratch_cu": 32},
			[]uint32{25<<12 | 1216, 0x3456_0000, 0x8000_7f12, 1216 * 25600, 0x00ea4fac, 0x3456_0000, 0x7f12, 1216 * 25600, 0, 400},
		},
		"MI250X, a die": {
			map[string]uint64{"simd_count": 440, "simd_per_cu": 4, "max_slots_scratch_cu": 32},
			[]uint32{25<<12 | 3520, 0x3456_0000, 0x8000_7f12, 3520 * 25600, 0x00ea4fac, 0x3456_0000, 0x7f12, 3520 * 25600, 0, 400},
		},
	} {
		d := &device{node: c.node}
		queue := make([]byte, pageBytes)
		d.scratchOf(388).put(queue, at)
		var got []uint32
		for off := offTmpring; off <= offScratchLane; off += 4 {
			got = append(got, binary.LittleEndian.Uint32(queue[off:]))
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
