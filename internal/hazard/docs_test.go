package hazard

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "rewrite the table in docs/hazards.md")

const page = "../../docs/hazards.md"

// The table people read is the table the daemon uses.
func TestThePageShowsTheTable(t *testing.T) {
	const begin, end = "<!-- hazards.yaml begins -->\n", "<!-- hazards.yaml ends -->\n"
	data, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok1 := strings.Cut(string(data), begin)
	got, after, ok2 := strings.Cut(rest, end)
	if !ok1 || !ok2 {
		t.Fatalf("%s has lost its marks %q and %q", page, begin, end)
	}
	want := markdown(Default().Rows())
	if *update {
		if err := os.WriteFile(page, []byte(before+begin+want+end+after), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("run go test ./internal/hazard -update; %s (-want +got):\n%s", page, diff)
	}
}

func markdown(rows []Row) string {
	var b strings.Builder
	b.WriteString("\n| row | GPUs | about | action | why | what to do |\n|---|---|---|---|---|---|\n")
	for _, r := range rows {
		why := r.Why
		for _, issue := range r.Issues {
			repository, number, _ := strings.Cut(issue, "#")
			why += fmt.Sprintf(" [%s](https://github.com/%s/issues/%s)", issue, repository, number)
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
