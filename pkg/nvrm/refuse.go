package nvrm

import (
	"errors"
	"io/fs"
	"regexp"
	"strings"

	"golang.org/x/sys/unix"
)

const leaveOut = "remove nvchannels from the config key mechanisms"

// vGPU matches names by NVIDIA's manual of vGPU, such as GRID A100-10C and NVIDIA H100-1-12CME. The
// public source does not have them.
var vGPU = regexp.MustCompile(`GRID|vGPU|-[0-9]+[ABCQ](ME)?$`)

// Refused returns why the channels of a host must not be set, and what to do; "" if nothing that
// its files and RM show prevents it.
func Refused(root fs.FS, sys Sys) (why, remedy string) {
	// osRmCapRegisterSmcPartition creates these; gpuN/mig is there without MIG, too.
	if instances, err := fs.Glob(root, "proc/driver/nvidia/capabilities/gpu*/mig/gi*"); err == nil && len(instances) > 0 {
		return "a GPU has MIG instances, which were not tried", "disable MIG, or " + leaveOut
	}
	gpus, err := GPUs(root)
	if err != nil {
		return "the GPUs of the driver are not known: " + err.Error(), ""
	}
	for _, g := range gpus {
		if vGPU.MatchString(g.Name) {
			return "GPU " + g.Name + " is a vGPU, whose channels the driver of the hypervisor has", leaveOut
		}
	}
	if servers, err := fs.Glob(root, "proc/[0-9]*/comm"); err == nil {
		for _, path := range servers {
			if comm, err := fs.ReadFile(root, path); err == nil && strings.HasPrefix(string(comm), "nvidia-cuda-mps") {
				return "MPS runs: its server owns the channels of all its clients", "stop MPS (echo quit | nvidia-cuda-mps-control), or " + leaveOut
			}
		}
	}
	// The known branches answer on all GPUs, with "off" before Hopper. A driver without the class
	// or the call is taken for one without the feature.
	cc, err := sys.Confidential()
	if err != nil && !errors.Is(err, InvalidClass) && !errors.Is(err, NotSupported) {
		return "it is not known whether confidential computing is on: " + err.Error(), "run as root, and allow the device " + ControlPath
	}
	// With protected PCIe, which MultiGPU shows, RM says that the feature is off
	// (confComputeApiCtrlCmdSystemGetCapabilities_IMPL).
	if cc.Feature != 0 || cc.DevTools != 0 || cc.MultiGPU != 0 {
		return "confidential computing is on, where nvchannels was not tried", leaveOut
	}
	return "", ""
}

// Confidential asks by a client of our own, which ends with the file. RM learns the state when the
// first GPU is opened.
func (kernel) Confidential() (p Confidential, err error) {
	fd, err := unix.Open(ControlPath, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return p, &fs.PathError{Op: "open", Path: ControlPath, Err: err}
	}
	defer unix.Close(fd)
	client, err := alloc(fd, 0, ClassRoot)
	if err != nil {
		return p, err
	}
	object, err := alloc(fd, client, ClassConfidential)
	if err == nil {
		err = control(fd, client, object, GetConfidential, Bytes(&p))
	}
	return p, err
}

// alloc creates a client, or an object below one. RM chooses the handle.
func alloc(fd int, client Handle, class Class) (Handle, error) {
	arg := nvos64{Root: client, Parent: client, Class: class}
	if err := call(fd, escAlloc, &arg); err != nil {
		return 0, err
	}
	if arg.Status != OK {
		return 0, arg.Status
	}
	return arg.New, nil
}
