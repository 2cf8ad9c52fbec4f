package inventory

import (
	"io"
	"os"
	"testing"

	"github.com/gpreempt/gpreempt/internal/testutil"
)

// Variables that make this program a child of a test, which lives until it is killed
// or its standard input ends.
const (
	// ChildEnv makes it a process that does nothing.
	ChildEnv = "GPREEMPT_TEST_CHILD"
	// ownerEnv makes it the owner of the queue positions that its value lists.
	ownerEnv = "GPREEMPT_TEST_QUEUE_OWNER"
)

func TestMain(m *testing.M) {
	switch positions := os.Getenv(ownerEnv); {
	case os.Getenv(ChildEnv) != "":
		_ = os.Stdout.Close() // the program is loaded
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	case positions != "":
		own(positions)
		os.Exit(0)
	}
	os.Exit(testutil.VerifyMain(m))
}
