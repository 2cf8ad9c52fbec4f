package peercred

import (
	"os"
	"os/exec"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestStatOfThisProcess(t *testing.T) {
	stat, err := readStat(int32(os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	if stat.start == 0 || stat.flags&exiting != 0 {
		t.Errorf("got %+v, want a start time and no sign of exiting", stat)
	}
}

func TestZombieIsExiting(t *testing.T) {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), roleKey+"=exit")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 1)); err == nil {
		t.Fatal("the child wrote something")
	}
	// Its output has ended, so it has begun to exit; it is not reaped before Wait.
	stat, err := readStat(int32(cmd.Process.Pid))
	if err != nil || stat.flags&exiting == 0 {
		t.Errorf("got %+v, %v; want the exiting flag", stat, err)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

func TestParseStat(t *testing.T) {
	const tail = " S 1 2 3 0 -1 4194560 5 6 7 8 9 10 11 12 20 0 1 0 987654 4096 7"
	for _, tc := range []struct {
		name, text string
		want       procStat
		err        string
	}{
		{name: "plain", text: "42 (python)" + tail, want: procStat{flags: 4194560, start: 987654}},
		{name: "a name that looks like more fields", text: "42 (a) S 1 2 (b))" + tail, want: procStat{flags: 4194560, start: 987654}},
		{name: "a name with a line break", text: "42 (a\nb)" + tail + "\n", want: procStat{flags: 4194560, start: 987654}},
		{name: "cut off", text: "42 (python) S 1 2", err: "3 fields after the command name, want 20 or more"},
		{name: "empty", text: "", err: `no command name in ""`},
		{name: "no number", text: "42 (x) S 1 2 3 0 -1 -4 5 6 7 8 9 10 11 12 20 0 1 0 9", err: `field 9 (flags): strconv.ParseUint: parsing "-4": invalid syntax`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := parseStat([]byte(tc.text))
			if diff := cmp.Diff(tc.want, got, cmp.AllowUnexported(procStat{})); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if got := text(err); got != tc.err {
				t.Errorf("error %q, want %q", got, tc.err)
			}
		})
	}
}

func FuzzParseStat(f *testing.F) {
	f.Add([]byte("42 (python) S 1 2 3 0 -1 4194560 5 6 7 8 9 10 11 12 20 0 1 0 987654 4096 7"))
	f.Add([]byte("1 (()) ) S"))
	f.Add([]byte(")"))
	f.Fuzz(func(t *testing.T, stat []byte) {
		got, err := parseStat(stat)
		if err != nil && got != (procStat{}) {
			t.Errorf("%+v beside %v", got, err)
		}
	})
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
