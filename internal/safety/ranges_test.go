package safety

import (
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestGFXNamesFamiliesAndSpans(t *testing.T) {
	for text, want := range map[GFXRange][2]uint32{
		"gfx90a":        {90010, 90010},
		"gfx942":        {90402, 90402},
		"gfx1151":       {110501, 110501},
		"gfx11xx":       {110000, 111515},
		"gfx120x":       {120000, 120015},
		"gfx9xx":        {90000, 91515},
		"gfx940-gfx942": {90400, 90402},
		"gfx*":          {0, math.MaxUint32},
	} {
		first, last, err := text.bounds()
		if got := [2]uint32{first, last}; err != nil || got != want {
			t.Errorf("%s: %v, %v, want %v", text, got, err, want)
		}
		if !text.Contains(first) || !text.Contains(last) || first > 0 && (text.Contains(first-1) || text.Contains(last+1)) {
			t.Errorf("%s does not contain what is between its bounds, or more", text)
		}
	}
	for _, bad := range []string{
		"", "gfx", "gfx9", "gfx90", "gfx90g", "gfx90A", "gfx11503", "gfxx", "gfx1xxx", "1100", "gfx001", "gfx+90a", "gfx1-gfx2",
		"gfx1103-gfx1100", "gfx11xx-gfx1200", "gfx9xx0", "gfx*x",
	} {
		if err := new(GFXRange).UnmarshalText([]byte(bad)); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

func TestUnknownFirmwareIsInNoRange(t *testing.T) {
	var r FirmwareRange
	if err := r.UnmarshalText([]byte(">=0x40 <128")); err != nil {
		t.Fatal(err)
	}
	var in []uint32
	for _, v := range []uint32{0, 0x3f, 0x40, 0x7f, 0x80} {
		if r.Contains(v) {
			in = append(in, v)
		}
	}
	if diff := cmp.Diff([]uint32{0x40, 0x7f}, in); diff != "" {
		t.Errorf("in %s (-want +got):\n%s", r, diff)
	}
	if below := FirmwareRange("<0x80"); below.Contains(0) || !below.Contains(1) {
		t.Errorf("%s has a version that is not known, or not the least", below)
	}
	if !FirmwareRange("").Contains(0) {
		t.Error("no bound keeps out a version that is not known")
	}
	for _, bad := range []string{"", "0x80", "=", "=0", "=0x", "=-1", "=0x1ffffffff", "~1", "= 0x80", ">=0x40,<0x80"} {
		if err := new(FirmwareRange).UnmarshalText([]byte(bad)); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

func TestKernelReleasesAgainstBounds(t *testing.T) {
	tests := []struct{ release, in, out string }{
		{"6.12.43+deb13-amd64", "=6.12 >=6.12.43 <6.13 =6 <=6.12", ">6.12 >=6.12.44 <6.12.43 >=7.0"},
		{"6.8.0-137-generic", ">=6.8.0-137 =6.8.0-137 >6.8.0-99 <6.8.0-138", ">6.8.0-137"},
		{"5.14.0-503.11.1.el9_5.x86_64", ">=5.14.0-503.11 <5.14.0-504", ">=5.14.0-503.12"},
		{"7.0.14-8-pve", ">=7.0 >=7.0.14-8", ">=7.0.14-9"},
		{"7.0.0-rc6", "<7.0 >=6.99 >=7.0-rc6 >7.0-rc5", ">=7.0 >=7.0-rc7"},
		{"7.0~rc6-1~exp1-amd64", "<7.0", ">=7.0"},
		{"7.0.0-0.rc6.20260101git35.fc44.x86_64", "<7.0", ">=7.0"},
		{"7.0.5-rc1", ">=7.0 <7.0.5 >7.0.4", ">=7.0.5"},
		{"7.0.10-arch1-1", ">=7.0 =7.0.10 =7.0.10-arch1", ">=7.0.10-arch2"},
		{"6.19.4.31300000", ">=6.19 <7.0", ">=7.0"},
		{"6.5", "=6.5.0 <6.5.1", ">=6.5.1"},
		{"10.0", ">=7.0 >9.9", "<7.0"},
		{"", "<7.0", ">=6.5"},
		{"strange", "<7.0", ">=6.5"},
		{"99999999999999999999999.1", ">=7.0", "<7.0"},
	}
	for _, tt := range tests {
		for i, text := range []string{tt.in, tt.out} {
			for bound := range strings.FieldsSeq(text) {
				var r KernelRange
				if err := r.UnmarshalText([]byte(bound)); err != nil {
					t.Fatal(err)
				}
				if got := r.Contains(tt.release); got != (i == 0) {
					t.Errorf("%q is in %s: %t", tt.release, bound, got)
				}
			}
		}
	}
	if r := KernelRange(">=6.5 <7.0"); r.Contains("7.1") || r.Contains("6.4") || !r.Contains("6.6") {
		t.Errorf("%s does not hold as a whole", r)
	}
	for _, bad := range []string{"", "7.0", ">=", ">=v7.0", "new", ">= 7.0"} {
		if err := new(KernelRange).UnmarshalText([]byte(bad)); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

// FuzzReleases checks that a release is itself, and on one side of a bound.
func FuzzReleases(f *testing.F) {
	f.Add("6.12.43+deb13-amd64", "6.12")
	f.Add("5.14.0-503.11.1.el9_5.x86_64", "5.14.0-503")
	f.Add("7.0~rc6", "7.0.0-rc6-rc7")
	f.Add("6..1", "-")
	f.Fuzz(func(t *testing.T, release, bound string) {
		if compareToBound(release, release) != 0 {
			t.Errorf("%q is not itself", release)
		}
		sides := 0
		for _, op := range []string{"<", "=", ">"} {
			if checkComparison(op, compareToBound(release, bound)) == nil {
				sides++
			}
		}
		if sides != 1 {
			t.Errorf("%q is on %d sides of %q", release, sides, bound)
		}
	})
}
