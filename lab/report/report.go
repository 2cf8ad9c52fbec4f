package report

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gpreempt/gpreempt/lab/evidence"
)

// Report is a report of runs.
type Report struct {
	runs []evidence.Run
	doc  document
}

// New makes a report of runs, side by side, with the verdict of a profile. The error is an
// *evidence.UnlikeError when the runs must not be compared with the first one.
func New(runs []evidence.Run, profile evidence.Profile) (*Report, error) {
	r := &Report{runs: runs}
	d := &r.doc
	every := arms(runs)
	all := merged(every)
	left := chooseCharted(all)
	d.Origin, d.OriginText = origins(runs)
	var names []string
	var verdicts []evidence.Verdict
	for i := range runs {
		names = append(names, clean(runs[i].Name))
		if about := about(&runs[i]); about != "" {
			d.About = append(d.About, about)
		}
		verdicts = append(verdicts, evidence.Judge(&runs[i], profile))
		d.Answers = append(d.Answers, AnswerOf(&runs[i], &verdicts[i]))
	}
	d.Title = strings.Join(names, ", ")
	if f := answerChart(d.Answers, d.Origin); f != nil {
		d.Chart = new(f.draw())
	}
	d.Sections = append(d.Sections, criteriaSection(runs, verdicts, profile), latencySection(all, left, d.Origin), adviceSection(all))
	if len(runs) > 1 {
		compared, err := comparisonSection(runs)
		if err != nil {
			return nil, err
		}
		d.Sections = append(d.Sections, compared)
	}
	d.Sections = append(d.Sections, checkSection(runs, every), armSection(all))
	d.Sections = append(d.Sections, partSections(all, d.Origin)...)
	d.Sections = append(d.Sections, suspendSection(all, d.Origin), timelineSection(all, d.Origin), machineSection(all, d.Origin),
		stabilitySection(all, d.Origin), frontierSection(all, d.Origin), troubleSection(runs), environmentSection(runs))
	for i := range runs {
		if runs[i].Plan != "" {
			d.Sections = append(d.Sections, section{ID: fmt.Sprintf("plan-%d", i+1), Title: "Plan of " + clean(runs[i].Name), File: cleanLines(runs[i].Plan)})
		}
	}
	for i := range d.Sections {
		for j := range d.Sections[i].Tables {
			d.Sections[i].Tables[j].compact()
		}
	}
	return r, nil
}

// about says when a run began and what it ran, "" if it does not say.
func about(run *evidence.Run) string {
	const most = 100 // characters of a command line
	var parts []string
	if !run.Began.IsZero() {
		parts = append(parts, run.Began.UTC().Format("2006-01-02 15:04 UTC"))
	}
	for _, work := range run.Work {
		parts = append(parts, cut(clean(work), most))
	}
	return strings.Join(parts, "; ")
}

// troubleSection lists alarms and faults.
func troubleSection(runs []evidence.Run) section {
	s := section{ID: "alarms", Title: "Alarms and faults"}
	faults := table{Title: "Faults: why a run may not be trusted", Head: []string{"run", "arm", ">repeat", "what", "effect"}}
	alarms := table{Title: "Alarms of the daemon and the kernel", Head: []string{"run", "time", "from", "text"}}
	for i := range runs {
		name := clean(runs[i].Name)
		for _, f := range runs[i].Faults {
			effect := "no verdict"
			if f.Fails {
				effect = "the run failed"
			}
			faults.Rows = append(faults.Rows, []string{name, or(clean(f.Arm)), fmt.Sprint(f.Repeat + 1), clean(f.What), effect})
		}
		for _, a := range runs[i].Alarms {
			at := "-"
			if !a.At.IsZero() {
				at = a.At.UTC().Format(time.RFC3339)
			}
			alarms.Rows = append(alarms.Rows, []string{name, at, or(clean(a.From)), clean(a.Text)})
		}
	}
	s.add(faults, alarms)
	if len(s.Tables) == 0 {
		s.text("No alarm and no fault was recorded.")
	}
	return s
}

// environmentSection says where the runs ran.
func environmentSection(runs []evidence.Run) section {
	s := section{ID: "environment", Title: "Environment"}
	for i := range runs {
		run := &runs[i]
		t := table{Title: clean(run.Name), Whole: true, Head: []string{"fact", "value"}, Rows: [][]string{
			{"measured on", or(strings.ToUpper(clean(string(run.Origin))))},
			{"backend", or(clean(run.Backend))},
			{"command", or(clean(run.Command))},
			{"seed", fmt.Sprint(run.Seed)},
		}}
		if !run.Began.IsZero() {
			t.Rows = append(t.Rows, []string{"began", run.Began.UTC().Format(time.RFC3339)})
		}
		for _, key := range slices.Sorted(maps.Keys(run.Environment)) {
			t.Rows = append(t.Rows, []string{clean(key), or(clean(run.Environment[key]))})
		}
		for _, what := range slices.Sorted(maps.Keys(run.Missing)) {
			t.Rows = append(t.Rows, []string{"no " + clean(what), clean(run.Missing[what])})
		}
		s.Tables = append(s.Tables, t)
	}
	return s
}

// cleanLines is clean for a text of several lines.
func cleanLines(s string) string {
	lines := strings.Split(strings.TrimRight(s, "\n"), "\n")
	for i := range lines {
		lines[i] = clean(strings.ReplaceAll(lines[i], "\t", "    "))
	}
	return strings.Join(lines, "\n")
}

// Markdown writes the report as Markdown: texts and tables, without charts. All but the answer is
// folded where Markdown is shown as a page.
func (r *Report) Markdown(w io.Writer) error {
	d := &r.doc
	var b strings.Builder
	fmt.Fprintf(&b, "# %s: %s\n\n**%s**: %s.\n", d.Origin, markdown(d.Title), d.Origin, d.OriginText)
	for _, about := range d.About {
		fmt.Fprintf(&b, "\n%s\n", markdown(about))
	}
	for _, a := range d.Answers {
		if len(d.Answers) > 1 {
			fmt.Fprintf(&b, "\n## %s\n", markdown(a.Run))
		}
		fmt.Fprintf(&b, "\n**%s** (profile %s): %s\n\n| |", a.Result, markdown(a.Profile), markdown(a.Why))
		rows := [2]string{a.Row, RowWork}
		for _, c := range a.Columns {
			fmt.Fprintf(&b, " %s |", c.Name)
			rows[0] += " | " + c.Latency()
			rows[1] += " | " + c.Work()
		}
		fmt.Fprintf(&b, "\n|---|---:|---:|---:|\n| %s |\n| %s |\n", rows[0], rows[1])
		for _, line := range []string{a.ProtectedIs(), a.Change} {
			if line != "" {
				fmt.Fprintf(&b, "\n%s\n", markdown(line))
			}
		}
	}
	for _, s := range d.Sections {
		fmt.Fprintf(&b, "\n<details>\n<summary>%s</summary>\n", markdown(s.Title))
		for _, text := range s.Text {
			fmt.Fprintf(&b, "\n%s\n", markdown(text))
		}
		for _, t := range s.Tables {
			b.WriteByte('\n')
			if t.Title != "" {
				fmt.Fprintf(&b, "%s:\n\n", markdown(t.Title))
			}
			if above := strings.TrimSpace(t.Above); above != "" {
				fmt.Fprintf(&b, "%s\n\n", markdown(above))
			}
			writeTable(&b, &t)
		}
		if s.File != "" {
			// Four spaces: no text of a plan can end the block.
			fmt.Fprintf(&b, "\n    %s\n", strings.ReplaceAll(s.File, "\n", "\n    "))
		}
		b.WriteString("\n</details>\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func writeTable(b *strings.Builder, t *table) {
	head, rule := "|", "|"
	for _, name := range t.Head {
		name, right := strings.CutPrefix(name, ">")
		head += " " + markdown(name) + " |"
		if right {
			rule += "---:|"
		} else {
			rule += "---|"
		}
	}
	fmt.Fprintf(b, "%s\n%s\n", head, rule)
	for _, row := range t.Rows {
		b.WriteByte('|')
		for _, c := range row {
			fmt.Fprintf(b, " %s |", markdown(c))
		}
		b.WriteByte('\n')
	}
}

// markdown escapes what Markdown would read as markup.
var markdownEscapes = strings.NewReplacer(`\`, `\\`, "|", `\|`, "`", "\\`", "<", "&lt;", "*", `\*`, "_", `\_`, "[", `\[`, "#", `\#`)

func markdown(s string) string { return markdownEscapes.Replace(s) }
