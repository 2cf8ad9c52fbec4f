package nvrm_test

import (
	"encoding/binary"
	"encoding/json"
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
	process  nvrm.Process
	view     *nvrm.View
	file     nvrm.File
	client   nvrm.Handle
	channels []nvrm.Channel // for compute
	// runs reports whether its kernel makes progress.
	runs func() bool
}

// set makes one call for channels of the rig, after edit.
func (r *rig) set(disable bool, channels []nvrm.Channel, edit func(*nvrm.DisableList)) error {
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
	return r.file.Control(r.client, r.channels[0].Subdevice, nvrm.DisableChannels, nvrm.Bytes(&list))
}

func (r *rig) class(client, object nvrm.Handle, index uint32) error {
	p := nvrm.HandleInfo{Object: object, Index: index}
	return r.file.Control(client, client, nvrm.GetHandleInfo, nvrm.Bytes(&p))
}

// expectations are in this order, on one process: what each returns, "runs" or "off" after it.
var expectations = []struct {
	name string
	do   func(*rig) error
	want string
}{
	{"a client that does not exist", func(r *rig) error { return r.class(0xc1dffff0, 0xc1dffff0, 2) }, "RM status INVALID_CLIENT, runs"},
	{"an object that does not exist", func(r *rig) error { return r.class(r.client, 0x5cfffff0, 2) }, "RM status OBJECT_NOT_FOUND, runs"},
	{"an unknown index", func(r *rig) error { return r.class(r.client, r.client, 9) }, "RM status INVALID_ARGUMENT, runs"},
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
		var list nvrm.DisableList
		return r.file.Control(r.client, 0x5cfffff0, nvrm.DisableChannels, nvrm.Bytes(&list))
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
	r := &rig{t: t, sys: sys, process: p, view: nvrm.NewView(sys, p)}
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
	if len(r.channels) == 0 {
		t.Fatal("no compute channels")
	}
	r.client = r.channels[0].Client
	if r.file, err = p.Copy(r.channels[0].File); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.file.Close() })
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
	sys, recorded := record(t)
	if recorded != nil {
		sys = recorded
	}
	r := rigOf(t, sys, keyOf(t, pid))
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
	if recorded != nil {
		recorded.Channels, _ = r.view.Channels()
		runs := r.runs
		r.runs = func() bool {
			answer := runs()
			recorded.Runs = append(recorded.Runs, answer)
			return answer
		}
	}
	check(t, r)
	if recorded != nil {
		recorded.save(t)
	}
}

// TestFiguresOfTheDriver prints how long calls take, on jobs as above: GPREEMPT_NVIDIA=PID:FILE for
// one job, and GPREEMPT_NVIDIA_OTHERS=PID,PID for others that are set in the same call.
// GPREEMPT_NVIDIA_FIGURES=FILE keeps the values of each call.
func TestFiguresOfTheDriver(t *testing.T) {
	pid, path, given := strings.Cut(os.Getenv("GPREEMPT_NVIDIA"), ":")
	if !given {
		t.Skip("needs an NVIDIA GPU and GPREEMPT_NVIDIA=PID:FILE, the pid of test/nvidia/job and its file of counters")
	}
	r := rigOf(t, nvrm.Kernel(), keyOf(t, pid))
	counter := counterOf(t, path)
	groups := []nvrm.Group{{Process: r.process, Channels: r.channels}}
	kept := map[string]map[string][]float64{} // in us, in the order of the calls
	figures := func(what string, cycles int, beside func()) {
		var off, on []time.Duration
		var slow []string
		begin := time.Now()
		for n := range cycles {
			for was := counter(); counter() == was; {
			}
			for until := time.Now().Add(time.Duration(n*7919%5000) * time.Microsecond); time.Now().Before(until); {
			}
			first := time.Now()
			looked := make(chan struct{})
			if beside != nil {
				go func() { beside(); close(looked) }()
			} else {
				close(looked)
			}
			if err := nvrm.Set(groups, true); err != nil {
				t.Fatal(err)
			}
			middle := time.Now()
			<-looked
			again := time.Now()
			if err := nvrm.Set(groups, false); err != nil {
				t.Fatal(err)
			}
			off, on = append(off, middle.Sub(first)), append(on, time.Since(again))
			if took := middle.Sub(first); took > 1500*time.Microsecond {
				slow = append(slow, fmt.Sprintf("%v at %v", took, first.Sub(begin).Round(time.Millisecond)))
			}
		}
		kept[what] = map[string][]float64{"off_us": microseconds(off), "on_us": microseconds(on)}
		slices.Sort(off)
		slices.Sort(on)
		at := func(d []time.Duration, per int) time.Duration { return d[min(len(d)-1, len(d)*per/100)] }
		t.Logf("%s, %d cycles: off p50 %v p90 %v p99 %v max %v; on p50 %v p99 %v max %v; %d slow: %v", what, cycles,
			at(off, 50), at(off, 90), at(off, 99), at(off, 100), at(on, 50), at(on, 99), at(on, 100), len(slow), slow[:min(len(slow), 24)])
	}
	timed := func(what string, f func() error) {
		const n = 200
		begin := time.Now()
		for range n {
			if err := f(); err != nil {
				t.Fatal(what, err)
			}
		}
		t.Logf("%s: %v", what, time.Since(begin)/n)
	}
	timed("copy a file", func() error {
		f, err := r.process.Copy(r.channels[0].File)
		if err != nil {
			return err
		}
		return f.Close()
	})
	timed("Quick behind 8 handles", func() error { return r.view.Quick(8) })
	timed("Quick behind 32 handles", func() error { return r.view.Quick(32) })
	timed("Scan", r.view.Scan)
	timed("NewestClient", func() error { _, err := r.sys.NewestClient(); return err })
	figures("one job", 300, nil)
	figures("one job, Quick beside it", 100, func() { _ = r.view.Quick(32) })
	figures("one job, Scan beside it", 100, func() { _ = r.view.Scan() })
	figures("one job, NewestClient beside it", 100, func() { _, _ = r.sys.NewestClient() })
	for other := range strings.SplitSeq(os.Getenv("GPREEMPT_NVIDIA_OTHERS"), ",") {
		if other == "" {
			continue
		}
		o := rigOf(t, nvrm.Kernel(), keyOf(t, other))
		groups = append(groups, nvrm.Group{Process: o.process, Channels: o.channels})
		figures(fmt.Sprintf("%d jobs in one call", len(groups)), 150, nil)
	}
	if file := os.Getenv("GPREEMPT_NVIDIA_FIGURES"); file != "" {
		text, err := json.Marshal(kept)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, append(text, '\n'), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	fd, err := unix.Open(nvrm.ControlPath, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	process, err := nvrm.Kernel().Open(keyOf(t, strconv.Itoa(os.Getpid())))
	if err != nil {
		t.Fatal(err)
	}
	defer process.Close()
	own, err := process.Copy(fd)
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	p := nvrm.HandleInfo{Object: r.client, Index: nvrm.IndexClass}
	if err := own.Control(r.client, r.client, nvrm.GetHandleInfo, nvrm.Bytes(&p)); !errors.Is(err, nvrm.InvalidClient) {
		t.Errorf("the job's client through a descriptor of our own: %v", err)
	}
}

func microseconds(values []time.Duration) []float64 {
	us := make([]float64, len(values))
	for i, v := range values {
		us[i] = float64(v.Nanoseconds()/100) / 10
	}
	return us
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
