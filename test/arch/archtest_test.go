// Package arch holds the import table and other properties of the source tree, and makes
// lists of documents from both. It has only tests.
package arch

import (
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
)

// checks are the properties, each giving a line for what breaks it.
var checks = []struct {
	name  string
	check func(*tree) []string
}{
	{"EveryPackageIsInTheTable", checkListed},
	{"ImportsFollowTheTable", checkImports},
	{"PurePackagesTouchNothing", checkPure},
	{"SystemCallsStayInTheKernelPackages", checkKernel},
	{"UnsafeStaysInItsFiles", checkUnsafe},
	{"EveryPackageHasAPurpose", checkPurposes},
	{"ProgramsLinkWhatTheyAreFor", checkLinks},
	{"TestsSleepInBubblesOnly", checkTestSleep},
	{"LogLinesHaveConstantMessagesAndFieldsOfLog", checkLogs},
	{"FilesThatUsersNameAreReadByRegular", checkReaders},
}

func TestTree(t *testing.T) {
	module, err := loadModule()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range checks {
		t.Run(c.name, func(t *testing.T) {
			for _, problem := range c.check(module) {
				t.Error(problem)
			}
		})
	}
}

func TestTableIsOrdered(t *testing.T) {
	var above []string
	for _, entry := range table {
		if slices.Contains(above, entry.pkg) {
			t.Errorf("%s is in the table twice", entry.pkg)
		}
		for _, imported := range entry.imports {
			if !slices.Contains(above, imported) {
				t.Errorf("%s may import %s, which does not stand above it in the table", entry.pkg, imported)
			}
		}
		above = append(above, entry.pkg)
	}
}

func lookup(dir string) (rule, bool) {
	for _, entry := range table {
		if entry.pkg == dir {
			return entry.rule, true
		}
	}
	return rule{}, false
}

func generated(dir string) bool { return strings.HasPrefix(dir, "api/gen/") }

func checkListed(t *tree) (problems []string) {
	for _, dir := range t.dirs() {
		if _, ok := lookup(dir); !ok {
			problems = append(problems, fmt.Sprintf("%s is not in the import table: add an entry with the packages it may import to test/arch/table_test.go,"+
				" below those packages and above its importers, and run make gen", dir))
		}
	}
	return problems
}

func checkImports(t *tree) (problems []string) {
	for _, dir := range t.dirs() {
		r, ok := lookup(dir)
		if !ok || generated(dir) {
			continue
		}
		for _, f := range t.packages[dir].code() {
			for _, imported := range slices.Sorted(maps.Keys(f.imports)) {
				if own, ok := t.own(imported); ok {
					if !slices.Contains(r.imports, own) {
						problems = append(problems, fmt.Sprintf("%s imports %s, which %s may not (test/arch/table_test.go)", f.name, own, dir))
					}
				} else if r.stdOnly && outside(imported) {
					problems = append(problems, fmt.Sprintf("%s imports %s, but %s uses the standard library only", f.name, imported, dir))
				}
			}
		}
	}
	return problems
}

// outside reports whether an import is from another module: the standard library
// has no dot in the first element of its paths.
func outside(imported string) bool {
	first, _, _ := strings.Cut(imported, "/")
	return strings.Contains(first, ".")
}

// within reports whether p is root or below it.
func within(p, root string) bool { return p == root || strings.HasPrefix(p, root+"/") }

func checkPure(t *tree) (problems []string) {
	for _, entry := range table {
		p := t.packages[entry.pkg]
		if !entry.pure || p == nil {
			continue
		}
		for _, f := range p.code() {
			for _, imported := range slices.Sorted(maps.Keys(f.imports)) {
				for _, root := range []string{"os", "net", "syscall", "golang.org/x/sys", "math/rand"} {
					if within(imported, root) {
						problems = append(problems, fmt.Sprintf("%s imports %s, but %s decides and does nothing: pass in what it needs to know", f.name, imported, entry.pkg))
					}
				}
			}
			for _, use := range f.uses("time", "Now", "Since", "Until", "Sleep", "After", "AfterFunc", "Tick", "NewTicker", "NewTimer") {
				problems = append(problems, fmt.Sprintf("%s: in %s time is an argument", use, entry.pkg))
			}
		}
	}
	return problems
}

func checkKernel(t *tree) (problems []string) {
	for _, dir := range t.dirs() {
		if r, ok := lookup(dir); !ok || r.kernel {
			continue
		}
		for _, f := range t.packages[dir].code() {
			for imported := range f.imports {
				if within(imported, "golang.org/x/sys") {
					problems = append(problems, fmt.Sprintf("%s imports %s, but %s is not a kernel package: call a kernel package", f.name, imported, dir))
				}
			}
		}
	}
	return problems
}

func checkUnsafe(t *tree) (problems []string) {
	for _, dir := range t.dirs() {
		r, ok := lookup(dir)
		if !ok || generated(dir) {
			continue
		}
		for _, f := range t.packages[dir].files {
			if _, uses := f.imports["unsafe"]; !uses {
				continue
			}
			base := path.Base(f.name)
			named := strings.HasSuffix(base, "_unsafe.go") || strings.HasSuffix(base, "_unsafe_test.go")
			if !named || !r.unsafe && !(r.unsafeTests && f.test) {
				problems = append(problems, fmt.Sprintf("%s imports unsafe: that belongs in a file *_unsafe.go of a package the table allows it", f.name))
			}
		}
	}
	return problems
}

// checkTestSleep: a test that sleeps waits for luck. In a bubble of
// testing/synctest time is fake and a sleep is exact.
func checkTestSleep(t *tree) (problems []string) {
	for _, dir := range t.dirs() {
		for _, f := range t.packages[dir].files {
			if _, bubble := f.imports["testing/synctest"]; !f.test || bubble {
				continue
			}
			for _, use := range f.uses("time", "Sleep") {
				problems = append(problems, fmt.Sprintf("%s in a test: wait for the thing itself, or run in a testing/synctest bubble", use))
			}
		}
	}
	return problems
}

// TestChecksFindWhatTheyAreFor breaks each property in a tree of its own.
func TestChecksFindWhatTheyAreFor(t *testing.T) {
	const module = "module example.com/m\n"
	for _, tc := range []struct {
		name  string
		check func(*tree) []string
		files map[string]string
		want  []string // the beginning of each problem
	}{
		{
			name:  "a package without an entry",
			check: checkListed,
			files: map[string]string{"internal/util/u.go": "package util"},
			want:  []string{"internal/util is not in the import table"},
		},
		{
			name:  "other modules, test data and hidden folders are left out",
			check: checkListed,
			files: map[string]string{
				"tools/go.mod": "module x", "tools/t.go": "package tools",
				"internal/cli/testdata/x.go": "package x", ".build/b.go": "package b",
			},
		},
		{
			name:  "an import against the direction",
			check: checkImports,
			files: map[string]string{"pkg/scheduler/s.go": `package scheduler; import _ "example.com/m/internal/server"`},
			want:  []string{"pkg/scheduler/s.go imports internal/server"},
		},
		{
			name:  "a test may import more",
			check: checkImports,
			files: map[string]string{"pkg/scheduler/s_test.go": `package scheduler; import _ "example.com/m/internal/testutil"`},
		},
		{
			name:  "a foreign module where the standard library is required",
			check: checkImports,
			files: map[string]string{"pkg/gpreempt/g.go": `package gpreempt; import _ "github.com/a/b"`},
			want:  []string{"pkg/gpreempt/g.go imports github.com/a/b"},
		},
		{
			name:  "a path that may be a FIFO",
			check: checkReaders,
			files: map[string]string{
				"internal/config/c.go": `package config; import ("os"; pem "crypto/tls"; "fmt")
var _, _ = os.ReadFile(path)
var _, _ = pem.LoadX509KeyPair(path, path)
var _ = os.DirFS(fmt.Sprint(path))
var _, _ = os.Open(fmt.Sprintf("%s/x", path))
var _, _ = os.ReadFile("/proc/self/maps")
var _, _ = os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))`,
				"internal/config/c_test.go":     `package config; import "os"; var _, _ = os.ReadFile(path)`,
				"internal/config/o.go":          `package config; import os "example.com/os"; var _, _ = os.ReadFile(path)`,
				"internal/mechanism/journal.go": `package mechanism; import "os"; var _, _ = os.ReadFile(boot)`,
				"lab/kfdtrace/functions.go":     `package kfdtrace`,
				"internal/regular/regular.go":   `package regular; import "os"; var _, _ = os.Open(path)`,
			},
			want: []string{
				"internal/config/c.go:2:12: read the path", "internal/config/c.go:3:12: read the path", "internal/config/c.go:4:9: read the path",
				"internal/config/c.go:5:12: read the path", "lab/kfdtrace/functions.go is in ownPaths", "lab/kfdtrace/tracefs.go is in ownPaths",
			},
		},
		{
			name:  "a scheduler that acts",
			check: checkPure,
			files: map[string]string{"pkg/scheduler/s.go": `package scheduler
import ("os/exec"; clock "time")
var now = clock.Now`},
			want: []string{"pkg/scheduler/s.go imports os/exec", "pkg/scheduler/s.go:3:11: clock.Now"},
		},
		{
			name:  "a timer and a clock in a pure package",
			check: checkPure,
			files: map[string]string{
				"pkg/scheduler/core.go":  `package scheduler; import "time"; var t = time.NewTimer(1)`,
				"pkg/scheduler/clock.go": `package scheduler; import "time"; var now = time.Now`,
			},
			want: []string{"pkg/scheduler/clock.go:1:45: time.Now", "pkg/scheduler/core.go:1:43: time.NewTimer"},
		},
		{
			name:  "a system call in the server",
			check: checkKernel,
			files: map[string]string{
				"internal/server/s.go":   `package server; import _ "golang.org/x/sys/unix"`,
				"internal/hrtimer/ok.go": `package hrtimer; import _ "golang.org/x/sys/unix"`,
			},
			want: []string{"internal/server/s.go imports golang.org/x/sys/unix"},
		},
		{
			name:  "unsafe in the wrong file and in the wrong package",
			check: checkUnsafe,
			files: map[string]string{
				"pkg/kfd/ioctl.go":               `package kfd; import _ "unsafe"`,
				"pkg/kfd/ioctl_unsafe.go":        `package kfd; import _ "unsafe"`,
				"internal/cli/fast_unsafe.go":    `package cli; import _ "unsafe"`,
				"pkg/scheduler/i_unsafe.go":      `package scheduler; import _ "unsafe"`,
				"pkg/scheduler/i_unsafe_test.go": `package scheduler; import _ "unsafe"`,
			},
			want: []string{"internal/cli/fast_unsafe.go imports unsafe", "pkg/kfd/ioctl.go imports unsafe", "pkg/scheduler/i_unsafe.go imports unsafe"},
		},
		{
			name:  "gpctl with a mechanism three imports down",
			check: checkLinks,
			files: map[string]string{
				"cmd/gpctl/main.go":               `package main; import _ "example.com/m/internal/cli"`,
				"internal/cli/c.go":               `package cli; import _ "example.com/m/internal/look"`,
				"internal/look/l.go":              `package look; import _ "example.com/m/internal/mechanism/dbgtrap"`,
				"internal/mechanism/dbgtrap/d.go": `package dbgtrap`,
			},
			want: []string{
				"gpctl links internal/look, which is for nothing yet: cmd/gpctl -> internal/cli -> internal/look",
				"gpctl links internal/mechanism/dbgtrap, which is for programs that work on the driver and its processes: " +
					"cmd/gpctl -> internal/cli -> internal/look -> internal/mechanism/dbgtrap",
			},
		},
		{
			name:  "the daemon with the acceptance, and with a model of the GPU",
			check: checkLinks,
			files: map[string]string{
				"cmd/gpreemptd/main.go":     `package main; import _ "example.com/m/internal/daemon"`,
				"internal/daemon/d.go":      `package daemon; import ( _ "example.com/m/accept/workload"; _ "example.com/m/emu/gpumodel" )`,
				"internal/daemon/d_test.go": `package daemon; import _ "example.com/m/emu/sim"`,
				"accept/workload/w.go":      `package workload`,
				"emu/gpumodel/g.go":         `package gpumodel`,
				"emu/sim/s.go":              `package sim`,
			},
			want: []string{
				"gpreemptd links accept/workload, which is for the acceptance of a GPU: cmd/gpreemptd -> internal/daemon -> accept/workload",
				"gpreemptd links emu/gpumodel, which is for tests: cmd/gpreemptd -> internal/daemon -> emu/gpumodel",
			},
		},
		{
			name:  "a package without a purpose, and a program",
			check: checkPurposes,
			files: map[string]string{
				"internal/util/u.go": "package util", "internal/config/yamlfile/y.go": "package yamlfile",
				"cmd/gpreemptd/main.go": "package main", "cmd/gptool/main.go": "package main",
			},
			want: []string{"cmd/gptool is a program that links nothing", "internal/util has no purpose"},
		},
		{
			name:  "a test that sleeps",
			check: checkTestSleep,
			files: map[string]string{
				"internal/cli/a_test.go": `package cli; import "time"; func f() { time.Sleep(1) }`,
				"internal/cli/b_test.go": `package cli; import ("testing/synctest"; "time"); func g() { synctest.Wait(); time.Sleep(1) }`,
			},
			want: []string{"internal/cli/a_test.go:1:40: time.Sleep"},
		},
		{
			name:  "log lines that nobody finds again",
			check: checkLogs,
			files: map[string]string{
				"internal/log/k.go": `package log; import "go.uber.org/zap"; func A(s string) zap.Field { return zap.String("a", s) }`,
				"internal/cli/a.go": `package cli
import ("fmt"; "go.uber.org/zap")
const fixed = "fixed"
type s struct{ out *zap.Logger }
func which(b bool) string { if b { return "one thing" }; return "another" }
func (s s) f(x string) {
	s.out.Info("a row: " + x)
	mine := s.out.With().Named("n")
	mine.Warn(fmt.Sprintf("a %s", x))
	s.out.Log(0, x)
	s.out.Debug("gpu 1 is lost")
	s.out.Error("no field of ours", zap.String("a", x))
	s.out.Info(fixed); s.out.Check(0, which(true)); x.Info(x)
}`,
				"internal/demo/b.go": `package demo; import "go.uber.org/zap"; func g(log *zap.Logger) { log.Info("GPU 2 is lost"); log.Info("100 %d"); log.Info("fixed") }`,
			},
			want: []string{
				"internal/cli/a.go:12:34: zap.String",
				"internal/cli/a.go:7:2: the message of a log line is not a constant",
				"internal/cli/a.go:9:2: the message of a log line is not a constant",
				"internal/cli/a.go:10:2: the message of a log line is not a constant",
				`internal/demo/b.go:1:67: "GPU 2 is lost" differs`,
				`internal/demo/b.go:1:94: "100 %d" differs`,
			},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			root := fstest.MapFS{"go.mod": {Data: []byte(module)}}
			for name, source := range tc.files {
				root[name] = &fstest.MapFile{Data: []byte(source), Mode: fs.ModePerm}
			}
			module, err := load(root)
			if err != nil {
				t.Fatal(err)
			}
			got := tc.check(module)
			for i, problem := range got {
				if i < len(tc.want) && strings.HasPrefix(problem, tc.want[i]) {
					got[i] = tc.want[i]
				}
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("problems (-want +got):\n%s", diff)
			}
		})
	}
}
