package cli

import (
	"testing"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/testutil/clitest"
)

// elsewhere are the commands whose output is compared by other tests than the scripts.
var elsewhere = map[string]string{
	"gpctl queue moves": "TestSlotsAreWatchedUntilTheDaemonEnds",
	"gpctl top":         "TestTopScreen: the screens of docs/images",
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
