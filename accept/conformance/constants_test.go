package conformance

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// constants are those of package kfd that the product uses, except for numbers of calls and of
// operations (Req, Trap), which the kernel's headers hold. The kernel owns what the others mean,
// and a new one may change that without another number: each that is passed to the driver names
// the expectation that shows it. The rest is marked with a "-" and why it is not passed.
var constants = map[string]string{
	"GraceMin": "grace-of-one-is-one",

	"MaxQueues":        "suspend-of-more-queues-than-there-can-be",
	"QueueErrorMask":   "suspend-of-an-id-with-the-error-mark",
	"QueueInvalidMask": "suspend-of-an-id-with-the-invalid-mark",

	"ECQueueNew":       "snapshot-clears-what-it-returns",
	"ECProcessRuntime": "runtime-enable-waits-for-the-debugger",

	"CRIUOpProcessInfo": "checkpoint-pauses",
	"CRIUOpUnpause":     "unpause-twice",

	"SMIQueueEviction": "smi-reports-a-pause",
	"SMIAllProcesses":  "smi-reports-other-processes-by-the-bit-or-by-right",
	"TriggerTTM":       "- in an event",

	"KmapEvicted":   "- in an answer",
	"KmapFailed":    "- in an answer",
	"KmapHeld":      "- in an answer",
	"KmapMapped":    "- in an answer",
	"KmapSuspended": "- in an answer",

	// Of the programs of the acceptance.
	"AllocVRAM":                 "available-memory-shrinks-by-two-mebibytes",
	"AllocUserptr":              "memory-of-the-process-needs-an-address",
	"AllocWritable":             "memory-handles-are-the-lowest-free",
	"AllocExecutable":           "- nothing shows it but a program on a GPU",
	"AllocCoherent":             "- nothing shows it but a program on a GPU",
	"EventTypeMemory":           "events-of-exceptions-count-from-the-middle",
	"QueueTypeComputeAQL":       "queue-runs-from-its-creation",
	"QueueTypeSDMA":             "copy-queue-created-meanwhile-is-new-too",
	"RuntimeEnableModeEnable":   "runtime-enable",
	"RuntimeEnableModeTTMPSave": "enable-returns-the-runtime-state",
	"WaitResultComplete":        "- in an answer",
	"WaitResultTimeout":         "- in an answer",

	"RuntimeBusy":        "- in an answer",
	"RuntimeDisabled":    "- in an answer",
	"RuntimeEnabled":     "- in an answer",
	"RuntimeFailed":      "- in an answer",
	"DevicePath":         "- a path",
	"PermissionProcess":  "- of this program",
	"PermissionThread":   "- of this program",
	"PermissionUnknown":  "- of this program",
	"QueueHardwareError": "- of this program",
	"QueueOK":            "- of this program",
	"QueueSkipped":       "- of this program",
}

func TestEveryConstantOfTheKernelHasAnExpectation(t *testing.T) {
	rows := map[string]bool{}
	for _, e := range table(t) {
		rows[e.name] = true
	}
	used := usedConstants(t)
	for name, files := range used {
		if strings.HasPrefix(name, "Req") || strings.HasPrefix(name, "Trap") {
			continue
		}
		row, known := constants[name]
		switch {
		case !known:
			t.Errorf("kfd.%s is not in constants: %s", name, files)
		case !strings.HasPrefix(row, "- ") && !rows[row]:
			t.Errorf("kfd.%s: the table has no expectation %q", name, row)
		}
	}
	for name := range constants {
		if used[name] == "" {
			t.Errorf("no shipped program uses kfd.%s", name)
		}
	}
}

// usedConstants returns the exported constants of package kfd that it or another package of the
// product uses, each with one such file.
func usedConstants(t *testing.T) map[string]string {
	t.Helper()
	const root = "../.."
	parse := func(path string) *ast.File {
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		return file
	}
	constant := func(n ast.Node) *ast.GenDecl {
		if d, ok := n.(*ast.GenDecl); ok && d.Tok == token.CONST {
			return d
		}
		return nil
	}
	var own []string
	for _, dir := range []string{"pkg/kfd", "emu/kfdabi"} {
		files, err := filepath.Glob(filepath.Join(root, dir, "*.go"))
		if err != nil {
			t.Fatal(err)
		}
		own = append(own, files...)
	}
	declared := map[string]bool{}
	for _, path := range own {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		for _, decl := range parse(path).Decls {
			if d := constant(decl); d != nil {
				for _, spec := range d.Specs {
					for _, name := range spec.(*ast.ValueSpec).Names {
						declared[name.Name] = name.IsExported()
					}
				}
			}
		}
	}
	used := map[string]string{}
	note := func(name, path string) {
		if declared[name] && used[name] == "" {
			used[name] = path
		}
	}
	for _, dir := range []string{"pkg", "internal", "cmd", "accept", "emu/kfdabi"} {
		err := filepath.WalkDir(filepath.Join(root, dir), func(path string, entry fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return err
			case entry.IsDir() && slices.Contains([]string{"conformance", "testutil"}, entry.Name()):
				return fs.SkipDir
			case entry.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go"):
				return nil
			}
			ast.Inspect(parse(path), func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.SelectorExpr:
					if x, ok := n.X.(*ast.Ident); ok && (x.Name == "kfd" || x.Name == "kfdabi") {
						note(n.Sel.Name, path)
					}
				case *ast.Ident:
					if slices.Contains(own, path) {
						note(n.Name, path)
					}
				}
				return !slices.Contains(own, path) || constant(n) == nil
			})
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return used
}
