package daemon

import (
	"os"
	"testing"

	"github.com/gpreempt/gpreempt/internal/testutil"
)

func TestMain(m *testing.M) {
	switch os.Getenv(roleEnv) {
	case roleVictim:
		os.Exit(victimMain(os.Stdin, os.Stdout))
	case roleTracer:
		os.Exit(tracerMain(os.Args[1:], os.Stdin, os.Stdout))
	case roleRelay:
		os.Exit(relayMain(os.Args[1]))
	case roleDaemon:
		os.Exit(daemonMain(os.Args[1], os.Args[2], os.Args[3], os.Stderr))
	}
	os.Exit(testutil.VerifyMain(m))
}
