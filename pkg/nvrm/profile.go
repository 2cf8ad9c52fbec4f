package nvrm

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
)

// Profile is what is known of a driver version.
type Profile struct {
	// Version is the version of the driver.
	Version string
	// Tag is the newest tag of the public source that was read for its branch.
	Tag string
	// Measured: the calls were made on a GPU with this branch.
	Measured bool
	// FirstObject is where CUDA's user-mode driver begins to count the handles of objects.
	FirstObject Handle
}

// profiles are the branches of the driver whose public source was compared: the structures used
// here are equal in all of them, byte for byte in the headers.
var profiles = map[int]Profile{
	570: {Tag: "570.211.01", FirstObject: firstObject},
	575: {Tag: "575.64.05", FirstObject: firstObject},
	580: {Tag: "580.142", FirstObject: firstObject, Measured: true},
	590: {Tag: "590.48.01", FirstObject: firstObject},
	595: {Tag: "595.45.04", FirstObject: firstObject},
}

const firstObject Handle = 0x5c000000

// versionFile is the file of the loaded driver.
const versionFile = "proc/driver/nvidia/version"

// ErrUnknownDriver reports a driver that this program must not use.
var ErrUnknownDriver = errors.New("this NVIDIA driver is not known")

// ReadProfile returns the profile of the loaded driver of a host. Errors: fs.ErrNotExist without
// a driver, ErrUnknownDriver.
func ReadProfile(root fs.FS) (Profile, error) {
	text, err := fs.ReadFile(root, versionFile)
	if err != nil {
		return Profile{}, err
	}
	return ParseVersion(string(text))
}

// ParseVersion returns the profile for the text of /proc/driver/nvidia/version.
func ParseVersion(text string) (Profile, error) {
	line, _, _ := strings.Cut(text, "\n")
	if !strings.Contains(line, "NVIDIA UNIX Open Kernel Module") {
		return Profile{}, fmt.Errorf("%w: %q is not the open kernel module: install that one", ErrUnknownDriver, clip(line))
	}
	for word := range strings.FieldsSeq(line) {
		branch, rest, dotted := strings.Cut(word, ".")
		n, err := strconv.Atoi(branch)
		if !dotted || err != nil || strings.Trim(rest, "0123456789.") != "" {
			continue
		}
		p, known := profiles[n]
		if !known {
			return Profile{}, fmt.Errorf("%w: the source of version %s was not compared; known branches are 570, 575, 580, 590 and 595", ErrUnknownDriver, clip(word))
		}
		p.Version = word
		return p, nil
	}
	return Profile{}, fmt.Errorf("%w: no version in %q", ErrUnknownDriver, clip(line))
}

func clip(s string) string { return s[:min(len(s), 120)] }

// Refused is RefusedBy for this host.
func Refused() (why, remedy string) { return RefusedBy(os.DirFS("/")) }

// RefusedBy returns why the channels of a host must not be set, and what to do; "" if nothing that
// its files show prevents it.
func RefusedBy(root fs.FS) (why, remedy string) {
	if instances, err := fs.Glob(root, "proc/driver/nvidia/capabilities/gpu*/mig/gi*"); err == nil && len(instances) > 0 {
		return "a GPU has MIG instances, which were not tried", "disable MIG, or remove nvchannels from the config key mechanisms"
	}
	gpus, err := GPUs(root)
	if err != nil {
		return "the GPUs of the driver are not known: " + err.Error(), ""
	}
	for _, g := range gpus {
		if strings.Contains(g.Name, "GRID") || strings.Contains(g.Name, "vGPU") {
			return "GPU " + g.Name + " is a vGPU, where the hypervisor's driver has the channels", "remove nvchannels from the config key mechanisms"
		}
	}
	if servers, err := fs.Glob(root, "proc/[0-9]*/comm"); err == nil {
		for _, path := range servers {
			if comm, err := fs.ReadFile(root, path); err == nil && strings.HasPrefix(string(comm), "nvidia-cuda-mps") {
				return "MPS runs: its server owns the channels of all its clients", "stop MPS (echo quit | nvidia-cuda-mps-control), or remove nvchannels from the config key mechanisms"
			}
		}
	}
	return "", ""
}
