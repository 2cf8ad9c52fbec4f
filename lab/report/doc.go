// Package report makes documents of evidence runs: a page of HTML in one file, Markdown, and a
// table of all samples as CSV. The same runs make the same bytes.
//
// The page has no script and loads nothing. Its charts are SVG, whose colours are variables of the
// page's style sheet; the figures of every chart are also in a table.
package report
