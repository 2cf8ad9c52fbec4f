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

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// node is a node of the topology.
type node struct {
	Number int
	// files are those in its directory, Props the content of "properties".
	files map[string]string
	Props map[string]uint64
	// Bytes is its memory. IOLinks and PeerLinks are the nodes that it has links to.
	Bytes              uint64
	IOLinks, PeerLinks []int
}

// Name returns the name of the processor, such as gfx942.
func (n node) Name() string { return gpreempt.GFXName(uint32(n.Props["gfx_target_version"])) }

// GPU reports whether the node is one.
func (n node) GPU() bool { return n.Props["simd_count"] > 0 }

// BDF returns the address of a GPU on the PCI bus: location_id is bus, device and function.
func (n node) BDF() string {
	at := n.Props["location_id"]
	return fmt.Sprintf("%04x:%02x:%02x.%x", n.Props["domain"], at>>8&0xff, at>>3&0x1f, at&7)
}

// Root returns the name of the PCI bus of a GPU.
func (n node) Root() string {
	return fmt.Sprintf("pci%04x:%02x", n.Props["domain"], n.Props["location_id"]>>8&0xff)
}

// cache is one level of a GPU's caches.
type cache struct{ Level, KiB, Line int }

// Caches returns those of an MI300X's die, used for all kinds of GPUs.
func (node) Caches() []cache { return []cache{{1, 32, 128}, {2, 4096, 128}, {3, 256 << 10, 64}} }

// set returns a node with another value of a property.
func (n node) set(property string, value uint64) node {
	old := fmt.Sprintf("%s %d\n", property, n.Props[property])
	n.files, n.Props = maps.Clone(n.files), maps.Clone(n.Props)
	n.files["properties"] = strings.Replace("\n"+n.files["properties"], "\n"+old, fmt.Sprintf("\n%s %d\n", property, value), 1)[1:]
	n.Props[property] = value
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
		n := node{Number: number, files: sub.files, Props: map[string]uint64{}}
		for line := range strings.Lines(n.files["properties"]) {
			field, value, _ := strings.Cut(strings.TrimSpace(line), " ")
			if n.Props[field], err = strconv.ParseUint(value, 10, 64); err != nil {
				return nil, fmt.Errorf("%s: %q: %w", path.Join(dir, name, "properties"), line, err)
			}
		}
		nodes = append(nodes, n)
	}
	slices.SortFunc(nodes, func(a, b node) int { return a.Number - b.Number })
	return nodes, nil
}

// hostNode is a NUMA node of the host.
type hostNode struct {
	cpus, firstCPU uint64
	// bytes is its memory.
	bytes uint64
}

const hostNodesDir = "/sys/devices/system/node"

// CPUNodes returns the number of CPU nodes in the topology. It is the number of the host's
// NUMA nodes, whose files the thunk reads for what the driver does not report.
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
	gpus := slices.DeleteFunc(slices.Clone(modelled), func(n node) bool { return !n.GPU() })
	var nodes []node
	if cpu := slices.IndexFunc(modelled, func(n node) bool { return !n.GPU() }); cpu >= 0 {
		for i, h := range host {
			n := modelled[cpu].set("cpu_cores_count", h.cpus).set("cpu_core_id_base", h.firstCPU)
			n.Number, n.Bytes = i, h.bytes
			nodes = append(nodes, n)
		}
	}
	cpus := uint64(len(nodes))
	for _, g := range gpus {
		g = g.set("io_links_count", cpus).set("caches_count", uint64(len(g.Caches())))
		g.Number, g.Bytes = len(nodes), vram
		nodes = append(nodes, g)
	}
	for i := range nodes {
		n := &nodes[i]
		for _, o := range nodes {
			switch {
			case o.Number == n.Number:
			case o.GPU() != n.GPU() && len(n.IOLinks) < int(n.Props["io_links_count"]):
				n.IOLinks = append(n.IOLinks, o.Number)
			case o.GPU() && n.GPU() && len(n.PeerLinks) < int(n.Props["p2p_links_count"]):
				n.PeerLinks = append(n.PeerLinks, o.Number)
			}
		}
	}
	return nodes
}
