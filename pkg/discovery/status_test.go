package discovery_test

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/discovery"
)

const status = "Name:\ttmux: server\nUmask:\t0022\nState:\tS (sleeping)\nTgid:\t4242\nNgid:\t0\nPid:\t4243\nPPid:\t1\nTracerPid:\t777\n" +
	"Uid:\t1000\t1001\t1002\t1003\nGid:\t5\t5\t5\t5\nVmPeak:\t  10000 kB\nCapInh:\t0000000000000000\nCapEff:\t0000010000080000\nSeccomp:\t0\n"

func TestProcStatusIsReadByName(t *testing.T) {
	got, err := discovery.ParseProcStatus([]byte(status))
	if err != nil {
		t.Fatal(err)
	}
	want := discovery.ProcStatus{Name: "tmux: server", Process: 4242, Tracer: 777, UID: 1001, Capabilities: 1<<40 | 1<<19}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestAProcStatusThatLacksALineIsRefused(t *testing.T) {
	for _, name := range []string{"Name", "Tgid", "TracerPid", "Uid", "CapEff"} {
		_, err := discovery.ParseProcStatus([]byte(strings.Replace(status, "\n"+name+":", "\nX"+name+":", 1)))
		if name == "Name" {
			_, err = discovery.ParseProcStatus([]byte("X" + status))
		}
		if err == nil || !strings.Contains(err.Error(), "no line begins with "+name+":") {
			t.Errorf("without %s: %v", name, err)
		}
	}
	for _, bad := range []string{"Tgid:\t-1", "TracerPid:\t0x5", "Uid:\t1000", "CapEff:\tall"} {
		name, _, _ := strings.Cut(bad, ":")
		_, err := discovery.ParseProcStatus([]byte(bad + "\n"))
		if err == nil || !strings.HasPrefix(err.Error(), "line 1: "+name+" is ") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// FuzzParseProcStatus checks that what is accepted is fit to be sent on and that
// what is refused gives nothing.
func FuzzParseProcStatus(f *testing.F) {
	f.Add([]byte(status))
	f.Add([]byte("Name:\t\xff\nTgid:\t1\nTracerPid:\t0\nUid:\t0\t0\t0\t0\nCapEff:\t000001ffffffffff\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := discovery.ParseProcStatus(b)
		if err != nil && s != (discovery.ProcStatus{}) {
			t.Errorf("refused, and gave %+v", s)
		}
		if !utf8.ValidString(s.Name) || s.Process < 0 || s.Tracer < 0 {
			t.Errorf("accepted %+v", s)
		}
	})
}
