package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
)

// These lines surround the table of docs/performance.md.
const tableBegins, tableEnds = "<!-- figures -->\n", "<!-- end of figures -->\n"

// docPath is relative to the root of the repository, where make runs this program.
const docPath = "docs/performance.md"

// document writes the table of a report to the document.
func document(reportPath string) error {
	text, err := os.ReadFile(reportPath)
	if err != nil {
		return fmt.Errorf("%w: run make bench first", err)
	}
	var r report
	if err := json.Unmarshal(text, &r); err != nil {
		return fmt.Errorf("%s: %w", reportPath, err)
	}
	doc, err := os.ReadFile(docPath)
	if err != nil {
		return err
	}
	changed, err := r.into(string(doc))
	if err != nil {
		return fmt.Errorf("%s: %w", docPath, err)
	}
	return os.WriteFile(docPath, []byte(changed), 0o600) //nolint:gosec // the path is a constant
}

// into returns a document with its table replaced by the report's.
func (r *report) into(doc string) (string, error) {
	before, rest, begins := strings.Cut(doc, tableBegins)
	_, after, ends := strings.Cut(rest, tableEnds)
	if !begins || !ends {
		return "", errors.New("no markers for the table")
	}
	return before + tableBegins + r.markdown() + tableEnds + after, nil
}

// markdown returns the table of figures.
func (r *report) markdown() string {
	var b strings.Builder
	fmt.Fprintf(&b, "`make bench` on %s with %d CPUs, %s. %s\n\n", r.Taken.Format("2 January 2006"), r.CPUs, r.Go, r.Simulated)
	fmt.Fprintf(&b, "| %s |\n|%s\n", strings.Join(columns, " | "), strings.Repeat("---|", len(columns)))
	for _, f := range r.Figures {
		fmt.Fprintf(&b, "| %s |\n", strings.Join(f.row(), " | "))
	}
	for _, s := range r.Skipped {
		fmt.Fprintf(&b, "\nSkipped: %s\n", s)
	}
	return b.String()
}
