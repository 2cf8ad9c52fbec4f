package discovery_test

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// stat returns a line of /proc/PID/stat.
func stat(pid int, comm string, state byte, threads int, start uint64) string {
	return fmt.Sprintf("%d (%s) %c 1 2 1 0 -1 4194304 10 0 0 0 5 6 0 0 20 0 %d 0 %d 1000 20 0\n", pid, comm, state, threads, start)
}

func TestParseProcStat(t *testing.T) {
	for _, comm := range []string{"python3", "a b", "tmux: server", ") S 1 (", "((", "", "new\nline", "\xff"} {
		got, err := discovery.ParseProcStat([]byte(stat(4211, comm, 'S', 64, 987654)))
		if err != nil {
			t.Errorf("comm %q: %v", comm, err)
			continue
		}
		want := discovery.ProcStat{PID: 4211, Comm: comm, State: 'S', Parent: 1, Group: 2, Session: 1, Flags: 4194304, Ticks: 11, Threads: 64, Start: 987654, Pages: 20}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("comm %q (-want +got):\n%s", comm, diff)
		}
	}
}

func TestProcessThatIsRemovedMeanwhileIsNotAlive(t *testing.T) {
	text := strings.Replace(stat(4211, "a", 'R', 0, 987654), " 1 2 1 ", " 0 -1 -1 ", 1)
	got, err := discovery.ParseProcStat([]byte(text))
	want := discovery.ProcStat{PID: 4211, Comm: "a", State: 'X', Flags: 4194304, Ticks: 11, Start: 987654, Pages: 20}
	if diff := cmp.Diff(want, got); diff != "" || err != nil || got.Alive() {
		t.Errorf("%s: %+v, %v, alive %t", text, got, err, got.Alive())
	}
}

func TestProcessWithoutRunnableThreadsIsNotAlive(t *testing.T) {
	tests := []struct {
		stat discovery.ProcStat
		want bool
	}{
		{discovery.ProcStat{State: 'S', Threads: 1}, true},
		{discovery.ProcStat{State: 't', Threads: 1}, true},
		{discovery.ProcStat{State: 'Z', Threads: 1}, false},
		{discovery.ProcStat{State: 'Z', Threads: 5}, true}, // only its leader ended
		{discovery.ProcStat{State: 'X', Threads: 0}, false},
	}
	for _, test := range tests {
		if got := test.stat.Alive(); got != test.want {
			t.Errorf("%c with %d threads: alive %v, want %v", test.stat.State, test.stat.Threads, got, test.want)
		}
	}
}

func TestParsersNameTheLineAndTheProblem(t *testing.T) {
	parse := map[string]func(string) error{
		"stat":   func(s string) error { _, err := discovery.ParseProcStat([]byte(s)); return err },
		"status": func(s string) error { _, err := discovery.ParseProcStatus([]byte(s)); return err },
		"type":   func(s string) error { _, err := discovery.ParseQueueType([]byte(s)); return err },
		"properties": func(s string) error {
			_, err := discovery.ParseNodeProperties(strings.NewReader(s))
			return err
		},
	}
	tests := []struct{ file, text, want string }{
		{"stat", "", "line 1: no command name in parentheses"},
		{"stat", ")(", "line 1: no command name in parentheses"},
		{"stat", "x (a) S", `line 1: the pid is "x ", want a positive number`},
		{"stat", "-5 (a) S", `line 1: the pid is "-5 ", want a positive number`},
		{"stat", "5 (a) S 1 2", "line 1: only 5 fields, want 24 or more"},
		{"stat", strings.Replace(stat(5, "a", 'S', 1, 77), " 77 ", " x ", 1), `line 1: field 22, the start time, is "x"`},
		{"stat", strings.Replace(stat(5, "a", 'S', 99, 77), " 99 ", " ? ", 1), `line 1: field 20, the number of threads, is "?"`},
		{"status", "Name:\ta\nUid:\t1\t1\t1\t1\n", "line 2: no line Uid: or Gid:"},
		{"status", "", "line 1: no line Uid: or Gid:"},
		{"status", "Name:\ta\nUid:\t1\t2\n", "line 2: Uid has 2 numbers, want 4"},
		{"status", "Name:\ta\nUid:\t1\tx\t1\t1\n", `line 2: Uid has the effective id "x", want a number`},
		{"status", "Gid:\t1\t-1\t1\t1\n", `line 1: Gid has the effective id "-1", want a number`},
		{"status", "NSpid:\n", "line 1: NSpid has 0 numbers, want 1 to 33"},
		{"status", "NSpid:" + strings.Repeat("\t1", 34), "line 1: NSpid has 34 numbers, want 1 to 33"},
		{"status", "NSpid:\t7\t0\n", `line 1: NSpid has the pid "0", want a positive number`},
		{"type", "", `line 1: "" is not a decimal number of 31 bits`},
		{"type", "0x1", `line 1: "0x1" is not a decimal number of 31 bits`},
		{"properties", "domain 0\nsimd_count\n", `line 2: simd_count is "", want a decimal number below 2^32`},
		{"properties", "simd_count -4\n", `line 1: simd_count is "-4", want a decimal number below 2^32`},
		{"properties", "num_xcc 4294967296\n", `line 1: num_xcc is "4294967296", want a decimal number below 2^32`},
	}
	for _, test := range tests {
		err := parse[test.file](test.text)
		if _, ok := errors.AsType[*discovery.ParseError](err); !ok || err.Error() != test.want {
			t.Errorf("%s %q: error %v, want *ParseError %s", test.file, test.text, err, test.want)
		}
	}
}

func TestParseNumberWithAndWithoutNewline(t *testing.T) {
	for _, text := range []string{"63420", "63420\n"} {
		if got, err := discovery.ParseNumber([]byte(text), 32); err != nil || got != 63420 {
			t.Errorf("%q: %d, %v", text, got, err)
		}
	}
}

func TestQueueTypeIsTheInternalEnumeration(t *testing.T) {
	want := map[string]gpreempt.QueueType{
		"0": gpreempt.QueueCompute,
		"1": gpreempt.QueueSDMA,
		"2": gpreempt.QueueUnknown, // HIQ, of the kernel only
		"3": gpreempt.QueueSDMAXGMI,
		"4": gpreempt.QueueSDMA,
		"5": gpreempt.QueueSDMA,
		"6": gpreempt.QueueUnknown,
	}
	for text, kind := range want {
		if got, err := discovery.ParseQueueType([]byte(text)); err != nil || got != kind {
			t.Errorf("type %s: %v, %v; want %v", text, got, err, kind)
		}
	}
}

func TestNodePropertiesAreReadByName(t *testing.T) {
	got, err := discovery.ParseNodeProperties(strings.NewReader(
		"num_xcc 8\nunique_id 18446744073709551616\nsomething new altogether\nsimd_per_cu 4\n\nsimd_count 1216\n" +
			"gfx_target_version 90402\ndomain 1\nlocation_id 2560\ndrm_render_minor 128\ncapability 2893521536\nnum_cp_queues 24"))
	if err != nil {
		t.Fatal(err)
	}
	want := discovery.NodeProperties{
		SIMDs: 1216, SIMDsPerCU: 4, GFX: 90402, Domain: 1, Location: 2560, RenderMinor: 128, CPQueues: 24, XCCs: 8, Capability: 2893521536,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("properties (-want +got):\n%s", diff)
	}
}

func FuzzParseProcStat(f *testing.F) {
	f.Add([]byte(stat(4211, "python (train) x", 'S', 64, 987654)))
	f.Add([]byte("1 (a) S"))
	f.Add([]byte(")("))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := discovery.ParseProcStat(b)
		if err != nil {
			return
		}
		if s.PID <= 0 || !bytes.Contains(b, []byte("("+s.Comm+")")) {
			t.Errorf("%q gave %+v", b, s)
		}
		again, err := discovery.ParseProcStat([]byte(stat(int(s.PID), s.Comm, s.State, s.Threads, s.Start)))
		// stat writes other values for the rest.
		again.Parent, again.Group, again.Session, again.Flags, again.Ticks, again.Pages = s.Parent, s.Group, s.Session, s.Flags, s.Ticks, s.Pages
		if s.State < utf8.RuneSelf && (err != nil || again != s) {
			t.Errorf("%+v, written and read again: %+v, %v", s, again, err)
		}
	})
}

func FuzzParseNodeProperties(f *testing.F) {
	f.Add([]byte("simd_count 1216\nsimd_per_cu 4\nhive_id 17445912345678901234\n"))
	f.Add([]byte("simd_count 1216\r\nsimd_count\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := discovery.ParseNodeProperties(bytes.NewReader(b))
		if err != nil && p != (discovery.NodeProperties{}) {
			t.Errorf("%+v with error %v", p, err)
		}
		if parseError, ok := errors.AsType[*discovery.ParseError](err); ok {
			lines := bytes.Split(b, []byte("\n"))
			if parseError.Line < 1 || parseError.Line > len(lines) || !bytes.Contains(lines[parseError.Line-1], []byte(strings.Fields(parseError.Problem)[0])) {
				t.Errorf("error %v does not point at its line", err)
			}
		}
	})
}

func FuzzProcTexts(f *testing.F) {
	f.Add([]byte("python3\x00-m\x00train\x00"))
	f.Add([]byte("\xff\x00\xfe"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, err := discovery.ParseQueueType(b); err == nil && len(bytes.Trim(b, "0123456789")) > 1 {
			t.Errorf("%q was accepted as a queue type", b)
		}
		cmdline := discovery.ParseProcCmdline(b)
		if !utf8.ValidString(cmdline) || strings.Contains(cmdline, "\x00") {
			t.Errorf("cmdline %q of %q", cmdline, b)
		}
	})
}

// FuzzParseProcEnviron compares with a simpler implementation.
func FuzzParseProcEnviron(f *testing.F) {
	f.Add([]byte("PATH=/usr/bin\x00GPREEMPT_CLASS=offline\x00GPREEMPT_CLASS=x\x00"), "GPREEMPT_CLASS")
	f.Add([]byte("=\x00a\x00\x00A==\xff"), "A")
	f.Add([]byte("A=\x00"), "")
	f.Fuzz(func(t *testing.T, b []byte, name string) {
		want := map[string]string{}
		for word := range strings.SplitSeq(string(b), "\x00") {
			if rest, found := strings.CutPrefix(word, name+"="); found && !strings.Contains(name, "=") && len(want) == 0 {
				want[name] = strings.ToValidUTF8(rest[:min(len(rest), 4096)], "\uFFFD")
			}
		}
		before := bytes.Clone(b)
		if diff := cmp.Diff(want, discovery.ParseProcEnviron(b, []string{name})); diff != "" || !bytes.Equal(b, before) {
			t.Errorf("%q (-want +got):\n%s", name, diff)
		}
	})
}
