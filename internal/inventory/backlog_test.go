package inventory

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// own keeps positions in its memory, prints the address, and runs until its input ends.
func own(positions string) {
	page, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		panic(err)
	}
	for n, word := range strings.Fields(positions) {
		value, err := strconv.ParseUint(word, 10, 64)
		if err != nil {
			panic(err)
		}
		binary.NativeEndian.PutUint64(page[wordBytes*n:], value)
	}
	fmt.Printf("%p\n", page)
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// owner starts a process that keeps positions at an address.
func owner(t *testing.T, positions ...uint64) (key gpreempt.ProcessKey, address uint64) {
	t.Helper()
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), os.Args[0])
	cmd.Env = append(os.Environ(), ownerEnv+"="+strings.Trim(fmt.Sprint(positions), "[]"))
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = stdin.Close()
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	})
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	if address, err = strconv.ParseUint(strings.TrimSpace(line), 0, 64); err != nil {
		t.Fatal(err)
	}
	p, err := proc.Open("/", gpreempt.ProcessKey{PID: int32(cmd.Process.Pid)})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	return p.Key(), address
}

// queue returns a queue with its positions at two addresses and a ring of 4096 bytes.
func queue(kind gpreempt.QueueType, aql bool, read, write uint64) gpreempt.QueueEntry {
	return gpreempt.QueueEntry{
		Queue: gpreempt.Queue{Type: kind, RingBytes: 4096},
		Info:  gpreempt.QueueInfo{AQL: aql, ReadPointer: read, WritePointer: write},
	}
}

// readBacklogs reads until the memory answers in time: a busy machine may delay it.
func readBacklogs(t *testing.T, key gpreempt.ProcessKey, queues ...gpreempt.QueueEntry) ([]Backlog, error) {
	t.Helper()
	r := NewBacklogReader()
	for {
		got, err := r.Read(t.Context(), key, queues)
		if !errors.Is(err, ErrMemoryBusy) {
			return got, err
		}
	}
}

func TestBacklogsOfAProcessAreRead(t *testing.T) {
	key, at := owner(t, 7, 10, 1020, 3, 4096, 8192, 5, 5, 9, 8)
	pair := func(n uint64) (read, write uint64) { return at + 16*n, at + 16*n + 8 }
	of := func(kind gpreempt.QueueType, aql bool, n uint64) gpreempt.QueueEntry {
		read, write := pair(n)
		return queue(kind, aql, read, write)
	}
	got, err := readBacklogs(t, key,
		of(gpreempt.QueueCompute, true, 0),
		queue(gpreempt.QueueCompute, true, 0, 0), // at unknown addresses
		of(gpreempt.QueueCompute, false, 1),
		of(gpreempt.QueueSDMA, false, 2),
		queue(gpreempt.QueueCompute, true, 8, 16), // where nothing is mapped
		of(gpreempt.QueueCompute, true, 3),
		of(gpreempt.QueueCompute, true, 4), // read more than was written: not positions
	)
	if err != nil {
		t.Fatal(err)
	}
	want := []Backlog{
		{Known: true, Value: 3, Unit: Packets, Written: 10},
		{},
		{Known: true, Value: 7, Unit: Dwords, Written: 3},
		{Known: true, Value: 4096, Unit: Bytes, Written: 8192},
		{},
		{Known: true, Unit: Packets, Written: 5},
		{},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("backlogs (-want +got):\n%s", diff)
	}
}

func TestPositionsThatWrapAreRead(t *testing.T) {
	const top = 1<<64 - 1
	for _, test := range []struct {
		kind        gpreempt.QueueType
		aql         bool
		read, write uint64
		want        Backlog
	}{
		{gpreempt.QueueCompute, true, top, 2, Backlog{true, 3, Packets, 2}},
		{gpreempt.QueueCompute, true, 0, 64, Backlog{true, 64, Packets, 64}},
		{gpreempt.QueueCompute, true, 0, 65, Backlog{}},
		{gpreempt.QueueCompute, false, 1023, 0, Backlog{true, 1, Dwords, 0}},
		{gpreempt.QueueSDMA, false, 0, 4097, Backlog{}},
		{gpreempt.QueueSDMAXGMI, false, 64, 128, Backlog{true, 64, Bytes, 128}},
	} {
		if got := of(queue(test.kind, test.aql, 8, 16), test.read, test.write); got != test.want {
			t.Errorf("%v, AQL %v, from %d to %d: %+v, want %+v", test.kind, test.aql, test.read, test.write, got, test.want)
		}
	}
}

func TestManyQueuesAreRead(t *testing.T) {
	key, at := owner(t, 1, 3)
	queues := make([]gpreempt.QueueEntry, 2000)
	want := make([]Backlog, len(queues))
	for n := range queues {
		queues[n] = queue(gpreempt.QueueCompute, true, at, at+8)
		want[n] = Backlog{Known: true, Value: 2, Unit: Packets, Written: 3}
	}
	got, err := readBacklogs(t, key, queues...)
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("error %v, backlogs (-want +got):\n%s", err, diff)
	}
}

func TestAnotherProcessWithThePIDIsNotRead(t *testing.T) {
	key, at := owner(t, 1, 3)
	key.Start++
	if got, err := readBacklogs(t, key, queue(gpreempt.QueueCompute, true, at, at+8)); !errors.Is(err, proc.ErrGone) || got != nil {
		t.Errorf("backlogs %v, error %v; want %v", got, err, proc.ErrGone)
	}
	gone := gpreempt.ProcessKey{PID: 1 << 30, Start: 1}
	if _, err := readBacklogs(t, gone, queue(gpreempt.QueueCompute, true, at, at+8)); !errors.Is(err, proc.ErrGone) {
		t.Errorf("error %v; want %v", err, proc.ErrGone)
	}
}

func TestUnknownPositionsNeedNoProcess(t *testing.T) {
	got, err := NewBacklogReader().Read(t.Context(), gpreempt.ProcessKey{}, []gpreempt.QueueEntry{{}, {}})
	if diff := cmp.Diff([]Backlog{{}, {}}, got); diff != "" || err != nil {
		t.Errorf("error %v, backlogs (-want +got):\n%s", err, diff)
	}
}

// silent returns a reader of memory that does not answer before release is closed.
func silent(release <-chan struct{}) *BacklogReader {
	r := NewBacklogReader()
	r.peek = func(_ int32, addresses, _ []uint64) (int, error) {
		<-release
		return len(addresses), nil
	}
	r.check = func(gpreempt.ProcessKey) error { return nil }
	return r
}

func TestMemoryThatDoesNotAnswerBlocksNoCaller(t *testing.T) {
	release := make(chan struct{})
	r := silent(release)
	queues := []gpreempt.QueueEntry{queue(gpreempt.QueueCompute, true, 8, 16)}
	read := func(pid int32) error {
		_, err := r.Read(t.Context(), gpreempt.ProcessKey{PID: pid, Start: 1}, queues)
		return err
	}
	for pid := range int32(maxStuck) {
		if err := read(pid + 1); !errors.Is(err, ErrMemoryBusy) {
			t.Fatalf("process %d: error %v, want %v", pid+1, err, ErrMemoryBusy)
		}
	}
	if len(r.reading) != maxStuck {
		t.Errorf("%d goroutines read, want %d", len(r.reading), maxStuck)
	}
	if err := read(1); !errors.Is(err, ErrMemoryBusy) {
		t.Errorf("once more: error %v, want %v", err, ErrMemoryBusy)
	}
	if err := read(maxStuck + 1); !errors.Is(err, ErrMemoryBusy) {
		t.Errorf("one more: error %v, want %v", err, ErrMemoryBusy)
	}
	close(release)
	for read(1) != nil { // as soon as it has answered
	}
}

func TestReadEndsWithItsContext(t *testing.T) {
	release := make(chan struct{})
	defer close(release)
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("enough")
	cancel(why)
	_, err := silent(release).Read(ctx, gpreempt.ProcessKey{PID: 1, Start: 1}, []gpreempt.QueueEntry{queue(gpreempt.QueueCompute, true, 8, 16)})
	if !errors.Is(err, why) {
		t.Errorf("error %v, want %v", err, why)
	}
}

func BenchmarkRead(b *testing.B) {
	words := make([]uint64, 2)
	p, err := proc.Open("/", gpreempt.ProcessKey{PID: int32(os.Getpid())})
	if err != nil {
		b.Fatal(err)
	}
	defer p.Close()
	at, err := strconv.ParseUint(fmt.Sprintf("%p", words), 0, 64)
	if err != nil {
		b.Fatal(err)
	}
	queues := make([]gpreempt.QueueEntry, 8)
	for n := range queues {
		queues[n] = queue(gpreempt.QueueCompute, true, at, at+8)
	}
	r := NewBacklogReader()
	b.ReportAllocs()
	for b.Loop() {
		if _, err := r.Read(b.Context(), p.Key(), queues); err != nil {
			b.Fatal(err)
		}
	}
}
