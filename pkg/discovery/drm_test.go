package discovery_test

import (
	"fmt"
	"io/fs"
	"slices"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

const userQueueParameter = "sys/module/amdgpu/parameters/user_queue"

// client adds a client of DRM to debugfs, with its owner, its device and directories.
func client(files fstest.MapFS, id, pid int, device string, dirs ...string) {
	dir := fmt.Sprintf("sys/kernel/debug/dri/client-%d/", id)
	put(files, dir+"proc_info", fmt.Sprintf("pid: %d\ncomm: python3\n", pid))
	files[dir+"device"] = &fstest.MapFile{Mode: fs.ModeSymlink, Data: []byte("../" + device)}
	for _, name := range dirs {
		put(files, dir+name+"/mqd_info", "queue_type: 1\n")
	}
}

func TestUserQueuesOfDRM(t *testing.T) {
	for name, tc := range map[string]struct {
		make func(fstest.MapFS)
		want discovery.UserQueues
	}{
		"a driver without them": {func(f fstest.MapFS) {
			client(f, 1, 7, "0000:03:00.0", "queue-1")
			delete(f, userQueueParameter)
		}, discovery.UserQueues{}},
		"off": {func(f fstest.MapFS) {
			put(f, userQueueParameter, "0\n")
			client(f, 1, 7, "0000:03:00.0", "queue-1")
		}, discovery.UserQueues{Parameter: "0"}},
		"no debugfs":               {func(fstest.MapFS) {}, discovery.UserQueues{Parameter: "1"}},
		"a kernel without clients": {func(f fstest.MapFS) { put(f, "sys/kernel/debug/dri/0/name", "amdgpu") }, discovery.UserQueues{Parameter: "1"}},
		"clients without queues": {
			func(f fstest.MapFS) { client(f, 1, 7, "0000:03:00.0", "queue-x", "queues") },
			discovery.UserQueues{Parameter: "1", Listed: true},
		},
		"queues of two processes": {func(f fstest.MapFS) {
			client(f, 1, 7, "0000:03:00.0", "queue-1", "queue-2")
			client(f, 2, 7, "0000:43:00.0", "queue_1")
			client(f, 3, 8, "0000:43:00.0", "queue-9")
			client(f, 4, 0, "0000:43:00.0", "queue-1") // its owner has exited
		}, discovery.UserQueues{Parameter: "1", Listed: true, Owners: map[int32][]string{
			7: {"0000:03:00.0", "0000:43:00.0"}, 8: {"0000:43:00.0"},
		}}},
		"an unknown device": {func(f fstest.MapFS) {
			client(f, 1, 7, "", "queue-1")
			delete(f, "sys/kernel/debug/dri/client-1/device")
		}, discovery.UserQueues{Parameter: "1", Listed: true, Owners: map[int32][]string{7: {""}}}},
		"an owner of another form": {func(f fstest.MapFS) {
			client(f, 1, 7, "0000:03:00.0", "queue-1")
			put(f, "sys/kernel/debug/dri/client-1/proc_info", "process 7")
		}, discovery.UserQueues{Parameter: "1"}},
	} {
		t.Run(name, func(t *testing.T) {
			files := fstest.MapFS{}
			put(files, userQueueParameter, "1\n")
			tc.make(files)
			if diff := cmp.Diff(tc.want, discovery.ReadUserQueues(files)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// drmHost is a host with two GPUs and the processes 7 and 8; 7 has a queue on the first.
func drmHost() fstest.MapFS {
	files := fstest.MapFS{}
	for i, bus := range []int{0x03, 0x43} {
		node := fmt.Sprintf("sys/class/kfd/kfd/topology/nodes/%d/", i+1)
		put(files, node+"gpu_id", fmt.Sprintf("%d\n", 1000*(i+1)))
		put(files, node+"name", "ip discovery\n")
		put(files, node+"properties", fmt.Sprintf("gfx_target_version 120000\nlocation_id %d\ndomain 0\n", bus<<8))
	}
	for _, pid := range []int{7, 8} {
		put(files, fmt.Sprintf("proc/%d/stat", pid), stat(pid, "train", 'S', 1, 100))
		put(files, fmt.Sprintf("proc/%d/status", pid), "Uid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\n")
		files[fmt.Sprintf("sys/class/kfd/kfd/proc/%d/queues", pid)] = &fstest.MapFile{Mode: fs.ModeDir | 0o755}
		put(files, fmt.Sprintf("proc/%d/environ", pid), "")
		put(files, fmt.Sprintf("proc/%d/cmdline", pid), "train")
	}
	queue := "sys/class/kfd/kfd/proc/7/queues/0/"
	put(files, queue+"gpuid", "1000\n")
	put(files, queue+"size", "4096\n")
	put(files, queue+"type", "0\n")
	put(files, userQueueParameter, "1\n")
	return files
}

func TestProcessesWithUserQueuesOfDRM(t *testing.T) {
	type use struct {
		DRM, All []gpreempt.GPUID
		Assumed  bool
	}
	var (
		none = use{}
		kfd  = use{All: []gpreempt.GPUID{1000}}
	)
	for name, tc := range map[string]struct {
		make func(fstest.MapFS)
		want [2]use
	}{
		"none": {func(f fstest.MapFS) { client(f, 1, 7, "0000:03:00.0") }, [2]use{kfd, none}},
		"on a GPU without a queue of KFD": {
			func(f fstest.MapFS) { client(f, 1, 7, "0000:43:00.0", "queue-1") },
			[2]use{{DRM: []gpreempt.GPUID{2000}, All: []gpreempt.GPUID{1000, 2000}}, none},
		},
		"of a process without queues of KFD": {
			func(f fstest.MapFS) { client(f, 1, 8, "0000:43:00.1", "queue-1") },
			[2]use{kfd, {DRM: []gpreempt.GPUID{2000}, All: []gpreempt.GPUID{2000}}},
		},
		"on a device that the topology does not have": {
			func(f fstest.MapFS) { client(f, 1, 8, "amdgpu_xcp.3", "queue-1") },
			[2]use{kfd, {DRM: []gpreempt.GPUID{1000, 2000}, All: []gpreempt.GPUID{1000, 2000}}},
		},
		"not shown": {
			func(f fstest.MapFS) {
				put(f, "proc/7/environ", "HSA_ENABLE_DRM_DEBUG=0\x00")
				put(f, "proc/8/environ", "A=1\x00HSA_ENABLE_DRM_DEBUG=1\x00")
			},
			[2]use{kfd, {DRM: []gpreempt.GPUID{1000, 2000}, All: []gpreempt.GPUID{1000, 2000}, Assumed: true}},
		},
		"asked for, and shown not to be there": {
			func(f fstest.MapFS) {
				put(f, "proc/8/environ", "HSA_ENABLE_DRM_DEBUG=1\x00")
				client(f, 1, 8, "0000:43:00.0")
			},
			[2]use{kfd, none},
		},
	} {
		t.Run(name, func(t *testing.T) {
			files := drmHost()
			tc.make(files)
			f := newFS(files)
			var got [2]use
			for i, p := range scan(t, f).Processes {
				got[i] = use{DRM: p.DRM, All: p.GPUs(), Assumed: p.DRMAssumed}
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func FuzzUserQueues(f *testing.F) {
	f.Add("pid: 7\ncomm: x\n", "../0000:03:00.0", "queue-1")
	f.Add("pid: -1", "..", "queue_4294967296")
	f.Fuzz(func(t *testing.T, info, device, queue string) {
		dir := "sys/kernel/debug/dri/client-1/"
		if !fs.ValidPath(dir + queue) {
			t.Skip()
		}
		files := fstest.MapFS{}
		put(files, userQueueParameter, "1")
		put(files, dir+queue, "")
		put(files, dir+"proc_info", info)
		files[dir+"device"] = &fstest.MapFile{Mode: fs.ModeSymlink, Data: []byte(device)}
		for pid, addresses := range discovery.ReadUserQueues(files).Owners {
			if pid <= 0 || len(addresses) != 1 || slices.Contains(addresses, "/") {
				t.Errorf("process %d has %q", pid, addresses)
			}
		}
	})
}
