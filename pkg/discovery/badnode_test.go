package discovery_test

import (
	"bytes"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// twoGPUs is a topology with the GPU of mi300x.txt as node 2, and the same one with another
// gpu_id and address as node 3.
func twoGPUs(t *testing.T) (m fstest.MapFS, good, other gpreempt.GPU) {
	t.Helper()
	m = tree(t, "mi300x.txt")
	for name, file := range maps.Clone(m) {
		if rest, found := strings.CutPrefix(name, nodes+"2/"); found {
			data := file.Data
			switch rest {
			case "gpu_id":
				data = []byte("4711\n")
			case "properties":
				data = bytes.ReplaceAll(data, []byte("drm_render_minor 128"), []byte("drm_render_minor 129"))
			}
			m[nodes+"3/"+rest] = &fstest.MapFile{Data: data, Mode: file.Mode}
		}
	}
	gpus, err := newFS(m).GPUs()
	if err != nil || len(gpus) != 2 {
		t.Fatalf("%v, %v", gpus, err)
	}
	return m, gpus[0], gpus[1]
}

// Whatever a file of the topology has, the GPUs of the other nodes are served, nothing
// panics, and a node is never served with a false id.
func TestOneBadFileCostsAtMostItsNode(t *testing.T) {
	random := make([]byte, 4096)
	source := rand.NewChaCha8([32]byte{})
	if _, err := source.Read(random); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{
		nodes + "3/gpu_id", nodes + "3/properties", nodes + "3/name", nodes + "0/gpu_id", nodes + "0/properties", nodes + "0/name",
		"sys/class/kfd/kfd/topology/generation_id", "sys/class/kfd/kfd/topology/system_properties", "sys/class/drm/renderD129/device/product_name",
	} {
		for what, data := range map[string][]byte{
			"empty": nil, "random": random, "60 MB": bytes.Repeat([]byte("9"), 60<<20), "cut": []byte("simd_c"),
			"2^64-1": []byte("18446744073709551615\n"), "negative": []byte("-1\n"), "lines": []byte("simd_count -1\ngfx_target_version 18446744073709551615\n"),
		} {
			m, good, other := twoGPUs(t)
			m[file] = &fstest.MapFile{Data: data}
			f := newFS(m)
			gpus, err := f.GPUs()
			if err != nil || !slices.Contains(gpus, good) {
				t.Errorf("%s %s: GPUs %v, %v", what, file, gpus, err)
			}
			if _, err := f.Generation(); err != nil && file == "sys/class/kfd/kfd/topology/generation_id" {
				t.Errorf("%s generation: %v", what, err)
			}
			bad := file == nodes+"3/gpu_id" || file == nodes+"3/properties"
			for _, gpu := range gpus {
				if gpu.ID != good.ID && gpu.ID != other.ID || bad && gpu.ID == other.ID {
					t.Errorf("%s %s: %+v is served", what, file, gpu)
				}
			}
			if omitted := f.Omitted(); bad != (len(omitted) == 1 && strings.HasPrefix(omitted[0], "node 3: "+file) && strings.HasSuffix(omitted[0], badNode)) &&
				!strings.HasPrefix(file, nodes+"0/gpu_id") || len(strings.Join(omitted, "")) > 400 {
				t.Errorf("%s %s: omitted %q", what, file, omitted)
			}
		}
	}
}

// A node that becomes bad keeps what was read before, while the file of no other node has its
// id; one that becomes good is served.
func TestNodeThatBecomesBadOrGood(t *testing.T) {
	m, good, other := twoGPUs(t)
	whole := m[nodes+"3/gpu_id"].Data
	f := newFS(m)
	step := func(what, data string, omitted int, want ...gpreempt.GPU) {
		t.Helper()
		m[nodes+"3/gpu_id"] = &fstest.MapFile{Data: []byte(data)}
		gpus, err := f.GPUs()
		if diff := cmp.Diff(want, gpus); diff != "" || err != nil || len(f.Omitted()) != omitted {
			t.Errorf("%s: %v, omitted %q (-want +got):\n%s", what, err, f.Omitted(), diff)
		}
	}
	step("bad from the start", "x", 1, good)
	step("good", string(whole), 0, good, other)
	step("bad again", "", 1, good, other)
	step("still bad", "-1", 1, good, other)
	step("the id of another", good.ID.String(), 1, good, other)
	step("good again", string(whole), 0, good, other)
	delete(m, nodes+"3/properties")
	step("gone", string(whole), 0, good)
	step("gone, and bad", "x", 1, good)
}
