package cli

import (
	"flag"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/internal/testutil/clitest"
)

var update = flag.Bool("update", false, "write the output of gplab to the scripts of testdata")

func TestMain(m *testing.M) {
	time.Local = time.UTC
	api.Version = "v0.3.0"
	os.Exit(testutil.VerifyMain(m))
}

// Besides what clitest.Scripts has, run-pass, run-fail, run-slow and run-other are the folders of
// runs, and $RUN that of a run with made-up figures.
func TestScripts(t *testing.T) {
	clitest.Scripts(t, Program, *update, func(env *testscript.Env) error {
		run, err := filepath.Abs(filepath.Join("..", "report", "testdata", "run"))
		if err != nil {
			return err
		}
		env.Setenv("RUN", run)
		return writeRuns(env.WorkDir)
	})
}

// elsewhere are the commands whose output is compared by other tests than the scripts.
var elsewhere = map[string]string{
	"gplab capture":   "TestCaptureSaysWhatBothCasesMade",
	"gplab trace kfd": "TestTraceShowsHowLongQueueOperationsTake",
}

func TestEveryCommandHasGoldenOutput(t *testing.T) { clitest.EveryCommand(t, Program, elsewhere) }
