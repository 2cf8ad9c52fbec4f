package daemon

import (
	"flag"
	"io"
	"strings"
	"testing"

	"github.com/gpreempt/gpreempt/internal/testutil"
)

var update = flag.Bool("update", false, "write the answers to testdata/mistakes.golden")

func TestMistakesAreAnsweredWithTheirRemedy(t *testing.T) {
	testutil.Mistakes(t, "testdata/mistakes.golden", *update, func(t *testing.T, mistake string) string {
		cmd := Command()
		cmd.SetArgs(strings.Fields(mistake)[1:])
		cmd.SetOut(io.Discard)
		err := cmd.ExecuteContext(t.Context())
		if err == nil {
			t.Fatal("it succeeds")
		}
		return err.Error()
	})
}
