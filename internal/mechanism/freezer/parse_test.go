package freezer

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestProcsAreReadOrRefused(t *testing.T) {
	for text, want := range map[string][]int32{
		"":                nil,
		"1\n0\n4194304\n": {1, 0, 4194304},
		"-1\n":            nil,
		"2147483648\n":    nil,
		"7\nx\n":          nil,
	} {
		got, err := parseProcs(text)
		if diff := cmp.Diff(want, got); diff != "" || (err == nil) != (text == "" || want != nil) {
			t.Errorf("%q: error %v (-want +got):\n%s", text, err, diff)
		}
	}
}

// Lines of other mounts neither hide the hierarchy nor imitate one, and its path
// survives the escaping.
func FuzzParseMounts(f *testing.F) {
	f.Add("24 30 0:22 / /sys rw shared:7 - sysfs sysfs rw\n", "", "sys/fs/cgroup")
	f.Add("36 24 0:30 / /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer\n", "a b", "mnt/\\040\tx\n")
	f.Add("", "0", "\r")
	f.Add("1 2 3 4 - cgroup2 \n", "..", "x - cgroup2 y")
	escape := strings.NewReplacer(" ", `\040`, "\t", `\011`, "\n", `\012`, `\`, `\134`).Replace
	f.Fuzz(func(t *testing.T, text, root, point string) {
		if found := parseMounts(text); found != nil && !strings.Contains(text, " - cgroup2 ") {
			t.Fatalf("%q: found %+v", text, found)
		}
		root, point = "/"+root, "/"+point
		line := "35 24 0:30 " + escape(root) + " " + escape(point) + " rw shared:9 - cgroup2 cgroup2 rw\n"
		got := parseMounts("24 30 0:22 / /sys rw - sysfs sysfs rw\n" + line)
		if diff := cmp.Diff(&mount{root, point}, got, cmp.AllowUnexported(mount{})); diff != "" {
			t.Fatalf("%q (-want +got):\n%s", line, diff)
		}
		if below, ok := got.below(root + "/x"); ok && root != "/" && below != "/x" {
			t.Fatalf("%s/x is %s below %s", root, below, root)
		}
	})
}

func FuzzFlat(f *testing.F) {
	f.Add("populated 1\nfrozen 0\n", "frozen")
	f.Add("Name:\tx\nPPid:\t1\n", "PPid:")
	f.Add("frozen 1 2\nfrozen\n", "frozen")
	f.Fuzz(func(t *testing.T, text, key string) {
		value := flat(text, key)
		if value == "" {
			return
		}
		stated := slices.ContainsFunc(strings.Split(text, "\n"), func(line string) bool {
			return slices.Equal(strings.Fields(line), []string{key, value})
		})
		if !stated {
			t.Fatalf("%q: %q is %q, and no line has that", text, key, value)
		}
	})
}

func FuzzParseProcs(f *testing.F) {
	f.Add("100\n101\n")
	f.Add("0\n")
	f.Add("-1\n4294967297\n")
	f.Fuzz(func(t *testing.T, text string) {
		pids, err := parseProcs(text)
		if err != nil {
			if pids != nil {
				t.Fatalf("%q: processes %v and error %v", text, pids, err)
			}
			return
		}
		if len(pids) != len(strings.Fields(text)) || slices.ContainsFunc(pids, func(pid int32) bool { return pid < 0 }) {
			t.Fatalf("%q: processes %v", text, pids)
		}
	})
}
