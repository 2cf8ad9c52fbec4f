package arch

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"testing"
)

// What a package is for.
const (
	shared     = "all programs"
	host       = "programs that work on the driver and its processes"
	daemon     = "the daemon"
	client     = "clients of the daemon"
	admin      = "the administrator's client"
	lab        = "evidence and forensics"
	acceptance = "the acceptance of a GPU"
	gpuProgram = "programs that use a GPU, or act as its driver"
	kit        = "tests"
)

// purposes are those of packages. A name stands for the packages below it too, and the
// longest name decides.
var purposes = map[string]string{
	"api/gen": shared, "internal/api": shared, "internal/cmdline": shared, "internal/spell": shared, "internal/config/yamlfile": shared, "internal/regular": shared, "internal/stat": shared,
	"pkg/discovery": shared, "pkg/gpreempt": shared, "pkg/scheduler": shared,

	"internal/child": host, "internal/log": host, "internal/mechanism": host, "internal/proc": host, "internal/safedir": host, "internal/safety": host, "pkg/kfd": host,

	"internal/auth": daemon, "internal/classify": daemon, "internal/config": daemon, "internal/container": daemon, "internal/daemon": daemon,
	"internal/dumps": daemon, "internal/events": daemon, "internal/hrtimer": daemon, "internal/inventory": daemon, "internal/server": daemon, "internal/targets": daemon,
	"internal/mechanism/freezer": daemon, "internal/mechanism/nvchannels": daemon, "pkg/nvrm": daemon,

	"internal/cli": admin, "internal/fleet": client, "internal/term": client, "pkg/client": client,

	"lab": lab,

	"accept": acceptance,

	"emu/kfdabi": gpuProgram,

	"emu": kit, "internal/testutil": kit, "test": kit,
}

// programs are the purposes of what each program links. An administrator's laptop needs no
// kernel interface, and gpctl must not act without the daemon; a root daemon needs no model
// of what it works on, and nothing that tests it.
var programs = map[string][]string{
	"cmd/gpreemptd":       {shared, host, daemon},
	"cmd/gpctl":           {shared, client, admin},
	"lab/cmd/gplab":       {shared, client, lab},
	"accept/cmd/gpaccept": {shared, host, gpuProgram, acceptance},
	"emu/cmd/kfdemu":      {shared, host, daemon, client, gpuProgram, kit},
}

// purposeOf returns what a package is for, and the name in purposes that says so.
func purposeOf(dir string) (purpose, name string) {
	for of, is := range purposes {
		if within(dir, of) && len(of) > len(name) {
			purpose, name = is, of
		}
	}
	return purpose, name
}

func checkPurposes(t *tree) (problems []string) {
	for _, dir := range t.dirs() {
		if purpose, _ := purposeOf(dir); purpose == "" && path.Base(path.Dir(dir)) != "cmd" {
			problems = append(problems, dir+" has no purpose: say in test/arch/purpose_test.go which programs may link it")
		}
		if path.Base(path.Dir(dir)) == "cmd" && programs[dir] == nil {
			problems = append(problems, dir+" is a program that links nothing: give it its purposes in test/arch/purpose_test.go")
		}
	}
	return problems
}

// checkLinks follows the imports of the programs through this module. Other modules cannot
// import this one, so that is all of its own that they link.
func checkLinks(t *tree) (problems []string) {
	for _, program := range slices.Sorted(maps.Keys(programs)) {
		via := linked(t, program)
		for _, dir := range slices.Sorted(maps.Keys(via)) {
			purpose, _ := purposeOf(dir)
			if dir == program || slices.Contains(programs[program], purpose) {
				continue
			}
			chain := dir
			for from := via[dir]; from != ""; from = via[from] {
				chain = from + " -> " + chain
			}
			if purpose == "" {
				purpose = "nothing yet"
			}
			problems = append(problems, fmt.Sprintf("%s links %s, which is for %s: %s", path.Base(program), dir, purpose, chain))
		}
	}
	return problems
}

// linked returns the packages of this module that a program links, each with the one that
// imports it.
func linked(t *tree, program string) map[string]string {
	via := map[string]string{program: ""}
	for queue := []string{program}; len(queue) > 0; queue = queue[1:] {
		p := t.packages[queue[0]]
		if p == nil {
			continue
		}
		for _, f := range p.code() {
			for _, imported := range slices.Sorted(maps.Keys(f.imports)) {
				own, ok := t.own(imported)
				if _, seen := via[own]; ok && !seen {
					via[own] = queue[0]
					queue = append(queue, own)
				}
			}
		}
	}
	return via
}

// TestPurposesAreOfPackages: a name for which there is no package any more says nothing.
func TestPurposesAreOfPackages(t *testing.T) {
	used := map[string]bool{}
	for _, entry := range table {
		_, name := purposeOf(entry.pkg)
		used[name] = true
	}
	for name := range purposes {
		if !used[name] {
			t.Errorf("purposes has %s, and the import table has no such package", name)
		}
	}
}
