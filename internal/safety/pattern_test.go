package safety

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
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
		{"amdgpu 0000:c5:00.0: failed to remove queue from MES, doorbell=0x1802", "mes-queue", gpu},
		{"amdgpu 0000:c5:00.0: amdgpu: Suspending all queues failed", "mes-gangs", gpu},
		{"amdgpu 0000:c5:00.0: failed to reset user queue", "mes-legacy-queue", gpu},
		{"kfd kfd: Error resetting queue", "mes-bad-queue", ""},
		{"[drm:amdgpu_mes_reg_write_reg_wait [amdgpu]] *ERROR* failed to reg_write_reg_wait", "mes-request", ""},
		{"[drm:mes_userq_preempt [amdgpu]] *ERROR* Failed to suspend gang: -110", "user-queue", ""},
		{"amdgpu 0000:c5:00.0: timeout waiting for kiq fence", "kiq-no-answer", gpu},
		{"amdgpu 0000:c5:00.0: amdgpu: timeout: rlcg faled to program reg: 0x0c5f4", "rlcg-no-answer", gpu},
		{"amdgpu 0000:c5:00.0: [drm:amdgpu_ring_test_helper [amdgpu]] *ERROR* ring kiq_2.1.0 test failed (-110)", "ring-test", gpu},
		{"[drm:gfx_v9_0_ring_test_ib [amdgpu]] *ERROR* amdgpu: IB test timed out", "ring-test", ""},
		{"amdgpu 0000:c5:00.0: amdgpu: couldn't schedule ib on ring <sdma0>", "ring-off", gpu},
		{"amdgpu: Failed to restore process queues", "restore", ""},
		{"amdgpu: Failed to restore queues of process pid 4242", "restore", ""},
		{"amdgpu: amdgpu_amdkfd_restore_userptr_worker: Failed to resume KFD", "resume", ""},
		{"amdgpu 0000:c5:00.0: add_all_kfd_queues_mes: Failed to add queue 0 for dev 64667", "add-queue", gpu},
		{"amdgpu: Pasid 0x8002 destroy queue 0 failed, ret -5", "destroy-queue", ""},
		{"amdgpu 0000:c5:00.0: amdgpu: Error starting queue manager for device 1002:74a1", "scheduler-start", gpu},
		{"amdgpu 0000:c5:00.0: amdgpu: Queues reset on process python3 tid 12 thread python3 pid 12", "process-reset", gpu},
		{"amdgpu 0000:c5:00.0: amdgpu: fail to wait on hqd deactive", "hqd-stuck", gpu},
		{"amdgpu 0000:c5:00.0: amdgpu: Timeout waiting for VM flush hub: 0!", "tlb-flush", gpu},
		{"amdgpu 0000:c5:00.0: Failed to reset SDMA logical instance 3", "sdma-reset", gpu},
		{"amdgpu 0000:c5:00.0: Starting gfx_v12_0 IP block soft reset", "soft-reset", gpu},
		{"amdgpu 0000:c5:00.0: [drm] device wedged, but recovered through reset", "device-wedged", gpu},
		{"amdgpu 0000:c5:00.0: amdgpu: suspend of IP block <mes_v11_0> failed -110", "ip-block", gpu},
		{"amdgpu 0000:c5:00.0: amdgpu: device lost from bus!", "bus", gpu},
		{"amdgpu 0000:c5:00.0: SMU: No response msg_reg: 26 resp_reg: 0", "smu", gpu},
		{"amdgpu: [powerplay] No response from smu", "smu", ""},
		{"amdgpu 0000:c5:00.0: psp reg (0x16080) wait timed out, mask: 80000000, read: 0 exp: 80000000", "psp", gpu},
		{"amdgpu 0000:c5:00.0: amdgpu: ERROR: GPU HW Critical Temperature Fault(aka CTF) detected!", "overheated", gpu},
		{"amdgpu 0000:c5:00.0: {1}uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!", "ras-fatal", gpu},
		{"amdgpu 0000:c5:00.0: {7} Uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!", "ras-fatal", gpu},
		{"amdgpu 0000:c5:00.0: amdgpu: {4}poison is consumed by client 22, kick off gpu reset flow", "ras-poison", gpu},
		{"amdgpu 0000:c5:00.0: {7} GPU reset for gfx RAS poison consumption is issued!", "ras-poison", gpu},
		{"amdgpu 0000:c5:00.0: {5}socket: 0, die: 1, 2 new uncorrectable hardware errors detected in umc block", "ras-uncorrectable", gpu},
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
		"amdgpu 0000:c5:00.0: {5}socket: 0, die: 1, 2 new correctable hardware errors detected in umc block",
		"amdgpu 0000:c5:00.0: {5}socket: 0, die: 1, 2 new deferred hardware errors detected in umc block",
		"amdgpu 0000:c5:00.0: {5}socket: 0, die: 1, 9 uncorrectable hardware errors detected in total in umc block",
		"amdgpu 0000:c5:00.0: {6}Poison is created",
		"amdgpu 0000:c5:00.0: SMU: I'm very busy msg_reg: 26 resp_reg: fc",
		"amdgpu 0000:c5:00.0: amdgpu: Failed to send message 0x26, response 0xfe",
		"amdgpu: Failed to restore queue (-22)",                 // of CRIU
		"amdgpu: Pasid 0x8002 destroy queue 0 failed, ret -512", // a signal while the queue is suspended
		"amdgpu: Pasid 0x8002 destroy queue 0 failed, ret -16",
		"amdgpu 0000:c5:00.0: amdgpu: WARN: GPU is throttled, expect performance decrease. thermal.",
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

// reports returns the directory of kernel logs of public reports, which is not part of this
// repository.
func reports(t *testing.T) string {
	t.Helper()
	dirs := []string{os.Getenv("GPREEMPT_KERNEL_LOGS")}
	for up := ""; len(dirs) < 7; up = filepath.Join(up, "..") {
		dirs = append(dirs, filepath.Join(up, "shared", "findings", "inputs"))
	}
	for _, dir := range dirs {
		if _, err := os.Stat(dir); dir != "" && err == nil {
			return dir
		}
	}
	t.Skip("no logs of public reports here: set GPREEMPT_KERNEL_LOGS to their directory")
	return ""
}

// In these logs ! precedes a line that must raise an alarm, and the others must not.
func TestLinesOfPublicReportsAreRecognised(t *testing.T) {
	dir := reports(t)
	stamp := regexp.MustCompile(`^\[[0-9.]+\] `)
	for name, want := range map[string]int{
		"k02-gfx1151-suspend-all.txt": 8, "k03-restore-fails.txt": 9, "k04-old-wording.txt": 5, "k05-mes-misc.txt": 8, "k07-linux73-wording.txt": 9,
	} {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		raised := 0
		for line := range strings.Lines(string(data)) {
			stamped := strings.TrimSuffix(line, "\n")
			text := stamp.ReplaceAllString(stamped, "")
			if text == stamped {
				continue // a comment
			}
			text, alarm := strings.CutPrefix(text, "!")
			p, _ := match(Record{Text: text})
			if (p != nil) != alarm {
				t.Errorf("%s: %q raises an alarm: %t, want %t", name, text, p != nil, alarm)
			}
			if p != nil {
				raised++
			}
		}
		if raised != want {
			t.Errorf("%s: %d alarms, want %d", name, raised, want)
		}
	}
}
