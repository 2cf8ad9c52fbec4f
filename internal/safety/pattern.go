package safety

import "regexp"

// Pattern is a message of the amdgpu driver about a GPU that fails.
type Pattern struct {
	// Name is a stable word for the failure.
	Name string
	// Text is matched at the beginning of the driver's message. Names that programs
	// choose are further back in a message, so that they cannot match.
	Text string
	// Source has the kernel's functions that print it.
	Source string
	// Issue is a public report with such a line; "" for none.
	Issue string

	re *regexp.Regexp
}

// patterns are the messages of Linux 6.12 and 7.2, and where they differ those of older
// kernels. One failure often prints several of them. Not in the list: page faults and
// other errors of a program, and "Runlist is getting oversubscribed", because suspending
// reduces the oversubscription.
var patterns = compile([]Pattern{
	{
		Name: "mes-no-answer", Text: `MES(\([0-9, ]+\))? failed to respon(d to|se) msg=`,
		Source: "mes_v11_0_submit_pkt_and_poll_completion, and that of mes_v12_0 and mes_v12_1", Issue: "ROCm/legacy-rocm-build#6273",
	},
	{Name: "mes-ring-full", Text: `MES(\([0-9, ]+\))? ring buffer is full`, Source: "the same"},
	{
		Name: "mes-queue", Text: `failed to (add|remove) hardware queue (to|from) MES`,
		Source: "add_queue_mes, remove_queue_mes", Issue: "ROCm/legacy-rocm-build#5724",
	},
	{
		Name: "mes-unrecoverable", Text: `MES might be in unrecoverable state`,
		Source: "add_queue_mes, remove_queue_mes, suspend_all_queues_mes, resume_all_queues_mes", Issue: "ROCm/legacy-rocm-build#5724",
	},
	{Name: "mes-gangs", Text: `failed to (suspend|resume) gangs from MES`, Source: "suspend_all_queues_mes, resume_all_queues_mes"},
	{Name: "mes-legacy-queue", Text: `failed to (unmap|reset) legacy queue`, Source: "amdgpu_mes_unmap_legacy_queue, amdgpu_mes_reset_legacy_queue"},
	{Name: "mes-hung-queues", Text: `Failed to detect (and reset )?hung queues`, Source: "amdgpu_mes_detect_and_reset_hung_queues"},
	{Name: "mes-bad-queue", Text: `Removing bad queue failed`, Source: "kfd_dqm_suspend_bad_queue_mes"},
	{
		Name: "evict", Text: `Failed to evict (queue [0-9]|process queues|queues of )`,
		Source: "evict_process_queues_cpsch, kfd_process_evict_queues, evict_process_worker", Issue: "ROCm/legacy-rocm-build#5724",
	},
	{Name: "quiesce", Text: `Failed to quiesce KFD`, Source: "amdgpu_amdkfd_evict_userptr"},
	{Name: "suspend", Text: `Failed to suspend process `, Source: "suspend_queues, kfd_suspend_all_processes"},
	{
		Name: "remove-queue", Text: `([a-z_]+: )?Failed to remove queue [0-9]`,
		Source: "remove_all_kfd_queues_mes (remove_all_queues_mes in 6.12), process_termination_cpsch", Issue: "ROCm/legacy-rocm-build#5724",
	},
	{
		Name: "preemption-failed", Text: `(XCC [0-9]+: )?Queue preemption failed for queue`,
		Source: "kfd_check_hiq_mqd_doorbell_id",
	},
	{
		Name: "preemption-timeout", Text: `HIQ MQD's queue_doorbell_id[0-9] is not 0, Queue preemption time out`,
		Source: "unmap_queues_cpsch before 6.12",
	},
	{
		Name: "cp-preemption", Text: `cp queue (pipe [0-9]+ queue [0-9]+ preemption failed|preemption time out)`,
		Source: "kgd_gfx_v9_hqd_destroy, hqd_destroy_v10_3, hqd_destroy_v11 and the like", Issue: "ROCm/TheRock#5793",
	},
	{Name: "unmap", Text: `(unmap queue|destroy mqd) failed`, Source: "update_queue"},
	{Name: "fence-timeout", Text: `qcm fence wait loop timeout expired`, Source: "amdkfd_fence_wait_timeout"},
	{Name: "cp-unrecoverable", Text: `The cp might be in an unrecoverable state`, Source: "unmap_queues_cpsch"},
	{Name: "runlist", Text: `failed to execute runlist`, Source: "map_queues_cpsch"},
	{Name: "wave-reset", Text: `Resetting wave fronts \(`, Source: "process_termination_cpsch, destroy_queue_nocpsch_locked"},
	{Name: "queue-reset", Text: `queue id 0x[0-9a-f]+ at pasid (0x)?[0-9a-f]+ is reset`, Source: "set_queue_as_reset"},
	{Name: "ring-timeout", Text: `ring \S+ timeout, signaled seq=`, Source: "amdgpu_job_timedout"},
	{Name: "ring-reset", Text: `Ring \S+ reset failed`, Source: "amdgpu_job_timedout"},
	{Name: "gpu-reset", Text: `GPU (reset|jobs stop) begin!`, Source: "amdgpu_device_gpu_recover"},
	{Name: "gpu-reset-done", Text: `GPU reset(\([0-9]+\) (succeeded|failed)| end with ret = -)`, Source: "amdgpu_device_gpu_recover, amdgpu_device_sched_resume"},
	{Name: "recovery-failed", Text: `(GPU Recovery Failed: |ASIC reset failed with error)`, Source: "amdgpu_job_timedout, amdgpu_do_asic_reset"},
})

func compile(ps []Pattern) []Pattern {
	for i := range ps {
		ps[i].re = regexp.MustCompile("^(?:" + ps[i].Text + ")")
	}
	return ps
}

// prefix precedes the driver's message: dev_err with a GPU or with KFD's own device,
// pr_err, DRM_ERROR, drm_err. Kernels up to 6.12 and some later ones also have "amdgpu: "
// after the device; 7.2 does not.
var prefix = regexp.MustCompile(`^(?:` +
	`amdgpu ([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]): (?:amdgpu: )?(?:\[drm(?::\w[^\]]*(?: \[amdgpu\])?)?\] )?` +
	`|kfd kfd: (?:amdgpu: )?` +
	`|amdgpu: ` +
	`|\[drm:[^\] ]+ \[amdgpu\]\] ` +
	`)(?:\*ERROR\* )?`)

// match returns the pattern that a record of the kernel about amdgpu matches, and the PCI
// address in it; "" if it has none.
func match(r Record) (pattern *Pattern, address string) {
	if r.Facility != 0 {
		return nil, ""
	}
	m := prefix.FindStringSubmatch(r.Text)
	if m == nil {
		return nil, ""
	}
	for i := range patterns {
		if patterns[i].re.MatchString(r.Text[len(m[0]):]) {
			return &patterns[i], m[1]
		}
	}
	return nil, ""
}
