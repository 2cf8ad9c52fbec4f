package cli

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"

	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/lab/hiplog"
)

func amdlogCommand(a *term.App) *cobra.Command {
	return term.Noun("amdlog", "Queues in the logs of AMD's HIP runtime", amdlogAnalyze(a), amdlogCompare(a), amdlogMatch(a))
}

func amdlogAnalyze(a *term.App) *cobra.Command {
	return &cobra.Command{
		Use:               "analyze FILE",
		Short:             "Show the hardware queues in a HIP log and their work",
		Args:              term.Operands("FILE"),
		ValidArgsFunction: files(1),
		RunE: func(_ *cobra.Command, args []string) error {
			log, err := analyzeLog(a, args[0])
			if err != nil {
				return err
			}
			return a.Show(log, func(p *term.Printer) { printAnalysis(p, log) })
		},
	}
}

func amdlogCompare(a *term.App) *cobra.Command {
	return &cobra.Command{
		Use:               "compare A B",
		Short:             "Compare two HIP logs and advise how their programs can share a GPU",
		Args:              term.Operands("A", "B"),
		ValidArgsFunction: files(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if args[0] == "-" && args[1] == "-" {
				return term.Usage(cmd, "only one of A and B can be standard input")
			}
			var logs [2]*analyzedLog
			for i, path := range args {
				var err error
				if logs[i], err = analyzeLog(a, path); err != nil {
					return err
				}
			}
			compared := &comparedLogs{logs[0].File, logs[1].File, hiplog.Compare(logs[0].Analysis, logs[1].Analysis)}
			return a.Show(compared, func(p *term.Printer) { printComparison(p, compared) })
		},
	}
}

// files completes the first operands by files.
func files(operands int) cobra.CompletionFunc {
	return func(_ *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if len(args) < operands {
			return nil, cobra.ShellCompDirectiveDefault
		}
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
}

// analyzedLog is an analysis in the output for programs.
type analyzedLog struct {
	File string `json:"file"`
	*hiplog.Analysis
}

// comparedLogs is a comparison in the output for programs.
type comparedLogs struct {
	FileA string `json:"file_a"`
	FileB string `json:"file_b"`
	*hiplog.Comparison
}

// analyzeLog reads the log at path, or standard input for "-", and shows its progress on a
// terminal.
func analyzeLog(a *term.App, path string) (*analyzedLog, error) {
	name, in, err := open(a, path)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	var r io.Reader = in
	if f, ok := in.(*os.File); ok && a.ErrTerminal && a.Getenv("TERM") != "dumb" {
		if info, err := f.Stat(); err == nil && info.Mode().IsRegular() && info.Size() >= minProgressBytes {
			bar := progress(a.Err, path, info.Size())
			defer func() { _, _ = bar.Clear(), bar.Exit() }() // it fails when the file has grown or the terminal is closed
			r = new(progressbar.NewReader(f, bar))
		}
	}
	analysis, err := hiplog.Analyze(r)
	switch {
	case err != nil:
		return nil, unreadable(name, err)
	case analysis.Records == 0:
		f := &term.Failure{Code: term.ExitFailure, Next: hiplog.Hint}
		switch {
		case analysis.Truncated:
			f.Message = fmt.Sprintf("%s: no line of a HIP log before the compressed data end early", name)
		case analysis.Bytes == 0:
			f.Message = name + " is empty: no HIP log"
		default:
			f.Message = fmt.Sprintf("%s: no line of a HIP log in %s", name, term.Count(analysis.Lines, "line"))
		}
		return nil, f
	}
	return &analyzedLog{name, analysis}, nil
}

// open opens the file at path, or standard input for "-", and returns its name.
func open(a *term.App, path string) (name string, in io.ReadCloser, err error) {
	if path == "-" {
		return "standard input", io.NopCloser(a.In), nil
	}
	f, err := os.Open(path)
	if err != nil {
		return path, nil, unreadable(path, err)
	}
	return path, f, nil
}

func unreadable(name string, err error) error {
	if path, ok := errors.AsType[*fs.PathError](err); ok {
		err = path.Err
	}
	f := &term.Failure{Code: term.ExitFailure, Message: fmt.Sprintf("cannot read %s: %v", name, err)}
	if errors.Is(err, fs.ErrPermission) {
		f.Code = term.ExitDenied
		f.Next = "run gplab as a user with permission to read it"
	}
	return f
}

// minProgressBytes is the size from which reading a file takes noticeable time.
const minProgressBytes = 16 << 20

// progress returns a bar for reading size bytes of the file at path.
func progress(w io.Writer, path string, size int64) *progressbar.ProgressBar {
	return progressbar.NewOptions64(size,
		progressbar.OptionSetWriter(w),
		progressbar.OptionSetDescription(term.Cut(term.Printable(filepath.Base(path)), 30)),
		progressbar.OptionShowBytes(true),
		progressbar.OptionUseIECUnits(true),
		progressbar.OptionSetWidth(20),
		progressbar.OptionThrottle(100*time.Millisecond),
	)
}
