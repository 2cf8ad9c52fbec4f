package discovery_test

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"
	"testing"
	"testing/fstest"
	"time"

	"github.com/gpreempt/gpreempt/pkg/discovery"
)

// bigHost returns processes with some queues each on 8 GPUs, with all files that
// kfd_process.c makes for them.
func bigHost(processes, queues int) fstest.MapFS {
	m := fstest.MapFS{}
	add := func(path, text string) { m[path] = &fstest.MapFile{Data: []byte(text)} }
	for n := range processes {
		pid := 1000 + n
		dir := procs + strconv.Itoa(pid)
		add(dir+"/pasid", strconv.Itoa(32770+n)+"\n")
		for gpu := range 8 {
			id := strconv.Itoa(63420 + gpu)
			add(dir+"/vram_"+id, "2147483648\n")
			add(dir+"/sdma_"+id, "0\n")
			add(dir+"/stats_"+id+"/evicted_ms", "0\n")
			add(dir+"/stats_"+id+"/cu_occupancy", "0\n")
			for _, counter := range []string{"faults", "page_in", "page_out"} {
				add(dir+"/counters_"+id+"/"+counter, "0\n")
			}
		}
		for q := range queues {
			queue := dir + "/queues/" + strconv.Itoa(q)
			add(queue+"/gpuid", strconv.Itoa(63420+q%8))
			add(queue+"/size", "1048576")
			add(queue+"/type", "0")
		}
		proc := "proc/" + strconv.Itoa(pid)
		add(proc+"/stat", stat(pid, "python3", 'S', 8, uint64(pid)))
		add(proc+"/status", "Name:\tpython3\nUid:\t1000\t1000\t1000\t1000\nGid:\t1000\t1000\t1000\t1000\nNSpid:\t"+strconv.Itoa(pid)+"\n")
		add(proc+"/comm", "python3\n")
		add(proc+"/cmdline", "python3\x00train.py\x00")
		add(proc+"/environ", "PATH=/usr/bin\x00GPREEMPT_CLASS=offline\x00")
		add(proc+"/cgroup", "0::/system.slice/job.service\n")
	}
	return m
}

// inMemory writes a tree to a directory of a tmpfs, which like sysfs never reuses an inode
// number.
func inMemory(tb testing.TB, m fstest.MapFS) string {
	tb.Helper()
	var st syscall.Statfs_t
	if err := syscall.Statfs("/dev/shm", &st); err != nil || st.Type != 0x01021994 {
		tb.Skip("/dev/shm is no tmpfs: inode numbers of other file systems may be used again")
	}
	dir, err := os.MkdirTemp("/dev/shm", "gpreempt") //nolint:usetesting // TempDir is seldom on a tmpfs
	if err != nil {
		tb.Skipf("/dev/shm cannot be written: %v", err)
	}
	tb.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.CopyFS(dir, m); err != nil {
		tb.Fatal(err)
	}
	return dir
}

// manyInMemory is inMemory for plain files, thousands of them.
func manyInMemory(tb testing.TB, m fstest.MapFS) string {
	tb.Helper()
	dir := inMemory(tb, nil)
	for path, file := range m { // os.CopyFS is slow: MapFS finds a directory by reading all names
		path = filepath.Join(dir, path)
		err := os.MkdirAll(filepath.Dir(path), 0o755)
		if err == nil {
			err = os.WriteFile(path, file.Data, 0o600)
		}
		if err != nil {
			tb.Fatal(err)
		}
	}
	return dir
}

// cpu returns the CPU time this process has used, user and system.
func cpu(tb testing.TB) time.Duration {
	tb.Helper()
	var use syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &use); err != nil {
		tb.Fatal(err)
	}
	return time.Duration(use.Utime.Nano() + use.Stime.Nano())
}

// cost returns the CPU time of one of many calls.
func cost(tb testing.TB, call func()) time.Duration {
	tb.Helper()
	const calls = 200
	runtime.GC()
	before := cpu(tb)
	for range calls {
		call()
	}
	return (cpu(tb) - before) / calls
}

// leastCalls makes the minimal system calls of a scan of processes with queues: it lists
// the processes and the queues of each, and checks whether it is alive.
func leastCalls(tb testing.TB, dir string) func() {
	tb.Helper()
	buf := make([]byte, 64<<10)
	list := func(path string, each func(pid string)) {
		fd, err := syscall.Open(path, syscall.O_RDONLY|syscall.O_CLOEXEC|syscall.O_DIRECTORY, 0)
		if err != nil {
			tb.Fatal(err)
		}
		defer syscall.Close(fd)
		var names []string
		for {
			n, err := syscall.ReadDirent(fd, buf)
			if err != nil {
				tb.Fatal(err)
			}
			if n == 0 {
				break
			}
			if each != nil {
				_, _, names = syscall.ParseDirent(buf[:n], -1, names)
			}
		}
		for _, name := range names {
			each(name)
		}
	}
	return func() {
		list(dir+"/"+procs, func(pid string) {
			list(dir+"/"+procs+pid+"/queues", nil)
			fd, err := syscall.Open(dir+"/proc/"+pid+"/stat", syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
			if err != nil {
				tb.Fatal(err)
			}
			defer syscall.Close(fd)
			if _, err := syscall.Read(fd, buf); err != nil {
				tb.Fatal(err)
			}
		})
	}
}

// BenchmarkScan measures the first scan of processes with 5 queues each, and those of
// an unchanged host after it. The last measure is the CPU time of a scan as a multiple
// of what leastCalls uses in the same run.
func BenchmarkScan(b *testing.B) {
	for _, processes := range []int{10, 100, 1000} {
		b.Run(fmt.Sprintf("processes=%d", processes), func(b *testing.B) {
			dir := manyInMemory(b, bigHost(processes, 5))
			b.Run("first", func(b *testing.B) { firstScan(b, dir, processes) })
			b.Run("unchanged", func(b *testing.B) { unchangedScan(b, dir) })
		})
	}
}

func firstScan(b *testing.B, dir string, processes int) {
	b.Helper()
	b.ReportAllocs()
	before := cpu(b)
	for b.Loop() {
		f := newFS(discovery.Host(dir))
		f.SetEnv([]string{"GPREEMPT_CLASS"})
		if s, err := f.Scan(); err != nil || len(s.Processes) != processes {
			b.Fatal(len(s.Processes), err)
		}
	}
	b.ReportMetric(float64((cpu(b)-before).Microseconds())/float64(b.N)/1000, "cpu-ms/scan")
}

func unchangedScan(b *testing.B, dir string) {
	b.Helper()
	f := newFS(discovery.Host(dir))
	if _, err := f.Scan(); err != nil {
		b.Fatal(err)
	}
	least := leastCalls(b, dir)
	var scans, leasts time.Duration
	b.ReportAllocs()
	for b.Loop() { // alternating
		began := cpu(b)
		if _, err := f.Scan(); err != nil {
			b.Fatal(err)
		}
		between := cpu(b)
		least()
		scans, leasts = scans+between-began, leasts+cpu(b)-between
	}
	b.ReportMetric(float64(scans.Microseconds())/float64(b.N)/1000, "cpu-ms/scan")
	b.ReportMetric(float64(scans)/float64(leasts), "times-least")
}

// BenchmarkIdle computes from the cost of the calls which share of a core a daemon uses for
// 10 unchanged processes of 8 queues: a scan at the pauses of Pace, between 50 ms and 1 s,
// and FS.Changed every 50 ms.
func BenchmarkIdle(b *testing.B) {
	const shortest, longest, span = 50 * time.Millisecond, time.Second, time.Hour
	dir := inMemory(b, bigHost(10, 8))
	f := newFS(discovery.Host(dir))
	f.SetEnv([]string{"GPREEMPT_CLASS"})
	must := func(err error) {
		if err != nil {
			b.Fatal(err)
		}
	}
	_, err := f.Scan()
	must(err)
	for b.Loop() {
		scan := cost(b, func() { _, err := f.Scan(); must(err) })
		look := cost(b, func() { _, err := f.Changed(); must(err) })
		// The facts of each process are read again every 10 s, 360 times in an hour.
		again := cost(b, func() {
			fresh := newFS(discovery.Host(dir))
			fresh.SetEnv([]string{"GPREEMPT_CLASS"})
			_, err := fresh.Scan()
			must(err)
		})
		pace := discovery.NewPace(shortest, longest)
		scans := 0
		for at := time.Duration(0); at < span; scans++ {
			at += scan + pace.Next(false, scan)
		}
		used := time.Duration(scans)*scan + time.Duration(span.Milliseconds()/shortest.Milliseconds())*look + 360*again
		b.ReportMetric(float64(scan.Nanoseconds())/1e3, "cpu-µs/scan")
		b.ReportMetric(float64(look.Nanoseconds())/1e3, "cpu-µs/look")
		b.ReportMetric(100*used.Seconds()/span.Seconds(), "%core")
	}
}
