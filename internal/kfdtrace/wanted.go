package kfdtrace

import (
	"fmt"
	"path"
	"strings"
)

// driver is the kernel module that contains amdgpu and KFD.
const driver = "amdgpu"

// The groups of functions, in the order of a report.
const (
	GroupQueue     = "queue"     // from the ioctl to the device's queue manager
	GroupScheduler = "scheduler" // runlists and MES: what reaches the firmware
	GroupMQD       = "mqd"       // memory queue descriptors
	GroupProcess   = "process"   // /dev/kfd and evictions
	GroupOther     = "other"     // named in Options.Functions
)

var groups = []string{GroupQueue, GroupScheduler, GroupMQD, GroupProcess, GroupOther}

// wantedFunction is a function, or a pattern as of path.Match.
type wantedFunction struct {
	pattern string
	group   string
	module  string // "" for any, and for the kernel itself
}

// wantedEvent is a trace event by the names it has had, each SYSTEM:NAME, the latest
// first. SYSTEM alone is all its events.
type wantedEvent []string

// driverFunctions returns the functions of drivers/gpu/drm/amd/amdkfd that show what
// happens to queues. None of them runs more than a few times per queue operation,
// which keeps the buffer small: all of amdgpu would record every register access of
// the display.
func driverFunctions() []wantedFunction {
	var list []wantedFunction
	for _, g := range []struct{ group, patterns string }{
		{GroupQueue, `kfd_ioctl_create_queue kfd_ioctl_destroy_queue kfd_ioctl_update_queue kfd_ioctl_set_cu_mask kfd_ioctl_set_debug_trap
			pqm_create_queue pqm_destroy_queue pqm_update_queue_properties pqm_update_mqd
			create_queue_cpsch destroy_queue_cpsch create_queue_nocpsch destroy_queue_nocpsch update_queue suspend_queues resume_queues`},
		{GroupScheduler, `execute_queues_cpsch map_queues_cpsch unmap_queues_cpsch pm_send_*
			add_queue_mes remove_queue_mes suspend_all_queues_mes resume_all_queues_mes remove_all_queues_mes`},
		{GroupMQD, `allocate_mqd allocate_sdma_mqd init_mqd* load_mqd* kfd_load_mqd_* update_mqd* destroy_mqd* kfd_destroy_mqd_*
			free_mqd* kfd_free_mqd_* checkpoint_mqd* restore_mqd*`},
		{GroupProcess, `kfd_open kfd_release evict_process_worker restore_process_worker
			evict_process_queues_* restore_process_queues_* kfd_process_evict_queues kfd_process_restore_queues`},
	} {
		for pattern := range strings.FieldsSeq(g.patterns) {
			list = append(list, wantedFunction{pattern: pattern, group: g.group, module: driver})
		}
	}
	return list
}

// driverEvents returns the trace events of compute work. Those of amdkfd exist in
// AMD's own driver package only, those of gpu_scheduler were renamed in Linux 6.16.
func driverEvents() []wantedEvent {
	return []wantedEvent{
		{"amdkfd:kfd_evict_process_worker_start"},
		{"amdkfd:kfd_evict_process_worker_end"},
		{"amdkfd:kfd_restore_process_worker_start"},
		{"amdkfd:kfd_restore_process_worker_end"},
		{"amdkfd:kfd_kgd2kfd_schedule_evict_and_restore_process"},
		{"amdkfd:kfd_map_memory_to_gpu_start"},
		{"amdkfd:kfd_map_memory_to_gpu_end"},
		{"amdgpu:amdgpu_reset_reg_dumps"},
		{"amdgpu:amdgpu_pasid_allocated"},
		{"amdgpu:amdgpu_pasid_freed"},
		{"amdgpu:amdgpu_vm_flush"},
		{"amdgpu:amdgpu_bo_move"},
		{"amdgpu:amdgpu_iv"},
		{"amdgpu:amdgpu_cs_ioctl"},
		{"amdgpu:amdgpu_sched_run_job"},
		{"gpu_scheduler:drm_sched_job_queue", "gpu_scheduler:drm_sched_job"},
		{"gpu_scheduler:drm_sched_job_run", "gpu_scheduler:drm_run_job"},
		{"gpu_scheduler:drm_sched_job_done", "gpu_scheduler:drm_sched_process_job"},
		{"gpu_scheduler:drm_sched_job_unschedulable", "gpu_scheduler:drm_sched_job_wait_dep"},
	}
}

// wanted returns what the options select.
func wanted(o Options) (events []wantedEvent, functions []wantedFunction, err error) {
	if len(o.Events)+len(o.Functions) == 0 {
		return driverEvents(), driverFunctions(), nil
	}
	for _, name := range o.Events {
		system, event, both := strings.Cut(name, ":")
		if !isName(system) || both && !isName(event) {
			return nil, nil, &Error{
				Request: true,
				What:    fmt.Sprintf("invalid trace event %q", name),
				Next:    "use SYSTEM:EVENT, or SYSTEM for all its events, as in the file available_events of tracefs",
			}
		}
		events = append(events, wantedEvent{name})
	}
	for _, name := range o.Functions {
		if _, err := path.Match(name, ""); err != nil || strings.ContainsAny(name, "/ \t\n") || name == "" {
			return nil, nil, &Error{
				Request: true,
				What:    fmt.Sprintf("invalid kernel function %q", name),
				Next:    "use a name as in /proc/kallsyms; * and ? are wildcards",
			}
		}
		functions = append(functions, wantedFunction{pattern: name, group: GroupOther})
	}
	return events, functions, nil
}

// isName reports whether s can be a part of a path below events.
func isName(s string) bool {
	return s != "" && !strings.ContainsFunc(s, func(r rune) bool {
		return r != '_' && r != '-' && (r < '0' || r > '9') && (r < 'a' || r > 'z') && (r < 'A' || r > 'Z')
	})
}
