package engine

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// childEnv makes the test binary a process that uses a queue: it has the file with its
// doorbell.
const childEnv = "KFDEMU_ENGINE_TEST_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		if err := child(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(testutil.VerifyMain(m))
}

// procMem is the memory of a real process.
type procMem struct{ f *os.File }

func openMem(t testing.TB, pid int) procMem {
	t.Helper()
	f, err := os.OpenFile(fmt.Sprintf("/proc/%d/mem", pid), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	})
	return procMem{f}
}

func (m procMem) ReadAt(p []byte, addr uint64) error {
	_, err := m.f.ReadAt(p, int64(addr))
	return result(err)
}

func (m procMem) WriteAt(p []byte, addr uint64) error {
	_, err := m.f.WriteAt(p, int64(addr))
	return result(err)
}

// result: the kernel gives EIO where nothing is mapped, and nothing at all for a
// process that ended.
func result(err error) error {
	if errors.Is(err, syscall.EIO) {
		return syscall.EFAULT
	}
	return err
}

// Where things are in the memory of the child.
const (
	childBytes   = 1 << 20
	childSlots   = 256
	childRing    = 0
	childRead    = 16 << 10
	childWrite   = childRead + 128
	childKernel  = childRead + 256
	childResult  = childRead + 320
	childSignal  = childRead + 384
	childKernarg = 32 << 10
)

// child puts as many packets on a queue as its first argument says, of kernels that
// take as long as its second says, waits for the last one's signal, and reports what it
// sees.
func child() error {
	n, err := strconv.ParseUint(os.Args[1], 10, 64)
	if err != nil {
		return err
	}
	took, err := time.ParseDuration(os.Args[2])
	if err != nil {
		return err
	}
	b, base, err := pages(childBytes)
	if err != nil {
		return err
	}
	doorbells, err := mapped(os.NewFile(3, "doorbells"), os.Getpagesize())
	if err != nil {
		return err
	}
	for slot := range childSlots {
		half(b, childRing+slot*PacketBytes).Store(uint32(PacketInvalid))
	}
	Kernel{Op: OpMix, Duration: took, Occupancy: 1000}.Put(b[childKernel:])
	Signal{Kind: SignalUser, Value: int64(n)}.Put(b[childSignal:])
	fmt.Println(base)
	if _, err := bufio.NewReader(os.Stdin).ReadString('\n'); err != nil {
		return err
	}
	for i := range n {
		for i-word(b, childRead).Load() >= childSlots {
			runtime.Gosched()
		}
		slot := childRing + int(i%childSlots)*PacketBytes
		kernarg := childKernarg + int(i%childSlots)*PacketBytes
		Mix{Result: base + childResult, Value: i}.Put(b[kernarg:])
		word(b, childWrite).Store(i + 1)
		first := Dispatch{
			Header: MakeHeader(PacketDispatch, true), Dimensions: 1,
			Kernel: base + childKernel, Kernarg: base + uint64(kernarg), Completion: base + childSignal,
		}.Put(b[slot:])
		half(b, slot).Store(first)
		word(doorbells, 0).Store(i)
	}
	for word(b, childSignal+SignalValue).Load() != 0 {
		runtime.Gosched()
	}
	fmt.Println(word(b, childRead).Load(), word(b, childResult).Load(), word(b, childResult+8).Load())
	return nil
}

// startChild starts one and returns its queue to the engine.
func startChild(t testing.TB, w *world, packets int, took time.Duration) (cmd *exec.Cmd, out *bufio.Reader) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	file, err := os.Create(filepath.Join(t.TempDir(), "doorbells"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if err := file.Truncate(int64(os.Getpagesize())); err != nil {
		t.Fatal(err)
	}
	doorbells, err := mapped(file, os.Getpagesize())
	if err != nil {
		t.Fatal(err)
	}
	cmd = exec.CommandContext(t.Context(), exe, strconv.Itoa(packets), took.String())
	cmd.Env = append(os.Environ(), childEnv+"=1")
	cmd.Stderr = os.Stderr
	cmd.ExtraFiles = []*os.File{file}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	out = bufio.NewReader(pipe)
	var base uint64
	if _, err := fmt.Fscanln(out, &base); err != nil {
		t.Fatal(err)
	}
	ref := gpumodel.QueueRef{Process: gpreempt.ProcessKey{PID: int32(cmd.Process.Pid), Start: 1}}
	spec := gpumodel.QueueSpec{
		GPU: w.gpu, Type: gpreempt.QueueCompute, Ring: base + childRing, RingBytes: childSlots * PacketBytes,
		Read: base + childRead, Write: base + childWrite,
	}
	w.rt.Do(func(m *gpumodel.Machine) {
		if _, err = m.StartProcess(gpumodel.ProcSpec{PID: ref.Process.PID, Start: ref.Process.Start}); err == nil {
			err = m.AttachQueue(ref.Process, spec)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	err = w.Add(Queue{
		Serial: 1, Ref: ref, Type: spec.Type, AQL: true, Ring: spec.Ring, RingBytes: uint32(spec.RingBytes),
		Read: spec.Read, Write: spec.Write, Doorbell: doorbells[:8], Memory: openMem(t, cmd.Process.Pid),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		w.Remove(1)
		if err := syscall.Munmap(doorbells); err != nil {
			t.Error(err)
		}
	})
	w.queues = []*ring{{w: w, ref: ref}}
	w.run(w.queues...)
	if _, err := io.WriteString(in, "go\n"); err != nil {
		t.Fatal(err)
	}
	return cmd, out
}

// expected is what it has to see.
func expected(packets int) string {
	var hash uint64
	for i := range uint64(packets) {
		hash = MixHash(hash, i)
	}
	return fmt.Sprint(packets, packets, hash)
}

func TestARealProcessSeesEveryPacketDoneOnceWhileItsQueueComesAndGoes(t *testing.T) {
	for _, preset := range presets {
		t.Run(preset, func(t *testing.T) {
			w := realWorld(t, preset)
			const packets = 3000
			cmd, out := startChild(t, w, packets, 5*us)
			said := make(chan string, 1)
			go func() {
				line, err := out.ReadString('\n')
				if err != nil {
					line = err.Error()
				}
				said <- strings.TrimSpace(line)
			}()
			var got string
			for got == "" {
				w.run()
				w.run(w.queues...)
				select {
				case got = <-said:
				case <-time.After(2 * ms):
				}
			}
			if want := expected(packets); got != want {
				t.Errorf("the process sees read index, count and hash %q, want %q", got, want)
			}
			if err := cmd.Wait(); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestARealProcessThatIsKilledStopsItsQueueQuietly(t *testing.T) {
	w := realWorld(t, "mi300x")
	cmd, _ := startChild(t, w, 1<<40, 5*us)
	await := func(cond func(Counters) bool) {
		for !cond(w.Counters()[0]) {
			<-time.After(ms)
		}
	}
	await(func(c Counters) bool { return c.Completed >= 100 })
	// The process ends while packets wait for the GPU. With an empty ring, nothing would
	// touch its memory.
	w.run()
	await(func(c Counters) bool { return c.Fetched > c.Read })
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil {
		t.Error("the process was not killed")
	}
	w.run(w.queues...)
	await(func(c Counters) bool { return c.Stopped })
	w.notes.add(func() { close(w.faults) })
	for f := range w.faults {
		t.Errorf("fault %v", f)
	}
}
