package kfdemu

import (
	"fmt"
	"strings"
)

// RenderNode returns the render node with a minor number, false if no GPU has it.
func (t *Tree) RenderNode(render uint32) (RenderNode, bool) {
	for _, n := range t.nodes {
		if n.gpu() && n.properties["drm_render_minor"] == uint64(render) {
			return RenderNode{
				PCIID: uint32(n.properties["device_id"]), GFX: uint32(n.properties["gfx_target_version"]),
				SIMDs: uint32(n.properties["simd_count"]), SIMDsPerCU: uint32(n.properties["simd_per_cu"]),
				Arrays: uint32(n.properties["array_count"]), ArraysPerEngine: uint32(n.properties["simd_arrays_per_engine"]),
				CUsPerArray: uint32(n.properties["cu_per_simd_array"]), WaveSize: uint32(n.properties["wave_front_size"]),
				EngineMHz: n.properties["max_engine_clk_fcompute"], MemoryMHz: hbmMHz, MemoryWidth: hbmWidth,
				VRAM: vram, GTT: gtt,
			}, true
		}
	}
	return RenderNode{}, false
}

// additions are the files and links that a tree has in addition to gpumodel's.
type additions struct{ files, links map[string]string }

func (a additions) file(dir, name string, value any) {
	a.files[dir+"/"+name] = fmt.Sprintf("%v\n", value)
}

// table adds a file with a name and a value on each line.
func (a additions) table(name string, rows ...row) {
	var b strings.Builder
	for _, r := range rows {
		fmt.Fprintf(&b, "%s %d\n", r.name, r.value)
	}
	a.files[name] = b.String()
}

type row struct {
	name  string
	value uint64
}

// Values that the model does not have.
const (
	// gtt is the host memory that a GPU may use, in bytes.
	gtt = 256 << 30
	// Of an idle GPU: thousandths of a degree and of a volt, millionths of a watt.
	idleMHz         = 132
	idleTemperature = 35_000
	idleVoltage     = 750
	idlePower       = 90_000_000
	maxPower        = 750_000_000
)

// made returns what a tree with these nodes has in addition to gpumodel's files: the nodes
// with their memory banks, caches and links, the GPUs as PCI and DRM devices, the driver's
// module, and the device files, which contain their numbers here.
func made(nodes []node, host []hostNode) additions {
	a := additions{files: map[string]string{}, links: map[string]string{
		classDir: "../../devices/virtual/kfd/kfd",
		"sys/dev/char/" + deviceNumber{KFDMajor, 0}.String(): "../../devices/virtual/kfd/kfd",
	}}
	a.file(deviceDir, "dev", deviceNumber{KFDMajor, 0})
	a.file(deviceDir, "uevent", fmt.Sprintf("MAJOR=%d\nMINOR=0\nDEVNAME=kfd", KFDMajor))
	a.file("dev", "kfd", deviceNumber{KFDMajor, 0})
	// No driver has this version.
	a.file("sys/module/amdgpu", "version", "emulated")
	a.file("sys/module/amdgpu", "initstate", "live")
	a.file("sys/module/amdgpu", "refcnt", len(nodes))
	a.file("sys/class/drm", "version", "drm 1.1.0 20060810")
	for i, n := range nodes {
		for name, text := range n.files {
			a.files[fmt.Sprintf("%s/%d/%s", nodesDir, n.number, name)] = text
		}
		if n.gpu() {
			a.gpuNode(n, nodes)
			a.pciDevice(n)
		} else {
			a.cpuNode(n, nodes, host[i].bytes)
		}
	}
	return a
}

// pciDevice adds a GPU as a device on the PCI bus with its DRM devices.
func (a additions) pciDevice(n node) {
	bdf := n.bdf()
	root := fmt.Sprintf("pci%04x:%02x", n.properties["domain"], n.properties["location_id"]>>8&0xff)
	dir := "sys/devices/" + root + "/" + bdf
	vendor, id := n.properties["vendor_id"], n.properties["device_id"]
	for name, value := range map[string]any{
		"vendor": fmt.Sprintf("0x%04x", vendor), "device": fmt.Sprintf("0x%04x", id),
		"subsystem_vendor": fmt.Sprintf("0x%04x", vendor), "subsystem_device": fmt.Sprintf("0x%04x", id),
		"revision": "0x00", "class": "0x120000", "numa_node": 0, "local_cpulist": 0,
		"uevent": fmt.Sprintf("DRIVER=amdgpu\nPCI_CLASS=120000\nPCI_ID=%04X:%04X\nPCI_SUBSYS_ID=%04X:%04X\nPCI_SLOT_NAME=%s",
			vendor, id, vendor, id, bdf),
		"unique_id":           fmt.Sprintf("%016x", n.properties["unique_id"]),
		"mem_info_vram_total": vram, "mem_info_vram_used": 0,
		"mem_info_vis_vram_total": vram, "mem_info_vis_vram_used": 0,
		"mem_info_gtt_total": gtt, "mem_info_gtt_used": 0,
		"gpu_busy_percent": 0, "mem_busy_percent": 0,
		"current_compute_partition": "SPX", "current_memory_partition": "NPS1",
		"product_name": fmt.Sprintf("Emulated AMD GPU, gfx_target_version %d", n.properties["gfx_target_version"]),
		// rocm-smi shows the part between the dashes as the board.
		"vbios_version":                     "000-EMULATED-000",
		"power_dpm_force_performance_level": "auto",
		"pp_dpm_sclk":                       clocks(idleMHz, n.properties["max_engine_clk_fcompute"]),
		"pp_dpm_mclk":                       clocks(idleMHz, hbmMHz),
	} {
		a.file(dir, name, value)
	}
	a.links[dir+"/subsystem"] = "../../../bus/pci"
	a.links[dir+"/driver"] = "../../../bus/pci/drivers/amdgpu"
	render := n.properties["drm_render_minor"]
	// No sensor of the host has this number.
	monitor := fmt.Sprintf("hwmon%d", render)
	for name, value := range map[string]any{
		"name": "amdgpu", "temp1_label": "edge", "temp1_input": idleTemperature, "temp2_label": "junction", "temp2_input": idleTemperature,
		"temp3_label": "mem", "temp3_input": idleTemperature, "in0_label": "vddgfx", "in0_input": idleVoltage, "power1_average": idlePower, "power1_cap": maxPower, "power1_cap_max": maxPower,
	} {
		a.file(dir+"/hwmon/"+monitor, name, value)
	}
	a.links[dir+"/hwmon/"+monitor+"/device"] = "../../../" + bdf
	a.links["sys/class/hwmon/"+monitor] = "../../devices/" + root + "/" + bdf + "/hwmon/" + monitor
	for _, d := range []struct {
		name  string
		minor uint64
	}{{fmt.Sprintf("card%d", render-firstRender), render - firstRender}, {fmt.Sprintf("renderD%d", render), render}} {
		number := deviceNumber{DRMMajor, d.minor}
		at := dir + "/drm/" + d.name
		a.file(at, "dev", number)
		a.file(at, "uevent", fmt.Sprintf("MAJOR=%d\nMINOR=%d\nDEVNAME=dri/%s\nDEVTYPE=drm_minor", DRMMajor, d.minor, d.name))
		a.links[at+"/device"] = "../../../" + bdf
		a.links[at+"/subsystem"] = "../../../../../class/drm"
		a.links["sys/class/drm/"+d.name] = "../../devices/" + root + "/" + bdf + "/drm/" + d.name
		a.links["sys/dev/char/"+number.String()] = "../../devices/" + root + "/" + bdf + "/drm/" + d.name
	}
	a.file("dev/dri", fmt.Sprintf("renderD%d", render), deviceNumber{DRMMajor, render})
}

// firstRender is the first render node's minor number (drm_minor_alloc).
const firstRender = 128

// clocks returns a pp_dpm file: the levels, of which the lowest is in use.
func clocks(lowest, highest uint64) string {
	return fmt.Sprintf("0: %dMhz *\n1: %dMhz", lowest, highest)
}

// deviceNumber is the number of a device file.
type deviceNumber struct{ major, minor uint64 }

func (d deviceNumber) String() string { return fmt.Sprintf("%d:%d", d.major, d.minor) }
