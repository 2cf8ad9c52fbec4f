package main

import (
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestTableOfTheDocumentIsReplaced(t *testing.T) {
	got, err := measured().into("# Before\n" + tableBegins + "old\n" + tableEnds + "after\n")
	if err != nil {
		t.Fatal(err)
	}
	want := "# Before\n" + tableBegins + "`make bench` on 1 January 0001 with 2 CPUs, . \n\n" +
		"|  | figure | median | repeats | limit |  |\n|---|---|---|---|---|---|\n" +
		"| d | NotifyOnline / echo, p50 | 1.20 x | 1.00..1.50 | <= 1.25 | met |\n" +
		"| e | over | 1.30 x | 1.00..1.40 | <= 1.25 | MISSED |\n" +
		"| i | SDK's rate | 0.50 x | 0.50..0.50 | >= 0.7 | MISSED |\n" +
		"| a | ping | 123 µs | 123..123 |  |  |\n\nSkipped: h: no seccomp\n" + tableEnds + "after\n"
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if _, err := measured().into("no place"); err == nil {
		t.Error("a document without a place for the table is taken")
	}
}

// The document reports what each section is, has figures of each, and of each guarded ratio.
func TestDocumentHasEverySection(t *testing.T) {
	text, err := os.ReadFile("../../docs/performance.md")
	if err != nil {
		t.Fatal(err)
	}
	explained, rest, _ := strings.Cut(string(text), tableBegins)
	figures, _, _ := strings.Cut(rest, tableEnds)
	for _, s := range sections {
		for _, letter := range s.letters {
			row := "\n| " + string(letter) + " | "
			if strings.Count(explained, row) != 1 {
				t.Errorf("docs/performance.md does not say once what section %c is", letter)
			}
			if !strings.Contains(figures, row) {
				t.Errorf("docs/performance.md has no figure of section %c: make bench && build/bench -doc", letter)
			}
		}
	}
	for _, g := range guarded {
		if !strings.Contains(figures, " | "+g.figure+" | ") {
			t.Errorf("docs/performance.md has no figure called %q, which is guarded", g.figure)
		}
	}
}
