package kfdemu

import (
	_ "embed"
	"fmt"
	"strings"
	"text/template"
)

// RenderNode returns the render node with a minor number, false if no GPU has it.
func (t *Tree) RenderNode(render uint32) (RenderNode, bool) {
	for _, n := range t.nodes {
		if p := n.Props; n.GPU() && n.Render() == uint64(render) {
			return RenderNode{
				PCIID: uint32(p["device_id"]), GFX: uint32(p["gfx_target_version"]),
				SIMDs: uint32(p["simd_count"]), SIMDsPerCU: uint32(p["simd_per_cu"]),
				Arrays: uint32(p["array_count"]), ArraysPerEngine: uint32(p["simd_arrays_per_engine"]),
				CUsPerArray: uint32(p["cu_per_simd_array"]), WaveSize: uint32(p["wave_front_size"]),
				EngineMHz: p["max_engine_clk_fcompute"], MemoryMHz: hbmMHz, MemoryWidth: hbmWidth,
				VRAM: vram, GTT: gtt,
			}, true
		}
	}
	return RenderNode{}, false
}

// Values that the model does not have, as in treeText.
const (
	// vram is the memory of a GPU in bytes, that of an MI300X, and gtt the host memory that
	// it may use.
	vram, gtt = 192 << 30, 256 << 30
	// Width is in bits.
	hbmWidth, hbmMHz = 8192, 1300
)

// treeText has the files that a tree has in addition to gpumodel's: each after a line with
// its path, or with that of a link and its target.
//
//go:embed tree.txt
var treeText string

var treeTemplate = template.Must(template.New("tree").Parse(treeText))

// made returns the files and links that a tree with these nodes has in addition to
// gpumodel's: the nodes with their memory banks, caches and links, the GPUs as PCI and DRM
// devices, the driver's module, and the device files, which contain their numbers here.
func made(nodes []node) (files, links map[string]string, err error) {
	files, links = map[string]string{}, map[string]string{}
	for _, n := range nodes {
		for name, text := range n.files {
			files[fmt.Sprintf("%s/%d/%s", nodesDir, n.Number, name)] = text
		}
	}
	var b strings.Builder
	if err := treeTemplate.Execute(&b, nodes); err != nil {
		return nil, nil, err
	}
	for section := range strings.SplitSeq("\n"+strings.TrimSpace(b.String()), "\n-- ") {
		head, text, _ := strings.Cut(section, " --")
		if link, target, is := strings.Cut(head, " -> "); is {
			links[link] = target
		} else if head != "" {
			files[head] = strings.TrimPrefix(text, "\n") + "\n"
		}
	}
	return files, links, nil
}

// firstRender is the first render node's minor number (drm_minor_alloc).
const firstRender = 128

// Render returns the minor number of a GPU's render node.
func (n node) Render() uint64 { return n.Props["drm_render_minor"] }

// Minors returns the minor numbers of a GPU's DRM devices, by their names.
func (n node) Minors() map[string]uint64 {
	card := n.Render() - firstRender
	return map[string]uint64{fmt.Sprintf("card%d", card): card, fmt.Sprintf("renderD%d", n.Render()): n.Render()}
}
