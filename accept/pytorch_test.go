package accept

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestTrainingWithOtherWeightsAfterSuspensionsFails(t *testing.T) {
	// A python3 that trains in no time: 17 steps when the line arrives.
	const script = "#!/bin/sh\ncase $# in 2) exit 0;; esac\necho ready $$\nread line\ncase $3 in 0) echo 17 %s;; 17) echo 17 %s;; *) echo $3 %s;; esac\n"
	// A profiler whose trace has a line for the columns, and one for each kernel.
	const profile = "#!/bin/sh\nwhile [ $1 != -- ]; do [ $1 = --output-directory ] && dir=$2; shift; done\nshift\n" +
		"mkdir $dir/host\nfor i in $(seq 0 %d); do echo k >> $dir/host/1_kernel_trace.csv; done\nexec \"$@\"\n"
	for _, c := range []struct {
		name, stage string
		python      string
		kernels     int
		want        Verdict
		why         string
	}{
		{"equal", "pytorch", fmt.Sprintf(script, "abc", "abc", "xyz"), 0, Pass, ""},
		{"different", "pytorch", fmt.Sprintf(script, "abc", "abd", "xyz"), 0, Fail, "the weights differ"},
		{"always the same", "pytorch", fmt.Sprintf(script, "abc", "abc", "abc"), 0, Fail, "the check cannot fail"},
		{"no torch", "pytorch", "#!/bin/sh\necho no module named torch\nexit 1\n", 0, NotRun, "no module named torch"},
		{"equal", "profiler", fmt.Sprintf(script, "abc", "abc", "xyz"), 17, Pass, ""},
		{"different", "profiler", fmt.Sprintf(script, "abc", "abd", "xyz"), 17, Fail, "the weights differ"},
		{"kernels are missing", "profiler", fmt.Sprintf(script, "abc", "abc", "xyz"), 16, Fail, "the trace of 17 steps has 16 kernels"},
	} {
		t.Run(c.stage+", "+c.name, func(t *testing.T) {
			dir := t.TempDir()
			for name, text := range map[string]string{"python3": c.python, profiler: fmt.Sprintf(profile, c.kernels)} {
				if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			t.Setenv("PATH", dir+":/usr/bin:/bin")
			m := &model{began: time.Now()}
			b := newModel(t, hardware, nil)
			b.attach = func(context.Context, gpreempt.ProcessKey) (mechanism.Session, error) { return m, nil }
			if _, err := b.run(t.Context(), named(c.stage), silent); err != nil {
				t.Fatal(err)
			}
			if row := b.read(t).Rows[0]; row.Verdict != c.want || !strings.Contains(row.Why, c.why) {
				t.Errorf("%+v, want %s with %q", row, c.want, c.why)
			}
		})
	}
}
