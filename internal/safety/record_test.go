package safety

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestRecordsAreParsed(t *testing.T) {
	tests := []struct {
		text string
		want Record
	}{
		{
			"3,1289,127033279654,-;amdgpu 0000:c5:00.0: amdgpu: GPU reset begin!\n SUBSYSTEM=pci\n DEVICE=+pci:0000:c5:00.0\n",
			Record{Seq: 1289, Time: 127033279654 * time.Microsecond, Text: "amdgpu 0000:c5:00.0: amdgpu: GPU reset begin!", Device: "+pci:0000:c5:00.0"},
		},
		{"12,7,5,-,caller=T1;hello; world\n", Record{Facility: 1, Seq: 7, Time: 5 * time.Microsecond, Text: "hello; world"}},
		{"30,7,5,c;x\n", Record{Facility: 3, Seq: 7, Time: 5 * time.Microsecond, Text: "x"}},
		{`6,1,0,-;a\x0ab \x5cx41 \xzz \x4` + "\n", Record{Seq: 1, Text: "a\nb \\x41 \\xzz \\x4"}},
		{"6,1,0,-;\n", Record{Seq: 1}},
		{"6,1,0,-;no newline", Record{Seq: 1, Text: "no newline"}},
		// An escaped newline stays in the text: it cannot begin a dictionary.
		{`6,1,0,-;x\x0a DEVICE=+pci:0000:03:00.0` + "\n", Record{Seq: 1, Text: "x\n DEVICE=+pci:0000:03:00.0"}},
		{"4,1,0,-;x\n SUBSYSTEM=kfd\n DEVICE=c237:0\n", Record{Seq: 1, Text: "x", Device: "c237:0"}},
	}
	for _, tt := range tests {
		got, err := ParseRecord([]byte(tt.text))
		if err != nil {
			t.Errorf("%q: %v", tt.text, err)
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%q (-want +got):\n%s", tt.text, diff)
		}
	}
	for _, bad := range []string{"", "hello", "6,1,0;x", "6,1,-;x", "x,1,0,-;x", "6,-1,0,-;x", "6,1,-5,-;x", "6,1,9223372036854775807,-;x", "6,1,0,-x"} {
		if r, err := ParseRecord([]byte(bad)); err == nil {
			t.Errorf("%q is %+v", bad, r)
		}
	}
}

// FuzzParseRecord checks that a record survives the kernel's format, and that any other
// input is either parsed or a short error.
func FuzzParseRecord(f *testing.F) {
	f.Add([]byte("3,1289,127033279654,-;amdgpu 0000:c5:00.0: amdgpu: GPU reset begin!\n SUBSYSTEM=pci\n DEVICE=+pci:0000:c5:00.0\n"), uint32(3), uint64(9), uint32(8), "t", "d")
	f.Add([]byte("6,1,0,-;a\\x0a\\"), uint32(8), uint64(1), uint32(0), "a\nb\\x41;", "")
	f.Add([]byte(";,,,"), uint32(0), uint64(0), uint32(0), "\x7f\xff DEVICE=x", "+pci:\n")
	f.Fuzz(func(t *testing.T, raw []byte, priority uint32, seq uint64, usec uint32, text, device string) {
		if r, err := ParseRecord(raw); err == nil {
			match(r)
		} else if len(err.Error()) > 500 {
			t.Errorf("an error of %d bytes", len(err.Error()))
		}
		want := Record{Facility: priority >> 3, Seq: seq, Time: time.Duration(usec) * time.Microsecond, Text: text, Device: device}
		printed := fmt.Sprintf("%d,%d,%d,-;%s\n DEVICE=%s\n", priority, seq, usec, escape(text), escape(device))
		got, err := ParseRecord([]byte(printed))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%q (-want +got):\n%s", printed, diff)
		}
	})
}

// escape escapes like msg_add_ext_text.
func escape(s string) string {
	var b strings.Builder
	for _, c := range []byte(s) {
		if c < ' ' || c >= 127 || c == '\\' {
			fmt.Fprintf(&b, `\x%02x`, c)
		} else {
			b.WriteByte(c)
		}
	}
	return b.String()
}
