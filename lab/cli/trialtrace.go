package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/lab/kfdtrace"
)

// mostTraceText bounds the text of a recording beside a trial, in bytes: a busy GPU reports thousands of interrupts each
// second, and a trial may take a day. What is beyond it is in the summary only.
const mostTraceText = 256 << 20

// recordBeside returns what records the driver into PATH.txt and PATH.json until its context ends, for a trial.
func recordBeside(host traceHost) func(context.Context, string, func()) error {
	return func(ctx context.Context, path string, started func()) error {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil { //nolint:gosec // G301: as the folder of the run
			return err
		}
		file, err := os.Create(path + ".txt")
		if err != nil {
			return err
		}
		text := &cutWriter{to: file, left: mostTraceText}
		const untilTheEnd = 1000 * time.Hour
		recording, err := host.record(ctx, kfdtrace.Options{Duration: untilTheEnd, Raw: text, Started: started})
		err = errors.Join(err, file.Close())
		if recording == nil {
			err = errors.Join(err, os.Remove(file.Name())) // it is empty
			// This fails if the folder has other recordings.
			_ = os.Remove(filepath.Dir(path))
			return err
		}
		recording.Interrupted = false // a repeat has no duration that is known before
		if text.cut {
			err = errors.Join(err, fmt.Errorf("%s ends after %s: its summary has the rest", file.Name(), term.Size(mostTraceText)))
		}
		return errors.Join(err, evidence.WriteJSON(filepath.Dir(path), filepath.Base(path)+".json", recording))
	}
}

// cutWriter passes on what comes first, and drops the rest.
type cutWriter struct {
	to   io.Writer
	left int
	cut  bool
}

func (w *cutWriter) Write(b []byte) (int, error) {
	n := min(len(b), w.left)
	w.cut = w.cut || n < len(b)
	w.left -= n
	if _, err := w.to.Write(b[:n]); err != nil {
		return 0, err
	}
	return len(b), nil
}
