package nvrm_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/nvrmtest"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/nvrm"
)

// rig is a process with compute channels, on the fake or on a GPU.
type rig struct {
	t        *testing.T
	sys      nvrm.Sys
	view     *nvrm.View
	files    map[nvrm.Handle]nvrm.File
	channels []nvrm.Channel // for compute
	// runs reports whether its kernel makes progress.
	runs func() bool
	real bool
}

// file returns the client of the channels, and its file.
func (r *rig) file() (nvrm.Handle, nvrm.File) {
	c := r.channels[0].Client
	return c, r.files[c]
}

// set makes one call for channels of the rig, after edit.
func (r *rig) set(disable bool, channels []nvrm.Channel, edit func(*nvrm.DisableList)) error {
	client, f := r.file()
	var list nvrm.DisableList
	if disable {
		list.Disable = 1
	}
	list.Number = uint32(len(channels))
	for i, c := range channels {
		list.Clients[i], list.Channels[i] = c.Client, c.Handle
	}
	if edit != nil {
		edit(&list)
	}
	return f.Control(client, r.channels[0].Subdevice, nvrm.DisableChannels, nvrm.Bytes(&list))
}

func (r *rig) class(client, object nvrm.Handle, index uint32) error {
	_, f := r.file()
	p := nvrm.HandleInfo{Object: object, Index: index}
	return f.Control(client, client, nvrm.GetHandleInfo, nvrm.Bytes(&p))
}

// expectations are in this order, on one process: what each returns, "runs" or "off" after it.
var expectations = []struct {
	name string
	do   func(*rig) error
	want string
}{
	{"a client that does not exist", func(r *rig) error { return r.class(0xc1dffff0, 0xc1dffff0, 2) }, "RM status INVALID_CLIENT, runs"},
	{"an object that does not exist", func(r *rig) error { c, _ := r.file(); return r.class(c, 0x5cfffff0, 2) }, "RM status OBJECT_NOT_FOUND, runs"},
	{"an unknown index", func(r *rig) error { c, _ := r.file(); return r.class(c, c, 9) }, "RM status INVALID_ARGUMENT, runs"},
	{"enable what is on", enable, "ok, runs"},
	{"enable what is on, again", enable, "ok, runs"},
	{"an event of the kernel", func(r *rig) error {
		return r.set(true, r.channels, func(l *nvrm.DisableList) { l.PreemptEvent = 8 })
	}, "RM status INSUFFICIENT_PERMISSIONS, runs"},
	{"disable", disable, "ok, off"},
	{"enable", enable, "ok, runs"},
	{"disable once", disable, "ok, off"},
	{"disable twice", disable, "ok, off"},
	{"enable once after that", enable, "ok, off"},
	{"enable twice after that", enable, "ok, runs"},
	{"a wrong channel behind the others", func(r *rig) error {
		return r.set(true, append(slices.Clip(r.channels), nvrm.Channel{Client: r.channels[0].Client, Handle: 0x5cfffff0}), nil)
	}, "RM status INVALID_CHANNEL, runs"},
	{"enable after that", enable, "ok, runs"},
	{"a wrong channel before the others", func(r *rig) error {
		return r.set(true, append([]nvrm.Channel{{Client: r.channels[0].Client, Handle: 0x5cfffff0}}, r.channels...), nil)
	}, "RM status INVALID_CHANNEL, runs"},
	{"enable after that, again", enable, "ok, runs"},
	{"disable for a wrong channel", disable, "ok, off"},
	{"enable with a wrong channel behind", func(r *rig) error {
		return r.set(false, append(slices.Clip(r.channels), nvrm.Channel{Client: r.channels[0].Client, Handle: 0x5cfffff0}), nil)
	}, "RM status INVALID_CHANNEL, runs"},
	{"an empty list", func(r *rig) error { return r.set(true, nil, nil) }, "RM status INVALID_PARAM_STRUCT, runs"},
	{"a wrong subdevice", func(r *rig) error {
		c, f := r.file()
		var list nvrm.DisableList
		return f.Control(c, 0x5cfffff0, nvrm.DisableChannels, nvrm.Bytes(&list))
	}, "RM status OBJECT_NOT_FOUND, runs"},
	{"enable at the end", enable, "ok, runs"},
}

func disable(r *rig) error { return r.set(true, r.channels, nil) }
func enable(r *rig) error  { return r.set(false, r.channels, nil) }

func check(t *testing.T, r *rig) {
	var got, want []string
	for _, e := range expectations {
		err := e.do(r)
		after := "off"
		if r.runs() {
			after = "runs"
		}
		text := "ok"
		if err != nil {
			text = strings.ReplaceAll(err.Error(), "\n", "; ")
		}
		got = append(got, e.name+": "+text+", "+after)
		want = append(want, e.name+": "+e.want)
	}
	t.Log("\n" + strings.Join(got, "\n"))
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestTheFakeBehavesAsExpected(t *testing.T) {
	m := nvrmtest.New()
	if why, _ := nvrm.Refused(fstest.MapFS{}, m.Sys()); why != "" {
		t.Errorf("refused: %s", why)
	}
	p := m.Start(key)
	r := rigOf(t, m.Sys(), key)
	r.runs = func() bool { off, all, _, _ := p.State(); return off < all }
	check(t, r)
}

func rigOf(t *testing.T, sys nvrm.Sys, key gpreempt.ProcessKey) *rig {
	t.Helper()
	p, err := sys.Open(key)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	r := &rig{t: t, sys: sys, view: nvrm.NewView(sys, p, profile(t))}
	begin := time.Now()
	for range 256 {
		if err := r.view.Scan(); err != nil {
			t.Fatal(err)
		}
		if r.view.Searched() {
			break
		}
	}
	searched := time.Since(begin)
	begin = time.Now()
	if err := r.view.Scan(); err != nil {
		t.Fatal(err)
	}
	again := time.Since(begin)
	all, unknown := r.view.Channels()
	newest, _ := sys.NewestClient()
	t.Logf("search %v, next scan %v; %d channels, %d with an unknown GPU; newest client %v: %+v", searched, again, len(all), unknown, newest, all)
	for _, c := range all {
		if c.Compute {
			r.channels = append(r.channels, c)
		}
	}
	if r.files, err = r.view.Copies(); err != nil || len(r.channels) == 0 {
		t.Fatal(err, len(r.channels))
	}
	t.Cleanup(func() { nvrm.CloseAll(r.files) })
	return r
}

// TestTheDriverBehavesAsExpected checks the same with the real driver, on a job of test/nvidia:
// GPREEMPT_NVIDIA=PID:FILE, as root. It leaves the job running.
func TestTheDriverBehavesAsExpected(t *testing.T) {
	pid, path, given := strings.Cut(os.Getenv("GPREEMPT_NVIDIA"), ":")
	if !given {
		t.Skip("needs an NVIDIA GPU and GPREEMPT_NVIDIA=PID:FILE, the pid of test/nvidia/job and its file of counters")
	}
	if why, _ := nvrm.Refused(os.DirFS("/"), nvrm.Kernel()); why != "" {
		t.Errorf("refused: %s", why)
	}
	r := rigOf(t, nvrm.Kernel(), keyOf(t, pid))
	r.real = true
	counter := counterOf(t, path)
	r.runs = func() bool {
		begin := counter()
		for until := time.Now().Add(30 * time.Millisecond); time.Now().Before(until); {
			if counter() != begin {
				return true
			}
		}
		return false
	}
	defer func() { _ = errors.Join(enable(r), enable(r), enable(r)) }()
	check(t, r)
	var off, on time.Duration
	const cycles = 50
	for range cycles {
		begin := time.Now()
		if err := r.set(true, r.channels, nil); err != nil {
			t.Fatal(err)
		}
		middle := time.Now()
		if err := r.set(false, r.channels, nil); err != nil {
			t.Fatal(err)
		}
		off, on = off+middle.Sub(begin), on+time.Since(middle)
		for was := counter(); counter() == was; {
		}
	}
	t.Logf("mean of %d cycles: off %v, on %v", cycles, off/cycles, on/cycles)
	quick := time.Now()
	if err := r.view.Quick(r.files); err != nil {
		t.Fatal(err)
	}
	t.Logf("Quick %v", time.Since(quick))
	fd, err := unix.Open(nvrm.ControlPath, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	own := nvrm.Kernel().Adopt(fd)
	defer own.Close()
	p := nvrm.HandleInfo{Object: r.channels[0].Client, Index: nvrm.IndexClass}
	t.Logf("the job's client through a descriptor of our own: %v", own.Control(r.channels[0].Client, r.channels[0].Client, nvrm.GetHandleInfo, nvrm.Bytes(&p)))
}

func keyOf(t *testing.T, pid string) gpreempt.ProcessKey {
	t.Helper()
	n, err := strconv.Atoi(pid)
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", n))
	if err != nil {
		t.Fatal(err)
	}
	stat, err := discovery.ParseProcStat(text)
	if err != nil {
		t.Fatal(err)
	}
	return gpreempt.ProcessKey{PID: int32(n), Start: stat.Start}
}

// counterOf returns a reader of the first word of a file, as a job writes it.
func counterOf(t *testing.T, path string) func() uint64 {
	t.Helper()
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = file.Close() })
	memory, err := unix.Mmap(int(file.Fd()), 0, 4096, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(memory) })
	return func() uint64 { return binary.NativeEndian.Uint64(memory) }
}
