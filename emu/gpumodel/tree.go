package gpumodel

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gpreempt/gpreempt/emu/driver"
)

// root is the tree as it is now.
func (m *Machine) root() *node {
	kfd := dir(map[string]*node{"topology": m.topology, "proc": m.kfdProcs()})
	return dir(map[string]*node{
		"sys": dir(map[string]*node{
			"class":  dir(map[string]*node{"kfd": dir(map[string]*node{"kfd": kfd})}),
			"kernel": dir(map[string]*node{"debug": dir(map[string]*node{"kfd": m.debugfs})}),
		}),
		"proc": m.procDirs(),
	})
}

// SetCPUNodes sets the number of CPU nodes, which come before the GPUs in the topology and in
// hqds. At first there are two.
func (m *Machine) SetCPUNodes(n int) {
	for i := range m.facts {
		m.facts[i].Node = n + i
	}
	m.cpuNodes, m.topology = n, m.topologyTree()
	m.moves++
}

// topologyTree is /sys/class/kfd/kfd/topology.
func (m *Machine) topologyTree() *node {
	nodes := map[string]*node{}
	for i := range m.cpuNodes {
		nodes[strconv.Itoa(i)] = dir(map[string]*node{
			"gpu_id":     file("0\n"),
			"name":       file("\n"),
			"properties": m.cpuProperties(i),
		})
	}
	for i, g := range m.facts {
		nodes[strconv.Itoa(g.Node)] = dir(map[string]*node{
			"gpu_id":     file(fmt.Sprintf("%d\n", g.ID)),
			"name":       file(g.Name + "\n"),
			"properties": m.gpuProperties(i),
		})
	}
	return dir(map[string]*node{
		"generation_id":     file("2\n"),
		"system_properties": file("platform_oem 35498446626881\nplatform_id 71791775140929\nplatform_rev 1\n"),
		"nodes":             dir(nodes),
	})
}

// The names of the properties, in the kernel's order: those that both kinds of node have
// before the clocks, and the rest of each kind. GPUs of Linux 7.2 have capability2, too.
var (
	commonProperties = []string{
		"cpu_cores_count", "simd_count", "mem_banks_count", "caches_count", "io_links_count", "p2p_links_count",
		"cpu_core_id_base", "simd_id_base", "max_waves_per_simd", "lds_size_in_kb", "gds_size_in_kb", "num_gws", "wave_front_size",
		"array_count", "simd_arrays_per_engine", "cu_per_simd_array", "simd_per_cu", "max_slots_scratch_cu", "gfx_target_version",
		"vendor_id", "device_id", "location_id", "domain", "drm_render_minor", "hive_id", "num_sdma_engines", "num_sdma_xgmi_engines",
		"num_sdma_queues_per_engine", "num_cp_queues", "cwsr_size", "ctl_stack_size",
	}
	cpuProperties = append(slices.Clone(commonProperties), "max_engine_clk_ccompute")
	gpuProperties = append(slices.Clone(commonProperties),
		"max_engine_clk_fcompute", "local_mem_size", "fw_version", "capability", "capability2", "debug_prop", "sdma_fw_version", "unique_id",
		"num_xcc", "max_engine_clk_ccompute")
)

// properties is a properties file: what values lacks is 0.
func properties(names []string, values map[string]uint64) *node {
	var text strings.Builder
	for _, name := range names {
		text.WriteString(name + " " + strconv.FormatUint(values[name], 10) + "\n")
	}
	return file(text.String())
}

// clockMHzCPU and coresPerCPU describe the simulated CPU nodes.
const (
	clockMHzCPU = 3800
	coresPerCPU = 112
)

func (m *Machine) cpuProperties(index int) *node {
	return properties(cpuProperties, map[string]uint64{
		"cpu_cores_count": coresPerCPU, "mem_banks_count": 1, "io_links_count": uint64(len(m.gpus)),
		"cpu_core_id_base": uint64(index * coresPerCPU), "max_engine_clk_ccompute": clockMHzCPU,
	})
}

func (m *Machine) gpuProperties(index int) *node {
	s, t := m.spec, m.spec.topology
	g := m.facts[index]
	var bus uint64
	if parts := strings.Split(g.BDF, ":"); len(parts) == 3 {
		bus, _ = strconv.ParseUint(parts[1], 16, 8)
	}
	area := s.saveArea()
	names := gpuProperties
	capability, capability2 := m.kernel.resets(&s)
	if !m.kernel.is7() {
		names = slices.DeleteFunc(slices.Clone(names), func(name string) bool { return name == "capability2" })
	}
	return properties(names, map[string]uint64{
		"simd_count":                 uint64(s.CUs * t.simdsPerCU),
		"mem_banks_count":            1,
		"io_links_count":             uint64(m.cpuNodes),
		"p2p_links_count":            uint64(len(m.gpus) - 1),
		"simd_id_base":               uint64(0x80001000 + index*0x1000),
		"max_waves_per_simd":         uint64(t.wavesPerSIMD),
		"lds_size_in_kb":             uint64(cmp.Or(t.ldsKB, 64)),
		"num_gws":                    64,
		"wave_front_size":            uint64(t.waveSize),
		"array_count":                uint64(t.arrays),
		"simd_arrays_per_engine":     uint64(t.arraysPerEngine),
		"cu_per_simd_array":          uint64(t.cusPerArray),
		"simd_per_cu":                uint64(t.simdsPerCU),
		"max_slots_scratch_cu":       32,
		"gfx_target_version":         uint64(s.GFX),
		"vendor_id":                  0x1002,
		"device_id":                  uint64(t.deviceID),
		"location_id":                bus << 8,
		"drm_render_minor":           uint64(g.RenderMinor),
		"num_sdma_engines":           uint64(s.SDMAEngines),
		"num_sdma_xgmi_engines":      uint64(s.XGMIEngines),
		"num_sdma_queues_per_engine": uint64(s.SDMAQueuesPerEngine),
		"num_cp_queues":              uint64(m.kernel.cpQueues(&s)),
		"cwsr_size":                  uint64(area.Bytes),
		"ctl_stack_size":             uint64(area.Stack),
		"max_engine_clk_fcompute":    uint64(t.clockMHz),
		"fw_version":                 uint64(t.firmware),
		"capability":                 uint64(t.capability | capability),
		"capability2":                uint64(capability2),
		"debug_prop":                 uint64(t.debugProp),
		"sdma_fw_version":            uint64(t.sdmaFirmware),
		"unique_id":                  0x5349_4d00_0000_0000 | uint64(g.ID),
		"num_xcc":                    uint64(s.XCCs),
		"max_engine_clk_ccompute":    clockMHzCPU,
	})
}

// saveArea returns the sizes of a compute queue's save area
// (kfd_queue_ctx_save_restore_size).
func (s Spec) saveArea() driver.SaveArea {
	const page, header = 4096, 40
	up := func(n, to int) int { return (n + to - 1) / to * to }
	t, cus := s.topology, s.CUs/s.XCCs
	waves := cus * 32
	if s.GFX < 100100 {
		waves = min(cus*40, t.arrays/t.arraysPerEngine*512)
	}
	stack := up(waves*t.controlStackBytePerWav+8+header, page)
	return driver.SaveArea{Stack: uint32(stack), Bytes: uint32(stack + up(cus*t.contextBytesPerCU, page)), Debug: uint32(up(waves*32, 64))}
}

// kfdProcs is /sys/class/kfd/kfd/proc.
func (m *Machine) kfdProcs() *node {
	return m.byPID(func(p *process) *node {
		entries := map[string]*node{
			"pasid":  file(m.kernel.pasidFile(p.pasid())),
			"queues": p.queueDirs(),
		}
		for i, g := range m.facts {
			entries[fmt.Sprintf("vram_%d", g.ID)] = file(fmt.Sprintf("%d\n", p.vram(m.gpus[i])))
		}
		return dir(entries)
	})
}

// byPID is a directory of the living by pid.
func (m *Machine) byPID(render func(*process) *node) *node {
	return byNumber(func() (pids []int) {
		for _, p := range m.procs {
			pids = append(pids, int(p.key.PID))
		}
		return pids
	}, func(pid int) *node { return render(m.processByPID(int32(pid))) })
}

// byNumber is a directory whose entries are named by the numbers that all returns. render
// is called with one of them.
func byNumber(all func() []int, render func(int) *node) *node {
	return &node{
		names: func() (names []string) {
			for _, n := range all() {
				names = append(names, strconv.Itoa(n))
			}
			return names
		},
		find: func(name string) *node {
			if n, err := strconv.Atoi(name); err == nil && strconv.Itoa(n) == name && slices.Contains(all(), n) {
				return render(n)
			}
			return nil
		},
	}
}

// queueDirs is the queues directory of a process. Its files end without a
// newline, as the kernel's do.
func (p *process) queueDirs() *node {
	return byNumber(func() (ids []int) {
		for _, q := range p.queues {
			ids = append(ids, int(q.id))
		}
		return ids
	}, func(id int) *node {
		q, _ := p.queue(uint32(id))
		return dir(map[string]*node{
			"gpuid": file(p.m.facts[q.gpu.index].ID.String()),
			"size":  file(strconv.FormatUint(q.memory.ring.bytes, 10)),
			"type":  file(strconv.Itoa(p.m.kernel.sysfsType(q.typ))),
		})
	})
}

// vram returns the memory that the queues of a process use on a GPU: rings and save areas.
func (p *process) vram(g *gpu) uint64 {
	sum := uint64(0)
	for _, q := range p.queues {
		if q.gpu == g {
			sum += q.memory.ring.bytes + uint64(q.memory.saveBytes)*uint64(p.m.spec.XCCs)
		}
	}
	return sum
}

// procDirs is /proc, with the GPU processes only.
func (m *Machine) procDirs() *node {
	return m.byPID(func(p *process) *node {
		return dir(map[string]*node{
			"cgroup":  file("0::/\n"),
			"cmdline": file(p.spec.Comm + "\x00"),
			"comm":    file(p.comm() + "\n"),
			"environ": file(""),
			"exe":     {link: "/usr/bin/" + p.spec.Comm},
			"stat":    file(p.stat()),
			"status":  file(p.status()),
		})
	})
}

// commBytes is how much of a command name the kernel keeps.
const commBytes = 15

func (p *process) comm() string {
	return p.spec.Comm[:min(len(p.spec.Comm), commBytes)]
}

// stat has 52 fields; field 22 is the start time.
func (p *process) stat() string {
	pid := p.key.PID
	return fmt.Sprintf("%d (%s) S 1 %d %d 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 %d", pid, p.comm(), pid, pid, p.key.Start) +
		strings.Repeat(" 0", 30) + "\n"
}

func (p *process) status() string {
	pid, uid, gid := p.key.PID, p.spec.UID, p.spec.GID
	return fmt.Sprintf("Name:\t%s\nUmask:\t0022\nState:\tS (sleeping)\nTgid:\t%d\nNgid:\t0\nPid:\t%d\nPPid:\t1\nTracerPid:\t0\n"+
		"Uid:\t%d\t%d\t%d\t%d\nGid:\t%d\t%d\t%d\t%d\nFDSize:\t64\nGroups:\t\n"+
		"NStgid:\t%d\nNSpid:\t%[12]d\nNSpgid:\t%[12]d\nNSsid:\t%[12]d\nKthread:\t0\nThreads:\t1\n",
		p.comm(), pid, pid, uid, uid, uid, uid, gid, gid, gid, gid, pid)
}
