package cli

import (
	"bytes"
	"context"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/internal/testutil/clitest"
)

func TestFleetStatusIsShownAgainAndAgain(t *testing.T) {
	socket := filepath.Join(testutil.TempSocketDir(t), "machine.sock")
	clitest.Serve(t, socket, clitest.NewMachine())
	ctx, end := context.WithCancel(t.Context())
	var out, errs bytes.Buffer
	streams := term.IO{In: strings.NewReader(""), Out: &out, Err: &errs, Getenv: func(string) string { return "" }}
	var sleep func(context.Context, time.Duration) error
	streams.Now, sleep = clitest.Clock()
	shown := 0
	streams.Sleep = func(ctx context.Context, d time.Duration) error {
		if shown++; shown == 2 {
			end()
		}
		return sleep(ctx, d)
	}
	Program.Run(ctx, []string{"fleet", "status", "--hosts", "gpu1=" + socket, "--watch=5s"}, streams)
	frame := func(at string) string {
		return "--- " + at + `
1 host, 1 answer; 2 GPUs, 1 of 3 offline targets suspended, 2 leases
  mechanisms  none 1
  policies    balanced 1
  versions    v0.3.0 1
  alarms      BREAKER_OPEN 1

HOST  VERSION  MECHANISM  POLICY    GPUS  OFFLINE  SUSPENDED  LEASES  FAILURES  QUIET P99  ALARMS
gpu1  v0.3.0   none       balanced     2        3          1       2         2      4.2ms  BREAKER_OPEN
`
	}
	if diff := cmp.Diff(frame("12:00:00")+frame("12:00:05"), out.String()); diff != "" {
		t.Errorf("errors %s; output (-want +got):\n%s", errs.String(), diff)
	}
}
