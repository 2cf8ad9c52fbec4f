package kfdtrace

import (
	"cmp"
	"fmt"
	"path"
	"slices"
	"strings"
)

// driver is the kernel module that holds amdgpu and KFD.
const driver = "amdgpu"

// The groups of functions, in the order of a report.
const (
	GroupQueue     = "queue"     // from the ioctl to the device's queue manager
	GroupScheduler = "scheduler" // runlists and MES: what reaches the firmware
	GroupMQD       = "mqd"       // memory queue descriptors
	GroupProcess   = "process"   // /dev/kfd and evictions
	GroupOther     = "other"     // named by the caller
)

var groups = []string{GroupQueue, GroupScheduler, GroupMQD, GroupProcess, GroupOther}

// wantedFunction is a function, or a pattern as of path.Match. The compiler may
// have put a suffix such as .constprop.0 behind the name.
type wantedFunction struct {
	pattern string
	group   string
	module  string // "" is any, and the kernel itself
}

// wantedEvent is a trace event by the names it had in the history of the kernel,
// each SYSTEM:NAME, the latest first. SYSTEM alone is all its events.
type wantedEvent []string

// driverFunctions are those of drivers/gpu/drm/amd/amdkfd that tell what becomes
// of queues. Not one of them runs more than a few times per queue operation, which
// is what keeps the buffer small: all of amdgpu (:mod:amdgpu) would record every
// register access of the display.
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

// driverEvents are the trace events that tell of compute work, the most telling
// first. Those of amdkfd exist in AMD's own driver package only, those of
// gpu_scheduler were renamed in Linux 6.16.
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

// namedEvents are those a person asked for.
func namedEvents(names []string) ([]wantedEvent, error) {
	var list []wantedEvent
	for _, name := range names {
		system, event, both := strings.Cut(name, ":")
		if !isName(system) || both && !isName(event) {
			return nil, &Error{
				Request: true,
				What:    fmt.Sprintf("%q is not the name of a trace event", name),
				Next:    "name it SYSTEM:EVENT, or SYSTEM for all its events, as in the file available_events of tracefs",
			}
		}
		list = append(list, wantedEvent{name})
	}
	return list, nil
}

// namedFunctions are those a person asked for, of any module.
func namedFunctions(names []string) ([]wantedFunction, error) {
	var list []wantedFunction
	for _, name := range names {
		if _, err := path.Match(name, ""); err != nil || strings.ContainsAny(name, "/ \t\n") || name == "" {
			return nil, &Error{
				Request: true,
				What:    fmt.Sprintf("%q is not the name of a kernel function", name),
				Next:    "name it as in the file available_filter_functions of tracefs; * and ? are wildcards",
			}
		}
		list = append(list, wantedFunction{pattern: name, group: GroupOther})
	}
	return list, nil
}

// isName tells a name that can be part of a path below events.
func isName(s string) bool {
	return s != "" && !strings.ContainsFunc(s, func(r rune) bool {
		return r != '_' && r != '-' && (r < '0' || r > '9') && (r < 'a' || r > 'z') && (r < 'A' || r > 'Z')
	})
}

// maxFunctions is how many functions one recording takes: more would change the
// timing of what is measured.
const maxFunctions = 500

// function is one found in the kernel. Static functions may share a name: each
// has its own entry.
type function struct {
	symbol  string // as the kernel lists it, such as execute_queues_cpsch.constprop.0
	module  string // "" is the kernel itself
	group   string
	index   int    // its line in available_filter_functions, from 1
	address uint64 // of its first instruction; 0 is unknown
}

// name is the function's name in the source.
func (f *function) name() string { return baseName(f.symbol) }

func baseName(symbol string) string {
	name, _, _ := strings.Cut(symbol, ".")
	return name
}

// chooser picks what is wanted out of a list of the kernel's functions.
type chooser struct {
	want  []wantedFunction
	exact map[string]int // the place in want of those without wildcards
	globs []int          // the place in want of those with
	hit   []bool
	found []function
}

func newChooser(want []wantedFunction) *chooser {
	c := &chooser{want: want, exact: map[string]int{}, hit: make([]bool, len(want))}
	for i, w := range want {
		if strings.ContainsAny(w.pattern, "*?[\\") {
			c.globs = append(c.globs, i)
		} else {
			c.exact[w.pattern] = i
		}
	}
	return c
}

// see takes one of the kernel's functions if it is wanted.
func (c *chooser) see(f function) {
	// Parts of a function that the compiler moved away are no calls of it.
	if strings.Contains(f.symbol, ".part.") || strings.Contains(f.symbol, ".cold") {
		return
	}
	name := f.name()
	i, ok := c.exact[name]
	for n := 0; !ok && n < len(c.globs); n++ {
		i = c.globs[n]
		ok, _ = path.Match(c.want[i].pattern, name) // the patterns are good
	}
	if !ok || c.want[i].module != "" && c.want[i].module != f.module {
		return
	}
	f.group = c.want[i].group
	c.hit[i] = true
	c.found = append(c.found, f)
}

// missing are the patterns that met no function.
func (c *chooser) missing() []string {
	var list []string
	for i, w := range c.want {
		if !c.hit[i] {
			list = append(list, w.pattern)
		}
	}
	return list
}

// compareGroups orders by group, as in a report.
func compareGroups(a, b string) int {
	return cmp.Compare(slices.Index(groups, a), slices.Index(groups, b))
}
