package kfdemu

import (
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// node is a node of the topology.
type node struct {
	number int
	// files are those in its directory, properties the content of the one of that name.
	files      map[string]string
	properties map[string]uint64
}

func (n node) gpu() bool { return n.properties["simd_count"] > 0 }

// bdf returns the address of a GPU on the PCI bus: location_id is bus, device and function.
func (n node) bdf() string {
	at := n.properties["location_id"]
	return fmt.Sprintf("%04x:%02x:%02x.%x", n.properties["domain"], at>>8&0xff, at>>3&0x1f, at&7)
}

// set returns a node with another value of a property.
func (n node) set(property string, value uint64) node {
	old := fmt.Sprintf("%s %d\n", property, n.properties[property])
	n.files, n.properties = maps.Clone(n.files), maps.Clone(n.properties)
	n.files["properties"] = strings.Replace("\n"+n.files["properties"], "\n"+old, fmt.Sprintf("\n%s %d\n", property, value), 1)[1:]
	n.properties[property] = value
	return n
}

// readNodes returns the nodes of gpumodel's topology in order.
func readNodes(files fs.FS) ([]node, error) {
	const dir = classDir + "/topology/nodes"
	all, err := read(files, dir)
	if err != nil {
		return nil, err
	}
	var nodes []node
	for name, sub := range all.dirs {
		number, err := strconv.Atoi(name)
		if err != nil {
			return nil, fmt.Errorf("%s/%s: the name of a node is a number", dir, name)
		}
		n := node{number: number, files: sub.files, properties: map[string]uint64{}}
		for line := range strings.Lines(n.files["properties"]) {
			field, value, _ := strings.Cut(strings.TrimSpace(line), " ")
			if n.properties[field], err = strconv.ParseUint(value, 10, 64); err != nil {
				return nil, fmt.Errorf("%s: %q: %w", path.Join(dir, name, "properties"), line, err)
			}
		}
		nodes = append(nodes, n)
	}
	slices.SortFunc(nodes, func(a, b node) int { return a.number - b.number })
	return nodes, nil
}

// hostNode is a NUMA node of the host.
type hostNode struct {
	cpus, firstCPU uint64
	// bytes is its memory.
	bytes uint64
}

const hostNodesDir = "/sys/devices/system/node"

// CPUNodes returns the number of CPU nodes in the topology: that of the host's NUMA nodes,
// where the thunk reads what the driver does not report about them.
func CPUNodes() (int, error) {
	nodes, err := hostNodes()
	return len(nodes), err
}

// hostNodes returns the NUMA nodes of the host, at least one. It divides the memory evenly
// between them.
func hostNodes() ([]hostNode, error) {
	var host unix.Sysinfo_t
	if err := unix.Sysinfo(&host); err != nil {
		return nil, fmt.Errorf("read the host's memory: %w", err)
	}
	var nodes []hostNode
	for {
		entries, err := os.ReadDir(fmt.Sprintf("%s/node%d", hostNodesDir, len(nodes)))
		if err != nil && len(nodes) > 0 {
			break // the last one
		}
		n := hostNode{firstCPU: ^uint64(0)}
		for _, e := range entries {
			if digits, ok := strings.CutPrefix(e.Name(), "cpu"); ok {
				if cpu, err := strconv.ParseUint(digits, 10, 32); err == nil {
					n.cpus++
					n.firstCPU = min(n.firstCPU, cpu)
				}
			}
		}
		if n.cpus == 0 {
			n.cpus, n.firstCPU = 1, 0
		}
		nodes = append(nodes, n)
		if err != nil {
			break // the host does not report NUMA nodes
		}
	}
	for i := range nodes {
		nodes[i].bytes = host.Totalram * uint64(host.Unit) / uint64(len(nodes))
	}
	return nodes, nil
}

// onHost returns the topology with the host's CPU nodes in place of the modelled ones. The
// GPUs follow those.
func onHost(modelled []node, host []hostNode) []node {
	gpus := slices.DeleteFunc(slices.Clone(modelled), func(n node) bool { return !n.gpu() })
	var nodes []node
	if cpu := slices.IndexFunc(modelled, func(n node) bool { return !n.gpu() }); cpu >= 0 {
		for i, h := range host {
			n := modelled[cpu].set("cpu_cores_count", h.cpus).set("cpu_core_id_base", h.firstCPU)
			n.number = i
			nodes = append(nodes, n)
		}
	}
	cpus := uint64(len(nodes))
	for _, g := range gpus {
		g = g.set("io_links_count", cpus).set("caches_count", uint64(len(caches)))
		g.number = len(nodes)
		nodes = append(nodes, g)
	}
	return nodes
}

// Values that the model does not have.
const (
	// vram is the memory of a GPU in bytes, that of an MI300X.
	vram = 192 << 30
	// Widths are in bits.
	hbmWidth, hbmMHz = 8192, 1300
	ddrWidth, ddrMHz = 64, 2400
	pcieWeight       = 20
	peerWeight       = 40
	// CRAT_IOLINK_FLAGS_ENABLED and CRAT_IOLINK_TYPE_PCIEXPRESS (kfd_crat.h).
	linkEnabled = 1
	linkPCIe    = 2
	pcieMBs     = 64000
)

// cache is one level of a GPU's caches: its size in KiB, its type of
// HSA_CACHE_TYPE_DATA (1), INSTRUCTION (2) and HSACU (8).
type cache struct{ level, kib, line, kind uint64 }

// caches are those of an MI300X's die, used for all kinds of GPUs.
var caches = []cache{{1, 32, 128, 1 | 8}, {2, 4096, 128, 1 | 8}, {3, 256 << 10, 64, 1 | 8}}

func (a additions) cpuNode(n node, nodes []node, bytes uint64) {
	dir := fmt.Sprintf("%s/%d", nodesDir, n.number)
	const system = 0 // HSA_MEM_HEAP_TYPE_SYSTEM
	a.bank(dir, system, bytes, ddrWidth, ddrMHz)
	a.connect(dir+"/io_links", n, pcieWeight, others(nodes, n, true), n.properties["io_links_count"])
}

func (a additions) gpuNode(n node, nodes []node) {
	dir := fmt.Sprintf("%s/%d", nodesDir, n.number)
	const public = 1 // HSA_MEM_HEAP_TYPE_FB_PUBLIC: the host can access all of it
	a.bank(dir, public, vram, hbmWidth, hbmMHz)
	a.connect(dir+"/io_links", n, pcieWeight, others(nodes, n, false), n.properties["io_links_count"])
	a.connect(dir+"/p2p_links", n, peerWeight, others(nodes, n, true), n.properties["p2p_links_count"])
	for i, c := range caches {
		a.table(fmt.Sprintf("%s/caches/%d/properties", dir, i),
			row{"processor_id_low", n.properties["simd_id_base"]}, row{"level", c.level}, row{"size", c.kib}, row{"cache_line_size", c.line},
			row{"cache_lines_per_tag", 1}, row{"association", 16}, row{"latency", 1}, row{"type", c.kind}, row{"sibling_map", 1})
	}
}

func (a additions) bank(dir string, heap, bytes, width, mhz uint64) {
	a.table(dir+"/mem_banks/0/properties",
		row{"heap_type", heap}, row{"size_in_bytes", bytes}, row{"flags", 0}, row{"width", width}, row{"mem_clk_max", mhz})
}

// others returns the GPUs or the CPUs of the nodes, without n.
func others(nodes []node, n node, gpus bool) []node {
	return slices.DeleteFunc(slices.Clone(nodes), func(o node) bool { return o.gpu() != gpus || o.number == n.number })
}

// connect adds the links from a node, at most count.
func (a additions) connect(dir string, from node, weight uint64, to []node, count uint64) {
	for i, n := range to[:min(len(to), int(count))] {
		a.table(fmt.Sprintf("%s/%d/properties", dir, i),
			row{"type", linkPCIe}, row{"version_major", 0}, row{"version_minor", 0}, row{"node_from", uint64(from.number)}, row{"node_to", uint64(n.number)},
			row{"weight", weight}, row{"min_latency", 0}, row{"max_latency", 0}, row{"min_bandwidth", pcieMBs / 2}, row{"max_bandwidth", pcieMBs},
			row{"recommended_transfer_size", 0}, row{"recommended_sdma_engine_id_mask", 0}, row{"flags", linkEnabled})
	}
}
