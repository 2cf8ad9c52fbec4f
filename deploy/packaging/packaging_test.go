package main

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/config"
)

// ordered are outputs of git describe for commits, the oldest first.
var ordered = []struct {
	version string
	commits int
	want    string
}{
	{"7a473ef", 9, "0.0.0+9.g7a473ef"},
	{"7a473ef-dirty", 9, "0.0.0+9.g7a473ef.dirty"},
	{"0a473ef", 10, "0.0.0+10.g0a473ef"},
	{"v0.1.0-alpha", 20, "0.1.0~alpha"},
	{"v0.1.0-rc.2", 20, "0.1.0~rc.2"},
	{"v0.1.0-rc.2-dirty", 20, "0.1.0~rc.2+0.dirty"},
	{"v0.1.0-rc.2-3-gabc1234", 23, "0.1.0~rc.2+3.gabc1234"},
	{"v0.1.0-rc.10", 24, "0.1.0~rc.10"},
	{"v0.1.0", 25, "0.1.0"},
	{"v0.1.0-dirty", 25, "0.1.0+0.dirty"},
	{"v0.1.0-9-gffffff0", 34, "0.1.0+9.gffffff0"},
	{"v0.1.0-10-g0123456", 35, "0.1.0+10.g0123456"},
	{"v0.1.0-10-g0123456-dirty", 35, "0.1.0+10.g0123456.dirty"},
	{"v0.1.1", 36, "0.1.1"},
	{"v0.10.0", 40, "0.10.0"},
}

func TestVersionsAreThoseOfPackages(t *testing.T) {
	for _, tt := range ordered {
		got, err := packageVersion(tt.version, tt.commits)
		if err != nil || got != tt.want {
			t.Errorf("packageVersion(%q, %d) = %q, %v, want %q", tt.version, tt.commits, got, err, tt.want)
		}
	}
	for _, bad := range []string{"", "1.0 2", "v1.0", "v1.0.0-rc_1", "v1.0.0+build"} {
		if got, err := packageVersion(bad, 1); err == nil {
			t.Errorf("packageVersion(%q) = %q, want an error", bad, got)
		}
	}
}

func TestDpkgOrdersVersionsByAge(t *testing.T) {
	if _, err := exec.LookPath("dpkg"); err != nil {
		t.Skip("no dpkg")
	}
	for i := range len(ordered) - 1 {
		a, b := ordered[i].want, ordered[i+1].want
		if out, err := exec.CommandContext(t.Context(), "dpkg", "--compare-versions", a, "lt", b).CombinedOutput(); err != nil || len(out) > 0 {
			t.Errorf("dpkg does not order %s before %s: %v %s", a, b, err, out)
		}
	}
}

func TestRPMOrdersVersionsByAge(t *testing.T) {
	if _, err := exec.LookPath("rpm"); err != nil {
		t.Skip("no rpm: apt-get install rpm")
	}
	for i := range len(ordered) - 1 {
		a, b := ordered[i].want, ordered[i+1].want
		out, err := exec.CommandContext(t.Context(), "rpm", "--eval", `%{lua:print(rpm.vercmp("`+a+`", "`+b+`"))}`).CombinedOutput()
		if err != nil || strings.TrimSpace(string(out)) != "-1" {
			t.Errorf("rpm compares %s with %s: %s %v, want -1", a, b, out, err)
		}
	}
}

// tree returns every file below dir.
func tree(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	err := fs.WalkDir(os.DirFS(dir), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := os.ReadFile(filepath.Join(dir, name))
		all[name] = string(text)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestStagedFilesAreReproducible(t *testing.T) {
	var trees []map[string]string
	for range 2 {
		dir := t.TempDir()
		r := release{packages: "1.2.3", date: time.Unix(1e9, 0).UTC()}
		if err := r.stage(dir); err != nil {
			t.Fatal(err)
		}
		trees = append(trees, tree(t, dir))
	}
	if diff := cmp.Diff(trees[0], trees[1]); diff != "" {
		t.Error(diff)
	}
	for _, name := range []string{
		"man/man8/gpreemptd.8.gz", "man/man8/gpaccept.8.gz", "man/man8/gpreemptd-config-default.8.gz", "man/man1/gpctl.1.gz", "man/man1/gpctl-status.1.gz", "man/man1/gplab-trial.1.gz", "man/man5/gpreemptd.yaml.5.gz",
		"completions/bash/gpctl", "completions/bash/gplab", "completions/zsh/_gpctl", "completions/fish/gpctl.fish", "completions/bash/gpreemptd", "completions/bash/gpaccept", "changelog.gz",
	} {
		if trees[0][name] == "" {
			t.Errorf("no %s", name)
		}
	}
	if got, want := trees[0]["gpreemptd.yaml"], string(config.DefaultYAML()); got != want {
		t.Errorf("gpreemptd.yaml is not the default:\n%s", cmp.Diff(want, got))
	}
}

func TestManualHasNoWarnings(t *testing.T) {
	if _, err := exec.LookPath("groff"); err != nil {
		t.Skip("no groff: apt-get install groff-base")
	}
	dir := t.TempDir()
	if err := writeManual(dir, "1.2.3", time.Unix(1e9, 0).UTC()); err != nil {
		t.Fatal(err)
	}
	for name, text := range tree(t, dir) {
		z, err := gzip.NewReader(strings.NewReader(text))
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(t.Context(), "groff", "-t", "-man", "-Tutf8", "-Kutf8", "-ww", "-rHY=0")
		cmd.Stdin = z
		var complaints bytes.Buffer
		cmd.Stderr = &complaints
		page, err := cmd.Output()
		// Long words cannot be broken.
		said := slices.DeleteFunc(strings.Split(complaints.String(), "\n"), func(line string) bool {
			return line == "" || strings.Contains(line, "can't break line") || strings.Contains(line, "cannot break line") || strings.Contains(line, "cannot adjust line")
		})
		if err != nil || len(said) > 0 || len(page) < 100 {
			t.Errorf("%s: %v, %q", name, err, said)
		}
	}
}

func TestBillOfMaterialsListsTheLinkedModules(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	text, err := billOfMaterials("v1.2.3", time.Unix(1e9, 0).UTC(), []string{self})
	if err != nil {
		t.Fatal(err)
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	var b bom
	if err := d.Decode(&b); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Token(); err != io.EOF {
		t.Errorf("more than one value: %v", err)
	}
	refs := map[string]bool{b.Metadata.Component.Ref: true}
	for _, c := range b.Components {
		if refs[c.Ref] {
			t.Errorf("%s is listed twice", c.Ref)
		}
		refs[c.Ref] = true
	}
	for _, dep := range b.Dependencies {
		for _, on := range dep.DependsOn {
			if !refs[on] {
				t.Errorf("%s needs %s, which is missing", dep.Ref, on)
			}
		}
	}
	found := slices.ContainsFunc(b.Components, func(c component) bool {
		return strings.HasPrefix(c.PURL, "pkg:golang/github.com/goreleaser/nfpm/v2@v2.")
	})
	if !found || b.Metadata.Timestamp != "2001-09-09T01:46:40Z" {
		t.Errorf("nfpm found %v, timestamp %s", found, b.Metadata.Timestamp)
	}
}
