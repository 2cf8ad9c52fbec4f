package safety

import (
	"testing"
)

// The lines have the driver's formats, with the prefixes of kernels from 6.1 to 7.2.
func TestLinesOfTheDriverAreRecognised(t *testing.T) {
	const gpu = "0000:c5:00.0"
	tests := []struct{ line, pattern, address string }{
		{"amdgpu 0000:c5:00.0: amdgpu: MES failed to respond to msg=REMOVE_QUEUE", "mes-no-answer", gpu},
		{"amdgpu 0000:c5:00.0: MES failed to respond to msg=MISC (WAIT_REG_MEM)", "mes-no-answer", gpu},
		{"amdgpu 0000:c5:00.0: amdgpu: MES(1) failed to respond to msg=INVALIDATE_TLBS", "mes-no-answer", gpu},
		{"amdgpu 0000:c5:00.0: MES(0, 1) failed to respond to msg=22", "mes-no-answer", gpu},
		{"[drm:mes_v11_0_submit_pkt_and_poll_completion.constprop.0 [amdgpu]] *ERROR* MES failed to response msg=3", "mes-no-answer", ""},
		{"amdgpu 0000:c5:00.0: amdgpu: MES ring buffer is full.", "mes-ring-full", gpu},
		{"amdgpu 0000:c5:00.0: MES(0, 0) ring buffer is full.", "mes-ring-full", gpu},
		{"amdgpu 0000:c5:00.0: amdgpu: failed to remove hardware queue from MES, doorbell=0x1802", "mes-queue", gpu},
		{"amdgpu 0000:c5:00.0: amdgpu: failed to add hardware queue to MES, doorbell=0x1006", "mes-queue", gpu},
		{"amdgpu 0000:c5:00.0: amdgpu: MES might be in unrecoverable state, issue a GPU reset", "mes-unrecoverable", gpu},
		{"amdgpu 0000:c5:00.0: amdgpu: failed to suspend gangs from MES", "mes-gangs", gpu},
		{"amdgpu 0000:c5:00.0: amdgpu: failed to unmap legacy queue", "mes-legacy-queue", gpu},
		{"[drm:amdgpu_mes_reset_legacy_queue [amdgpu]] *ERROR* failed to reset legacy queue", "mes-legacy-queue", ""},
		{"amdgpu 0000:c5:00.0: Failed to detect and reset hung queues", "mes-hung-queues", gpu},
		{"amdgpu 0000:c5:00.0: Failed to detect hung queues", "mes-hung-queues", gpu},
		{"amdgpu 0000:c5:00.0: amdgpu: Removing bad queue failed", "mes-bad-queue", gpu},
		{"amdgpu 0000:c5:00.0: amdgpu: Failed to evict queue 1", "evict", gpu},
		{"amdgpu 0000:c5:00.0: amdgpu: Failed to evict process queues", "evict", gpu},
		{"amdgpu: Failed to evict process queues", "evict", ""},
		{"amdgpu: Failed to evict queues of pasid 0x8003", "evict", ""},
		{"amdgpu: Failed to evict queues of process pid 2439413", "evict", ""},
		{"amdgpu: Failed to quiesce KFD", "quiesce", ""},
		{"amdgpu 0000:c5:00.0: amdgpu: Failed to suspend process queues.", "suspend", gpu},
		{"amdgpu: Failed to suspend process pid 14368", "suspend", ""},
		{"amdgpu 0000:c5:00.0: amdgpu: remove_all_kfd_queues_mes: Failed to remove queue 0 for dev 64667", "remove-queue", gpu},
		{"amdgpu 0000:c5:00.0: amdgpu: Failed to remove queue 2", "remove-queue", gpu},
		{"amdgpu 0000:c5:00.0: amdgpu: Queue preemption failed for queue with doorbell_id: 1006", "preemption-failed", gpu},
		{"amdgpu 0000:c5:00.0: amdgpu: XCC 3: Queue preemption failed for queue with doorbell_id: 80004008", "preemption-failed", gpu},
		{"amdgpu 0000:c5:00.0: amdgpu: HIQ MQD's queue_doorbell_id0 is not 0, Queue preemption time out", "preemption-timeout", gpu},
		{"amdgpu: cp queue pipe 1 queue 3 preemption failed", "cp-preemption", ""},
		{"amdgpu: cp queue preemption time out.", "cp-preemption", ""},
		{"amdgpu 0000:c5:00.0: amdgpu: unmap queue failed", "unmap", gpu},
		{"amdgpu 0000:c5:00.0: amdgpu: destroy mqd failed", "unmap", gpu},
		{"amdgpu 0000:c5:00.0: qcm fence wait loop timeout expired", "fence-timeout", gpu},
		{"amdgpu: qcm fence wait loop timeout expired", "fence-timeout", ""},
		{"kfd kfd: amdgpu: qcm fence wait loop timeout expired", "fence-timeout", ""},
		{"amdgpu 0000:c5:00.0: amdgpu: The cp might be in an unrecoverable state due to an unsuccessful queues preemption", "cp-unrecoverable", gpu},
		{"amdgpu 0000:c5:00.0: amdgpu: failed to execute runlist", "runlist", gpu},
		{"amdgpu: Resetting wave fronts (cpsch) on dev 00000000e2b0f6a1", "wave-reset", ""},
		{"amdgpu 0000:c5:00.0: amdgpu: queue id 0x3 at pasid 0x8003 is reset", "queue-reset", gpu},
		{"amdgpu 0000:c5:00.0: queue id 0x3 at pasid 32771 is reset", "queue-reset", gpu},
		{"amdgpu 0000:c5:00.0: amdgpu: ring gfx_0.0.0 timeout, signaled seq=2662395, emitted seq=2662397", "ring-timeout", gpu},
		{"amdgpu 0000:c5:00.0: amdgpu: Ring gfx_0.0.0 reset failed", "ring-reset", gpu},
		{"amdgpu 0000:c5:00.0: amdgpu: GPU reset begin!", "gpu-reset", gpu},
		{"amdgpu 0000:c5:00.0: amdgpu: GPU reset begin!. Source:  3", "gpu-reset", gpu},
		{"amdgpu 0000:c5:00.0: GPU jobs stop begin!. Source:  3", "gpu-reset", gpu},
		{"amdgpu 0000:c5:00.0: amdgpu: GPU reset(2) succeeded!", "gpu-reset-done", gpu},
		{"amdgpu 0000:c5:00.0: amdgpu: GPU reset(3) failed", "gpu-reset-done", gpu},
		{"amdgpu 0000:c5:00.0: amdgpu: GPU reset end with ret = -62", "gpu-reset-done", gpu},
		{"amdgpu 0000:c5:00.0: amdgpu: GPU Recovery Failed: -62", "recovery-failed", gpu},
		{"amdgpu 0000:c5:00.0: [drm] *ERROR* ASIC reset failed with error, -62 for drm dev, 0000:c5:00.0", "recovery-failed", gpu},
		{"amdgpu 0000:c5:00.0: [drm:amdgpu_do_asic_reset [amdgpu]] *ERROR* GPU Recovery Failed: -62", "recovery-failed", gpu},
		{"amdgpu 10000:c5:00.7: amdgpu: GPU reset begin!", "gpu-reset", "10000:c5:00.7"},
	}
	seen := map[string]bool{}
	for _, tt := range tests {
		p, address := match(Record{Text: tt.line})
		if p == nil {
			t.Errorf("%q is not recognised", tt.line)
			continue
		}
		seen[p.Name] = true
		if p.Name != tt.pattern || address != tt.address {
			t.Errorf("%q is %s of %q, want %s of %q", tt.line, p.Name, address, tt.pattern, tt.address)
		}
	}
	for _, p := range patterns {
		if !seen[p.Name] {
			t.Errorf("no line for pattern %s", p.Name)
		}
	}
}

func TestOtherLinesRaiseNoAlarm(t *testing.T) {
	for _, line := range []string{
		"",
		"amdgpu 0000:c5:00.0: amdgpu: ring mes_kiq_3.1.0 uses VM inv eng 13 on hub 0",
		"amdgpu 0000:c5:00.0: amdgpu: [gfxhub] page fault (src_id:0 ring:169 vmid:0 pasid:0)",
		// The fault of a program (gmc_v9_0_process_interrupt), as a stage of the acceptance makes one.
		"amdgpu 0000:0a:00.0: amdgpu: [gfxhub0] no-retry page fault (src_id:0 ring:24 vmid:8 pasid:32770)",
		"amdgpu 0000:0a:00.0: amdgpu:  for process gpreemptd pid 4242 thread gpreemptd pid 4242",
		"amdgpu 0000:0a:00.0: amdgpu:   in page starting at address 0x00007f1234560000 from IH client 0x1b (UTCL2)",
		"amdgpu 0000:0a:00.0: amdgpu:   cookie node_id 0 fault from die AID0.XCD0",
		"amdgpu 0000:0a:00.0: amdgpu: VM_L2_PROTECTION_FAULT_STATUS:0x00801031",
		"amdgpu 0000:0a:00.0: amdgpu: \t Faulty UTCL2 client ID: TCP (0x8)",
		"amdgpu 0000:0a:00.0: amdgpu: \t MORE_FAULTS: 0x1",
		"amdgpu 0000:0a:00.0: amdgpu: \t PERMISSION_FAULTS: 0x3",
		"amdgpu 0000:c5:00.0: amdgpu: ring gfx_0.0.0 timeout, but soft recovered",
		"amdgpu 0000:c5:00.0: amdgpu: Ring gfx_0.0.0 reset succeeded",
		"amdgpu 0000:c5:00.0: amdgpu: GPU reset end with ret = 0",
		"amdgpu: Runlist is getting oversubscribed. Expect reduced ROCm performance.",
		// Another driver, or a text in the wrong place: processes and files can have any
		// name.
		"nouveau 0000:c5:00.0: GPU reset begin!",
		"[drm] *ERROR* GPU Recovery Failed: -62",
		"MES failed to respond to msg=REMOVE_QUEUE",
		"amdgpu 0000:c5:00.0: amdgpu:  Process GPU reset begin! pid 1 thread MES failed to respond to msg=1 pid 1",
		"process '/tmp/amdgpu: GPU reset begin!' started with executable stack",
		"amdgpu: GPU res[1]: segfault at 0 ip 0 sp 0 error 4 in GPU reset begin![0+1000]",
		"x amdgpu: GPU reset begin!",
		"12345678GPU reset begin! amdgpu: ",
		"x\namdgpu: GPU reset begin!",
	} {
		if p, _ := match(Record{Text: line}); p != nil {
			t.Errorf("%q is %s", line, p.Name)
		}
	}
}

func TestLinesOfProgramsRaiseNoAlarm(t *testing.T) {
	for facility := range uint32(32) {
		p, _ := match(Record{Facility: facility, Text: "amdgpu 0000:c5:00.0: amdgpu: GPU reset begin!"})
		if (p != nil) != (facility == 0) {
			t.Errorf("facility %d: alarm %t", facility, p != nil)
		}
	}
}
