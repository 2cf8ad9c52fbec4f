package kfd

import (
	"errors"
	"fmt"

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
// (kfd_ioctl_set_debug_trap).
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

// Profile is a line of drivers.
type Profile struct {
	// Name is the driver's kernel, or amd-dkms for AMD's own package.
	Name string
	// Version is the first interface version of the line.
	Version Version
	// Permission is the rule in the source that the profile was read from. Stable releases
	// changed it within one interface version, 6.12.103 for one: it is only for people until a
	// result of Device.ProbePermissionRule. A caller that follows PermissionThread, the stricter
	// one, is allowed under both.
	Permission PermissionRule
}

// profiles are the known lines, the oldest first, each through a minor version. Versions
// between them are unknown. A new version is a new row here and a layout file in testdata.
var profiles = []struct {
	Profile
	through uint32
}{
	// The first with DBG_TRAP in this form. Nothing that this package uses changed up to 1.16.
	{Profile{"6.5", Version{1, 13}, PermissionThread}, 16},
	{Profile{"6.12", Version{1, 17}, PermissionThread}, 17},
	// AMD's package reports 1.18 with 6.12's debug structures. Debugging may fail with EBUSY while
	// its PC sampler is active. AMD's older packages, before 1.13, have a DBG_TRAP of another form
	// under another number, and are refused.
	{Profile{"amd-dkms", Version{1, 18}, PermissionThread}, 18},
	// 7.3 has the same version and the same headers. What it changed is nothing that this package
	// depends on: see GraceMin.
	{Profile{"7.2", Version{1, 23}, PermissionProcess}, 23},
}

// UnknownMinor warns that a driver's version was not compared with this package. The
// nearest older profile is used for it.
type UnknownMinor struct {
	Driver  Version
	Profile string
}

// String returns the warning for the operator.
func (w UnknownMinor) String() string {
	return fmt.Sprintf("unknown KFD interface %v: using the ABI of %s, which newer drivers have kept so far", w.Driver, w.Profile)
}

// ProfileFor returns the profile for a driver. For an unknown minor version it is that of
// the nearest older one, with a warning. Another major version, or one older than 1.13,
// which has no DBG_TRAP, is an error that wraps ErrVersion.
func ProfileFor(v Version) (Profile, *UnknownMinor, error) {
	if v.Major != 1 {
		return Profile{}, nil, fmt.Errorf("%w: version %v; 1.13 and later minor versions of 1 are supported", ErrVersion, v)
	}
	n := len(profiles) - 1
	for n >= 0 && profiles[n].Version.Minor > v.Minor {
		n--
	}
	if n < 0 {
		return Profile{}, nil, fmt.Errorf("%w: version %v cannot suspend queues; that needs 1.13 (Linux 6.5, or an AMD driver package of that age)", ErrVersion, v)
	}
	p := profiles[n]
	if v.Minor > p.through {
		return p.Profile, &UnknownMinor{Driver: v, Profile: p.Name}, nil
	}
	return p.Profile, nil, nil
}
