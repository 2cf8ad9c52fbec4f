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

// Profile describes the behaviour of a line of drivers, where it matters to callers of
// this package.
type Profile struct {
	// Name is the driver's kernel, or amd-dkms for AMD's own package.
	Name string
	// Version is the first interface version with this behaviour.
	Version Version
	// Permission is the rule in the source that the profile was read from. Stable releases
	// changed it within one interface version: assume it until a result of
	// Device.ProbePermissionRule. A caller that follows PermissionThread, the stricter one,
	// is allowed under both.
	Permission PermissionRule
	// DeviceInfoSize is sizeof(struct kfd_dbg_device_info_entry) in bytes.
	DeviceInfoSize uint32
	// SecondaryContexts: a process may have several KFD contexts, of which only the first
	// can be debugged: EOPNOTSUPP for the others.
	SecondaryContexts bool
}

// delta is one node of the tree of profiles: the changes from its parent.
type delta struct {
	name   string
	parent string
	minor  uint32
	// through is the last minor version known to behave the same.
	through uint32
	// backport marks a change within an interface version: only a probe, and not the
	// version, distinguishes it from its parent.
	backport bool
	change   func(*Profile)
}

// tree holds every profile after its parent. A new version is a new node here and
// a layout file in testdata.
var tree = []delta{
	{
		// The first with DBG_TRAP in this form. Nothing that this package uses changed up
		// to 1.16.
		name: "6.5", minor: 13, through: 16,
		change: func(p *Profile) {
			p.Permission = PermissionThread
			p.DeviceInfoSize = 120
		},
	},
	{name: "6.12", parent: "6.5", minor: 17, through: 17, change: func(*Profile) {}},
	{
		name: "6.12.103", parent: "6.12", minor: 17, through: 17, backport: true,
		change: func(p *Profile) { p.Permission = PermissionProcess },
	},
	{
		// AMD's package reports 1.18 with 6.12's debug structures. Debugging may fail with
		// EBUSY while its PC sampler is active.
		// AMD's older packages, before 1.13, have a DBG_TRAP of another form under
		// another number, and are refused.
		name: "amd-dkms", parent: "6.12", minor: 18, through: 18, change: func(*Profile) {},
	},
	{
		// 7.3 has the same version and the same headers. What it changed is nothing that this
		// package depends on: see GraceMin.
		name: "7.2", parent: "6.12.103", minor: 23, through: 23,
		change: func(p *Profile) {
			p.DeviceInfoSize = 128
			p.SecondaryContexts = true
		},
	},
}

// profile builds the node named name from the root down.
func profile(name string) Profile {
	for _, d := range tree {
		if d.name != name {
			continue
		}
		var p Profile
		if d.parent != "" {
			p = profile(d.parent)
		}
		p.Name = d.name
		p.Version = Version{Major: 1, Minor: d.minor}
		d.change(&p)
		return p
	}
	panic("kfd: unknown profile " + name) // an error in the tree
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
	var best *delta
	for i := range tree {
		if d := &tree[i]; !d.backport && d.minor <= v.Minor {
			best = d
		}
	}
	if best == nil {
		return Profile{}, nil, fmt.Errorf("%w: version %v cannot suspend queues; that needs 1.13 (Linux 6.5, or an AMD driver package of that age)", ErrVersion, v)
	}
	if v.Minor > best.through {
		return profile(best.name), &UnknownMinor{Driver: v, Profile: best.name}, nil
	}
	return profile(best.name), nil, nil
}

// WithPermission returns the profile for a driver that follows rule r: that of the
// backport, if it is known, and otherwise p with the rule changed. PermissionUnknown
// changes nothing.
func (p Profile) WithPermission(r PermissionRule) Profile {
	if r == PermissionUnknown || r == p.Permission {
		return p
	}
	for _, d := range tree {
		if d.backport && d.parent == p.Name && profile(d.name).Permission == r {
			return profile(d.name)
		}
	}
	p.Permission = r
	return p
}
