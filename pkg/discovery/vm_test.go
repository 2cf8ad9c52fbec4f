package discovery_test

import (
	"fmt"
	"io/fs"
	"syscall"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// vmHost is a host with the GPUs 1000, 2000 and 3000, the render nodes 128 to 130, and a
// process with pid 7 to which the driver lists all of them.
func vmHost() fstest.MapFS {
	files := fstest.MapFS{}
	for i, id := range []gpreempt.GPUID{1000, 2000, 3000} {
		node := fmt.Sprintf("sys/class/kfd/kfd/topology/nodes/%d/", i+1)
		put(files, node+"gpu_id", fmt.Sprintf("%d\n", id))
		put(files, node+"name", "ip discovery\n")
		put(files, node+"properties", fmt.Sprintf("gfx_target_version 90402\ndrm_render_minor %d\n", 128+i))
		put(files, fmt.Sprintf("sys/class/kfd/kfd/proc/7/vram_%d", id), "0\n")
	}
	put(files, "sys/class/kfd/kfd/proc/7/pasid", "32771\n")
	return files
}

func put(files fstest.MapFS, name, text string) { files[name] = &fstest.MapFile{Data: []byte(text)} }

// open adds a descriptor of a device to the process.
func open(files fstest.MapFS, fd, major, minor int, fdinfo string) {
	put(files, fmt.Sprintf("proc/7/fdinfo/%d", fd), "pos:\t0\nflags:\t02100002\n"+fdinfo)
	files[fmt.Sprintf("proc/7/fd/%d", fd)] = &fstest.MapFile{
		Mode: fs.ModeDevice | fs.ModeCharDevice, Sys: &syscall.Stat_t{Rdev: uint64(major<<8 | minor)},
	}
}

func renderNode(pasid int) string {
	return fmt.Sprintf("drm-driver:\tamdgpu\ndrm-client-id:\t12\npasid:\t%d\n", pasid)
}

func TestWithoutVM(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(fstest.MapFS)
		want   []gpreempt.GPUID
	}{
		"nothing shows one": {func(fstest.MapFS) {}, []gpreempt.GPUID{1000, 2000, 3000}},
		"memory": {
			func(f fstest.MapFS) { put(f, "sys/class/kfd/kfd/proc/7/vram_2000", "4096\n") },
			[]gpreempt.GPUID{1000, 3000},
		},
		"render nodes with the PASID of the process": {
			func(f fstest.MapFS) {
				open(f, 3, 226, 128, renderNode(32771))
				open(f, 5, 226, 130, renderNode(32771))
			},
			[]gpreempt.GPUID{2000},
		},
		"a render node with a PASID of its own": {
			func(f fstest.MapFS) { open(f, 3, 226, 128, renderNode(32790)) },
			[]gpreempt.GPUID{1000, 2000, 3000},
		},
		"devices of others": {
			func(f fstest.MapFS) {
				open(f, 3, 226, 128, "drm-driver:\ti915\npasid:\t32771\n")
				open(f, 4, 236, 129, renderNode(32771))
				open(f, 5, 226, 129, "pasid:\t32771\n")
			},
			[]gpreempt.GPUID{1000, 2000, 3000},
		},
		"debugfs decides alone": {
			func(f fstest.MapFS) {
				put(f, "sys/class/kfd/kfd/proc/7/pasid", "0\n")
				put(f, "sys/kernel/debug/kfd/proc/7/pasid_1000", "32771\n")
				put(f, "sys/kernel/debug/kfd/proc/7/pasid_2000", "32772\n")
				put(f, "sys/kernel/debug/kfd/proc/7/pasid_3000", "0\n")
				open(f, 3, 226, 130, renderNode(32800))
			},
			[]gpreempt.GPUID{3000},
		},
		"render nodes, where the process has no PASID and debugfs is not there": {
			func(f fstest.MapFS) {
				put(f, "sys/class/kfd/kfd/proc/7/pasid", "0\n")
				open(f, 3, 226, 128, renderNode(32800))
				open(f, 4, 226, 129, renderNode(32801))
			},
			[]gpreempt.GPUID{3000},
		},
		"sysfs does not show the process": {
			func(f fstest.MapFS) {
				delete(f, "sys/class/kfd/kfd/proc/7/pasid")
				open(f, 3, 226, 128, renderNode(32771))
			},
			[]gpreempt.GPUID{1000, 2000, 3000},
		},
	} {
		t.Run(name, func(t *testing.T) {
			files := vmHost()
			gpus, err := discovery.ProcessGPUs(files, 7)
			if err != nil {
				t.Fatal(err)
			}
			tc.change(files)
			if diff := cmp.Diff(tc.want, discovery.WithoutVM(files, 7, gpus)); diff != "" {
				t.Errorf("GPUs (-want +got):\n%s", diff)
			}
		})
	}
}

func TestProcessGPUsAreThoseThatTheDriverLists(t *testing.T) {
	files := vmHost()
	delete(files, "sys/class/kfd/kfd/proc/7/vram_2000")
	gpus, err := discovery.ProcessGPUs(files, 7)
	if err != nil {
		t.Fatal(err)
	}
	var got []gpreempt.GPUID
	for _, g := range gpus {
		got = append(got, g.ID)
	}
	if diff := cmp.Diff([]gpreempt.GPUID{1000, 3000}, got); diff != "" {
		t.Errorf("GPUs (-want +got):\n%s", diff)
	}
	if _, err := discovery.ProcessGPUs(files, 8); err == nil {
		t.Error("no error for a process that the driver does not know")
	}
}
