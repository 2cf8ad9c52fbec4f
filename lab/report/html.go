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
	"trim":  strings.TrimSpace,
}).Parse(pageText))

// HTML writes the report as one page, which needs no other file, network or script.
func (r *Report) HTML(w io.Writer) error {
	return page.Execute(w, struct {
		*document
		Style   template.CSS
		RowWork string
	}{&r.doc, template.CSS(pageStyle), RowWork}) //nolint:gosec // G203: a file of this package
}

// mark returns the class of a cell or word that says how something went.
func mark(cell string) string {
	switch {
	case cell == resultYes || cell == string(evidence.Pass):
		return "good"
	case cell == resultNo || cell == string(evidence.Fail) || cell == "the run failed":
		return "bad"
	case strings.HasPrefix(strings.ToLower(cell), resultUnknown):
		return "note"
	}
	return ""
}
