package nvrm

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
)

// branches are those of the driver whose public source was compared, up to the tags 570.211.01,
// 575.64.05, 580.142, 590.48.01 and 595.45.04: the structures used here are equal in all of them,
// byte for byte in the headers. On which of them the mechanism may be used is in the hazard table.
var branches = []string{"570", "575", "580", "590", "595"}

// versionFile is the file of the loaded driver.
const versionFile = "proc/driver/nvidia/version"

// ErrUnknownDriver reports a driver that this program must not use.
var ErrUnknownDriver = errors.New("this NVIDIA driver is not known")

// ReadVersion returns the version of the loaded driver of a host. Errors: fs.ErrNotExist without
// a driver, ErrUnknownDriver.
func ReadVersion(root fs.FS) (string, error) {
	text, err := fs.ReadFile(root, versionFile)
	if err != nil {
		return "", err
	}
	return ParseVersion(string(text))
}

// ParseVersion returns the version in the text of /proc/driver/nvidia/version.
func ParseVersion(text string) (string, error) {
	line, _, _ := strings.Cut(text, "\n")
	if !strings.Contains(line, "NVIDIA UNIX Open Kernel Module") {
		return "", fmt.Errorf("%w: %q is not the open kernel module: install that one", ErrUnknownDriver, clip(line))
	}
	for word := range strings.FieldsSeq(line) {
		branch, rest, dotted := strings.Cut(word, ".")
		if !dotted || branch == "" || strings.Trim(branch, "0123456789") != "" || strings.Trim(rest, "0123456789.") != "" {
			continue
		}
		if !slices.Contains(branches, branch) {
			return "", fmt.Errorf("%w: the source of version %s was not compared; known branches are %s", ErrUnknownDriver, clip(word), strings.Join(branches, ", "))
		}
		return word, nil
	}
	return "", fmt.Errorf("%w: no version in %q", ErrUnknownDriver, clip(line))
}

func clip(s string) string { return s[:min(len(s), 120)] }
