package workload

import (
	"bytes"
	"errors"
	"flag"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestArgsAreRead(t *testing.T) {
	got, err := ParseArgs(strings.Fields("--gpus 7,9 --queues 3 --runtime --packets 100 --duration 250 --occupancy 500000 "+
		"--rate 12.5 --depth 8 --sdma --churn --wait poll --priority high"), io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	want := Config{
		GPUs: []gpreempt.GPUID{7, 9}, Queues: 3, SDMA: true, Runtime: true, Packets: 100, Kernel: 250 * time.Microsecond,
		Occupancy: 500_000, Rate: 12.5, Depth: 8, Churn: true, Poll: true, Priority: "high",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the configuration (-want +got):\n%s", diff)
	}
	got, err = ParseArgs(nil, io.Discard)
	if diff := cmp.Diff(Config{Queues: 1, Depth: 4}, got); err != nil || diff != "" {
		t.Errorf("without arguments: %v (-want +got):\n%s", err, diff)
	}
}

func TestWrongArgsAreRefused(t *testing.T) {
	for _, args := range []string{
		"now", "--queues -1", "--queues 1025", "--depth 0", "--depth 4097", "--duration 3600000001", "--occupancy 1000001", "--rate 1e9",
		"--rate -1", "--rate NaN", "--wait long", "--priority 3", "--gpus", "--gpus x", "--gpus 0", "--gpus 7,", "--speed 3", "--packets -3",
	} {
		var help bytes.Buffer
		if cfg, err := ParseArgs(strings.Fields(args), &help); err == nil || help.Len() == 0 {
			t.Errorf("%s: read as %+v, with the message %q", args, cfg, help.String())
		}
	}
	if _, err := ParseArgs([]string{"--help"}, io.Discard); !errors.Is(err, flag.ErrHelp) {
		t.Errorf("--help returns %v", err)
	}
}

func FuzzParseArgs(f *testing.F) {
	f.Add("--gpus 7,9 --queues 3 --rate 0.5")
	f.Add("--rate NaN --depth 4096")
	f.Fuzz(func(t *testing.T, args string) {
		c, err := ParseArgs(strings.Fields(args), io.Discard)
		if err != nil {
			return
		}
		if c.Depth < 1 || c.Depth > maxDepth || c.Queues < 0 || c.Queues > maxQueues || !(c.Rate >= 0) || c.Kernel < 0 || c.Occupancy > 1_000_000 {
			t.Errorf("%q was read as %+v", args, c)
		}
	})
}
