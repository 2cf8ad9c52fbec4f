package freezer

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// A host on which process 100 is a job with the child 101 and grandchild 102 in a
// scope of its own, and this program is a service of systemd.
const jobScope = "sys/fs/cgroup/system.slice/job.scope/"

var jobHost = map[string]string{
	"proc/self/mountinfo":       "24 30 0:22 / /sys rw shared:7 - sysfs sysfs rw\n35 24 0:30 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n",
	"proc/self/cgroup":          "0::/system.slice/gpreemptd.service\n",
	"proc/100/stat":             "100 (job) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 1 0 0\n",
	"proc/100/cgroup":           "0::/system.slice/job.scope\n",
	"proc/100/status":           "Name:\tjob\nPPid:\t1\n",
	"proc/101/status":           "Name:\tloader\nPPid:\t100\n",
	"proc/102/status":           "Name:\tloader of PPid: 1\nPPid:\t101\n",
	jobScope + "cgroup.procs":   "100\n101\n102\n",
	jobScope + "cgroup.type":    "domain\n",
	jobScope + "cgroup.stat":    "nr_descendants 0\nnr_dying_descendants 3\n",
	jobScope + "cgroup.freeze":  "0\n",
	jobScope + "cgroup.threads": "",
	jobScope + "cgroup.events":  "populated 1\nfrozen 1\n",

	"sys/fs/cgroup/cgroup.procs":              "1\n",
	"sys/fs/cgroup/system.slice/cgroup.procs": "",
}

func TestCgroupIsFrozenOnlyWhenItIsTheProcesssOwn(t *testing.T) {
	elsewhere := func(path string) map[string]string { return map[string]string{"proc/100/cgroup": "0::" + path + "\n"} }
	for name, c := range map[string]struct {
		change map[string]string
		// want is the cgroup that may be frozen, or why is the reason that none may.
		want, why string
	}{
		"its own": {want: "/system.slice/job.scope"},
		"hybrid hierarchy": {
			change: map[string]string{
				"proc/100/cgroup":     "5:freezer:/\n1:name=systemd:/x\n0::/system.slice/job.scope\n",
				"proc/self/mountinfo": "36 24 0:30 / /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer\n35 24 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
			},
			want: "/system.slice/job.scope",
		},
		"part of the hierarchy is mounted": {
			change: map[string]string{
				"proc/self/mountinfo": "35 24 0:30 /system.slice /sys/fs/cgroup/system.slice rw - cgroup2 cgroup2 rw\n",
			},
			want: "/system.slice/job.scope",
		},
		"another part is mounted": {
			change: map[string]string{"proc/self/mountinfo": "35 24 0:30 /system /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"},
			why:    "this program cannot see its cgroup /system.slice/job.scope",
		},
		"not mounted": {
			change: map[string]string{"proc/self/mountinfo": "36 24 0:30 / /sys/fs/cgroup rw - cgroup cgroup rw,freezer\n"},
			why:    "cgroup v2 is not mounted",
		},
		"version 1 only": {
			change: map[string]string{"proc/100/cgroup": "5:freezer:/\n"},
			why:    "it is in no cgroup of version 2",
		},
		"root":                     {change: elsewhere("/"), why: "it is in the root cgroup"},
		"outside of the namespace": {change: elsewhere("/../job"), why: "this program cannot see its cgroup /../job"},
		"removed":                  {change: elsewhere("/old.scope (deleted)"), why: "this program cannot see its cgroup /old.scope (deleted)"},
		"that of this program": {
			change: elsewhere("/system.slice/gpreemptd.service"),
			why:    "this program is in its cgroup /system.slice/gpreemptd.service",
		},
		"above that of this program": {
			change: map[string]string{"proc/self/cgroup": "0::/system.slice/job.scope/gpreemptd\n"},
			why:    "this program is in its cgroup /system.slice/job.scope",
		},
		"slice": {
			change: elsewhere("/user.slice/user-1000.slice"),
			why:    "its cgroup /user.slice/user-1000.slice belongs to a login session or to systemd",
		},
		"login session": {
			change: elsewhere("/user.slice/user-1000.slice/session-3.scope"),
			why:    "its cgroup /user.slice/user-1000.slice/session-3.scope belongs to a login session or to systemd",
		},
		"systemd of a user": {
			change: elsewhere("/user.slice/user-1000.slice/user@1000.service"),
			why:    "its cgroup /user.slice/user-1000.slice/user@1000.service belongs to a login session or to systemd",
		},
		"other process": {
			change: map[string]string{"proc/102/status": "Name:\tx\nPPid:\t1\n", "proc/1/status": "Name:\tinit\nPPid:\t0\n"},
			why:    "process 102 in its cgroup /system.slice/job.scope was not started by it",
		},
		"other process of another pid namespace": {
			change: map[string]string{jobScope + "cgroup.procs": "100\n0\n"},
			why:    "process 0 in its cgroup /system.slice/job.scope was not started by it",
		},
		"other process that has just exited": {
			change: map[string]string{jobScope + "cgroup.procs": "100\n999\n"},
			why:    "process 999 in its cgroup /system.slice/job.scope was not started by it",
		},
		"parents in a cycle": {
			change: map[string]string{"proc/101/status": "PPid:\t102\n"},
			why:    "process 101 in its cgroup /system.slice/job.scope was not started by it",
		},
		"left meanwhile": {
			change: map[string]string{jobScope + "cgroup.procs": ""},
			why:    "it has left the cgroup /system.slice/job.scope",
		},
		"cgroups below": {
			change: map[string]string{jobScope + "cgroup.stat": "nr_descendants 1\n"},
			why:    "its cgroup /system.slice/job.scope has child cgroups",
		},
		"threaded": {
			change: map[string]string{jobScope + "cgroup.type": "threaded\n"},
			why:    "its cgroup /system.slice/job.scope is of type threaded",
		},
	} {
		t.Run(name, func(t *testing.T) {
			files := maps.Clone(jobHost)
			maps.Copy(files, c.change)
			g, why, err := ownCgroup(t, tree(t, files))
			if err != nil {
				t.Fatal(err)
			}
			got := ""
			if g != nil {
				got = g.path
				g.close()
			}
			if diff := cmp.Diff([]string{c.want, c.why}, []string{got, why}); diff != "" {
				t.Errorf("cgroup and why not (-want +got):\n%s", diff)
			}
		})
	}
}

func TestProcessThatExitsMeanwhileIsGone(t *testing.T) {
	files := maps.Clone(jobHost)
	delete(files, "proc/100/cgroup")
	if _, _, err := ownCgroup(t, tree(t, files)); !errors.Is(err, mechanism.ErrGone) {
		t.Errorf("error %v, want %v", err, mechanism.ErrGone)
	}
}

func TestDamagedFilesOfACgroupAreErrors(t *testing.T) {
	for file, text := range map[string]string{
		jobScope + "cgroup.procs": "100\nx\n",
		"proc/101/status":         "Name:\tloader\n",
	} {
		files := maps.Clone(jobHost)
		files[file] = text
		if g, why, err := ownCgroup(t, tree(t, files)); err == nil || g != nil || why != "" {
			t.Errorf("%s: cgroup %v, why %q, error %v, want an error", file, g, why, err)
		}
	}
}

// ownCgroup returns the cgroup of process 100.
func ownCgroup(t *testing.T, root string) (*cgroup, string, error) {
	t.Helper()
	p, err := proc.Open(root, gpreempt.ProcessKey{PID: 100, Start: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	return New(Config{Root: root}).ownCgroup(p)
}

// tree writes files below a directory.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return root
}
