package conformance

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// The verbs of the extension at kfdabi.KmapPath. Its descriptor is the default where fd is not given.
func init() {
	verbs["kmap"] = func(d *doing) (int64, error) {
		flags := unix.O_RDWR
		if d.text("inherit", "no") != "yes" {
			flags |= unix.O_CLOEXEC
		}
		fd, err := d.sys.Open(kfdabi.KmapPath, flags)
		return d.newFD(fd, err)
	}
	verbs["pidfd"] = func(d *doing) (int64, error) {
		fd, err := d.sys.PidfdOpen(int32(d.num("pid", 0)))
		return d.newFD(fd, err)
	}
	maps.Copy(verbs, kmapVerbs)
}

var kmapVerbs = map[string]func(*doing) (int64, error){"limit": limit, "kmap_info": kmapInfo, "occupancy": occupancy, "lapse": lapse}

// limit is SET. The targets are the processes pids, or the descriptors fds; n is their limits, of which
// the last is for the rest too. room is that of each for the states of its queues. The results of all
// targets follow each other. hung are the GPUs of queues whose last runlist failed; the reset that a
// failure causes may evict them before they are listed, or after.
func limit(d *doing) (int64, error) {
	fds, drop, err := d.targets()
	if err != nil {
		return 0, err
	}
	defer drop()
	limits := d.limits()
	room := d.num("room", 64)
	lists := make([][]kfdabi.KmapQueue, len(fds))
	targets := make([]kfdabi.KmapTargetArgs, len(fds))
	for i, fd := range fds {
		lists[i] = make([]kfdabi.KmapQueue, room)
		targets[i] = kfdabi.KmapTargetArgs{
			PIDFD: fd, Limit: limits[min(i, len(limits)-1)], QueuesPtr: pointerBy(d, "list", lists[i]), NumQueues: uint32(room), Pad: uint32(d.num("pad", 0)),
		}
	}
	args := []kfdabi.KmapSetArgs{{
		TargetsPtr: pointerBy(d, "targets", targets), NumTargets: uint32(d.num("num", uint64(len(targets)))), TargetSize: uint32(d.num("size", 32)),
		LeaseMS: uint32(d.num("lease", 60000)), Flags: uint32(d.num("flags", 0)), Grace: uint32(d.num("grace", 0)),
	}}
	r, err := d.ioctl(kfdabi.ReqKmapSet, pointer(d, args))
	d.out("failed", args[0].Failed)
	d.out("cycles", args[0].Cycles)
	d.out("lapses", args[0].Lapses)
	var results, states []string
	var queues, held, ids, gpus, hung []uint32
	sorted := true
	for i, t := range targets {
		results = append(results, reply{Errno: unix.Errno(-t.Result)}.result())
		queues, held = append(queues, t.NumQueues), append(held, t.NumHeld)
		list := lists[i][:min(uint64(t.NumQueues), room)]
		if err != nil || t.Result != 0 && t.Result != -int32(unix.EIO) {
			continue
		}
		for _, q := range list {
			ids, gpus, states = append(ids, q.ID), append(gpus, q.GPUID), append(states, q.State.String())
			if q.State&kfdabi.KmapFailed != 0 {
				hung = append(hung, q.GPUID)
			}
		}
		sorted = sorted && slices.IsSortedFunc(list, func(a, b kfdabi.KmapQueue) int { return cmp.Or(cmp.Compare(a.GPUID, b.GPUID), cmp.Compare(a.ID, b.ID)) })
	}
	d.out("results", strings.Join(results, ","))
	d.out("states", strings.Join(states, ","))
	d.list("queues", queues)
	d.list("held", held)
	d.list("ids", ids)
	d.list("gpus", gpus)
	d.list("hung", hung)
	d.out("sorted", sorted)
	return r, err
}

// targets returns the descriptors of a SET. drop closes those that it opened.
func (d *doing) targets() (fds []int32, drop func(), err error) {
	var opened []int
	drop = func() {
		for _, fd := range opened {
			if err := d.sys.Close(fd); err != nil {
				d.wrong = err
			}
		}
	}
	for _, fd := range d.nums("fds") {
		fds = append(fds, int32(fd))
	}
	pids := d.nums("pids")
	if pid, given := d.values["pid"]; given {
		pids = append(pids, number32(pid))
	}
	for _, pid := range pids {
		fd, err := d.sys.PidfdOpen(int32(pid))
		if err != nil {
			drop()
			return nil, nil, err
		}
		opened, fds = append(opened, fd), append(fds, int32(fd))
	}
	return fds, drop, nil
}

// limits returns the numbers in n; none is no limit.
func (d *doing) limits() []uint32 {
	var limits []uint32
	for word := range strings.SplitSeq(d.text("n", "0"), ",") {
		n, err := strconv.ParseUint(word, 0, 32)
		if word == "none" {
			n, err = uint64(kfdabi.KmapNoLimit), nil
		}
		if err != nil {
			d.wrong = err
		}
		limits = append(limits, uint32(n))
	}
	return limits
}

// pointerBy is pointer for another key than "buf".
func pointerBy[T any](d *doing, key string, buf []T) kfd.Pointer {
	other := &doing{sys: d.sys, values: map[string]string{"buf": d.text(key, "there")}}
	p := pointer(other, buf)
	d.wrong = cmp.Or(d.wrong, other.wrong)
	return p
}

func kmapInfo(d *doing) (int64, error) {
	args := []kfdabi.KmapInfoArgs{{Pad: uint32(d.num("pad", 0))}}
	r, err := d.ioctl(kfdabi.ReqKmapInfo, pointer(d, args))
	a := args[0]
	d.out("major", a.ABIMajor)
	d.out("minor", a.ABIMinor)
	d.out("targets", a.MaxTargets)
	d.out("min", a.MinLeaseMS)
	d.out("max", a.MaxLeaseMS)
	d.out("lapses", a.Lapses)
	d.out("limited", a.Limited)
	return r, err
}

// lapse waits until n leases of the handle have ended.
func lapse(d *doing) (int64, error) {
	return 0, eventually("the lease does not end", func() (bool, error) {
		var args kfdabi.KmapInfoArgs
		_, err := d.ioctl(kfdabi.ReqKmapInfo, kfd.PointerTo(&args))
		return uint64(args.Lapses) >= d.num("n", 1), err
	})
}

func occupancy(d *doing) (int64, error) {
	args := []kfdabi.KmapOccupancyArgs{{GPUID: uint32(d.num("gpu", 0)), Flags: uint32(d.num("flags", 0)), Pad: [2]uint32{0, uint32(d.num("pad", 0))}}}
	r, err := d.ioctl(kfdabi.ReqKmapOccupancy, pointer(d, args))
	a := args[0]
	d.out("mapped", a.CPMapped)
	d.out("held", a.CPHeld)
	d.out("sdma_mapped", a.SDMAMapped)
	d.out("sdma_held", a.SDMAHeld)
	d.out("over", a.OverSubscribed)
	d.out("limited", a.Limited)
	d.out("slots", a.CPSlots > 0)
	return r, err
}
