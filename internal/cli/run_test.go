package cli

import (
	"context"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"syscall"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/testscript"
)

// execve is a fake for a machine with few files. It prints what would be executed.
func execve(stdout io.Writer) func(path string, args, env []string) error {
	return func(path string, args, env []string) error {
		switch path {
		case "/usr/bin/train", "./train", "/bin/sh":
			fmt.Fprintf(stdout, "%s %q\n%s\n", path, args, strings.Join(env, "\n"))
			return nil
		case "/usr/bin/script":
			return syscall.ENOEXEC
		case "/opt/bin/data", "/usr/bin/data":
			return syscall.EACCES
		case "/opt/bin/file/train":
			return syscall.ENOTDIR
		case "/usr/bin/huge":
			return syscall.E2BIG
		}
		return syscall.ENOENT
	}
}

// python compares the list that Python reads from a file with the wanted one.
func python(ts *testscript.TestScript, _ bool, args []string) {
	interpreter, err := exec.LookPath("python3")
	if err != nil {
		ts.Logf("skipped: no python3 to read %s", args[0])
		return
	}
	const read = "import runpy, sys\nfor q in runpy.run_path(sys.argv[1])['queues']: print(q)"
	got, err := exec.CommandContext(context.Background(), interpreter, "-c", read, ts.MkAbs(args[0])).CombinedOutput()
	if err != nil {
		ts.Fatalf("python3: %v\n%s", err, got)
	}
	if diff := cmp.Diff(ts.ReadFile(args[1]), string(got)); diff != "" {
		ts.Fatalf("list in %s (-want +got):\n%s", args[0], diff)
	}
}
