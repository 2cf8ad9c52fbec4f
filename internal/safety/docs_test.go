package safety

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "rewrite the tables in docs/hazards.md and the reports in testdata")

const page = "../../docs/hazards.md"

func TestThePageShowsTheTable(t *testing.T) {
	checkPage(t, "hazards.yaml begins", "hazards.yaml ends", rowTable(Default().rows))
}

func TestThePageShowsThePatterns(t *testing.T) {
	checkPage(t, "patterns begin", "patterns end", patternTable())
}

// checkPage compares the part of the page between two comments.
func checkPage(t *testing.T, begin, end, want string) {
	t.Helper()
	begin, end = "<!-- "+begin+" -->\n", "<!-- "+end+" -->\n"
	data, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok1 := strings.Cut(string(data), begin)
	got, after, ok2 := strings.Cut(rest, end)
	if !ok1 || !ok2 {
		t.Fatalf("%s does not have the comments %q and %q", page, begin, end)
	}
	if *update {
		if err := os.WriteFile(page, []byte(before+begin+want+end+after), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("run go test ./internal/safety -update; %s (-want +got):\n%s", page, diff)
	}
}

func patternTable() string {
	var b strings.Builder
	b.WriteString("\n| pattern | the driver's message begins with | printed by | seen in |\n|---|---|---|---|\n")
	for _, p := range patterns {
		issue := link(p.Issue)
		if p.Doubtful.Driver != "" {
			issue = fmt.Sprintf("also about GPUs that work, with driver %s: %s", p.Doubtful.Driver, link(p.Doubtful.Issue))
		}
		fmt.Fprintf(&b, "| %s | `%s` | %s | %s |\n", p.Name, strings.ReplaceAll(p.Text, "|", `\|`), p.Source, issue)
	}
	b.WriteString("\n")
	return b.String()
}

// link returns a link to an issue, owner/repository#number; "" for none.
func link(issue string) string {
	repository, number, ok := strings.Cut(issue, "#")
	if !ok {
		return issue
	}
	return fmt.Sprintf("[%s](https://github.com/%s/issues/%s)", issue, repository, number)
}

func rowTable(rows []Row) string {
	var b strings.Builder
	b.WriteString("\n| row | GPUs | about | action | why | what to do |\n|---|---|---|---|---|---|\n")
	for _, r := range rows {
		why := r.Why
		for _, issue := range r.Issues {
			why += " " + link(issue)
		}
		for _, evidence := range []struct{ verb, text string }{{"Read", r.Read}, {"Searched", r.Searched}} {
			if evidence.text != "" {
				why += " " + evidence.verb + ": " + evidence.text
			}
		}
		var cells []string
		for _, cell := range []string{r.ID, r.Conditions(), strings.Join(r.Mechanisms, ", "), r.Action.String(), why, r.Remedy} {
			cells = append(cells, strings.NewReplacer("|", `\|`, "*", `\*`, "<", "&lt;").Replace(cell))
		}
		fmt.Fprintf(&b, "| %s |\n", strings.Join(cells, " | "))
	}
	b.WriteString("\n")
	return b.String()
}
