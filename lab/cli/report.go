package cli

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/lab/report"
)

// reportCommand needs no daemon. Its -o names a file: the report has forms of its own.
func reportCommand(a *term.App) *cobra.Command {
	var page, markdown, samples, frontier, profile string
	cmd := &cobra.Command{
		Use:   "report DIR...",
		Short: "Make a report of trials and simulations: HTML, Markdown, CSV",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return term.Usage(cmd, "missing argument: DIR, the folder of a run")
			}
			if cmd.Flags().Changed("jq") {
				return term.Usage(cmd, "--jq does not apply to a report; --csv has the samples")
			}
			return nil
		},
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]cobra.Completion, cobra.ShellCompDirective) {
			return nil, cobra.ShellCompDirectiveFilterDirs
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			limits, err := evidence.LoadProfile(profile)
			if err != nil {
				return term.Usage(cmd, "invalid --profile: %v", err)
			}
			runs, err := readRuns(args)
			if err != nil {
				return err
			}
			r, err := report.New(runs, limits)
			if err != nil {
				message := err.Error()
				if unlike, ok := errors.AsType[*evidence.UnlikeError](err); ok {
					message = "the runs cannot be shown side by side, they differ in " + strings.Join(unlike.Differences, "; ")
				}
				return &term.Failure{Code: term.ExitRefused, Message: message, Next: "a report of each run"}
			}
			var forms []reportForm
			for _, form := range []reportForm{
				{"output", page, r.HTML}, {"markdown", markdown, r.Markdown}, {"csv", samples, r.CSV}, {"frontier", frontier, r.Frontier},
			} {
				if cmd.Flags().Changed(form.flag) {
					forms = append(forms, form)
				}
			}
			if len(forms) == 0 {
				return r.Markdown(a.Out)
			}
			return writeForms(forms)
		},
	}
	cmd.Flags().StringVarP(&page, "output", "o", "", "write one page of HTML to this `FILE`")
	cmd.Flags().StringVar(&markdown, "markdown", "", "write the texts and tables as Markdown to this `FILE`")
	cmd.Flags().StringVar(&samples, "csv", "", "write all samples, one value a line, to this `FILE`")
	cmd.Flags().StringVar(&frontier, "frontier", "", "write the chart of p99 against offline work as SVG to this `FILE`")
	cmd.Flags().StringVar(&profile, "profile", evidence.DefaultProfile, "limits of the verdict: "+strings.Join(evidence.ProfileNames(), ", ")+", or a YAML file")
	term.Complete(cmd, "profile", evidence.ProfileNames())
	return cmd
}

// reportForm is a file of a report. flag is the flag that names its path.
type reportForm struct {
	flag, path string
	write      func(io.Writer) error
}

// writeForms writes files of a report.
func writeForms(forms []reportForm) error {
	for _, form := range forms {
		if err := term.ReplaceFile(form.path, "--"+form.flag, form.write); err != nil {
			return err
		}
	}
	return nil
}

// reportIn writes the report of a run into the run's folder, as a page and as Markdown, with the
// verdict by the profile of its plan. It returns the path of the page.
func reportIn(dir string, run *evidence.Run) (page string, err error) {
	limits := evidence.Profile{Name: evidence.NoProfile, About: "it has no limit, so that there is no verdict."}
	if name := planProfile(run); name != "" && name != evidence.NoProfile {
		if limits, err = evidence.LoadProfile(name); err != nil {
			return "", &term.Failure{Code: term.ExitUsage, Message: err.Error(), Next: "gplab report " + dir + " --profile NAME"}
		}
	}
	r, err := report.New([]evidence.Run{*run}, limits)
	if err != nil {
		return "", err
	}
	page = filepath.Join(dir, "report.html")
	if err := writeForms([]reportForm{
		{"output-dir", page, r.HTML}, {"output-dir", filepath.Join(dir, "report.md"), r.Markdown},
	}); err != nil {
		return "", err
	}
	return page, nil
}

// readRuns reads the runs of folders.
func readRuns(dirs []string) ([]evidence.Run, error) {
	var runs []evidence.Run
	for _, dir := range dirs {
		run, err := evidence.Read(dir)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil, &term.Failure{Code: term.ExitNotFound, Message: fmt.Sprintf("%s is not a folder of a run: %v", dir, err), Next: "name the folder that gplab trial or gplab sim has written"}
		case err != nil:
			return nil, &term.Failure{Code: term.ExitFailure, Message: err.Error(), Next: "repeat the run"}
		}
		runs = append(runs, *run)
	}
	return runs, nil
}
