package daemon

import (
	"io/fs"
	"os"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/emu/nvrmtest"
	"github.com/gpreempt/gpreempt/internal/safety"
	"github.com/gpreempt/gpreempt/pkg/nvrm"
)

// nvidiaHost returns the files of a host with GPUs of NVIDIA.
func nvidiaHost(version string, models ...string) fstest.MapFS {
	files := fstest.MapFS{
		"proc/sys/kernel/osrelease":  {Data: []byte("6.12.0\n")},
		"proc/driver/nvidia/version": {Data: []byte("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  " + version + "  Release Build\n")},
		"sys/module/nvidia/version":  {Data: []byte(version + "\n")},
		"proc/driver/nvidia/gpus":    {Mode: fs.ModeDir},
	}
	for i, model := range models {
		files["proc/driver/nvidia/gpus/0000:0"+string(rune('1'+i))+":00.0/information"] = &fstest.MapFile{Data: []byte("Model: \t\t " + model + "\n")}
	}
	return files
}

func TestDoctorSaysWhatPreventsTheUseOfNVIDIAsGPUs(t *testing.T) {
	type row struct {
		Found, Remedy string
		Usable        bool
	}
	const (
		leaveOut = "remove nvchannels from the config key mechanisms"
		risk     = ". If gpreemptd and its supervisor both die, processes stay suspended until gpreemptd --cleanup"
		why      = ", hazard nvidia-unmeasured: The mechanism never ran on such a GPU with such a driver: at most the driver's public source was compared. The driver does not resume a process when gpreemptd dies."
		try      = "Run the test pkg/nvrm.TestTheDriverBehavesAsExpected with a job on a spare GPU (docs/nvidia.md); if it succeeds, allow the driver and the GPU with a row in safety.hazards."
	)
	site, err := safety.Parse("site", []byte("- {id: here, nvidia: \"=575\", model: [A100], action: allow, why: Tested.}\n- {id: one, nvidia: \"=580\", model: [H100], action: limit, why: Ours.}\n"))
	if err != nil {
		t.Fatal(err)
	}
	mig := nvidiaHost("580.159.04", "NVIDIA H200")
	mig["proc/driver/nvidia/capabilities/gpu0/mig/gi1/access"] = &fstest.MapFile{}
	mps := nvidiaHost("580.159.04", "NVIDIA H200")
	mps["proc/9/comm"] = &fstest.MapFile{Data: []byte("nvidia-cuda-mps\n")}
	for name, tt := range map[string]struct {
		root fs.FS
		cc   nvrm.Confidential
		err  error
		rows []safety.Row
		want row
	}{
		"measured":     {root: nvidiaHost("580.159.04", "NVIDIA H200", "NVIDIA H200"), want: row{"driver 580.159.04, GPUs: NVIDIA H200, NVIDIA H200" + risk, "", true}},
		"other driver": {root: nvidiaHost("595.45.04", "NVIDIA H200"), want: row{"driver 595.45.04, GPUs: NVIDIA H200 (denied: NVIDIA H200 with driver 595.45.04" + why + ")" + risk, try, false}},
		"other GPU": {
			root: nvidiaHost("580.159.04", "NVIDIA A100", "NVIDIA H200"),
			want: row{"driver 580.159.04, GPUs: NVIDIA A100 (denied: NVIDIA A100 with driver 580.159.04" + why + "), NVIDIA H200" + risk, try, true},
		},
		"a row of the site": {root: nvidiaHost("575.64.05", "NVIDIA A100"), rows: site, want: row{"driver 575.64.05, GPUs: NVIDIA A100" + risk, "", true}},
		"limited":           {root: nvidiaHost("580.159.04", "NVIDIA H100"), rows: site, want: row{"driver 580.159.04, GPUs: NVIDIA H100" + risk, "", true}},
		"no GPU":            {root: nvidiaHost("580.159.04"), want: row{"the NVIDIA driver has no GPU", "see dmesg | grep NVRM", false}},
		"no driver":         {root: fstest.MapFS{}, want: row{"the NVIDIA driver is not loaded", "load a known version of NVIDIA's open kernel module, or " + leaveOut, false}},
		"unknown driver": {root: nvidiaHost("600.1", "NVIDIA H200"), want: row{
			"this NVIDIA driver is not known: the source of version 600.1 was not compared; known branches are 570, 575, 580, 590, 595",
			"load a known version of NVIDIA's open kernel module, or " + leaveOut, false,
		}},
		"MIG":  {root: mig, want: row{"a GPU has MIG instances, which were not tried", "disable MIG, or " + leaveOut, false}},
		"MPS":  {root: mps, want: row{"MPS runs: its server owns the channels of all its clients", "stop MPS (echo quit | nvidia-cuda-mps-control), or " + leaveOut, false}},
		"vGPU": {root: nvidiaHost("580.159.04", "NVIDIA H100-20C"), want: row{"GPU NVIDIA H100-20C is a vGPU, whose channels the driver of the hypervisor has", leaveOut, false}},
		"confidential computing": {
			root: nvidiaHost("580.159.04", "NVIDIA H200"), cc: nvrm.Confidential{Feature: 2},
			want: row{"confidential computing is on, where nvchannels was not tried", leaveOut, false},
		},
		"no rights": {
			root: nvidiaHost("580.159.04", "NVIDIA H200"), err: &fs.PathError{Op: "open", Path: nvrm.ControlPath, Err: os.ErrPermission},
			want: row{"it is not known whether confidential computing is on: open /dev/nvidiactl: permission denied", "run as root, and allow the device /dev/nvidiactl", false},
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := nvrmtest.New()
			m.SetConfidential(tt.cc, tt.err)
			var got row
			got.Found, got.Remedy, got.Usable = examineNVIDIA(tt.root, m.Sys(), tt.rows)
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
