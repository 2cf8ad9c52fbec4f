package testutil

import (
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Mistakes compares the answers to mistakes with those of a file. Its blocks are separated by empty lines:
// lines that begin with "$ " are the mistake, those with "# " comments, the others the whole answer. In each
// answer the remedy stands between « and », which are not in the real one. With update it writes the answers
// that differ into the file, where the remedy is then to be marked.
func Mistakes(t *testing.T, path string, update bool, answer func(t *testing.T, mistake string) string) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	blocks := strings.Split(strings.TrimSpace(string(data)), "\n\n")
	for i, block := range blocks {
		var before, mistake, want []string
		for line := range strings.SplitSeq(block, "\n") {
			rest, isMistake := strings.CutPrefix(line, "$ ")
			switch {
			case isMistake:
				mistake = append(mistake, rest)
				before = append(before, line)
			case strings.HasPrefix(line, "# "):
				before = append(before, line)
			default:
				want = append(want, line)
			}
		}
		if len(mistake) == 0 { // a comment
			continue
		}
		t.Run(mistake[0], func(t *testing.T) {
			got := strings.TrimSpace(answer(t, strings.Join(mistake, "\n")))
			marked := strings.Join(want, "\n")
			diff := cmp.Diff(strings.NewReplacer("«", "", "»", "").Replace(marked), got)
			if diff != "" && update {
				blocks[i] = strings.Join(append(before, got), "\n")
				return
			}
			if diff != "" {
				t.Errorf("answer (-want +got):\n%s", diff)
			}
			if _, after, found := strings.Cut(marked, "«"); !found || strings.Index(after, "»") < 1 {
				t.Errorf("the remedy is not marked: %s", marked)
			}
		})
	}
	if update {
		if err := os.WriteFile(path, []byte(strings.Join(blocks, "\n\n")+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}
