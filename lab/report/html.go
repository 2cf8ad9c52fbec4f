package report

import (
	_ "embed"
	"html/template"
	"io"
	"strings"

	"github.com/gpreempt/gpreempt/lab/evidence"
)

//go:embed page.html
var pageText string

//go:embed page.css
var pageStyle string

var page = template.Must(template.New("page").Funcs(template.FuncMap{
	"right": func(column string) bool { return strings.HasPrefix(column, ">") },
	"name":  func(column string) string { return strings.TrimPrefix(column, ">") },
	"mark":  mark,
}).Parse(pageText))

// HTML writes the report as one page, which needs no other file, network or script.
func (r *Report) HTML(w io.Writer) error {
	return page.Execute(w, struct {
		*document
		Style template.CSS
	}{&r.doc, template.CSS(pageStyle)}) //nolint:gosec // G203: a file of this package
}

// mark returns the class of a cell that says how something went.
func mark(cell string) string {
	switch {
	case cell == resultYes || cell == adviceStay || cell == string(evidence.Pass):
		return "good"
	case cell == resultNo || cell == adviceNext || cell == string(evidence.Fail) || cell == "the run failed":
		return "bad"
	case cell == adviceConsider || strings.HasPrefix(strings.ToLower(cell), resultUnknown):
		return "note"
	}
	return ""
}
