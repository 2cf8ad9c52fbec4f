package kfd

import (
	"encoding/binary"
	"errors"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// smiSys has one event stream, at descriptor 55. Each read returns the next chunk.
type smiSys struct {
	t      *testing.T
	gpu    uint32
	chunks []string
	wrote  *[]SMIMask
	closed *[]int
}

func (smiSys) Open(string, int) (int, error) { return fakeFD, nil }
func (s smiSys) Close(fd int) error          { *s.closed = append(*s.closed, fd); return nil }

func (s *smiSys) Ioctl(_ int, req Request, arg Pointer) (uintptr, error) {
	switch req {
	case ReqGetVersion:
		v := As[GetVersionArgs](arg)
		v.Major, v.Minor = 1, 23
		return 0, nil
	case ReqSMIEvents:
		a := As[SMIEventsArgs](arg)
		if a.GPUID != s.gpu {
			return 0, unix.EINVAL
		}
		a.AnonFD = 55
		return 0, nil
	default:
		return 0, unix.ENOTTY
	}
}

func (s *smiSys) Read(fd int, p []byte) (int, error) {
	if fd != 55 {
		return 0, unix.EBADF
	}
	if len(s.chunks) == 0 {
		return 0, unix.EAGAIN
	}
	n := copy(p, s.chunks[0])
	s.chunks = s.chunks[1:]
	if n == 0 {
		return 0, unix.EINTR
	}
	return n, nil
}

func (s *smiSys) Write(fd int, p []byte) (int, error) {
	if fd != 55 || len(p) != 8 {
		return 0, unix.EFAULT
	}
	*s.wrote = append(*s.wrote, SMIMask(binary.NativeEndian.Uint64(p)))
	return len(p), nil
}

func TestSMIStream(t *testing.T) {
	var wrote []SMIMask
	var closed []int
	sys := &smiSys{t: t, gpu: 0x8a31, wrote: &wrote, closed: &closed, chunks: []string{
		"9 5123456789012 -4211 8a31 2\n", "", "no event\n0 zero\na 5123 -4211 8a31 0\n",
	}}
	d, err := OpenWith(sys, DevicePath)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.OpenSMI(1, 0); !errors.Is(err, unix.EINVAL) {
		t.Errorf("an unknown GPU: %v, want EINVAL", err)
	}
	s, err := d.OpenSMI(0x8a31, SMIEvents(SMIQueueEviction, SMIQueueRestore)|SMIAllProcesses)
	if err != nil {
		t.Fatal(err)
	}
	var got []SMIEvent
	for range 3 { // the third finds nothing
		events, err := s.Read()
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, events...)
	}
	want := []SMIEvent{{SMIQueueEviction, "5123456789012 -4211 8a31 2"}, {SMIQueueRestore, "5123 -4211 8a31 0"}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]SMIMask{0x8000000000000300}, wrote); diff != "" {
		t.Errorf("masks (-want +got):\n%s", diff)
	}
	if s.FD() != 55 {
		t.Errorf("descriptor %d, want 55", s.FD())
	}
	if err := errors.Join(s.Close(), s.Close(), d.Close()); err != nil {
		t.Error(err)
	}
	if _, err := s.Read(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("read after Close: %v, want %v", err, os.ErrClosed)
	}
	if diff := cmp.Diff([]int{55, fakeFD}, closed); diff != "" {
		t.Errorf("closed (-want +got):\n%s", diff)
	}
}

func TestReasonOfAnEviction(t *testing.T) {
	type reason struct {
		Trigger SMITrigger
		OK      bool
	}
	got := map[string]reason{}
	want := map[string]reason{
		"9 5123456789012 -4211 8a31 2": {TriggerTTM, true},
		"9 0 -0 0 4":                   {TriggerCRIUCheckpoint, true},
		"a 77 -1 ff 0":                 {},
		"1 8a31:cat":                   {},
		"9 1 -2 3":                     {},
		"9 1 -2 3 y":                   {},
		"9 1 -2 3 4 5":                 {},
	}
	for text := range want {
		var r reason
		e, _ := parseSMIEvent(text)
		if r.Trigger, r.OK = e.Evicted(); !r.OK {
			r.Trigger = 0
		}
		got[text] = r
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("reasons (-want +got):\n%s", diff)
	}
}
