package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
)

// userQueues is what a kernel's source says about user queues of DRM, which the driver's debug
// interface does not know: docs/lab/user-queues.md.
type userQueues struct {
	// Ops are the operations on a queue, Flags the kinds of queue that can be asked for.
	Ops, Flags []string
	// Default are the source files of engines that accept user queues where amdgpu.user_queue
	// is -1, its default.
	Default []string
	// KFD are the source files of the compute driver that mention them.
	KFD []string
}

func (u userQueues) String() string {
	words := func(list []string) string {
		if len(list) == 0 {
			return "none"
		}
		return strings.Join(list, ", ")
	}
	return fmt.Sprintf("user queues: ops %s; flags %s; accepted by default by %s; known to KFD in %s",
		words(u.Ops), words(u.Flags), words(u.Default), words(u.KFD))
}

var (
	userqOp     = regexp.MustCompile(`(?m)^#define\s+AMDGPU_USERQ_OP_(\w+)`)
	userqFlag   = regexp.MustCompile(`(?m)^#define\s+AMDGPU_USERQ_CREATE_FLAGS_QUEUE_(\w+)\s+\(1 << `)
	userqChoice = regexp.MustCompile(`(?s)switch \(amdgpu_user_queue\) \{\n(.*?)\n\t\}`)
)

const drmHeader = "include/uapi/drm/amdgpu_drm.h"

// readUserQueues reads the source of a kernel. It fails where the source decides in a form that it
// does not know.
func readUserQueues(tree fs.FS) (userQueues, error) {
	var u userQueues
	header, err := fs.ReadFile(tree, drmHeader)
	if err != nil {
		return u, err
	}
	for _, m := range userqOp.FindAllSubmatch(header, -1) {
		u.Ops = append(u.Ops, string(m[1]))
	}
	for _, m := range userqFlag.FindAllSubmatch(header, -1) {
		u.Flags = append(u.Flags, string(m[1]))
	}
	choices := 0
	err = eachSource(tree, "amdgpu", func(name string, text []byte) error {
		for _, m := range userqChoice.FindAllSubmatch(text, -1) {
			choices++
			branch := byDefault(string(m[1]))
			off, on := strings.Contains(branch, "disable_uq = true"), strings.Contains(branch, "disable_uq = false")
			if off == on {
				return fmt.Errorf("%s: by default, user queues are neither on nor off: %q", name, branch)
			}
			if on {
				u.Default = append(u.Default, name)
			}
		}
		return nil
	})
	if err != nil {
		return u, err
	}
	if len(u.Ops) > 0 && choices == 0 {
		return u, errors.New("there are user queues, and no engine asks amdgpu.user_queue")
	}
	err = eachSource(tree, "amdkfd", func(name string, text []byte) error {
		if bytes.Contains(text, []byte("userq")) || bytes.Contains(text, []byte("usermode_queue")) {
			u.KFD = append(u.KFD, name)
		}
		return nil
	})
	return u, err
}

// byDefault returns the statements of a switch for the value -1, up to the first break.
func byDefault(cases string) string {
	_, branch, found := strings.Cut(cases, "case -1:")
	if !found {
		_, branch, _ = strings.Cut(cases, "default:")
	}
	branch, _, _ = strings.Cut(branch, "break;")
	return branch
}

// eachSource calls fn with each C file of a directory of the driver.
func eachSource(tree fs.FS, dir string, fn func(name string, text []byte) error) error {
	files, err := fs.Glob(tree, amdDir+"/"+dir+"/*.c")
	if err != nil {
		return err
	}
	if len(files) == 0 {
		return fmt.Errorf("no source in %s/%s", amdDir, dir)
	}
	for _, file := range files {
		text, err := fs.ReadFile(tree, file)
		if err != nil {
			return err
		}
		if err := fn(path.Base(file), text); err != nil {
			return err
		}
	}
	return nil
}

// planned is the state for which gpreempt is made: queues that can be created and freed, no AQL
// queues, and none by default.
var planned = userQueues{Ops: []string{"CREATE", "FREE"}, Flags: []string{"SECURE"}}

// A kernel's source that differs from planned is the day for which docs/lab/user-queues.md has the plan.
func TestUserQueuesOfKernelSources(t *testing.T) {
	trees := filepath.SplitList(os.Getenv("GPREEMPT_KERNEL_TREES"))
	if len(trees) == 0 {
		t.Skip("no source of a kernel: set GPREEMPT_KERNEL_TREES to directories of unpacked kernels, separated by colons")
	}
	for _, tree := range trees {
		got, err := readUserQueues(os.DirFS(tree))
		if err != nil {
			t.Errorf("%s: %v", tree, err)
			continue
		}
		t.Logf("%s: %v", tree, got)
		if diff := cmp.Diff(planned, got); diff != "" && len(got.Ops) > 0 {
			t.Errorf("%s: the driver's user queues have changed, docs/lab/user-queues.md has the plan (-planned +got):\n%s", tree, diff)
		}
	}
}

func TestUserQueuesAreReadFromTheSource(t *testing.T) {
	const (
		header = "#define AMDGPU_USERQ_OP_CREATE\t1\n#define AMDGPU_USERQ_OP_FREE\t2\n" +
			"#define AMDGPU_USERQ_CREATE_FLAGS_QUEUE_PRIORITY_HIGH 3 /* admin only */\n#define AMDGPU_USERQ_CREATE_FLAGS_QUEUE_SECURE  (1 << 2)\n"
		off = "\tswitch (amdgpu_user_queue) {\n\tcase -1:\n\tcase 0:\n\tdefault:\n\t\tadev->gfx.disable_uq = true;\n\t\tbreak;\n" +
			"\tcase 1:\n\t\tadev->gfx.disable_uq = false;\n\t\tbreak;\n\t}\n"
		on = "\tswitch (amdgpu_user_queue) {\n\tcase 0:\n\t\tadev->gfx.disable_uq = true;\n\t\tbreak;\n" +
			"\tdefault:\n\t\tadev->gfx.disable_uq = false;\n\t\tbreak;\n\t}\n"
	)
	tree := func(header, gfx, kfd string) fstest.MapFS {
		return fstest.MapFS{
			drmHeader:                       {Data: []byte(header)},
			amdDir + "/amdgpu/gfx_v11_0.c":  {Data: []byte(gfx)},
			amdDir + "/amdkfd/kfd_device.c": {Data: []byte(kfd)},
		}
	}
	for name, tt := range map[string]struct {
		tree fstest.MapFS
		want userQueues
		err  string
	}{
		"Linux 6.12":       {tree("#define AMDGPU_INFO 1\n", "", ""), userQueues{}, ""},
		"Linux 7.3":        {tree(header, off, ""), planned, ""},
		"a way to suspend": {tree(header+"#define AMDGPU_USERQ_OP_MODIFY 3\n", off, ""), userQueues{Ops: []string{"CREATE", "FREE", "MODIFY"}, Flags: planned.Flags}, ""},
		"AQL": {
			tree(header+"#define AMDGPU_USERQ_CREATE_FLAGS_QUEUE_AQL_COMPUTE (1 << 3)\n", off, ""),
			userQueues{Ops: planned.Ops, Flags: []string{"SECURE", "AQL_COMPUTE"}},
			"",
		},
		"the default":         {tree(header, off+on, ""), userQueues{Ops: planned.Ops, Flags: planned.Flags, Default: []string{"gfx_v11_0.c"}}, ""},
		"KFD knows them":      {tree(header, off, "amdgpu_userq_suspend(adev);"), userQueues{Ops: planned.Ops, Flags: planned.Flags, KFD: []string{"kfd_device.c"}}, ""},
		"another form":        {tree(header, strings.ReplaceAll(off, "disable_uq", "uq_off"), ""), userQueues{}, "gfx_v11_0.c: by default, user queues are neither on nor off"},
		"no parameter":        {tree(header, "", ""), userQueues{}, "there are user queues, and no engine asks"},
		"no source of kernel": {fstest.MapFS{}, userQueues{}, "amdgpu_drm.h"},
	} {
		got, err := readUserQueues(tt.tree)
		if tt.err != "" {
			if err == nil || !strings.Contains(err.Error(), tt.err) {
				t.Errorf("%s: error %v, want one with %q", name, err, tt.err)
			}
			continue
		}
		if diff := cmp.Diff(tt.want, got); diff != "" || err != nil {
			t.Errorf("%s: %v (-want +got):\n%s", name, err, diff)
		}
	}
	want := "user queues: ops CREATE, FREE; flags SECURE; accepted by default by none; known to KFD in none"
	if got := planned.String(); got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
