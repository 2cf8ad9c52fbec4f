package kfd

import (
	"encoding/binary"
	"errors"
	"os"
	"slices"
	"strings"
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
		"9 5123456789012 -42", "", "11 8a31 2\na 5123 -4211 8a31 0\n4 1 hang",
	}}
	d, err := OpenWith(sys, DevicePath)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.OpenSMI(1); !errors.Is(err, unix.EINVAL) {
		t.Errorf("an unknown GPU: %v, want EINVAL", err)
	}
	s, err := d.OpenSMI(0x8a31)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Select(SMIEvents(SMIQueueEviction, SMIQueueRestore) | SMIAllProcesses); err != nil {
		t.Error(err)
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

func TestParseQueueEviction(t *testing.T) {
	for text, want := range map[string]QueueEviction{
		"9 5123456789012 -4211 8a31 2": {BoottimeNS: 5123456789012, PID: 4211, GPU: 0x8a31, Trigger: TriggerTTM},
		"9 0 -0 0 4":                   {Trigger: TriggerCRIUCheckpoint},
		"a 77 -1 ff 0":                 {BoottimeNS: 77, PID: 1, GPU: 255, Restored: true},
		"a 77 -1 ff R":                 {BoottimeNS: 77, PID: 1, GPU: 255, Restored: true, Rescheduled: true},
		"a 77 -1 ff \x00":              {BoottimeNS: 77, PID: 1, GPU: 255, Restored: true},
		"a 77 -1 ff ":                  {BoottimeNS: 77, PID: 1, GPU: 255, Restored: true},
	} {
		e, ok := parseSMIEvent([]byte(text))
		got, err := ParseQueueEviction(e)
		if diff := cmp.Diff(want, got); diff != "" || err != nil || !ok {
			t.Errorf("%q: %v, error %v (-want +got):\n%s", text, ok, err, diff)
		}
	}
	for _, text := range []string{"1 8a31:cat", "9 1 -2 3", "9 x -2 3 4", "9 1 2 3 4", "9 1 -2 g 4", "9 1 -2 3 y", "9 1 -2 3 4 5", "9 1"} {
		e, _ := parseSMIEvent([]byte(text))
		if got, err := ParseQueueEviction(e); err == nil {
			t.Errorf("%q was parsed as %+v", text, got)
		}
	}
}

func TestLinesThatAreTooLongAreThrownAway(t *testing.T) {
	var l lines
	long := "9 " + strings.Repeat("x", maxLine)
	var got []SMIEvent
	for _, chunk := range []string{"2 a\n" + long, long, "9 tail\n3 b\n", "no event\n0 zero\n", "4 c\n"} {
		got = append(got, l.add([]byte(chunk))...)
	}
	want := []SMIEvent{{2, "a"}, {3, "b"}, {4, "c"}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

// The events do not depend on how the stream is cut, and the buffer is bounded.
func FuzzSMILines(f *testing.F) {
	f.Add("9 5123456789012 -4211 8a31 2\na 1 -2 3 R\n", uint8(5))
	f.Add("1 8a31:a\nb\n\n", uint8(1))
	f.Add(strings.Repeat("9", 3*maxLine)+"\n2 x\n", uint8(200))
	f.Fuzz(func(t *testing.T, text string, step uint8) {
		var whole, parts lines
		want := whole.add([]byte(text))
		var got []SMIEvent
		for rest := text; rest != ""; {
			n := min(len(rest), int(step)+1)
			got = append(got, parts.add([]byte(rest[:n]))...)
			rest = rest[n:]
			if len(parts.rest) > maxLine {
				t.Fatalf("%d bytes are buffered", len(parts.rest))
			}
		}
		if !slices.Equal(want, got) {
			t.Errorf("in one piece %+v, in parts %+v", want, got)
		}
		for _, e := range got {
			ev, err := ParseQueueEviction(e)
			if err != nil && ev != (QueueEviction{}) {
				t.Errorf("%+v was parsed as %+v, error %v", e, ev, err)
			}
			if err == nil && ev.PID < 0 {
				t.Errorf("%+v was parsed with process %d", e, ev.PID)
			}
		}
	})
}
