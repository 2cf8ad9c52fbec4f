package nvrm

import (
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"strings"
)

// Profile is what is known of a driver version.
type Profile struct {
	// Version is the version of the driver.
	Version string
	// Tag is the newest tag of the public source that was read for its branch.
	Tag string
	// FirstObject is where CUDA's user-mode driver begins to count the handles of objects.
	FirstObject Handle
}

// profiles are the branches of the driver whose public source was compared: the structures used
// here are equal in all of them, byte for byte in the headers. On which of them the mechanism may be
// used is in the hazard table.
var profiles = map[int]Profile{
	570: {Tag: "570.211.01", FirstObject: firstObject},
	575: {Tag: "575.64.05", FirstObject: firstObject},
	580: {Tag: "580.142", FirstObject: firstObject},
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
