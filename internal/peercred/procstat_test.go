package peercred

import (
	"os"
	"os/exec"
	"testing"

	"github.com/gpreempt/gpreempt/pkg/discovery"
)

func TestStatOfThisProcess(t *testing.T) {
	stat, err := readStat(int32(os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	if stat.Start == 0 || stat.Flags&discovery.FlagExiting != 0 {
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
	if err != nil || stat.Flags&discovery.FlagExiting == 0 {
		t.Errorf("got %+v, %v; want the exiting flag", stat, err)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}
