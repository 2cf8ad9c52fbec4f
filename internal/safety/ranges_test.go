package safety

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestGFXNamesFamiliesAndSpans(t *testing.T) {
	tests := []struct {
		text string
		want GFXRange
	}{
		{"gfx90a", GFXRange{90010, 90010}},
		{"gfx942", GFXRange{90402, 90402}},
		{"gfx1151", GFXRange{110501, 110501}},
		{"gfx11xx", GFXRange{110000, 111515}},
		{"gfx120x", GFXRange{120000, 120015}},
		{"gfx9xx", GFXRange{90000, 91515}},
		{"gfx940-gfx942", GFXRange{90400, 90402}},
		{"gfx*", everyGFX},
	}
	for _, tt := range tests {
		got, err := parseGFX(tt.text)
		if err != nil || got != tt.want {
			t.Errorf("%s: %v, %v, want %v", tt.text, got, err, tt.want)
		}
		if got.String() != tt.text {
			t.Errorf("String of %s is %s", tt.text, got)
		}
	}
	for _, bad := range []string{
		"", "gfx", "gfx9", "gfx90", "gfx90g", "gfx90A", "gfx11503", "gfxx", "gfx1xxx", "1100", "gfx001", "gfx+90a", "gfx1-gfx2",
		"gfx1103-gfx1100", "gfx11xx-gfx1200", "gfx9xx0", "gfx*x",
	} {
		if got, err := parseGFX(bad); err == nil {
			t.Errorf("%q is %v", bad, got)
		}
	}
}

func TestUnknownFirmwareIsInNoRange(t *testing.T) {
	r, err := parseFirmware(">=0x40 <128")
	if err != nil {
		t.Fatal(err)
	}
	if got := r.String(); got != ">=0x40 <0x80" {
		t.Error(got)
	}
	var in []uint32
	for _, v := range []uint32{0, 0x3f, 0x40, 0x7f, 0x80} {
		if r.hasFirmware(v) {
			in = append(in, v)
		}
	}
	if diff := cmp.Diff([]uint32{0x40, 0x7f}, in); diff != "" {
		t.Errorf("in %s (-want +got):\n%s", r, diff)
	}
	if below, err := parseFirmware("<0x80"); err != nil || below.hasFirmware(0) || !below.hasFirmware(1) {
		t.Errorf("%s has a version that is not known, or not the least (%v)", below, err)
	}
	if !(Range{}).hasFirmware(0) {
		t.Error("no bound keeps out a version that is not known")
	}
	for _, bad := range []string{"", "0x80", "=", "=0", "=0x", "=-1", "=0x1ffffffff", "~1", "= 0x80", ">=0x40,<0x80"} {
		if r, err := parseFirmware(bad); err == nil {
			t.Errorf("%q is %s", bad, r)
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
				r, err := parseKernel(bound)
				if err != nil {
					t.Fatal(err)
				}
				if got := r.hasKernel(tt.release); got != (i == 0) {
					t.Errorf("%q is in %s: %t", tt.release, bound, got)
				}
			}
		}
	}
	if r, err := parseKernel(">=6.5 <7.0"); err != nil || r.String() != ">=6.5 <7.0" || r.hasKernel("7.1") || r.hasKernel("6.4") || !r.hasKernel("6.6") {
		t.Errorf("%s, %v", r, err)
	}
	for _, bad := range []string{"", "7.0", ">=", ">=v7.0", "new", ">= 7.0"} {
		if r, err := parseKernel(bad); err == nil {
			t.Errorf("%q is %s", bad, r)
		}
	}
}

// FuzzReleases checks that releases have one order, and that a release compares to
// a bound as it is written.
func FuzzReleases(f *testing.F) {
	f.Add("6.12.43+deb13-amd64", "6.12", "7.0-rc3")
	f.Add("5.14.0-503.11.1.el9_5.x86_64", "5.14.0-503", "5.14.0-503.el9")
	f.Add("7.0~rc6", "7.0.0-rc6-rc7", "rc1")
	f.Add("6..1", "-", "0.0.0")
	f.Fuzz(func(t *testing.T, a, b, c string) {
		if compareToBound(a, a) != 0 {
			t.Errorf("%q is not itself", a)
		}
		all := []release{parseRelease(a), parseRelease(b), parseRelease(c)}
		for _, x := range all {
			for _, y := range all {
				if x.compare(y) != -y.compare(x) {
					t.Errorf("%v and %v: %d and %d", x, y, x.compare(y), y.compare(x))
				}
			}
		}
		slices.SortFunc(all, release.compare)
		if all[0].compare(all[2]) > 0 {
			t.Errorf("no order: %v", all)
		}
		for _, x := range all {
			if bound := all[1]; len(bound.suffix) == 0 && x.as(bound).compare(bound) > 0 && x.compare(bound) < 0 {
				t.Errorf("%v is both sides of %v", x, bound)
			}
		}
	})
}
