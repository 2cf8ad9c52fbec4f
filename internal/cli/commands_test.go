package cli

import (
	"bytes"
	"errors"
	"testing"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/internal/testutil/clitest"
)

// elsewhere are the commands whose output is compared by other tests than the scripts.
var elsewhere = map[string]string{
	"gpctl queue moves": "TestSlotsAreWatchedUntilTheDaemonEnds",
	"gpctl top":         "TestTopScreen: the screens of docs/images",
	"gpctl fleet top":   "TestFleetTopShowsTheHostsAgainAndAgain",
	"gpctl web":         "TestWebShowsWhatTheDaemonAnswers, and the pages of docs/images",
}

func TestEveryCommandHasGoldenOutput(t *testing.T) { clitest.EveryCommand(t, Program, elsewhere) }

func TestGraphicsVersionsHaveCompilerNames(t *testing.T) {
	for v, want := range map[uint32]string{0: "-", 90402: "gfx942", 90010: "gfx90a", 110000: "gfx1100", 90008: "gfx908"} {
		if got := gfx(v); got != want {
			t.Errorf("gfx(%d) = %q, want %q", v, got, want)
		}
	}
}

// FuzzReadPolicy checks that a policy on standard input is either an error or a request
// that sets what it lists.
func FuzzReadPolicy(f *testing.F) {
	f.Add([]byte("policy:\n  share_floor: 0.3\n  max_wait: 0.005s\n"))
	f.Add([]byte(`{"preset": "custom", "linger": "LINGER_NONE", "shadow": true}`))
	f.Add([]byte("a: &a [*a]\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		a := &term.App{IO: term.IO{In: bytes.NewReader(data)}}
		req := &gpreemptv1.SetPolicyRequest{Policy: &gpreemptv1.Policy{}}
		if err := readPolicy(a, &cobra.Command{Use: "set"}, req); err != nil {
			if f, ok := errors.AsType[*term.Failure](err); !ok || f.Code != term.ExitUsage {
				t.Errorf("not a usage error: %v", err)
			}
			return
		}
		if proto.Size(req.GetPolicy()) == 0 && req.GetPreset() == "" && !bytes.Contains(data, []byte("preset")) {
			t.Error("accepted without effect")
		}
	})
}

// The read position of some queues wraps at the end of the ring, and the write position never
// does.
func TestPositionsAreThoseInTheRing(t *testing.T) {
	const ring = 4096 // bytes: 1024 dwords, 64 packets
	type row struct {
		r, w   uint64
		behind string
	}
	for name, test := range map[string]struct {
		hqd  *gpreemptv1.Hqd
		want row
	}{
		"the write position is a ring ahead": {&gpreemptv1.Hqd{Kind: "cp", Aql: true, RingBytes: ring, ReadPointer: 1008, WritePointer: 2*1024 + 16}, row{1008, 16, "2 packets"}},
		"both grow":                          {&gpreemptv1.Hqd{Kind: "cp", RingBytes: ring, ReadPointer: 5 * 1024, WritePointer: 5*1024 + 7}, row{0, 7, "7 dwords"}},
		"nothing behind":                     {&gpreemptv1.Hqd{Kind: "cp", Aql: true, RingBytes: ring, ReadPointer: 16, WritePointer: 1024 + 16}, row{16, 16, "0 packets"}},
		"no ring":                            {&gpreemptv1.Hqd{Kind: "cp", ReadPointer: 3, WritePointer: 4}, row{3, 4, "-"}},
		"SDMA counts bytes":                  {&gpreemptv1.Hqd{Kind: "sdma", RingBytes: ring, ReadPointer: 9000, WritePointer: 9064}, row{9000, 9064, "64 bytes"}},
		"SDMA that was reset":                {&gpreemptv1.Hqd{Kind: "sdma", RingBytes: ring, ReadPointer: 9000, WritePointer: 64}, row{9000, 64, "-"}},
	} {
		r, w, behind := positions(test.hqd)
		if got := (row{r, w, behind}); got != test.want {
			t.Errorf("%s: %+v, want %+v", name, got, test.want)
		}
	}
}
