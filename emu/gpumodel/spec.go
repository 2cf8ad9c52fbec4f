package gpumodel

import (
	"fmt"
	"hash/fnv"
	"slices"
	"strings"
	"time"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Costs are the times that the scheduling firmware and the driver take for their work.
// Every value is modelled, none was measured on hardware: see Presets.
type Costs struct {
	// Unmap is the fixed part of unmapping every queue of a GPU (HWS).
	Unmap time.Duration
	// Map is the fixed part of mapping the runlist again (HWS).
	Map time.Duration
	// RemoveQueue is the fixed part of unmapping one queue (MES).
	RemoveQueue time.Duration
	// AddQueue is the fixed part of mapping one queue (MES).
	AddQueue time.Duration
	// Save is the time to write out the wave state of a fully occupied GPU; a
	// GPU that is occupied less takes proportionally less.
	Save time.Duration
	// Restore is the time to read it back.
	Restore time.Duration
	// Jitter spreads every cost evenly over 1-Jitter to 1+Jitter of its value.
	Jitter float64
}

// Spec describes one kind of GPU and what its scheduling costs.
type Spec struct {
	// Name is the preset's name, such as mi300x.
	Name string
	// GFX is gfx_target_version: major*10000 + minor*100 + step.
	GFX uint32
	// XCCs is the number of accelerator complex dies in a node.
	XCCs int
	// CUs is the number of compute units of a node.
	CUs int
	// MES: the firmware schedules queue by queue; otherwise it is HWS, which schedules
	// by runlist.
	MES bool
	// Slots is the number of hardware queue descriptors for compute queues.
	Slots int
	// VMIDs is the number of processes that can be mapped at once.
	VMIDs int
	// SDMAEngines, XGMIEngines and SDMAQueuesPerEngine bound the copy queues.
	SDMAEngines, XGMIEngines, SDMAQueuesPerEngine int
	// CopyRate is what one copy queue moves, and LinkRate what all of a GPU's
	// move together, in bytes per second.
	CopyRate, LinkRate int64
	// Quantum is how long a set of queues stays mapped when not all fit.
	Quantum time.Duration
	// ContextBytes is the wave state of the fully occupied GPU.
	ContextBytes int64
	// Costs is what scheduling takes.
	Costs Costs

	topology topology
}

// topology has the values that only the topology files show.
type topology struct {
	kernelName                                string
	deviceID                                  uint32
	simdsPerCU, wavesPerSIMD, waveSize        int
	arrays, arraysPerEngine, cusPerArray      int
	clockMHz                                  int
	firmware, sdmaFirmware                    int
	capability, debugProp                     uint32
	ldsKB                                     int // 0 means 64
	contextBytesPerCU, controlStackBytePerWav int
	// ids and buses are those of a known host; other hosts have invented ones.
	ids   []gpreempt.GPUID
	buses []uint8
}

// Bytes of wave state per CU: vector registers, scalar registers, LDS, hardware
// registers, as the kernel sizes the save area.
const (
	contextPerCUCDNA  = (512 + 16 + 64 + 4) << 10
	contextPerCUCDNA4 = (512 + 16 + 160 + 4) << 10
	contextPerCURDNA3 = (384 + 16 + 64 + 4) << 10
)

// Shares of the peak memory bandwidth that saving and restoring wave state are
// assumed to reach.
const (
	saveEfficiency    = 0.4
	restoreEfficiency = 0.6
)

// Capability bits of the topology: SVM, precise memory, wave launch override and
// mode, trap debugging with firmware support, watch points.
const (
	capabilityDebugFirmware = 0x20000000

	capabilityCDNA = 0x08000000 | capabilityDebugFirmware | 0x40000 | 0x20000 | 0x10000 | 0x8000 | 0x2000 | 2<<8 | 0x80
	capabilityRDNA = capabilityCDNA &^ 0x40000

	// In addition: errors of memory are counted and reported (MI350X), and precise exceptions of
	// the ALU (gfx12).
	capabilityCDNA4 = capabilityCDNA | 0x04300000
	capabilityRDNA4 = capabilityRDNA | 0x40000000
)

// Presets returns the kinds of GPU the model knows. A node is a whole GPU, except
// for mi250x, where it is one of the two dies.
//
// The sizes are the products'. The costs are assumptions: the fixed parts are
// chosen so that suspending the process that fills an mi300x, while another one
// stays mapped, takes near 0.4 ms and resuming it near 0.35 ms, in line with the
// only public hints, which nobody has verified; the variable parts are the bytes
// of wave state over a fraction of the peak memory bandwidth.
func Presets() []Spec {
	cdna3 := Spec{
		GFX:                 90402,
		Slots:               24,
		VMIDs:               8,
		SDMAEngines:         2,
		SDMAQueuesPerEngine: 8,
		CopyRate:            50e9,
		LinkRate:            64e9,
		Quantum:             10 * time.Millisecond,
		Costs:               Costs{Unmap: 170 * time.Microsecond, Map: 130 * time.Microsecond, Jitter: 0.05},
		topology: topology{
			kernelName: "ip discovery", simdsPerCU: 4, wavesPerSIMD: 8, waveSize: 64, arraysPerEngine: 1, cusPerArray: 10,
			firmware: 185, sdmaFirmware: 24, capability: capabilityCDNA, debugProp: 1511,
			contextBytesPerCU: contextPerCUCDNA, controlStackBytePerWav: 8,
		},
	}

	mi300x := cdna3
	mi300x.Name, mi300x.XCCs, mi300x.CUs, mi300x.XGMIEngines = "mi300x", 8, 304, 14
	mi300x.topology.deviceID, mi300x.topology.arrays, mi300x.topology.clockMHz = 0x74a1, 32, 2100

	mi308x := cdna3
	mi308x.Name, mi308x.XCCs, mi308x.CUs, mi308x.XGMIEngines = "mi308x", 4, 80, 6
	mi308x.topology.deviceID, mi308x.topology.arrays, mi308x.topology.clockMHz = 0x74a2, 16, 1420
	mi308x.topology.ids = []gpreempt.GPUID{0xf7bc, 0xf05b, 0xeb40, 0xc66d, 0xf220, 0xf5c7, 0xeedc, 0xc3f1}
	mi308x.topology.buses = []uint8{0x0a, 0x80, 0xa4, 0xc8, 0x0b, 0x81, 0xa5, 0xc9}

	// As MI300X; its memory is faster, 6 TB/s (AMD's data sheet of MI325X). The firmware is that
	// of ROCm/aiter#3139.
	mi325x := mi300x
	mi325x.Name, mi325x.topology.deviceID, mi325x.topology.firmware = "mi325x", 0x74a5, 186

	// The topology that AMD captured of an MI350X (ROCm/rocm-systems#10274). MI355X has another
	// device and clock (AMD's data sheet, libdrm's amdgpu.ids), and is assumed to be the same
	// otherwise.
	mi350x := mi300x
	mi350x.Name, mi350x.GFX, mi350x.CUs = "mi350x", 90500, 256
	mi350x.topology.deviceID, mi350x.topology.cusPerArray, mi350x.topology.clockMHz = 0x75a0, 9, 2200
	mi350x.topology.firmware, mi350x.topology.sdmaFirmware, mi350x.topology.ldsKB = 30, 20, 160
	mi350x.topology.capability, mi350x.topology.debugProp = capabilityCDNA4, 1494
	mi350x.topology.contextBytesPerCU = contextPerCUCDNA4

	mi355x := mi350x
	mi355x.Name, mi355x.topology.deviceID, mi355x.topology.clockMHz = "mi355x", 0x75a3, 2400

	mi250x := cdna3
	mi250x.Name, mi250x.GFX, mi250x.XCCs, mi250x.CUs, mi250x.XGMIEngines = "mi250x", 90010, 1, 110, 3
	mi250x.CopyRate, mi250x.LinkRate = 25e9, 32e9
	mi250x.topology.kernelName, mi250x.topology.deviceID = "aldebaran", 0x7408
	mi250x.topology.arrays, mi250x.topology.cusPerArray, mi250x.topology.clockMHz = 8, 16, 1700
	mi250x.topology.firmware, mi250x.topology.sdmaFirmware = 78, 8

	mi210 := mi250x
	mi210.Name, mi210.CUs = "mi210", 104
	mi210.topology.deviceID = 0x740f

	mi100 := mi250x
	mi100.Name, mi100.GFX, mi100.CUs, mi100.XGMIEngines = "mi100", 90008, 120, 6
	mi100.topology.kernelName, mi100.topology.deviceID = "arcturus", 0x738c
	mi100.topology.clockMHz, mi100.topology.firmware, mi100.topology.sdmaFirmware = 1502, 68, 18
	mi100.topology.capability = capabilityCDNA &^ 0x40000

	rx := cdna3
	rx.Name, rx.GFX, rx.XCCs, rx.CUs, rx.MES, rx.Slots = "rx7900xtx", 110000, 1, 96, true, 8
	rx.CopyRate, rx.LinkRate = 25e9, 32e9
	rx.Quantum = time.Millisecond
	rx.Costs = Costs{RemoveQueue: 90 * time.Microsecond, AddQueue: 70 * time.Microsecond, Jitter: 0.05}
	rx.topology = topology{
		kernelName: "ip discovery", deviceID: 0x744c, simdsPerCU: 2, wavesPerSIMD: 16, waveSize: 32,
		arrays: 12, arraysPerEngine: 2, cusPerArray: 8, clockMHz: 2526, firmware: 550, sdmaFirmware: 24,
		capability: capabilityRDNA, debugProp: 1495,
		contextBytesPerCU: contextPerCURDNA3, controlStackBytePerWav: 12,
	}

	// Strix Halo with 40 compute units (rocminfo in ROCm/TheRock#1881), whose memory is the
	// host's: LPDDR5X-8000, 256 bits. The number of SDMA engines and the versions of firmware are assumed.
	halo := rx
	halo.Name, halo.GFX, halo.CUs, halo.SDMAEngines, halo.XGMIEngines = "gfx1151", 110501, 40, 1, 0
	halo.topology.deviceID, halo.topology.arrays, halo.topology.cusPerArray, halo.topology.clockMHz = 0x1586, 4, 10, 2900
	halo.topology.firmware = 31

	// RX 9070 XT (rocminfo in ROCm/legacy-rocm-build#5849, firmware of #6625). The slots are those
	// of its pipes (gfx_v12_0_sw_init).
	rdna4 := rx
	rdna4.Name, rdna4.GFX, rdna4.CUs = "gfx1201", 120001, 64
	rdna4.topology.deviceID, rdna4.topology.arrays, rdna4.topology.clockMHz = 0x7550, 8, 2570
	rdna4.topology.firmware, rdna4.topology.sdmaFirmware, rdna4.topology.capability = 358, 662, capabilityRDNA4

	peak := map[string]float64{
		"mi300x": 5.3e12, "mi308x": 5.3e12, "mi250x": 1.6e12, "mi210": 1.6e12, "mi100": 1.2e12, "rx7900xtx": 0.96e12,
		"mi325x": 6e12, "mi350x": 8e12, "mi355x": 8e12, "gfx1151": 0.256e12, "gfx1201": 0.64e12,
	}
	presets := []Spec{mi300x, mi308x, mi250x, mi210, mi100, rx, mi325x, mi350x, mi355x, halo, rdna4}
	for i := range presets {
		s := &presets[i]
		s.ContextBytes = int64(s.CUs) * int64(s.topology.contextBytesPerCU)
		s.Costs.Save = overRate(s.ContextBytes, peak[s.Name]*saveEfficiency)
		s.Costs.Restore = overRate(s.ContextBytes, peak[s.Name]*restoreEfficiency)
	}
	return presets
}

func overRate(bytes int64, perSecond float64) time.Duration {
	return time.Duration(float64(bytes) / perSecond * float64(time.Second))
}

// PresetByName returns a preset, or an error that names them all.
func PresetByName(name string) (Spec, error) {
	var names []string
	for _, s := range Presets() {
		if s.Name == name {
			return s, nil
		}
		names = append(names, s.Name)
	}
	return Spec{}, fmt.Errorf("there is no simulated GPU %q: the presets are %s", name, strings.Join(names, ", "))
}

// maxGPUs is how many GPUs a machine can have.
const maxGPUs = 64

// Validate reports whether a machine with that many GPUs of the kind can be made.
// The presets can, with 1 to 64 GPUs.
func (s Spec) Validate(gpus int) error {
	switch {
	case gpus < 1 || gpus > maxGPUs:
		return fmt.Errorf("a simulated machine has 1 to %d GPUs, not %d", maxGPUs, gpus)
	case s.XCCs < 1 || s.CUs < s.XCCs || s.Slots < 1 || s.VMIDs < 1:
		return fmt.Errorf("GPU %q: XCCs, CUs, Slots and VMIDs must be at least 1, and CUs at least XCCs", s.Name)
	case s.Quantum <= 0 || s.CopyRate <= 0 || s.LinkRate < s.CopyRate:
		return fmt.Errorf("GPU %q: Quantum and CopyRate must be positive, and LinkRate at least CopyRate", s.Name)
	case s.Costs.Jitter < 0 || s.Costs.Jitter > 1:
		return fmt.Errorf("GPU %q: Costs.Jitter is %v, outside 0 to 1", s.Name, s.Costs.Jitter)
	case slices.Min([]time.Duration{s.Costs.Unmap, s.Costs.Map, s.Costs.RemoveQueue, s.Costs.AddQueue, s.Costs.Save, s.Costs.Restore}) < 0:
		return fmt.Errorf("GPU %q: a cost is negative: %+v", s.Name, s.Costs)
	}
	return nil
}

// SuspendTime returns the modelled time to suspend a process that has queues compute
// queues on each of gpus GPUs and fills occupancy (0 to 1) of each, while another
// process stays mapped there and nothing else is being rescheduled. It is the
// mean: Jitter is left out.
func (s Spec) SuspendTime(gpus, queues int, occupancy float64) time.Duration {
	fixed := s.Costs.Unmap + s.Costs.Map
	if s.MES {
		fixed = time.Duration(queues) * s.Costs.RemoveQueue
	}
	return time.Duration(gpus) * (fixed + time.Duration(float64(s.Costs.Save)*occupancy))
}

// defaultGrace is the field SCH_WAVE after power-on (mmCP_IQ_WAIT_TIME2_DEFAULT of
// gc_9_0_default.h), and longestGrace the time-out of the driver (queue_preemption_timeout_ms).
const (
	defaultGrace = 0x40
	longestGrace = 9 * time.Second
)

// grace returns the time of a grace period in its register: units of 1000 clocks, 0 is
// without end. When the driver's time-out is over, the model saves what still runs.
func (s Spec) grace(register uint32) time.Duration {
	switch register {
	case 0:
		return longestGrace
	case driver.DefaultGrace:
		register = defaultGrace
	}
	return time.Duration(register) * 1000 * time.Microsecond / time.Duration(s.topology.clockMHz)
}

// firstGPUNode is the topology node of GPU 0: the nodes before are CPUs.
const firstGPUNode = 2

// gpus describes the GPUs of a machine with n of them.
func (s Spec) gpus(n int) []gpreempt.GPU {
	var all []gpreempt.GPU
	for i, id := range s.gpuIDs(n) {
		bus := 0x10 + i
		if i < len(s.topology.buses) {
			bus = int(s.topology.buses[i])
		}
		all = append(all, gpreempt.GPU{
			ID:          id,
			Node:        firstGPUNode + i,
			Name:        s.topology.kernelName,
			GFX:         s.GFX,
			BDF:         fmt.Sprintf("0000:%02x:00.0", bus),
			RenderMinor: 128 + i,
			XCCs:        s.XCCs,
			CUs:         s.CUs,
			QueueSlots:  s.Slots,
			MES:         s.MES,

			DebugFirmware: s.topology.capability&capabilityDebugFirmware != 0,
		})
	}
	return all
}

// gpuIDs returns numbers like those the kernel hashes: 16 bits, stable, distinct.
func (s Spec) gpuIDs(n int) []gpreempt.GPUID {
	ids := slices.Clone(s.topology.ids[:min(n, len(s.topology.ids))])
	hash := fnv.New32a()
	hash.Write([]byte(s.Name))
	for id := hash.Sum32() & 0xffff; len(ids) < n; id = (id + 12061) & 0xffff {
		if id != 0 && !slices.Contains(ids, gpreempt.GPUID(id)) {
			ids = append(ids, gpreempt.GPUID(id))
		}
	}
	return ids
}
