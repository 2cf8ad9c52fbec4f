package term

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"
	"text/tabwriter"
	"text/template"
	"time"

	"github.com/itchyny/gojq"
	"github.com/spf13/cobra"
)

// expression is what --jq or --template makes of the JSON of an answer.
type expression func(w io.Writer, data any) error

// compile prepares --jq and --template, so that an invalid one is found before the daemon is
// called.
func (a *App) compile(cmd *cobra.Command) (err error) {
	flag := "jq"
	switch {
	case a.jq != "" && a.template != "":
		return Usage(cmd, "--jq and --template are mutually exclusive")
	case a.jq != "":
		a.expression, err = compileJQ(cmd, a.jq)
	case a.template != "":
		flag = "template"
		a.expression, err = a.compileTemplate(a.template)
	default:
		return nil
	}
	switch {
	case err != nil:
		return Usage(cmd, "invalid --%s: %v", flag, err)
	case cmd.Flags().Changed("output") && a.Output != FormatJSON:
		return Usage(cmd, "--%s needs -o json, not %s", flag, a.Output)
	}
	a.Output = FormatJSON
	return nil
}

// express prints the JSON of an answer as --jq or --template has it.
func (a *App) express(raw []byte) error {
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber() // as it is written: 64 bits do not fit a float
	var data any
	if err := dec.Decode(&data); err != nil {
		return err
	}
	var out bytes.Buffer
	if err := a.expression(&out, data); err != nil {
		return err
	}
	text := out.String()
	if a.Terminal { // strings in it have no escapes any more
		text = plainText.ReplaceAllStringFunc(text, Printable)
	}
	_, err := io.WriteString(a.Out, text)
	return err
}

var plainText = regexp.MustCompile(`[^\n\t]+`)

// compileJQ compiles an expression that prints each of its results on a line: strings as they
// are, others as JSON.
func compileJQ(cmd *cobra.Command, text string) (expression, error) {
	query, err := gojq.Parse(text)
	if err != nil {
		if at, ok := errors.AsType[*gojq.ParseError](err); ok {
			err = fmt.Errorf("%w after %q", err, text[:min(at.Offset, len(text))])
		}
		return nil, err
	}
	code, err := gojq.Compile(query)
	if err != nil {
		return nil, err
	}
	return func(w io.Writer, data any) error {
		results := code.RunWithContext(cmd.Context(), data)
		for {
			v, ok := results.Next()
			if !ok {
				return nil
			}
			switch v := v.(type) {
			case error:
				if halt, ok := errors.AsType[*gojq.HaltError](v); ok && halt.Value() == nil {
					return nil
				}
				return &Failure{Code: ExitFailure, Message: fmt.Sprintf("--jq %s: %v", text, v), Next: "see the answer with -o json"}
			case string:
				fmt.Fprintln(w, v)
			default:
				line, err := gojq.Marshal(v)
				if err != nil {
					return err
				}
				fmt.Fprintf(w, "%s\n", line)
			}
		}
	}, nil
}

// compileTemplate compiles a template of text/template, with functions that have the names and
// the meaning of those of gh.
func (a *App) compileTemplate(text string) (expression, error) {
	var rows bytes.Buffer
	table := tabwriter.NewWriter(&rows, 0, 0, 2, ' ', 0)
	parsed, err := template.New("").Option("missingkey=error").Funcs(template.FuncMap{
		"join":     join,
		"pluck":    pluck,
		"timefmt":  timefmt,
		"timeago":  a.timeago,
		"truncate": func(n int, v any) string { return Cut(fmt.Sprint(v), max(n, 1)) },
		"tablerow": func(cells ...any) string {
			fmt.Fprintln(table, strings.Join(texts(cells), "\t"))
			return ""
		},
		"tablerender": func() (string, error) {
			defer rows.Reset()
			err := table.Flush()
			return rows.String(), err
		},
	}).Parse(text)
	if err != nil {
		return nil, errors.New(strings.TrimPrefix(err.Error(), "template: "))
	}
	return func(w io.Writer, data any) error {
		var out bytes.Buffer
		err := parsed.Execute(&out, data)
		if err == nil {
			err = table.Flush() // rows without tablerender
		}
		if err != nil {
			return &Failure{Code: ExitFailure, Message: "--template: " + strings.TrimPrefix(err.Error(), "template: "), Next: "see the answer with -o json"}
		}
		_, _ = rows.WriteTo(&out) // a bytes.Buffer accepts everything
		if out.Len() > 0 && !bytes.HasSuffix(out.Bytes(), []byte("\n")) {
			out.WriteByte('\n')
		}
		_, err = out.WriteTo(w)
		return err
	}, nil
}

func texts(list []any) []string {
	var all []string
	for _, v := range list {
		all = append(all, fmt.Sprint(v))
	}
	return all
}

func join(separator string, list []any) string { return strings.Join(texts(list), separator) }

// pluck returns the field of each object of a list.
func pluck(field string, list []any) ([]any, error) {
	var all []any
	for _, v := range list {
		object, ok := v.(map[string]any)
		if !ok {
			return nil, fmt.Errorf("pluck %q: %v is not an object", field, v)
		}
		all = append(all, object[field])
	}
	return all, nil
}

func timefmt(layout, at string) (string, error) {
	t, err := time.Parse(time.RFC3339, at)
	return t.Local().Format(layout), err
}

func (a *App) timeago(at string) (string, error) {
	t, err := time.Parse(time.RFC3339, at)
	return Duration(max(0, a.Now().Sub(t))) + " ago", err
}
