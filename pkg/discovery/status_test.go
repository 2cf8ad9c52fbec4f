package discovery_test

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/discovery"
)

const status = "Name:\ttmux: server\nUmask:\t0022\nState:\tS (sleeping)\nTgid:\t4242\nNgid:\t0\nPid:\t4243\nPPid:\t1\nTracerPid:\t777\n" +
	"Uid:\t1000\t1001\t1002\t1003\nGid:\t5\t6\t5\t5\nVmPeak:\t  10000 kB\nCapInh:\t0000000000000000\nCapEff:\t0000010000080000\nNSpid:\t4242\t7\nSeccomp:\t0\n"

func TestProcStatusIsReadByName(t *testing.T) {
	got, err := discovery.ParseProcStatus([]byte(status))
	if err != nil {
		t.Fatal(err)
	}
	want := discovery.ProcStatus{Name: "tmux: server", Process: 4242, Tracer: 777, UID: 1001, GID: 6, Capabilities: 1<<40 | 1<<19, NamespacePIDs: []int32{7}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestProcStatusWithoutALineIsAnError(t *testing.T) {
	for _, name := range []string{"Uid", "Gid"} {
		_, err := discovery.ParseProcStatus([]byte(strings.Replace(status, "\n"+name+":", "\nX"+name+":", 1)))
		if err == nil || !strings.Contains(err.Error(), "no line Uid: or Gid:") {
			t.Errorf("without %s: %v", name, err)
		}
	}
	for _, bad := range []string{"Tgid:\t-1", "TracerPid:\t0x5", "Uid:\t1000", "CapEff:\tall"} {
		name, _, _ := strings.Cut(bad, ":")
		_, err := discovery.ParseProcStatus([]byte(bad + "\n"))
		if err == nil || !strings.HasPrefix(err.Error(), "line 1: "+name+" ") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// FuzzParseProcStatus checks that an accepted result is valid and that an error comes
// without a result.
func FuzzParseProcStatus(f *testing.F) {
	f.Add([]byte(status))
	f.Add([]byte("Name:\t\xff\nTgid:\t1\nTracerPid:\t0\nUid:\t0\t0\t0\t0\nCapEff:\t000001ffffffffff\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := discovery.ParseProcStatus(b)
		if err != nil && !cmp.Equal(s, discovery.ProcStatus{}) {
			t.Errorf("an error with the result %+v", s)
		}
		if !utf8.ValidString(s.Name) || s.Process < 0 || s.Tracer < 0 {
			t.Errorf("accepted %+v", s)
		}
	})
}

// FuzzIDsInProcStatus checks that the lines are parsed, whatever is around them.
func FuzzIDsInProcStatus(f *testing.F) {
	f.Add(uint32(1001), uint32(100), int32(318), "Name:\tpython\n", "Seccomp:\t0\n")
	f.Add(uint32(0), uint32(0), int32(0), "", "")
	f.Add(uint32(1<<32-1), uint32(5), int32(1), "Uid:\n", "NSpid:\t1\tx\n")
	f.Fuzz(func(t *testing.T, uid, gid uint32, nested int32, before, after string) {
		want := discovery.ProcStatus{UID: uid, GID: gid}
		pids := "4211"
		if nested > 0 {
			want.NamespacePIDs = []int32{nested}
			pids += "\t" + strconv.Itoa(int(nested))
		}
		own := fmt.Sprintf("Uid:\t1\t%d\t2\t3\nGid:\t1\t%d\t2\t3\nNSpid:\t%s\n", uid, gid, pids)
		if got, err := discovery.ParseProcStatus([]byte(own)); err != nil || !cmp.Equal(want, got) {
			t.Fatalf("%q gave %+v, %v", own, got, err)
		}
		text := before + "\n" + own + after
		got, err := discovery.ParseProcStatus([]byte(text))
		if err != nil && !cmp.Equal(got, discovery.ProcStatus{}) {
			t.Errorf("an error with the result %+v", got)
		}
		others := func(line string) bool {
			return strings.HasPrefix(line, "Uid:") || strings.HasPrefix(line, "Gid:") || strings.HasPrefix(line, "NSpid:")
		}
		got.Name, got.Process, got.Tracer, got.Capabilities = "", 0, 0, 0
		if err == nil && !slices.ContainsFunc(strings.Split(before+"\n"+after, "\n"), others) && !cmp.Equal(want, got) {
			t.Errorf("%q gave %+v, want %+v", text, got, want)
		}
		if slices.ContainsFunc(got.NamespacePIDs, func(pid int32) bool { return pid <= 0 }) {
			t.Errorf("accepted %+v", got)
		}
	})
}
