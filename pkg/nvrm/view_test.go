package nvrm_test

import (
	"errors"
	"fmt"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/emu/nvrmtest"
	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/nvrm"
)

const version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (root@host)\n"

var key = gpreempt.ProcessKey{PID: 100, Start: 7}

// viewOf returns a view of a process of the machine that was scanned once.
func viewOf(t *testing.T, m *nvrmtest.Machine) (*nvrm.View, nvrm.Process) {
	t.Helper()
	p, err := m.Sys().Open(key)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	v := nvrm.NewView(m.Sys(), p)
	if err := v.Scan(); err != nil {
		t.Fatal(err)
	}
	return v, p
}

func compute(channels []nvrm.Channel) (n int) {
	for _, c := range channels {
		if c.Compute {
			n++
		}
	}
	return n
}

func TestVersionsWhoseSourceWasNotComparedAreRefused(t *testing.T) {
	for text, want := range map[string]string{
		version: "580.159.04",
		"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.45.04  Release Build\n": "595.45.04",
		"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  565.57.01  Release Build\n": "",
		"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  600.10.01  Release Build\n": "",
		"NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23\n":             "",
		"": "",
	} {
		p, err := nvrm.ParseVersion(text)
		if p != want || (want == "") != errors.Is(err, nvrm.ErrUnknownDriver) {
			t.Errorf("ParseVersion(%q) = %q, %v; want %q", text, p, err, want)
		}
	}
}

func FuzzParseVersion(f *testing.F) {
	f.Add(version)
	f.Fuzz(func(t *testing.T, text string) {
		if p, err := nvrm.ParseVersion(text); (err == nil) != (p != "") {
			t.Errorf("%q: version %q, error %v", text, p, err)
		}
	})
}

func FuzzGPUs(f *testing.F) {
	f.Add([]byte("Model: \t\t NVIDIA H200\nDevice Minor: \t 0\n"))
	f.Fuzz(func(t *testing.T, information []byte) {
		gpus, err := nvrm.GPUs(fstest.MapFS{"proc/driver/nvidia/gpus/0000:01:00.0/information": {Data: information}})
		if err != nil || len(gpus) != 1 {
			t.Errorf("%d GPUs, %v", len(gpus), err)
		}
	})
}

func TestViewFindsChannelsThatAreCreatedAndFreed(t *testing.T) {
	m := nvrmtest.New()
	m.Start(gpreempt.ProcessKey{PID: 99, Start: 1}) // has its own client
	p := m.Start(key)
	v, _ := viewOf(t, m)
	var got [][2]int
	note := func() {
		channels, unknown := v.Channels()
		got = append(got, [2]int{len(channels), compute(channels)})
		for _, c := range channels {
			if c.GPU != nvrmtest.GPU {
				t.Errorf("a channel is on GPU %v", c.GPU)
			}
		}
		if unknown != 0 {
			t.Errorf("%d channels have an unknown GPU", unknown)
		}
		if err := v.Scan(); err != nil {
			t.Fatal(err)
		}
	}
	note()
	p.Bear(3)
	note()
	note()
	p.FreeChannel()
	note()
	note()
	want := [][2]int{{20, 8}, {20, 8}, {23, 11}, {23, 11}, {22, 10}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("channels, compute channels (-want +got):\n%s", diff)
	}
}

// Handles are asked for one by one. All of these channels are born between two of the questions.
func TestChannelsThatAreCreatedDuringASearchAreFound(t *testing.T) {
	for at := 1; at < 12; at++ {
		m := nvrmtest.New()
		t.Cleanup(m.Close)
		p := m.Start(key)
		v, _ := viewOf(t, m)
		m.Before(func(call int, _ nvrm.Command) error {
			if call == at {
				p.Bear(3)
			}
			return nil
		})
		for range 2 {
			if err := v.Quick(8); err != nil {
				t.Fatal(err)
			}
		}
		if channels, _ := v.Channels(); len(channels) != 23 {
			t.Errorf("before call %d: %d channels are known, want 23", at, len(channels))
		}
	}
}

// procFiles returns the files of /proc of a process.
func procFiles(root fstest.MapFS, key gpreempt.ProcessKey) {
	dir := fmt.Sprintf("proc/%d/", key.PID)
	root[dir+"stat"] = &fstest.MapFile{Data: fmt.Appendf(nil, "%d (job) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 %d 0 0\n", key.PID, key.Start)}
	root[dir+"status"] = &fstest.MapFile{Data: []byte("Uid:\t1\t1\t1\t1\nGid:\t1\t1\t1\t1\n")}
}

// A forked process has the files of its parent. That it has another parent by now does not matter.
func TestTheChannelsOfAForkedProcessAreThoseOfTheOldestThatHasTheFile(t *testing.T) {
	m := nvrmtest.New()
	t.Cleanup(m.Close)
	keys := []gpreempt.ProcessKey{{PID: 300, Start: 7}, {PID: 200, Start: 8}, {PID: 100, Start: 9}}
	parent := m.Start(keys[0])
	middle := parent.Fork(keys[1])
	middle.Fork(keys[2])
	middle.Kill()
	root := fstest.MapFS{}
	procFiles(root, keys[0])
	procFiles(root, keys[2])
	s := nvrm.NewSource(root, m.Sys(), func(int32) bool { return false })
	t.Cleanup(s.Close)
	uses := func() (all []string) {
		found, warnings, err := s.Uses()
		if err != nil {
			t.Fatal(err)
		}
		for _, u := range found {
			all = append(all, fmt.Sprintf("%v %d", u.Key, len(u.Queues)))
		}
		return append(all, warnings...)
	}
	got := [][]string{uses()}
	parent.Kill()
	delete(root, "proc/300/stat")
	got = append(got, uses())
	want := [][]string{{"100@9 0", "300@7 20"}, {"100@9 20"}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("processes and their channels, before and after the parent's end (-want +got):\n%s", diff)
	}
}

func TestAClientOlderThanTheSearchedHandlesIsFoundByLaterScans(t *testing.T) {
	m := nvrmtest.New()
	m.Start(key)
	m.Assign(100_000)
	v, _ := viewOf(t, m)
	scans := 1
	for ; scans < 100; scans++ {
		if channels, _ := v.Channels(); len(channels) == 20 {
			break
		}
		if err := v.Scan(); err != nil {
			t.Fatal(err)
		}
	}
	if scans != 25 {
		t.Errorf("the channels were found by scan %d, want 25 of 4096 handles each", scans)
	}
}

func TestChannelsAreDisabledThroughCopiesOfTheProcessOnly(t *testing.T) {
	m := nvrmtest.New()
	p := m.Start(key)
	m.Start(gpreempt.ProcessKey{PID: 101, Start: 8})
	v, process := viewOf(t, m)
	channels, _ := v.Channels()
	group := []nvrm.Group{{Process: process, Channels: channels}}
	if err := nvrm.Set(group, true); err != nil {
		t.Fatal(err)
	}
	off, all, others, _ := p.State()
	if err := nvrm.Set(group, false); err != nil {
		t.Fatal(err)
	}
	on, _, _, _ := p.State()
	if got, want := [4]int{off, all, others, on}, [4]int{8, 8, 12, 0}; got != want {
		t.Errorf("compute off, all, copy off, compute off after enabling: %v, want %v", got, want)
	}
	wrong := channels[:1:1]
	wrong[0].Client++
	if err := nvrm.Set(group, true); !errors.Is(err, nvrmtest.WrongClient) {
		t.Errorf("through another process's file: %v", err)
	}
	p.Kill()
	if n := m.Clients(); n != 1 {
		t.Errorf("%d clients are left after the process, want the other process's", n)
	}
}

func TestSourceListsProcessesWithTheDriverOpenAndItsGPUs(t *testing.T) {
	root := fstest.MapFS{
		"proc/driver/nvidia/gpus/0000:01:00.0/information": {Data: []byte("Model: \t\t NVIDIA H100 80GB HBM3\nDevice Minor: \t 0\n")},
	}
	for _, k := range []gpreempt.ProcessKey{key, {PID: 101, Start: 8}, {PID: 102, Start: 9}} {
		procFiles(root, k)
	}
	m := nvrmtest.New()
	p := m.Start(key)
	m.Start(gpreempt.ProcessKey{PID: 102, Start: 9}) // part of the daemon
	files := discovery.NewFS(root)
	files.Add(nvrm.NewSource(root, m.Sys(), func(pid int32) bool { return pid == 102 }))
	gpus, err := files.GPUs()
	if err != nil {
		t.Fatal(err)
	}
	want := []gpreempt.GPU{{ID: nvrmtest.GPU, Driver: "nvidia", Name: "NVIDIA H100 80GB HBM3", BDF: "0000:01:00.0", MES: true, XCCs: 1}}
	if diff := cmp.Diff(want, gpus); diff != "" {
		t.Errorf("GPUs (-want +got):\n%s", diff)
	}
	scan := func() (all []string) {
		s, err := files.Scan()
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range s.Processes {
			all = append(all, fmt.Sprintf("%v %s %d queues %v", p.Key, p.Driver, len(p.Queues), p.GPUs()))
		}
		return append(all, s.Warnings...)
	}
	if diff := cmp.Diff([]string{"100@7 nvidia 20 queues [256]"}, scan()); diff != "" {
		t.Errorf("first scan (-want +got):\n%s", diff)
	}
	p.Bear(2)
	looked, ok := files.Look(key)
	if !ok || len(looked.Queues) != 22 {
		t.Errorf("Look found %d queues, %v; want 22", len(looked.Queues), ok)
	}
	p.Kill()
	delete(root, "proc/100/stat")
	if diff := cmp.Diff([]string(nil), scan()); diff != "" {
		t.Errorf("after the end (-want +got):\n%s", diff)
	}
	if _, err := m.Sys().Open(key); !errors.Is(err, proc.ErrGone) {
		t.Errorf("Open of an ended process: %v", err)
	}
}
