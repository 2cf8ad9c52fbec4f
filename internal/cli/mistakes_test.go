package cli

import (
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/internal/testutil/clitest"
)

func TestMistakesAreAnsweredWithTheirRemedy(t *testing.T) {
	dir := t.TempDir()
	socket := filepath.Join(dir, "s")
	clitest.Serve(t, socket, clitest.NewMachine())
	now, sleep := clitest.Clock()
	testutil.Mistakes(t, "testdata/mistakes.golden", *update, func(t *testing.T, mistake string) string {
		var out, errs bytes.Buffer
		streams := term.IO{
			In: strings.NewReader(""), Out: &out, Err: &errs, Now: now, Sleep: sleep,
			Getenv: func(name string) string {
				if name == term.SocketEnv {
					return socket
				}
				return ""
			},
			Environ: func() []string { return nil },
			Exec:    func(path string, _, _ []string) error { return fmt.Errorf("exec %s: %w", path, fs.ErrNotExist) },
		}
		code := Program.Run(context.Background(), split(strings.ReplaceAll(mistake, "DIRECTORY", dir))[1:], streams)
		if code == term.ExitOK || out.Len() > 0 {
			t.Errorf("exit code %d, output %q", code, &out)
		}
		return strings.ReplaceAll(errs.String(), dir, "DIRECTORY")
	})
}

// split splits a line as a shell does that knows only ' and spaces.
func split(line string) (all []string) {
	for i, part := range strings.Split(line, "'") {
		if i%2 == 1 {
			all = append(all, part)
		} else {
			all = append(all, strings.Fields(part)...)
		}
	}
	return all
}
