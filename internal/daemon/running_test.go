package daemon

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

// A new file is compared with what the daemon does now, and says what it does not know, without a reload.
func TestConfigCheckShowsWhatRulesMakeOfRunningProcesses(t *testing.T) {
	h := newFakeHost(t, "6.12", strings.Replace(trainersAreOffline, "preset: strict", "preset: shadow", 1))
	trainer, viewer := h.start("trainer"), h.start("viewer")
	h.put(fmt.Sprintf("proc/%d/cgroup", viewer.PID()), "0::/system.slice/docker-"+strings.Repeat("ab", 32)+".scope\n")
	opts := h.opts
	opts.ConfigPath = filepath.Join(t.TempDir(), "new.yaml")
	write(t, opts.ConfigPath, "rules:\n  - {name: viewers, match: {comm: \"view*\"}, class: online}\n  - {name: trainers, match: {comm: \"train*\"}, class: unmanaged}\n"+
		"  - {name: all of the user, match: {uid: 4242}, class: offline}\n")
	shown := func() string {
		t.Helper()
		var out strings.Builder
		if err := showRunning(t.Context(), opts, &out); err != nil {
			t.Fatal(err)
		}
		text := strings.NewReplacer(fmt.Sprint(trainer.PID()), "PID1", fmt.Sprint(viewer.PID()), "PID2", opts.Socket, "SOCKET").Replace(out.String())
		lines := strings.Split(text, "\n")
		for n := range lines {
			lines[n] = strings.Join(strings.Fields(lines[n]), " ")
		}
		return strings.Join(lines, "\n")
	}
	const unknown = `not known: priorities and rings of queues: open /sys/kernel/debug/kfd/mqds: no such file or directory
not known: names, images, labels and pods of containers: 1 processes
`
	const alone = `PID COMMAND NOW THEN BY
PID1 trainer - unmanaged rule trainers
PID2 viewer - online rule viewers
processes with queues: 2, with another class then: 0
rules that match none of them: all of the user
` + unknown + `not known: NOW: the daemon at SOCKET does not answer: `
	if got := shown(); !strings.HasPrefix(got, alone) {
		t.Errorf("without a daemon:\n%s\nwant\n%s", got, alone)
	}
	c, _ := h.serve()
	h.target(c, trainer, "it is classified", func(t *gpreemptv1.Target) bool { return t.GetClass() == gpreemptv1.Class_CLASS_OFFLINE })
	want := `PID COMMAND NOW THEN BY
PID1 trainer offline unmanaged (changes) rule trainers
PID2 viewer unmanaged online (changes) rule viewers
processes with queues: 2, with another class then: 2
rules that match none of them: all of the user
` + unknown
	if diff := cmp.Diff(want, shown()); diff != "" {
		t.Errorf("beside the daemon (-want +got):\n%s", diff)
	}
}
