package discovery_test

import (
	"strings"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestProcessInASlurmJobHasTheRecordOfTheProlog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := tree(t, "host.txt")
		m["proc/4211/cgroup"].Data = []byte("0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_3\n")
		m["run/gpreempt/slurm/7"] = &fstest.MapFile{Data: []byte("partition=batch\naccount=physics\nqos=low\n")}
		m["run/gpreempt/slurm/8"] = &fstest.MapFile{Data: []byte("partition=serving\n")}
		want := host()
		want[2].Cgroup = gpreempt.Cgroup{
			Path: "/system.slice/slurmstepd.scope/job_7/step_0/user/task_3", Unit: "slurmstepd.scope", Slice: "system.slice", SlurmJob: 7,
		}
		want[2].Slurm = gpreempt.SlurmJob{Partition: "batch", Account: "physics", QOS: "low"}
		f := newFS(m)
		if diff := cmp.Diff(discovery.Snapshot{Processes: want}, scan(t, f)); diff != "" {
			t.Fatalf("snapshot (-want +got):\n%s", diff)
		}
		delete(m, "run/gpreempt/slurm/7")
		want[2].Slurm = gpreempt.SlurmJob{}
		time.Sleep(15 * time.Second)
		if diff := cmp.Diff(discovery.Snapshot{Processes: want}, scan(t, f)); diff != "" {
			t.Errorf("snapshot without the record (-want +got):\n%s", diff)
		}
	})
}

func TestSlurmRecordIsValidAsAWholeOrNotAtAll(t *testing.T) {
	tests := map[string]struct {
		text  string
		want  gpreempt.SlurmJob
		valid bool
	}{
		"all":                     {"partition=batch\naccount=a b=c\nqos=low\n", gpreempt.SlurmJob{Partition: "batch", Account: "a b=c", QOS: "low"}, true},
		"without a QOS":           {"partition=batch\naccount=\n", gpreempt.SlurmJob{Partition: "batch"}, true},
		"nothing":                 {"", gpreempt.SlurmJob{}, false},
		"cut off":                 {"partition=batch\naccount=phys", gpreempt.SlurmJob{}, false},
		"a key twice":             {"partition=batch\naccount=x\npartition=serving\n", gpreempt.SlurmJob{}, false},
		"an unknown key":          {"partition=batch\nclass=online\n", gpreempt.SlurmJob{}, false},
		"no value":                {"partition=batch\naccount\n", gpreempt.SlurmJob{}, false},
		"an empty line":           {"partition=batch\n\n", gpreempt.SlurmJob{}, false},
		"a control character":     {"partition=batch\naccount=\x1b[2J\n", gpreempt.SlurmJob{}, false},
		"not UTF-8":               {"partition=\xff\n", gpreempt.SlurmJob{}, false},
		"a value of 257 bytes":    {"partition=" + strings.Repeat("x", 257) + "\n", gpreempt.SlurmJob{}, false},
		"a value of 256 bytes":    {"qos=" + strings.Repeat("x", 256) + "\n", gpreempt.SlurmJob{QOS: strings.Repeat("x", 256)}, true},
		"a space before the key":  {" partition=batch\n", gpreempt.SlurmJob{}, false},
		"the end of another host": {"partition=batch\r\n", gpreempt.SlurmJob{}, false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			got, valid := discovery.ParseSlurmRecord([]byte(test.text))
			if diff := cmp.Diff(test.want, got); diff != "" || valid != test.valid {
				t.Errorf("valid: %v, want %v (-want +got):\n%s", valid, test.valid, diff)
			}
		})
	}
}

func FuzzParseSlurmRecord(f *testing.F) {
	f.Add([]byte("partition=batch\naccount=physics\nqos=low\n"))
	f.Add([]byte("partition=batch\npartition=x\n"))
	f.Add([]byte("account=\xff\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		got, valid := discovery.ParseSlurmRecord(b)
		if !valid && got != (gpreempt.SlurmJob{}) {
			t.Errorf("%q is not valid and has %+v", b, got)
		}
		if !valid {
			return
		}
		// What it has is a whole line of the record.
		for key, value := range map[string]string{"partition": got.Partition, "account": got.Account, "qos": got.QOS} {
			if value != "" && strings.Count("\n"+string(b), "\n"+key+"="+value+"\n") != 1 {
				t.Errorf("%s %q of %q", key, value, b)
			}
		}
	})
}
