package kfd

import (
	"errors"
	"fmt"
	"slices"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Version is the version of the ioctl interface, as returned by GET_VERSION.
type Version struct {
	Major uint32
	Minor uint32
}

// String returns "major.minor".
func (v Version) String() string { return fmt.Sprintf("%d.%d", v.Major, v.Minor) }

// ErrVersion reports a driver whose interface this package does not support.
var ErrVersion = errors.New("KFD interface not supported")

// PermissionRule is the driver's rule about debuggers of other processes
// (kfd_ioctl_set_debug_trap), as Device.ProbePermissionRule finds it. A caller that follows
// PermissionThread, the stricter one, is allowed under both.
type PermissionRule uint8

// The rules.
const (
	// PermissionUnknown means that the rule could not be determined.
	PermissionUnknown PermissionRule = iota
	// PermissionThread: only the OS thread that traces (ptrace) the target's main thread,
	// for every operation except DISABLE, which any process may call. Linux 6.5 to
	// 6.12.102, and later up to 7.2 without a backport of the other rule.
	PermissionThread
	// PermissionProcess: that thread, or any thread of the process that enabled debugging
	// last, tracing or not, for every operation. Linux 6.12.103, 7.2.
	PermissionProcess
)

// String returns a word for the rule.
func (r PermissionRule) String() string {
	return gpreempt.Word(r, "rule", "unknown", "thread", "process")
}

// profiles are the known lines of drivers of major version 1, the oldest first, each from one minor
// version through another. Versions between them are unknown. A new version is a new row here and a
// layout file in testdata. A line does not tell the PermissionRule: stable releases changed it
// within one version, 6.12.103 for one.
var profiles = []struct {
	name          string
	from, through uint32
}{
	// The first with DBG_TRAP in this form. Nothing that this package uses changed up to 1.16.
	{"6.5", 13, 16},
	{"6.12", 17, 17},
	// AMD's package reports 1.18 with 6.12's debug structures. Debugging may fail with EBUSY while
	// its PC sampler is active. AMD's older packages, before 1.13, have a DBG_TRAP of another form
	// under another number, and are refused.
	{"amd-dkms", 18, 18},
	// 7.3 has the same version and the same headers. What it changed is nothing that this package
	// depends on: see GraceMin.
	{"7.2", 23, 23},
}

// ProfileFor returns the line of a driver by its first kernel, or amd-dkms for AMD's own package.
// For an unknown minor version it is the nearest older one, with a warning for the operator.
// Another major version, or one older than 1.13, which has no DBG_TRAP, is an error that wraps
// ErrVersion.
func ProfileFor(v Version) (name, warning string, err error) {
	if v.Major != 1 {
		return "", "", fmt.Errorf("%w: version %v; 1.13 and later minor versions of 1 are supported", ErrVersion, v)
	}
	for _, p := range slices.Backward(profiles) {
		switch {
		case v.Minor < p.from:
			continue
		case v.Minor > p.through:
			warning = fmt.Sprintf("unknown KFD interface %v: using the ABI of %s, which newer drivers have kept so far", v, p.name)
		}
		return p.name, warning, nil
	}
	return "", "", fmt.Errorf("%w: version %v cannot suspend queues; that needs 1.13 (Linux 6.5, or an AMD driver package of that age)", ErrVersion, v)
}
