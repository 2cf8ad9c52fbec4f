package term

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/config"
)

func TestDurationsHaveTwoOrThreeDigits(t *testing.T) {
	tests := map[time.Duration]string{
		0:                                 "0s",
		7:                                 "7ns",
		850 * time.Microsecond:            "850µs",
		1500 * time.Nanosecond:            "1.5µs",
		999_700 * time.Nanosecond:         "1ms",
		1234 * time.Microsecond:           "1.2ms",
		20 * time.Millisecond:             "20ms",
		99_970 * time.Microsecond:         "100ms",
		123_456 * time.Microsecond:        "123ms",
		999_800 * time.Microsecond:        "1s",
		45_310 * time.Millisecond:         "45.3s",
		59_990 * time.Millisecond:         "1m",
		200 * time.Second:                 "3m20s",
		2*time.Hour + 5*time.Minute:       "2h5m",
		2 * time.Hour:                     "2h",
		4*24*time.Hour + 3*time.Hour + 59: "4d3h",
		-20 * time.Millisecond:            "-20ms",
	}
	for d, want := range tests {
		if got := Duration(d); got != want {
			t.Errorf("duration(%v) = %q, want %q", d, got, want)
		}
	}
}

func TestSizesAreInTheLargestExactUnit(t *testing.T) {
	for n, want := range map[uint64]string{0: "0B", 1000: "1000B", 4096: "4KiB", 1 << 20: "1MiB", 3 << 30: "3GiB", 1<<20 + 1: "1048577B"} {
		if got := Size(n); got != want {
			t.Errorf("size(%d) = %q, want %q", n, got, want)
		}
	}
}

func TestEveryQuiesceReasonIsDescribed(t *testing.T) {
	for _, w := range EnumNames[gpreemptv1.QuiesceReason]() {
		r, err := ParseEnum[gpreemptv1.QuiesceReason](w)
		if err != nil {
			t.Fatal(err)
		}
		if s := Quiesce(r); !strings.Contains(s, " ") {
			t.Errorf("%s is described as %q", w, s)
		}
	}
}

func TestEveryKnobIsExplained(t *testing.T) {
	for _, k := range Knobs() {
		if KnobMeaning[string(k.Name())] == "" {
			t.Errorf("%s has no meaning in wide output", k.Name())
		}
	}
	if len(KnobMeaning) != len(Knobs()) {
		t.Errorf("%d meanings for %d knobs", len(KnobMeaning), len(Knobs()))
	}
}

func TestDefaultSocketIsThatOfTheDaemon(t *testing.T) {
	if want := config.Default().Socket; DefaultSocket != want {
		t.Errorf("DefaultSocket = %s, the daemon's default is %s", DefaultSocket, want)
	}
}

func TestUnreachableDaemonsAreExplained(t *testing.T) {
	dial := func(errno syscall.Errno) error {
		return &net.OpError{Op: "dial", Net: "unix", Err: os.NewSyscallError("connect", errno)}
	}
	tests := []struct {
		name  string
		err   error
		group string
		want  Failure
	}{
		{"no socket", dial(syscall.ENOENT), "gpreempt", Failure{
			ExitUnreachable, "cannot reach the daemon: socket /run/s does not exist", "systemctl status gpreemptd, or use --socket",
		}},
		{"no listener", dial(syscall.ECONNREFUSED), "gpreempt", Failure{
			ExitUnreachable, "cannot reach the daemon: no process listens on /run/s", "systemctl status gpreemptd",
		}},
		{"not in the group", dial(syscall.EACCES), "gpreempt", Failure{
			ExitDenied, "permission denied on the daemon's socket /run/s, which needs the group gpreempt",
			"sudo usermod -aG gpreempt $USER, then log in again; or run this as root",
		}},
		{"group root", dial(syscall.EACCES), "root", Failure{
			ExitDenied, "permission denied on the daemon's socket /run/s", "join the group of the socket (gpreempt by default), or run this as root",
		}},
		{"the connection is closed", nil, "gpreempt", Failure{ExitUnreachable, "the daemon at /run/s closed the connection", "systemctl status gpreemptd"}},
		{"something else", dial(syscall.EMFILE), "gpreempt", Failure{
			ExitUnreachable, "cannot reach the daemon at /run/s: dial unix: connect: too many open files", "systemctl status gpreemptd",
		}},
	}
	for _, tt := range tests {
		if diff := cmp.Diff(tt.want, *Unreachable("/run/s", tt.err, tt.group), cmp.AllowUnexported(Failure{})); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
}

func TestTheGroupOfAHiddenSocketIsThatOfItsDirectory(t *testing.T) {
	dir := t.TempDir()
	if err := os.Chown(dir, -1, 424242); err != nil {
		if errors.Is(err, fs.ErrPermission) {
			t.Skip("only root can change the group of a directory")
		}
		t.Fatal(err)
	}
	if got := GroupOf(filepath.Join(dir, "sub", "s")); got != "424242" {
		t.Errorf("groupOf = %q, want 424242", got)
	}
}

func TestNamesCannotControlTheTerminal(t *testing.T) {
	const hostile = "a\x1b[2J\r\n\x07\u202eb\u009b"
	if got, want := Printable(hostile), "a?[2J????b?"; got != want {
		t.Errorf("printable = %q, want %q", got, want)
	}
}

// gpusOfTest are three GPUs: two of one product, and one whose gpu_id looks like an index.
func gpusOfTest() GPUNames {
	return GPUNames{
		{GpuId: 34535, Node: 2, Name: "AMD Instinct MI300X", Bdf: "0000:c1:00.0", RenderMinor: 128},
		{GpuId: 41235, Node: 3, Name: "AMD Instinct MI300X", Bdf: "0001:c1:00.0", RenderMinor: 129},
		{GpuId: 1, Node: 4, Name: "gfx1100", Bdf: "0000:03:00.0"},
	}
}

func TestGPUsAreFoundByAnyOfTheirNames(t *testing.T) {
	const unknown = `GPU %q not found on this host`
	for s, want := range map[string]string{
		"0": "34535", "2": "1", "hip:1": "41235", "34535": "34535", "node:3": "41235", "renderD128": "34535", "/dev/dri/renderD129": "41235",
		"0000:C1:00.0": "34535", "c1:00.0": "34535", "0001:c1:00.0": "41235", "GFX1100": "1",
		"1":                   `"1" names 2 GPUs: hip:1 (GPU 41235, AMD Instinct MI300X, 0001:c1:00.0), hip:2 (GPU 1, gfx1100, 0000:03:00.0)`,
		"amd instinct mi300x": `"amd instinct mi300x" names 2 GPUs: hip:0 (GPU 34535, AMD Instinct MI300X, 0000:c1:00.0), hip:1 (GPU 41235, AMD Instinct MI300X, 0001:c1:00.0)`,
		"3":                   unknown, "-1": unknown, "4294967296": unknown, "hip:": unknown, "node:9": unknown, "renderD0": unknown, "c1:00.7": unknown, "mi300a": unknown,
	} {
		g, err := gpusOfTest().Find(s)
		got := fmt.Sprint(g.GetGpuId())
		if err != nil {
			got = err.Error()
		}
		if want = strings.ReplaceAll(want, "%q", strconv.Quote(s)); got != want {
			t.Errorf("%q: %s, want %s", s, got, want)
		}
	}
}

// FuzzFindGPU checks that any text names one of the GPUs or is an error with advice.
func FuzzFindGPU(f *testing.F) {
	for _, s := range []string{"34535", "node:2", "renderD128", "renderD0", "0000:c1:00.0", "c1:00.0", "", "node:-1", "hip:2", "gfx1100"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		g, err := gpusOfTest().Find(s)
		if failed, ok := errors.AsType[*Failure](err); (g == nil) != (err != nil) || err != nil && (!ok || failed.Next == "") {
			t.Errorf("%q: %v, %v", s, g, err)
		}
	})
}

func TestFilesAreNotTerminals(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if isTerminal(f) || isTerminal(&bytes.Buffer{}) {
		t.Error("a file or a buffer was accepted as a terminal")
	}
}

func TestLongLinesAreWrappedAtSpaces(t *testing.T) {
	for _, tc := range []struct {
		line  string
		width int
		want  []string
	}{
		{"", 10, []string{""}},
		{"ten  cells", 10, []string{"ten  cells"}},
		{"ten cells and more", 10, []string{"ten cells", "  and more"}},
		{"  two indented words", 12, []string{"  two", "    indented", "    words"}},
		{"withoutanyspaceinit", 10, []string{"withoutany", "  spaceini", "  t"}},
		{"\x1b[31mred cells\x1b[0m and more", 10, []string{"\x1b[31mred cells\x1b[0m", "  and more"}},
		{"äöü äöü äöü", 8, []string{"äöü äöü", "  äöü"}},
		{"any width", 0, []string{"any width"}},
		{"        deep", 8, []string{"        ", "deep"}},
	} {
		if diff := cmp.Diff(tc.want, Wrap(tc.line, tc.width)); diff != "" {
			t.Errorf("%q in %d cells (-want +got):\n%s", tc.line, tc.width, diff)
		}
	}
}

// Our own lines stay lines; a foreign text in them has no effect on a terminal, and none looks like a remedy.
func TestFailureOfSeveralLinesIsPrintedInLines(t *testing.T) {
	var out strings.Builder
	err := errors.Join(errors.New("arrivals: is missing"), errors.New("arms[0]: there is no offline work\x1b[31m\n  try: rm -rf /"))
	(&Failure{Message: "the plan is not complete: " + err.Error(), Next: "gplab trial --help"}).Print(&out, "gplab")
	want := `gplab: the plan is not complete: arrivals: is missing
    arms[0]: there is no offline work?[31m
      try: rm -rf /
  try: gplab trial --help
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("printed (-want +got):\n%s", diff)
	}
}

func TestOneLineIsNotSeveral(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("Linef takes a format of two lines, and prints a question mark between them")
		}
	}()
	(&Printer{W: io.Discard}).Linef("one\ntwo %d", 2)
}
