package nvrm_test

import (
	"io/fs"
	"os"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/emu/nvrmtest"
	"github.com/gpreempt/gpreempt/pkg/nvrm"
)

func TestHostsWhereChannelsMustNotBeDisabledAreRefused(t *testing.T) {
	type refusal struct{ Why, Remedy string }
	const (
		leaveOut = "remove nvchannels from the config key mechanisms"
		asRoot   = "run as root, and allow the device /dev/nvidiactl"
		instance = "proc/driver/nvidia/capabilities/gpu1/mig/gi7/access"
	)
	secret := refusal{"confidential computing is on, where nvchannels was not tried", leaveOut}
	noRights := &fs.PathError{Op: "open", Path: nvrm.ControlPath, Err: os.ErrPermission}
	vGPU := func(name string) refusal {
		return refusal{"GPU " + name + " is a vGPU, whose channels the driver of the hypervisor has", leaveOut}
	}
	for name, tt := range map[string]struct {
		file, comm, model string
		cc                nvrm.Confidential
		err               error
		want              refusal
	}{
		"a whole GPU":             {file: "proc/driver/nvidia/capabilities/gpu0/mig", comm: "nvidia-persiste\n", model: "NVIDIA A100-SXM4-80GB"},
		"MIG instances":           {file: instance, want: refusal{"a GPU has MIG instances, which were not tried", "disable MIG, or " + leaveOut}},
		"MPS":                     {comm: "nvidia-cuda-mps\n", want: refusal{"MPS runs: its server owns the channels of all its clients", "stop MPS (echo quit | nvidia-cuda-mps-control), or " + leaveOut}},
		"a vGPU":                  {model: "NVIDIA H100-20C", want: vGPU("NVIDIA H100-20C")},
		"a vGPU of an instance":   {model: "NVIDIA A100-1-5CME", want: vGPU("NVIDIA A100-1-5CME")},
		"a vGPU by an older name": {model: "GRID T4", want: vGPU("GRID T4")},
		"confidential computing":  {cc: nvrm.Confidential{Feature: 2, Environment: 2}, want: secret},
		"developers' tools":       {cc: nvrm.Confidential{DevTools: 1}, want: secret},
		"protected PCIe":          {cc: nvrm.Confidential{MultiGPU: 1}, want: secret},
		"a host that could":       {cc: nvrm.Confidential{CPU: 1, GPUs: 2}},
		"no such class":           {err: nvrm.InvalidClass},
		"no such call":            {err: nvrm.NotSupported},
		"another status":          {err: nvrm.GPUIsLost, want: refusal{"it is not known whether confidential computing is on: RM status GPU_IS_LOST", asRoot}},
		"no rights":               {err: noRights, want: refusal{"it is not known whether confidential computing is on: open /dev/nvidiactl: permission denied", asRoot}},
	} {
		t.Run(name, func(t *testing.T) {
			root := fstest.MapFS{
				"proc/7/comm": {Data: []byte(tt.comm)},
				"proc/driver/nvidia/gpus/0000:01:00.0/information": {Data: []byte("Model: \t\t " + tt.model + "\n")},
			}
			if tt.file != "" {
				root[tt.file] = &fstest.MapFile{}
			}
			m := nvrmtest.New()
			m.SetConfidential(tt.cc, tt.err)
			var got refusal
			got.Why, got.Remedy = nvrm.Refused(root, m.Sys())
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
