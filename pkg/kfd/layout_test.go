package kfd_test

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// To add a kernel: unpack the headers of its package somewhere, then
//
//	go test ./pkg/kfd -run TestLayoutOfTheHeaderHere -kfd-include DIR -kfd-golden "PACKAGE VERSION"
//
// DIR is the directory that has linux/kfd_ioctl.h, of the source or of the installed
// headers. The test writes testdata/layout-MAJOR.MINOR.txt.
var (
	includeDir = flag.String("kfd-include", "/usr/include", "the directory of linux/kfd_ioctl.h")
	goldenFrom = flag.String("kfd-golden", "", "write the golden file; the value names the source of the header")
)

// cStruct is the C structure of a Go one.
type cStruct struct {
	goType reflect.Type
	name   string
	// fields are the C names of the Go fields that are not blank, in order.
	fields []string
	// since is the minor version that added the last newer fields, or if newer is 0 the
	// structure itself.
	since, newer int
}

// isIn reports whether the structure is in the header of a minor version.
func (c cStruct) isIn(minor int) bool { return c.newer > 0 || minor >= c.since }

func arm[T any](name string, fields ...string) cStruct {
	c := cStruct{goType: reflect.TypeFor[T](), name: "kfd_ioctl_dbg_trap_args", fields: []string{"pid", "op"}}
	for _, f := range fields {
		c.fields = append(c.fields, name+"."+f)
	}
	return c
}

var cStructs = []cStruct{
	{goType: reflect.TypeFor[kfd.GetVersionArgs](), name: "kfd_ioctl_get_version_args", fields: []string{"major_version", "minor_version"}},
	{goType: reflect.TypeFor[kfd.SMIEventsArgs](), name: "kfd_ioctl_smi_events_args", fields: []string{"gpuid", "anon_fd"}},
	{goType: reflect.TypeFor[kfd.RuntimeInfo](), name: "kfd_runtime_info", fields: []string{"r_debug", "runtime_state", "ttmp_setup"}},
	{goType: reflect.TypeFor[kfd.CRIUArgs](), name: "kfd_ioctl_criu_args", fields: []string{
		"devices", "bos", "priv_data", "priv_data_size", "num_devices", "num_bos", "num_objects", "pid", "op",
	}},
	{goType: reflect.TypeFor[kfd.QueueSnapshotEntry](), name: "kfd_queue_snapshot_entry", fields: []string{
		"exception_status", "ring_base_address", "write_pointer_address", "read_pointer_address", "ctx_save_restore_address",
		"queue_id", "gpu_id", "ring_size", "queue_type", "ctx_save_restore_area_size", "reserved",
	}},
	{goType: reflect.TypeFor[kfd.DeviceInfoEntry](), name: "kfd_dbg_device_info_entry", fields: []string{
		"exception_status", "lds_base", "lds_limit", "scratch_base", "scratch_limit", "gpuvm_base", "gpuvm_limit",
		"gpu_id", "location_id", "vendor_id", "device_id", "revision_id", "subsystem_vendor_id", "subsystem_device_id",
		"fw_version", "gfx_target_version", "simd_count", "max_waves_per_simd", "array_count", "simd_arrays_per_engine",
		"num_xcc", "capability", "debug_prop", "capability2", "pad",
	}, since: 23, newer: 2},
	{goType: reflect.TypeFor[kfdabi.CreateQueueArgs](), name: "kfd_ioctl_create_queue_args", fields: []string{
		"ring_base_address", "write_pointer_address", "read_pointer_address", "doorbell_offset", "ring_size", "gpu_id", "queue_type",
		"queue_percentage", "queue_priority", "queue_id", "eop_buffer_address", "eop_buffer_size", "ctx_save_restore_address",
		"ctx_save_restore_size", "ctl_stack_size", "sdma_engine_id", "metadata_ring_size",
	}, since: 23, newer: 1},
	{goType: reflect.TypeFor[kfdabi.DestroyQueueArgs](), name: "kfd_ioctl_destroy_queue_args", fields: []string{"queue_id", "pad"}},
	{goType: reflect.TypeFor[kfdabi.UpdateQueueArgs](), name: "kfd_ioctl_update_queue_args", fields: []string{
		"ring_base_address", "queue_id", "ring_size", "queue_percentage", "queue_priority",
	}},
	{goType: reflect.TypeFor[kfdabi.SetCUMaskArgs](), name: "kfd_ioctl_set_cu_mask_args", fields: []string{"queue_id", "num_cu_mask", "cu_mask_ptr"}},
	{goType: reflect.TypeFor[kfdabi.AllocQueueGWSArgs](), name: "kfd_ioctl_alloc_queue_gws_args", fields: []string{"queue_id", "num_gws", "first_gws", "pad"}},
	{goType: reflect.TypeFor[kfdabi.AcquireVMArgs](), name: "kfd_ioctl_acquire_vm_args", fields: []string{"drm_fd", "gpu_id"}},
	{goType: reflect.TypeFor[kfdabi.ProcessAperturesNewArgs](), name: "kfd_ioctl_get_process_apertures_new_args", fields: []string{
		"kfd_process_device_apertures_ptr", "num_of_nodes", "pad",
	}},
	{goType: reflect.TypeFor[kfdabi.ProcessDeviceApertures](), name: "kfd_process_device_apertures", fields: []string{
		"lds_base", "lds_limit", "scratch_base", "scratch_limit", "gpuvm_base", "gpuvm_limit", "gpu_id", "pad",
	}},
	{goType: reflect.TypeFor[kfdabi.RuntimeEnableArgs](), name: "kfd_ioctl_runtime_enable_args", fields: []string{"r_debug", "mode_mask", "capabilities_mask"}},
	{goType: reflect.TypeFor[kfdabi.ProfilerArgs](), name: "kfd_ioctl_profiler_args", fields: []string{"op", "pmc.gpu_id", "pmc.lock", "pmc.perfcount_enable"}, since: 23},
	arm[kfd.TrapEnableArgs]("enable", "exception_mask", "rinfo_ptr", "rinfo_size", "dbg_fd"),
	arm[kfd.TrapDisableArgs](""),
	arm[kfd.TrapSendRuntimeEventArgs]("send_runtime_event", "exception_mask", "gpu_id", "queue_id"),
	arm[kfdabi.TrapSetExceptionsEnabledArgs]("set_exceptions_enabled", "exception_mask"),
	arm[kfd.TrapSuspendQueuesArgs]("suspend_queues", "exception_mask", "queue_array_ptr", "num_queues", "grace_period"),
	arm[kfd.TrapResumeQueuesArgs]("resume_queues", "queue_array_ptr", "num_queues"),
	arm[kfdabi.TrapSetWaveLaunchOverrideArgs]("launch_override", "override_mode", "enable_mask", "support_request_mask", "pad"),
	arm[kfdabi.TrapSetWaveLaunchModeArgs]("launch_mode", "launch_mode", "pad"),
	arm[kfdabi.TrapSetNodeAddressWatchArgs]("set_node_address_watch", "address", "mode", "mask", "gpu_id", "id"),
	arm[kfdabi.TrapClearNodeAddressWatchArgs]("clear_node_address_watch", "gpu_id", "id"),
	arm[kfdabi.TrapSetFlagsArgs]("set_flags", "flags", "pad"),
	arm[kfd.TrapQueryDebugEventArgs]("query_debug_event", "exception_mask", "gpu_id", "queue_id"),
	arm[kfd.TrapQueryExceptionInfoArgs]("query_exception_info", "info_ptr", "info_size", "source_id", "exception_code", "clear_exception"),
	arm[kfd.TrapQueueSnapshotArgs]("queue_snapshot", "exception_mask", "snapshot_buf_ptr", "num_queues", "entry_size"),
	arm[kfdabi.TrapDeviceSnapshotArgs]("device_snapshot", "exception_mask", "snapshot_buf_ptr", "num_devices", "entry_size"),
}

// cConstants are the C names of numbers, without the requests.
var cConstants = map[string]uint64{
	"EC_QUEUE_WAVE_ABORT":                    uint64(kfdabi.ECQueueWaveAbort),
	"EC_QUEUE_WAVE_TRAP":                     uint64(kfdabi.ECQueueWaveTrap),
	"EC_QUEUE_WAVE_MEMORY_VIOLATION":         uint64(kfdabi.ECQueueWaveMemoryViolation),
	"EC_QUEUE_NEW":                           uint64(kfd.ECQueueNew),
	"EC_DEVICE_QUEUE_DELETE":                 uint64(kfdabi.ECDeviceQueueDelete),
	"EC_DEVICE_MEMORY_VIOLATION":             uint64(kfdabi.ECDeviceMemoryViolation),
	"EC_DEVICE_NEW":                          uint64(kfdabi.ECDeviceNew),
	"EC_PROCESS_RUNTIME":                     uint64(kfd.ECProcessRuntime),
	"EC_PROCESS_DEVICE_REMOVE":               uint64(kfdabi.ECProcessDeviceRemove),
	"KFD_EC_MASK_QUEUE":                      uint64(kfdabi.ExceptionsOfQueue),
	"KFD_EC_MASK_DEVICE":                     uint64(kfdabi.ExceptionsOfDevice),
	"KFD_EC_MASK_PROCESS":                    uint64(kfdabi.ExceptionsOfProcess),
	"(__u32)KFD_DBG_QUEUE_ERROR_MASK":        uint64(kfd.QueueErrorMask),
	"(__u32)KFD_DBG_QUEUE_INVALID_MASK":      uint64(kfd.QueueInvalidMask),
	"DEBUG_RUNTIME_STATE_DISABLED":           uint64(kfd.RuntimeDisabled),
	"DEBUG_RUNTIME_STATE_ENABLED":            uint64(kfd.RuntimeEnabled),
	"DEBUG_RUNTIME_STATE_ENABLED_BUSY":       uint64(kfd.RuntimeBusy),
	"DEBUG_RUNTIME_STATE_ENABLED_ERROR":      uint64(kfd.RuntimeFailed),
	"KFD_RUNTIME_ENABLE_MODE_ENABLE_MASK":    uint64(kfdabi.RuntimeEnableModeEnable),
	"KFD_RUNTIME_ENABLE_MODE_TTMP_SAVE_MASK": uint64(kfdabi.RuntimeEnableModeTTMPSave),
	"KFD_IOC_QUEUE_TYPE_COMPUTE":             uint64(kfd.QueueTypeCompute),
	"KFD_IOC_QUEUE_TYPE_SDMA":                uint64(kfd.QueueTypeSDMA),
	"KFD_IOC_QUEUE_TYPE_COMPUTE_AQL":         uint64(kfd.QueueTypeComputeAQL),
	"KFD_IOC_QUEUE_TYPE_SDMA_XGMI":           uint64(kfd.QueueTypeSDMAXGMI),
	"KFD_IOC_QUEUE_TYPE_SDMA_BY_ENG_ID":      uint64(kfd.QueueTypeSDMAByEngID),
	"KFD_SMI_EVENT_VMFAULT":                  uint64(kfdabi.SMIVMFault),
	"KFD_SMI_EVENT_GPU_PRE_RESET":            uint64(kfdabi.SMIGPUPreReset),
	"KFD_SMI_EVENT_GPU_POST_RESET":           uint64(kfdabi.SMIGPUPostReset),
	"KFD_SMI_EVENT_QUEUE_EVICTION":           uint64(kfd.SMIQueueEviction),
	"KFD_SMI_EVENT_QUEUE_RESTORE":            uint64(kfd.SMIQueueRestore),
	"KFD_SMI_EVENT_ALL_PROCESS":              64,
	"KFD_QUEUE_EVICTION_TRIGGER_SVM":         uint64(kfdabi.TriggerSVM),
	"KFD_QUEUE_EVICTION_TRIGGER_USERPTR":     uint64(kfdabi.TriggerUserptr),
	"KFD_QUEUE_EVICTION_TRIGGER_TTM":         uint64(kfd.TriggerTTM),
	"KFD_QUEUE_EVICTION_TRIGGER_SUSPEND":     uint64(kfdabi.TriggerSuspend),
	"KFD_QUEUE_EVICTION_CRIU_CHECKPOINT":     uint64(kfd.TriggerCRIUCheckpoint),
	"KFD_QUEUE_EVICTION_CRIU_RESTORE":        uint64(kfdabi.TriggerCRIURestore),
}

// cConstantsOf72 were added between 6.12 and 7.2, like newRequests.
var cConstantsOf72 = map[string]uint64{
	"KFD_SMI_EVENT_PROCESS_START":  uint64(kfdabi.SMIProcessStart),
	"KFD_SMI_EVENT_PROCESS_END":    uint64(kfdabi.SMIProcessEnd),
	"KFD_IOC_PROFILER_PMC":         uint64(kfdabi.ProfilerPMC),
	"KFD_IOC_PROFILER_VERSION":     uint64(kfdabi.ProfilerVersion),
	"KFD_IOC_PROFILER_PTL_CONTROL": uint64(kfdabi.ProfilerPTLControl),
}

var newRequests = []kfd.Request{kfdabi.ReqCreateProcess, kfdabi.ReqProfiler}

// init adds the constants whose C names can be derived from ours.
func init() {
	for op := kfd.TrapEnable; op <= kfd.TrapGetDeviceSnapshot; op++ {
		cConstants["KFD_IOC_DBG_TRAP_"+op.String()] = uint64(op)
	}
	for name, op := range map[string]kfd.CRIUOp{
		"PROCESS_INFO": kfd.CRIUOpProcessInfo, "CHECKPOINT": kfdabi.CRIUOpCheckpoint, "UNPAUSE": kfd.CRIUOpUnpause,
		"RESTORE": kfdabi.CRIUOpRestore, "RESUME": kfdabi.CRIUOpResume,
	} {
		cConstants["KFD_CRIU_OP_"+name] = uint64(op)
	}
}

// requests are those of /dev/kfd.
var requests = []kfd.Request{
	kfd.ReqGetVersion, kfdabi.ReqCreateQueue, kfdabi.ReqDestroyQueue, kfdabi.ReqSetMemoryPolicy, kfdabi.ReqGetClockCounters,
	kfdabi.ReqGetProcessApertures, kfdabi.ReqUpdateQueue, kfdabi.ReqCreateEvent, kfdabi.ReqDestroyEvent, kfdabi.ReqSetEvent,
	kfdabi.ReqResetEvent, kfdabi.ReqWaitEvents, kfdabi.ReqSetScratchBackingVA, kfdabi.ReqGetTileConfig, kfdabi.ReqSetTrapHandler,
	kfdabi.ReqGetProcessAperturesNew, kfdabi.ReqAcquireVM, kfdabi.ReqAllocMemoryOfGPU, kfdabi.ReqFreeMemoryOfGPU,
	kfdabi.ReqMapMemoryToGPU, kfdabi.ReqUnmapMemoryFromGPU, kfdabi.ReqSetCUMask, kfdabi.ReqGetQueueWaveState, kfdabi.ReqGetDmabufInfo,
	kfdabi.ReqImportDmabuf, kfdabi.ReqAllocQueueGWS, kfd.ReqSMIEvents, kfdabi.ReqSVM, kfdabi.ReqSetXnackMode, kfd.ReqCRIUOp,
	kfdabi.ReqAvailableMemory, kfdabi.ReqExportDmabuf, kfdabi.ReqRuntimeEnable, kfd.ReqDbgTrap, kfdabi.ReqCreateProcess, kfdabi.ReqProfiler,
}

// deviceInfoSize is the size of DeviceInfoEntry, to which 7.2 added two fields, at a minor version.
func deviceInfoSize(minor int) uintptr {
	size := reflect.TypeFor[kfd.DeviceInfoEntry]().Size()
	if minor < 23 {
		size -= 8
	}
	return size
}

// isNew reports whether a driver of 6.12 lacks r.
func isNew(r kfd.Request) bool { return r == newRequests[0] || r == newRequests[1] }

// ours returns the layout of the Go code for a minor version, in the probe's form.
func ours(t *testing.T, minor int) map[string]string {
	t.Helper()
	got := map[string]string{"version": fmt.Sprintf("1.%d", minor)}
	_, warning, err := kfd.ProfileFor(kfd.Version{Major: 1, Minor: uint32(minor)})
	if err != nil || warning != "" {
		t.Fatalf("no profile for minor version %d: %v, %v", minor, warning, err)
	}
	for _, c := range cStructs {
		if !c.isIn(minor) {
			continue
		}
		size := c.goType.Size()
		if c.goType == reflect.TypeFor[kfd.DeviceInfoEntry]() {
			size = deviceInfoSize(minor)
		}
		got["sizeof "+c.name] = strconv.Itoa(int(size))
		names := c.names(minor)
		for f := range c.goType.Fields() {
			if f.Name == "_" || len(names) == 0 {
				continue
			}
			got["offsetof "+c.name+" "+names[0]] = fmt.Sprintf("%d %d", f.Offset, f.Type.Size())
			names = names[1:]
		}
		if len(names) != 0 {
			t.Errorf("%v has no fields for %q", c.goType, names)
		}
	}
	for _, req := range requests {
		name := req.String()
		if minor >= 23 || !isNew(req) {
			got["request "+name] = fmt.Sprintf("%#x", uint32(req))
		}
	}
	for name, v := range cConstants {
		got["constant "+name] = fmt.Sprintf("%#x", v)
	}
	for name, v := range cConstantsOf72 {
		if minor >= 23 {
			got["constant "+name] = fmt.Sprintf("%#x", v)
		}
	}
	return got
}

// names returns the C fields that the structure has at a minor version.
func (c cStruct) names(minor int) []string {
	if minor < c.since {
		return c.fields[:len(c.fields)-c.newer]
	}
	return c.fields
}

// probe returns the C program that prints the layout of a header.
func probe(minor int) string {
	var b strings.Builder
	b.WriteString("#include <stdio.h>\n#include <stddef.h>\n#include <linux/kfd_ioctl.h>\nint main(void) {\n")
	line := func(key, format, value string) { fmt.Fprintf(&b, "\tprintf(%q, %s);\n", key+": "+format+"\n", value) }
	line("version", "%d.%d", "KFD_IOCTL_MAJOR_VERSION, KFD_IOCTL_MINOR_VERSION")
	for _, c := range cStructs {
		if !c.isIn(minor) {
			continue
		}
		line("sizeof "+c.name, "%zu", "sizeof(struct "+c.name+")")
		for _, f := range c.names(minor) {
			line("offsetof "+c.name+" "+f, "%zu %zu", fmt.Sprintf("offsetof(struct %s, %s), sizeof(((struct %s *)0)->%s)", c.name, f, c.name, f))
		}
	}
	for _, req := range requests {
		name := req.String()
		if minor >= 23 || !isNew(req) {
			line("request "+name, "%#x", "(unsigned)AMDKFD_IOC_"+name)
		}
	}
	constants := func(of map[string]uint64) {
		for name := range of {
			line("constant "+name, "%#llx", "(unsigned long long)("+name+")")
		}
	}
	constants(cConstants)
	if minor >= 23 {
		constants(cConstantsOf72)
	}
	b.WriteString("\treturn 0;\n}\n")
	return b.String()
}

// headerMinor returns the version of a header, and reports whether it has DBG_TRAP.
func headerMinor(t *testing.T, path string) (minor int, debug bool) {
	t.Helper()
	b, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		t.Skipf("%s is missing", path)
	}
	if err != nil {
		t.Fatal(err)
	}
	minor = -1
	for line := range strings.Lines(string(b)) {
		if words := strings.Fields(line); len(words) == 3 && words[1] == "KFD_IOCTL_MINOR_VERSION" {
			if minor, err = strconv.Atoi(words[2]); err != nil {
				t.Fatalf("%s: %v", path, err)
			}
		}
	}
	return minor, strings.Contains(string(b), "AMDKFD_IOC_DBG_TRAP\t")
}

// parseLayout reads lines of "key: value"; # begins a comment.
func parseLayout(t *testing.T, text string) map[string]string {
	t.Helper()
	m := map[string]string{}
	for s := bufio.NewScanner(strings.NewReader(text)); s.Scan(); {
		if s.Text() == "" || strings.HasPrefix(s.Text(), "#") {
			continue
		}
		key, value, ok := strings.Cut(s.Text(), ": ")
		if !ok {
			t.Fatalf("line %q has no value", s.Text())
		}
		if value == "0" && strings.HasPrefix(key, "constant ") {
			value = "0x0" // C's %#x has no prefix for zero
		}
		if old, twice := m[key]; twice && old != value {
			t.Errorf("%s is both %s and %s", key, old, value)
		}
		m[key] = value
	}
	return m
}

func TestLayoutOfTheHeaderHere(t *testing.T) {
	header := filepath.Join(*includeDir, "linux", "kfd_ioctl.h")
	minor, debug := headerMinor(t, header)
	if !debug {
		t.Skipf("%s is of version 1.%d, without AMDKFD_IOC_DBG_TRAP (added with 1.13): only the golden files are compared", header, minor)
	}
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skipf("no C compiler for %s: only the golden files are compared", header)
	}
	if drm := filepath.Join(*includeDir, "drm", "drm.h"); !exists(drm) {
		t.Skipf("%s, which the header needs, is missing: only the golden files are compared", drm)
	}
	if _, warning, err := kfd.ProfileFor(kfd.Version{Major: 1, Minor: uint32(minor)}); warning != "" || err != nil {
		t.Skipf("%s is of version 1.%d, which has no profile: %v %v", header, minor, warning, err)
	}
	dir := t.TempDir()
	source, program := filepath.Join(dir, "probe.c"), filepath.Join(dir, "probe")
	if err := os.WriteFile(source, []byte(probe(minor)), 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), cc, "-D__user=", "-I", *includeDir, "-o", program, source).CombinedOutput(); err != nil {
		t.Fatalf("compile the probe: %v\n%s", err, out)
	}
	out, err := exec.CommandContext(t.Context(), program).Output()
	if err != nil {
		t.Fatal(err)
	}
	if *goldenFrom != "" {
		writeGolden(t, minor, cc, parseLayout(t, string(out)))
	}
	if diff := cmp.Diff(parseLayout(t, string(out)), ours(t, minor)); diff != "" {
		t.Errorf("%s (-) and this package (+) differ:\n%s", header, diff)
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func writeGolden(t *testing.T, minor int, cc string, layout map[string]string) {
	t.Helper()
	version, err := exec.CommandContext(t.Context(), cc, "-dumpfullversion").Output()
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "# The numbers of linux/kfd_ioctl.h of %s:\n", *goldenFrom)
	b.WriteString("# printed by the C probe of layout_test.go (TestLayoutOfTheHeaderHere), compiled\n")
	fmt.Fprintf(&b, "# with cc %s for x86-64 against that header. Offsets and sizes are in bytes;\n", strings.TrimSpace(string(version)))
	b.WriteString("# offsetof has the offset of a field and its size.\n")
	for _, key := range slices.Sorted(maps.Keys(layout)) {
		fmt.Fprintf(&b, "%s: %s\n", key, layout[key])
	}
	if err := os.WriteFile(goldenFile(minor), []byte(b.String()), 0o644); err != nil {
		t.Fatal(err)
	}
}

func goldenFile(minor int) string {
	return filepath.Join("testdata", fmt.Sprintf("layout-1.%d.txt", minor))
}

func TestLayoutOfKnownHeaders(t *testing.T) {
	for kernel, minor := range map[string]int{"6.12": 17, "7.2": 23} {
		t.Run(kernel, func(t *testing.T) {
			golden, err := os.ReadFile(goldenFile(minor))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(parseLayout(t, string(golden)), ours(t, minor)); diff != "" {
				t.Errorf("%s (-) and this package (+) differ:\n%s", goldenFile(minor), diff)
			}
		})
	}
}

func TestStructuresHaveOnlyFixedSizes(t *testing.T) {
	fixed := func(f reflect.Type) bool {
		switch f.Kind() {
		case reflect.Uint32, reflect.Uint64:
			return true
		case reflect.Array:
			return f.Elem() == reflect.TypeFor[kfdabi.ProcessDeviceApertures]() // checked here, too
		default:
			return f == reflect.TypeFor[kfd.Pointer]()
		}
	}
	for _, c := range cStructs {
		var end uintptr
		for f := range c.goType.Fields() {
			if f.Offset != end {
				t.Errorf("%v.%s: %d bytes before it are not padded explicitly", c.goType, f.Name, f.Offset-end)
			}
			end = f.Offset + f.Type.Size()
			if f.Name != "_" && !fixed(f.Type) {
				t.Errorf("%v.%s is a %v, which has no fixed size", c.goType, f.Name, f.Type)
			}
		}
		if end != c.goType.Size() {
			t.Errorf("%v: %d bytes at its end are not padded explicitly", c.goType, c.goType.Size()-end)
		}
		if first := c.goType.Field(0).Type.String(); first != "structs.HostLayout" {
			t.Errorf("%v begins with a %s, want structs.HostLayout", c.goType, first)
		}
	}
}

func TestRequestsCarryTheirStructures(t *testing.T) {
	sizes := map[kfd.Request]uintptr{
		kfd.ReqGetVersion:                reflect.TypeFor[kfd.GetVersionArgs]().Size(),
		kfdabi.ReqCreateQueue:            reflect.TypeFor[kfdabi.CreateQueueArgs]().Size(),
		kfdabi.ReqDestroyQueue:           reflect.TypeFor[kfdabi.DestroyQueueArgs]().Size(),
		kfdabi.ReqUpdateQueue:            reflect.TypeFor[kfdabi.UpdateQueueArgs]().Size(),
		kfdabi.ReqSetCUMask:              reflect.TypeFor[kfdabi.SetCUMaskArgs]().Size(),
		kfdabi.ReqAllocQueueGWS:          reflect.TypeFor[kfdabi.AllocQueueGWSArgs]().Size(),
		kfdabi.ReqAcquireVM:              reflect.TypeFor[kfdabi.AcquireVMArgs]().Size(),
		kfdabi.ReqGetProcessAperturesNew: reflect.TypeFor[kfdabi.ProcessAperturesNewArgs]().Size(),
		kfdabi.ReqRuntimeEnable:          reflect.TypeFor[kfdabi.RuntimeEnableArgs]().Size(),
		kfdabi.ReqProfiler:               reflect.TypeFor[kfdabi.ProfilerArgs]().Size(),
		kfd.ReqSMIEvents:                 reflect.TypeFor[kfd.SMIEventsArgs]().Size(),
		kfd.ReqCRIUOp:                    reflect.TypeFor[kfd.CRIUArgs]().Size(),
	}
	for req, size := range sizes {
		if int(size) != req.Size() {
			t.Errorf("%v carries %d bytes, its structure has %d", req, req.Size(), size)
		}
	}
	for _, c := range cStructs {
		if c.name == "kfd_ioctl_dbg_trap_args" && int(c.goType.Size()) != kfd.ReqDbgTrap.Size() {
			t.Errorf("%v has %d bytes, the driver copies %d", c.goType, c.goType.Size(), kfd.ReqDbgTrap.Size())
		}
	}
}

// The table has the requests by number, by which the driver selects the handler.
func TestRequestTable(t *testing.T) {
	const none, w, r, rw = 0, 1, 2, 3
	want := map[uint8]struct {
		name      string
		dir, size uint32
	}{
		0x01: {"GET_VERSION", r, 8}, 0x02: {"CREATE_QUEUE", rw, 96}, 0x03: {"DESTROY_QUEUE", rw, 8},
		0x04: {"SET_MEMORY_POLICY", w, 32}, 0x05: {"GET_CLOCK_COUNTERS", rw, 40}, 0x06: {"GET_PROCESS_APERTURES", r, 400},
		0x07: {"UPDATE_QUEUE", w, 24}, 0x08: {"CREATE_EVENT", rw, 32}, 0x09: {"DESTROY_EVENT", w, 8},
		0x0A: {"SET_EVENT", w, 8}, 0x0B: {"RESET_EVENT", w, 8}, 0x0C: {"WAIT_EVENTS", rw, 24},
		0x11: {"SET_SCRATCH_BACKING_VA", rw, 16}, 0x12: {"GET_TILE_CONFIG", rw, 40}, 0x13: {"SET_TRAP_HANDLER", w, 24},
		0x14: {"GET_PROCESS_APERTURES_NEW", rw, 16}, 0x15: {"ACQUIRE_VM", w, 8}, 0x16: {"ALLOC_MEMORY_OF_GPU", rw, 40},
		0x17: {"FREE_MEMORY_OF_GPU", w, 8}, 0x18: {"MAP_MEMORY_TO_GPU", rw, 24}, 0x19: {"UNMAP_MEMORY_FROM_GPU", rw, 24},
		0x1A: {"SET_CU_MASK", w, 16}, 0x1B: {"GET_QUEUE_WAVE_STATE", rw, 24}, 0x1C: {"GET_DMABUF_INFO", rw, 32},
		0x1D: {"IMPORT_DMABUF", rw, 24}, 0x1E: {"ALLOC_QUEUE_GWS", rw, 16}, 0x1F: {"SMI_EVENTS", rw, 8},
		0x20: {"SVM", rw, 24}, 0x21: {"SET_XNACK_MODE", rw, 4}, 0x22: {"CRIU_OP", rw, 56},
		0x23: {"AVAILABLE_MEMORY", rw, 16}, 0x24: {"EXPORT_DMABUF", rw, 16}, 0x25: {"RUNTIME_ENABLE", rw, 16},
		0x26: {"DBG_TRAP", rw, 32}, 0x27: {"CREATE_PROCESS", none, 0}, 0x28: {"PROFILER", rw, 16},
	}
	if len(want) != len(requests) {
		t.Errorf("%d requests are named, want %d", len(requests), len(want))
	}
	for nr, c := range want {
		req := kfd.Request(c.dir<<30 | c.size<<16 | 'K'<<8 | uint32(nr))
		if got := req.String(); !slices.Contains(requests, req) || got != c.name || req.Number() != nr || req.Size() != int(c.size) {
			t.Errorf("request %#x: %s, number %#x, %d bytes; want %s, %#x, %d", uint32(req), got, req.Number(), req.Size(), c.name, nr, c.size)
		}
	}
	if got := kfd.Request(0x4bff).String(); got != "request(0x4bff)" {
		t.Errorf("a request without a name is %s", got)
	}
}
