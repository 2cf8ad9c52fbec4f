package safety

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"strings"

	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// apus are the GPUs that amdgpu_discovery_set_ip_blocks (amdgpu_discovery.c) and, for the
// older ones, the PCI table of amdgpu_drv.c mark AMD_IS_APU, by the gfx_target_version of
// kgd2kfd_probe (kfd_device.c). No file in sysfs has this: the memory that an APU reserves
// is VRAM in the topology. The MI300A has the number of the MI300X and cannot be
// distinguished.
var apus = []uint32{
	70000, 80001, 90002, 90012, 100103, 100303, 100305, 100306, 110003,
	110500, 110501, 110502, 110503, 110504, 110700, 110701,
}

// Read reads the facts that rows use from the host's /proc and /sys; fsys is its root. A
// fact that cannot be read is unknown, and a warning.
func Read(fsys fs.FS, gpus []gpreempt.GPU) (Host, []GPU, []string) {
	var warnings []string
	warn := func(what string, err error) {
		warnings = append(warnings, fmt.Sprintf("%s is unknown: %v: hazards that depend on it are not recognised", what, err))
	}
	var h Host
	var err error
	if h.Kernel, err = line(fsys, "proc/sys/kernel/osrelease"); err != nil {
		warn("the kernel's version", err)
	}
	// The kernel's own driver has no version.
	if h.Driver, err = line(fsys, "sys/module/amdgpu/version"); err != nil && !errors.Is(err, fs.ErrNotExist) {
		warn("the version of the amdgpu driver", err)
	}
	var facts []GPU
	for _, gpu := range gpus {
		if gpu.Driver == "nvidia" {
			if h.NVIDIA, err = line(fsys, "sys/module/nvidia/version"); err != nil {
				warn("the version of the NVIDIA driver", err)
			}
			facts = append(facts, GPU{ID: gpu.ID, NVIDIA: cmp.Or(gpu.Name, "NVIDIA")})
			continue
		}
		g := GPU{ID: gpu.ID, GFX: gpu.GFX, APU: slices.Contains(apus, gpu.GFX)}
		if g.MEC, g.SDMA, err = topologyFirmware(fsys, gpu.Node); err != nil {
			warn(fmt.Sprintf("the MEC and SDMA firmware of GPU %s", gpu.ID), err)
		}
		if gpu.MES {
			if g.MES, g.MESKIQ, err = mesFirmware(fsys, gpu.BDF); err != nil {
				warn(fmt.Sprintf("the MES firmware of GPU %s", gpu.ID), err)
			}
		}
		facts = append(facts, g)
	}
	return h, facts, warnings
}

// topologyFirmware reads fw_version and sdma_fw_version of a node: decimal, and as in the
// firmware files (node_show in kfd_topology.c does not mask them).
func topologyFirmware(fsys fs.FS, node int) (mec, sdma uint32, err error) {
	path := fmt.Sprintf("sys/class/kfd/kfd/topology/nodes/%d/properties", node)
	data, err := fs.ReadFile(fsys, path)
	if err != nil {
		return 0, 0, err
	}
	p, err := discovery.ParseNodeProperties(bytes.NewReader(data))
	if err != nil {
		return 0, 0, fmt.Errorf("%s: %w", path, err)
	}
	return uint32(p.Firmware), uint32(p.SDMAFirmware), nil
}

// mesFirmware reads the versions of the two MES firmwares, masked with
// AMDGPU_MES_VERSION_MASK by the kernel (amdgpu_ucode.c). The files belong to the PCI
// device. The topology replaces the function by the number of a partition
// (kfd_topology_add_device), so a partition's files are at function 0.
func mesFirmware(fsys fs.FS, bdf string) (mes, kiq uint32, err error) {
	const devices = "sys/bus/pci/devices/"
	dir := devices + bdf + "/fw_version/"
	if _, err := fs.Stat(fsys, strings.TrimSuffix(dir, "/")); errors.Is(err, fs.ErrNotExist) {
		if slot, _, ok := strings.Cut(bdf, "."); ok {
			dir = devices + slot + ".0/fw_version/"
		}
	}
	if mes, err = firmwareFile(fsys, dir+"mes_fw_version"); err == nil {
		kiq, err = firmwareFile(fsys, dir+"mes_kiq_fw_version")
	}
	return mes, kiq, err
}

// firmwareFile reads "0x00000083\n".
func firmwareFile(fsys fs.FS, path string) (uint32, error) {
	text, err := line(fsys, path)
	if err != nil {
		return 0, err
	}
	v, err := strconv.ParseUint(text, 0, 32)
	if err != nil {
		return 0, fmt.Errorf("%s: %q is not a firmware version", path, text)
	}
	return uint32(v), nil
}

func line(fsys fs.FS, path string) (string, error) {
	data, err := fs.ReadFile(fsys, path)
	return strings.TrimSpace(string(data)), err
}
