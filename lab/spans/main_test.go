package spans_test

import (
	"os"
	"testing"

	"github.com/gpreempt/gpreempt/internal/testutil"
)

func TestMain(m *testing.M) { os.Exit(testutil.VerifyMain(m)) }
