package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

const (
	firstPatch = `Subject: first
---
--- a/drivers/a.c
+++ b/drivers/a.c
@@ -1,2 +1,3 @@
 int a;
+int patched;
 int b;
--- /dev/null
+++ b/drivers/new.c
@@ -0,0 +1 @@
+int new;
`
	secondPatch = `--- a/drivers/a.c
+++ b/drivers/a.c
@@ -1,2 +1,2 @@
-int a;
+int again;
 int b;
`
)

func TestPatchedDriverBecomesDebiansAgain(t *testing.T) {
	tree := driverTree{dir: t.TempDir()}
	write(t, tree.dir, map[string]string{"drivers/a.c": "int a;\nint b;\n", "drivers/b.c": "b", "include/trace/x.h": ""})
	patches := t.TempDir()
	write(t, patches, map[string]string{"1": firstPatch, "2": secondPatch, "3": strings.ReplaceAll(secondPatch, "int b;", "int c;")})
	a, b := filepath.Join(tree.dir, "drivers", "a.c"), filepath.Join(tree.dir, "drivers", "b.c")
	old := time.Unix(1e9, 0)
	for _, step := range []struct{ patch, want string }{
		{"", "int a;\nint b;\n"},
		{"1", "int a;\nint patched;\nint b;\n"},
		{"1", "int a;\nint patched;\nint b;\n"},
		{"2", "int again;\nint b;\n"},
		{"", "int a;\nint b;\n"},
		{"1", "int a;\nint patched;\nint b;\n"},
	} {
		before := read(t, a)
		for _, name := range []string{a, b} {
			if err := os.Chtimes(name, old, old); err != nil {
				t.Fatal(err)
			}
		}
		file := ""
		if step.patch != "" {
			file = filepath.Join(patches, step.patch)
		}
		if err := tree.patch(t.Context(), file); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(step.want, read(t, a)); diff != "" {
			t.Errorf("patch %q (-want +got):\n%s", step.patch, diff)
		}
		for name, changed := range map[string]bool{a: before != step.want, b: false} {
			if info, err := os.Stat(name); err != nil || info.ModTime().Equal(old) == changed {
				t.Errorf("patch %q: %s written: %v, its content changed: %v (%v)", step.patch, name, !changed, changed, err)
			}
		}
	}
	if got := read(t, tree.dir, "drivers", "new.c"); got != "int new;\n" {
		t.Errorf("the new file has %q", got)
	}
	if err := tree.patch(t.Context(), filepath.Join(patches, "3")); err == nil || !strings.Contains(err.Error(), "does not apply") {
		t.Errorf("a patch for other source: %v", err)
	}
	if left, err := filepath.Glob(filepath.Join(tree.dir, "patch-*")); len(left) > 0 || err != nil {
		t.Errorf("left: %v, %v", left, err)
	}
}

func TestModuleIsNamedByItsPatch(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{"1": firstPatch, "2": secondPatch})
	names := map[string]bool{}
	for _, patch := range []string{"", filepath.Join(dir, "1"), filepath.Join(dir, "2"), filepath.Join(dir, "1")} {
		name, err := digest(t.TempDir(), patch)
		if err != nil {
			t.Fatal(err)
		}
		names[name] = true
	}
	if len(names) != 3 {
		t.Errorf("%d names for no patch and two patches", len(names))
	}
}

func TestReportsOfTheKernelAreFound(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{"console": `[    1.0] Linux version 6.12
[    2.0] amdgpu 0000:00:00.0: amdgpu: qcm fence wait loop timeout expired
[    3.0] BUG kmalloc-2k (Not tainted): Object corrupt
[    4.0] WARNING: CPU: 0 PID: 1 at mm/slub.c:1 f+0x1/0x2 [amdgpu]
[    5.0] BUG: unable to handle page fault for address: 0
[    6.0] kfd: DEBUG of a queue
`})
	got, err := kernelReports(filepath.Join(dir, "console"))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"BUG kmalloc-2k (Not tainted): Object corrupt", "WARNING: CPU: 0 PID: 1 at mm/slub.c:1 f+0x1/0x2 [amdgpu]",
		"BUG: unable to handle page fault for address: 0",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestPatchForAnotherSeriesIsRefusedByName(t *testing.T) {
	for _, test := range []struct{ patch, release, want string }{
		{firstPatch, "7.3.4+deb13-amd64", ""},
		{"For Linux 6.12, tested.\n" + firstPatch, "6.12.117+deb12-amd64", ""},
		{"For Linux 6.12, tested.\n" + firstPatch, "6.120.1", "the patch is for Linux 6.12, and this is 6.120.1: the driver that it changes is another one there"},
	} {
		got := ""
		if err := fits([]byte(test.patch), test.release); err != nil {
			got = err.Error()
		}
		if got != test.want {
			t.Errorf("%s: got %q, want %q", test.release, got, test.want)
		}
	}
}
