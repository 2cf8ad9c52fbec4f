package kfd_test

import (
	"maps"
	"reflect"
	"testing"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// init adds what processes call about themselves to what layout_test.go compares.
func init() {
	cStructs = append(cStructs, selfStructs...)
	maps.Copy(cConstants, selfConstants)
}

var selfStructs = []cStruct{
	{goType: reflect.TypeFor[kfdabi.CreateEventArgs](), name: "kfd_ioctl_create_event_args", fields: []string{
		"event_page_offset", "event_trigger_data", "event_type", "auto_reset", "node_id", "event_id", "event_slot_index",
	}},
	{goType: reflect.TypeFor[kfdabi.DestroyEventArgs](), name: "kfd_ioctl_destroy_event_args", fields: []string{"event_id", "pad"}},
	{goType: reflect.TypeFor[kfdabi.SetEventArgs](), name: "kfd_ioctl_set_event_args", fields: []string{"event_id", "pad"}},
	{goType: reflect.TypeFor[kfdabi.ResetEventArgs](), name: "kfd_ioctl_reset_event_args", fields: []string{"event_id", "pad"}},
	{goType: reflect.TypeFor[kfdabi.WaitEventsArgs](), name: "kfd_ioctl_wait_events_args", fields: []string{
		"events_ptr", "num_events", "wait_for_all", "timeout", "wait_result",
	}},
	{goType: reflect.TypeFor[kfdabi.SignalEventData](), name: "kfd_event_data", fields: []string{
		"signal_event_data.last_event_age", "kfd_event_data_ext", "event_id", "pad",
	}},
	{goType: reflect.TypeFor[kfdabi.MemoryEventData](), name: "kfd_event_data", fields: []string{
		"memory_exception_data.failure.NotPresent", "memory_exception_data.failure.ReadOnly", "memory_exception_data.failure.NoExecute", "memory_exception_data.failure.imprecise", "memory_exception_data.va", "memory_exception_data.gpu_id", "memory_exception_data.ErrorType", "kfd_event_data_ext", "event_id", "pad",
	}},
	{goType: reflect.TypeFor[kfdabi.HWEventData](), name: "kfd_event_data", fields: []string{
		"hw_exception_data.reset_type", "hw_exception_data.reset_cause", "hw_exception_data.memory_lost", "hw_exception_data.gpu_id", "kfd_event_data_ext", "event_id", "pad",
	}},
	{goType: reflect.TypeFor[kfdabi.AllocMemoryArgs](), name: "kfd_ioctl_alloc_memory_of_gpu_args", fields: []string{
		"va_addr", "size", "handle", "mmap_offset", "gpu_id", "flags",
	}},
	{goType: reflect.TypeFor[kfdabi.FreeMemoryArgs](), name: "kfd_ioctl_free_memory_of_gpu_args", fields: []string{"handle"}},
	{goType: reflect.TypeFor[kfdabi.MapMemoryArgs](), name: "kfd_ioctl_map_memory_to_gpu_args", fields: []string{
		"handle", "device_ids_array_ptr", "n_devices", "n_success",
	}},
	{goType: reflect.TypeFor[kfdabi.UnmapMemoryArgs](), name: "kfd_ioctl_unmap_memory_from_gpu_args", fields: []string{
		"handle", "device_ids_array_ptr", "n_devices", "n_success",
	}},
	{goType: reflect.TypeFor[kfdabi.AvailableMemoryArgs](), name: "kfd_ioctl_get_available_memory_args", fields: []string{"available", "gpu_id", "pad"}},
	{goType: reflect.TypeFor[kfdabi.DmabufInfoArgs](), name: "kfd_ioctl_get_dmabuf_info_args", fields: []string{
		"size", "metadata_ptr", "metadata_size", "gpu_id", "flags", "dmabuf_fd",
	}},
	{goType: reflect.TypeFor[kfdabi.ImportDmabufArgs](), name: "kfd_ioctl_import_dmabuf_args", fields: []string{"va_addr", "handle", "gpu_id", "dmabuf_fd"}},
	{goType: reflect.TypeFor[kfdabi.ExportDmabufArgs](), name: "kfd_ioctl_export_dmabuf_args", fields: []string{"handle", "flags", "dmabuf_fd"}},
	{goType: reflect.TypeFor[kfdabi.SVMArgs](), name: "kfd_ioctl_svm_args", fields: []string{"start_addr", "size", "op", "nattr"}},
	{goType: reflect.TypeFor[kfdabi.SVMAttribute](), name: "kfd_ioctl_svm_attribute", fields: []string{"type", "value"}},
	{goType: reflect.TypeFor[kfdabi.SetXnackModeArgs](), name: "kfd_ioctl_set_xnack_mode_args", fields: []string{"xnack_enabled"}},
	{goType: reflect.TypeFor[kfdabi.SetMemoryPolicyArgs](), name: "kfd_ioctl_set_memory_policy_args", fields: []string{
		"alternate_aperture_base", "alternate_aperture_size", "gpu_id", "default_policy", "alternate_policy", "misc_process_flag",
	}, since: 18, newer: 1},
	{goType: reflect.TypeFor[kfdabi.ClockCountersArgs](), name: "kfd_ioctl_get_clock_counters_args", fields: []string{
		"gpu_clock_counter", "cpu_clock_counter", "system_clock_counter", "system_clock_freq", "gpu_id", "pad",
	}},
	{goType: reflect.TypeFor[kfdabi.ProcessAperturesArgs](), name: "kfd_ioctl_get_process_apertures_args", fields: []string{
		"process_apertures", "num_of_nodes", "pad",
	}},
	{goType: reflect.TypeFor[kfdabi.SetScratchBackingVAArgs](), name: "kfd_ioctl_set_scratch_backing_va_args", fields: []string{"va_addr", "gpu_id", "pad"}},
	{goType: reflect.TypeFor[kfdabi.TileConfigArgs](), name: "kfd_ioctl_get_tile_config_args", fields: []string{
		"tile_config_ptr", "macro_tile_config_ptr", "num_tile_configs", "num_macro_tile_configs", "gpu_id", "gb_addr_config", "num_banks", "num_ranks",
	}},
	{goType: reflect.TypeFor[kfdabi.SetTrapHandlerArgs](), name: "kfd_ioctl_set_trap_handler_args", fields: []string{"tba_addr", "tma_addr", "gpu_id", "pad"}},
	{goType: reflect.TypeFor[kfdabi.QueueWaveStateArgs](), name: "kfd_ioctl_get_queue_wave_state_args", fields: []string{
		"ctl_stack_address", "ctl_stack_used_size", "save_area_used_size", "queue_id", "pad",
	}},
}

var selfConstants = map[string]uint64{
	"KFD_IOC_EVENT_SIGNAL":                         uint64(kfdabi.EventTypeSignal),
	"KFD_IOC_EVENT_HW_EXCEPTION":                   uint64(kfdabi.EventTypeHWException),
	"KFD_IOC_EVENT_DEBUG_EVENT":                    uint64(kfdabi.EventTypeDebug),
	"KFD_IOC_EVENT_MEMORY":                         uint64(kfdabi.EventTypeMemory),
	"KFD_SIGNAL_EVENT_LIMIT":                       kfdabi.SignalEventLimit,
	"KFD_IOC_WAIT_RESULT_COMPLETE":                 uint64(kfdabi.WaitResultComplete),
	"KFD_IOC_WAIT_RESULT_TIMEOUT":                  uint64(kfdabi.WaitResultTimeout),
	"KFD_IOC_WAIT_RESULT_FAIL":                     uint64(kfdabi.WaitResultFail),
	"(__u32)KFD_IOC_ALLOC_MEM_FLAGS_VRAM":          uint64(kfdabi.AllocVRAM),
	"(__u32)KFD_IOC_ALLOC_MEM_FLAGS_GTT":           uint64(kfdabi.AllocGTT),
	"(__u32)KFD_IOC_ALLOC_MEM_FLAGS_USERPTR":       uint64(kfdabi.AllocUserptr),
	"(__u32)KFD_IOC_ALLOC_MEM_FLAGS_DOORBELL":      uint64(kfdabi.AllocDoorbell),
	"(__u32)KFD_IOC_ALLOC_MEM_FLAGS_MMIO_REMAP":    uint64(kfdabi.AllocMMIORemap),
	"(__u32)KFD_IOC_ALLOC_MEM_FLAGS_CONTIGUOUS":    uint64(kfdabi.AllocContiguous),
	"(__u32)KFD_IOC_ALLOC_MEM_FLAGS_EXT_COHERENT":  uint64(kfdabi.AllocExtCoherent),
	"(__u32)KFD_IOC_ALLOC_MEM_FLAGS_UNCACHED":      uint64(kfdabi.AllocUncached),
	"(__u32)KFD_IOC_ALLOC_MEM_FLAGS_COHERENT":      uint64(kfdabi.AllocCoherent),
	"(__u32)KFD_IOC_ALLOC_MEM_FLAGS_AQL_QUEUE_MEM": uint64(kfdabi.AllocAQLQueueMem),
	"(__u32)KFD_IOC_ALLOC_MEM_FLAGS_NO_SUBSTITUTE": uint64(kfdabi.AllocNoSubstitute),
	"(__u32)KFD_IOC_ALLOC_MEM_FLAGS_PUBLIC":        uint64(kfdabi.AllocPublic),
	"(__u32)KFD_IOC_ALLOC_MEM_FLAGS_EXECUTABLE":    uint64(kfdabi.AllocExecutable),
	"(__u32)KFD_IOC_ALLOC_MEM_FLAGS_WRITABLE":      uint64(kfdabi.AllocWritable),
	"KFD_IOCTL_SVM_OP_SET_ATTR":                    uint64(kfdabi.SVMOpSetAttr),
	"KFD_IOCTL_SVM_OP_GET_ATTR":                    uint64(kfdabi.SVMOpGetAttr),
	"KFD_IOCTL_SVM_ATTR_PREFERRED_LOC":             uint64(kfdabi.SVMAttrPreferredLoc),
	"KFD_IOCTL_SVM_ATTR_PREFETCH_LOC":              uint64(kfdabi.SVMAttrPrefetchLoc),
	"KFD_IOCTL_SVM_ATTR_ACCESS":                    uint64(kfdabi.SVMAttrAccess),
	"KFD_IOCTL_SVM_ATTR_ACCESS_IN_PLACE":           uint64(kfdabi.SVMAttrAccessInPlace),
	"KFD_IOCTL_SVM_ATTR_NO_ACCESS":                 uint64(kfdabi.SVMAttrNoAccess),
	"KFD_IOCTL_SVM_ATTR_SET_FLAGS":                 uint64(kfdabi.SVMAttrSetFlags),
	"KFD_IOCTL_SVM_ATTR_CLR_FLAGS":                 uint64(kfdabi.SVMAttrClrFlags),
	"KFD_IOCTL_SVM_ATTR_GRANULARITY":               uint64(kfdabi.SVMAttrGranularity),
	"(__u32)KFD_IOCTL_SVM_LOCATION_SYSMEM":         uint64(kfdabi.SVMLocationSysmem),
	"(__u32)KFD_IOCTL_SVM_LOCATION_UNDEFINED":      uint64(kfdabi.SVMLocationUndefined),
	"KFD_IOCTL_SVM_FLAG_HOST_ACCESS":               uint64(kfdabi.SVMFlagHostAccess),
	"KFD_IOCTL_SVM_FLAG_COHERENT":                  uint64(kfdabi.SVMFlagCoherent),
	"KFD_IOCTL_SVM_FLAG_GPU_ALWAYS_MAPPED":         uint64(kfdabi.SVMFlagGPUAlwaysMapped),
	"KFD_IOC_CACHE_POLICY_COHERENT":                uint64(kfdabi.CachePolicyCoherent),
	"KFD_IOC_CACHE_POLICY_NONCOHERENT":             uint64(kfdabi.CachePolicyNonCoherent),
}

func TestRequestsOfProcessesCarryTheirStructures(t *testing.T) {
	for req, of := range map[kfd.Request]reflect.Type{
		kfdabi.ReqCreateEvent:         reflect.TypeFor[kfdabi.CreateEventArgs](),
		kfdabi.ReqDestroyEvent:        reflect.TypeFor[kfdabi.DestroyEventArgs](),
		kfdabi.ReqSetEvent:            reflect.TypeFor[kfdabi.SetEventArgs](),
		kfdabi.ReqResetEvent:          reflect.TypeFor[kfdabi.ResetEventArgs](),
		kfdabi.ReqWaitEvents:          reflect.TypeFor[kfdabi.WaitEventsArgs](),
		kfdabi.ReqAllocMemoryOfGPU:    reflect.TypeFor[kfdabi.AllocMemoryArgs](),
		kfdabi.ReqFreeMemoryOfGPU:     reflect.TypeFor[kfdabi.FreeMemoryArgs](),
		kfdabi.ReqMapMemoryToGPU:      reflect.TypeFor[kfdabi.MapMemoryArgs](),
		kfdabi.ReqUnmapMemoryFromGPU:  reflect.TypeFor[kfdabi.UnmapMemoryArgs](),
		kfdabi.ReqAvailableMemory:     reflect.TypeFor[kfdabi.AvailableMemoryArgs](),
		kfdabi.ReqGetDmabufInfo:       reflect.TypeFor[kfdabi.DmabufInfoArgs](),
		kfdabi.ReqImportDmabuf:        reflect.TypeFor[kfdabi.ImportDmabufArgs](),
		kfdabi.ReqExportDmabuf:        reflect.TypeFor[kfdabi.ExportDmabufArgs](),
		kfdabi.ReqSVM:                 reflect.TypeFor[kfdabi.SVMArgs](),
		kfdabi.ReqSetXnackMode:        reflect.TypeFor[kfdabi.SetXnackModeArgs](),
		kfdabi.ReqSetMemoryPolicy:     reflect.TypeFor[kfdabi.SetMemoryPolicyArgs](),
		kfdabi.ReqGetClockCounters:    reflect.TypeFor[kfdabi.ClockCountersArgs](),
		kfdabi.ReqGetProcessApertures: reflect.TypeFor[kfdabi.ProcessAperturesArgs](),
		kfdabi.ReqSetScratchBackingVA: reflect.TypeFor[kfdabi.SetScratchBackingVAArgs](),
		kfdabi.ReqGetTileConfig:       reflect.TypeFor[kfdabi.TileConfigArgs](),
		kfdabi.ReqSetTrapHandler:      reflect.TypeFor[kfdabi.SetTrapHandlerArgs](),
		kfdabi.ReqGetQueueWaveState:   reflect.TypeFor[kfdabi.QueueWaveStateArgs](),
	} {
		if int(of.Size()) != req.Size() {
			t.Errorf("%v carries %d bytes, %v has %d", req, req.Size(), of, of.Size())
		}
	}
}
