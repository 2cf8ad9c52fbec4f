package log

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

var update = flag.Bool("update", false, "write docs/reference/logs.md")

const (
	document = "../../docs/reference/logs.md"
	intro    = `# Logs

gpreemptd logs to journald; as text if standard error is a terminal; and otherwise as JSON. A message is constant, so that it can be searched
for. Values are in fields. In journald a key is a field in capitals with ` + "`GPREEMPT_`" + ` before it: ` + "`GPREEMPT_TARGET`" + `. Durations are
` + "`1.5ms`" + ` there, and seconds in JSON. A line contains no character that a terminal acts on.

## Messages

A change of state is one line, from the same records as the event stream and the metrics. Daily work is at debug, because a server may
announce thousands of times a second; ` + "`gpctl events`" + ` shows it without a log.

| message | level | when |
|---|---|---|
| ` + "`target changed`" + ` | debug | a process appeared, exited, was suspended or resumed; warn if that failed or it is quarantined, info when the quarantine ends |
| ` + "`target reclassified`" + ` | info | its class or priority changed |
| ` + "`target would have changed`" + ` | debug | the same, with the shadow policy: nothing was done |
| ` + "`lease changed`" + ` | debug | announced, quiescing, held, ended |
| ` + "`lease answered`" + ` | debug | its announcement was answered before the GPUs were quiet, and why |
| ` + "`breaker opened`, `breaker closed`" + ` | warn, info | nothing is suspended on a GPU for a while, or again allowed |
| ` + "`policy changed`, `drain began`, `drain ended`" + ` | info | by an admin, whom the audit log names, by a reload, or by the end of the daemon |
| ` + "`config changed`" + ` | info | a reload applied a change, or found one that needs a restart; a line for each key |
| ` + "`warning raised`, `warning cleared`" + ` | warn or error, info | one of the [warnings](warnings.md) |
| ` + "`admin call`" + ` | info, or warn when refused | the audit log, at every ` + "`log.level`" + ` |

One preemption at debug, without times:

` + "```json\n"
	rest = "```" + `

Of lines with the same level, message and subject (the keys marked *) the first five are written, and then one in 10 s: the latest, with the
number of lines left out (` + "`repeated`" + `). Lines at debug, changes of state and the audit log are never left out; refused calls have a limit of their
own (` + "`unlogged`" + `). If the reader of the log is too slow, lines are lost, and one line has their number (` + "`lost`" + `).

## Keys

This page is generated from the fields in internal/log (` + "`make gen`" + `).

| key | type | meaning |
|---|---|---|
`
)

// types are the types of zap's fields in the document.
var types = map[string]string{
	"String": "text", "Stringer": "text", "ByteString": "text", "Any": "text", "Error": "text", "Bool": "true or false",
	"Int": "number", "Int32": "number", "Int64": "number", "Uint32": "number", "Uint64": "number", "Duration": "duration", "Time": "time",
}

// TestReferenceOfTheLog generates the page: the lines of one preemption, and the keys from the source, of which each
// field has its own, and a comment with its meaning.
func TestReferenceOfTheLog(t *testing.T) {
	source, err := parser.ParseFile(token.NewFileSet(), "fields.go", nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	var page strings.Builder
	page.WriteString(intro)
	page.WriteString(logged(t, false, scheduler.GPUAdded{GPU: 23256}, offlineSeen, announced, scheduler.LeaseFinished{Lease: 1, End: scheduler.EndCompleted}))
	page.WriteString(rest)
	known := map[string]bool{}
	ast.Inspect(source, func(n ast.Node) bool {
		f, ok := n.(*ast.ValueSpec)
		if !ok || f.Names[0].Name == "subjects" {
			return true
		}
		kind, key := "Error", "error"
		if made, ok := f.Values[0].(*ast.CallExpr); ok {
			kind = "Stringer"
			if len(made.Args) == 2 {
				kind = made.Args[1].(*ast.SelectorExpr).Sel.Name
			}
			if key, err = strconv.Unquote(made.Args[0].(*ast.BasicLit).Value); err != nil {
				t.Fatal(err)
			}
		}
		meaning := strings.TrimSpace(f.Comment.Text())
		if meaning == "" || types[kind] == "" || known[key] {
			t.Errorf("%s, of key %q and type %s: comment, type or key", f.Names[0].Name, key, kind)
		}
		known[key] = true
		mark := ""
		if Subject(key) {
			mark = " *"
		}
		fmt.Fprintf(&page, "| `%s`%s | %s | %s |\n", key, mark, types[kind], strings.ReplaceAll(meaning, "|", `\|`))
		return true
	})
	for _, key := range subjects {
		if !known[key] {
			t.Errorf("subject %q is not a key", key)
		}
	}
	if *update {
		if err := os.WriteFile(document, []byte(page.String()), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	text, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(text), page.String()); diff != "" {
		t.Errorf("%s (-want +got); go test ./internal/log -update writes it:\n%s", document, diff)
	}
}
