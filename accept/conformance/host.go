package conformance

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// A Result is what came of one expectation on a host.
type Result struct {
	Name string
	// NotRun says why the expectation was not played; "" if it was.
	NotRun string
	// Err is how the host differs; nil if it agrees.
	Err error
}

// Host describes the machine of Play.
type Host struct {
	// Version is the driver's.
	Version kfd.Version
	// GFX is the gfx_target_version of the GPUs, in the driver's order.
	GFX []uint32
	// GPUs are their IDs.
	GPUs []uint32
	// Profile names the driver's rules where nothing but kfdemu is the driver; "" for a
	// driver.
	Profile string
}

// Play plays the table on the running driver, with processes of this program that Agent
// serves, and calls each with every expectation that is for such a host. It needs root and
// preempts all work on the GPUs. Expectations about what only the inside of a driver shows,
// and those that harm the kernel, are not run. The sockets of the processes are in a new
// directory below dir.
func Play(ctx context.Context, host Host, dir string, each func(Result)) error {
	all, err := loadTable()
	if err != nil {
		return err
	}
	release, err := kernelRelease()
	if err != nil {
		return err
	}
	if dir, err = os.MkdirTemp(dir, "agents-"); err != nil {
		return err
	}
	holds := host.tags(release)
	holds.addKmap()
	h, err := newKernelHost(ctx, dir, holds)
	if err != nil {
		return errors.Join(err, os.RemoveAll(dir))
	}
	h.ids = host.GPUs
	for _, e := range all {
		if !e.isFor(h.holds) {
			continue
		}
		if err = context.Cause(ctx); err != nil {
			break
		}
		r := Result{Name: e.name, NotRun: e.cannotRun(len(h.ids))}
		if r.NotRun == "" {
			r.Err = e.perform(h)
		}
		each(r)
	}
	return errors.Join(err, h.close(), os.RemoveAll(dir))
}

// tags returns the conditions that hold on the host. Queues are created on the GPUs on which
// the daemon uses the debug interface.
func (h Host) tags(release string) tags {
	holds := realTags(profileTags(cmp.Or(h.Profile, profileOf(h.Version, release))))
	holds["gpu"], holds["two-gpus"], holds["emulated"] = len(h.GFX) > 0, len(h.GFX) == 2, h.Profile != ""
	debugged := func(gfx uint32) bool { return slices.Contains([]uint32{90010, 90402, 90500}, gfx) }
	if len(h.GFX) > 0 && !slices.ContainsFunc(h.GFX, func(gfx uint32) bool { return !debugged(gfx) }) {
		holds["queues"], holds["hws"], holds["per-vmid"] = true, true, true
	}
	return holds
}

// cannotRun returns why an expectation is not played on a driver that shows nothing of its
// inside, with a number of GPUs; "" if it is.
func (e expectation) cannotRun(gpus int) string {
	for _, s := range e.steps {
		switch {
		case isGPU(s.actor) || slices.Contains(observed, s.verb):
			return "only an emulated driver shows or does this"
		case s.verb == "enable" || s.verb == "attach":
			for _, a := range s.answers {
				if a.result == "EALREADY" {
					return "a refused ENABLE corrupts the kernel's memory (docs/lab/upstream.md)"
				}
			}
		}
	}
	if gpus > 2 && slices.ContainsFunc(e.when, func(c string) bool { return strings.HasSuffix(c, "two-gpus") }) {
		return "the answer is written for one or two GPUs"
	}
	return ""
}

// profileOf returns the profile of a driver of kfdtest. Stable releases of one interface
// version differ.
func profileOf(v kfd.Version, release string) string {
	// Another one on such a kernel is that of AMD's package.
	const minorOf612, minorOf7 = 17, 23
	var minor, patch int
	if _, err := fmt.Sscanf(release, "6.%d.%d", &minor, &patch); err == nil && minor == 12 && v.Minor == minorOf612 {
		switch {
		case patch >= 117:
			return "6.12.117"
		case patch >= 103:
			return "6.12.103"
		}
	}
	if _, err := fmt.Sscanf(release, "7.%d.", &minor); err == nil && minor >= 3 && v.Minor == minorOf7 {
		return "7.3"
	}
	name, _, _ := kfd.ProfileFor(v) // "" for one that is not supported
	return name
}

// realTags adds the conditions of a real driver.
func realTags(holds tags) tags {
	holds["real"] = true
	return holds
}

// addKmap adds the condition that the running kernel has the extension at kfdabi.KmapPath.
func (t tags) addKmap() {
	sys := kfd.Kernel()
	fd, err := sys.Open(kfdabi.KmapPath, unix.O_RDWR|unix.O_CLOEXEC)
	if err == nil {
		var info kfdabi.KmapInfoArgs
		_, err = sys.Ioctl(fd, kfdabi.ReqKmapInfo, kfd.PointerTo(&info))
		err = errors.Join(err, sys.Close(fd))
	}
	t["kmap"] = err == nil // it says why it has not
}

// kmapProfile is the profile of kfdtest with the extension at kfdabi.KmapPath.
const kmapProfile = "6.12+kmap"

// profileTags returns the conditions of the drivers of a profile of kfdtest. "7.2" holds of 7.3,
// too.
func profileTags(profile string) tags {
	holds := tags{profile: true, "checks-buffers": profile != "6.5", "kmap": profile == kmapProfile}
	switch profile {
	case "6.12.103", "6.12.117", "7.2", "7.3":
		holds["process-rule"] = true
	default:
		holds["thread-rule"] = true
	}
	switch profile {
	case "7.3":
		holds["7.2"], holds["pauses-once"], holds["checks-overflow"], holds["own-faults"] = true, true, true, true
	case "6.12.117":
		holds["pauses-once"], holds["checks-overflow"], holds["own-faults"] = true, true, true
	}
	if profile == "6.12.117" || holds["7.2"] {
		holds["destroy-recovers"], holds["enable-unwinds"] = true, true
	}
	return holds
}

// kernelRelease returns uname -r.
func kernelRelease() (string, error) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "", err
	}
	return unix.ByteSliceToString(u.Release[:]), nil
}
