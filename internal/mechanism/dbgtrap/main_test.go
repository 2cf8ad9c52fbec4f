package dbgtrap

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"testing"

	"github.com/gpreempt/gpreempt/emu/workload"
	"github.com/gpreempt/gpreempt/internal/testutil"
)

// roleEnv makes a run of this test binary a program that a test drives.
const roleEnv = "DBGTRAP_TEST_ROLE"

// A job may end its main thread, so it has to know which one that is.
func init() {
	if os.Getenv(roleEnv) == roleJob {
		runtime.LockOSThread()
	}
}

func TestMain(m *testing.M) {
	switch role := os.Getenv(roleEnv); role {
	case "":
		os.Exit(testutil.VerifyMain(m))
	case roleJob:
		job := &realJob{endMain: make(chan struct{})}
		go func() {
			answerCommands(job.do)
			os.Exit(0)
		}()
		job.main()
	case roleQueues:
		args := []string{"--runtime", "--rate", "0.001", "--depth", "1", "--duration", "1"}
		os.Exit(workload.Main(context.Background(), workload.Kernel(), args, os.Stdin, os.Stdout, os.Stderr))
	case roleDaemon:
		answerCommands(new(realDaemon).do)
	default:
		fmt.Fprintf(os.Stderr, "no role %q\n", role)
		os.Exit(2)
	}
}
