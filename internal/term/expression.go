package term

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"

	"github.com/itchyny/gojq"
	"github.com/spf13/cobra"
)

// expression is what --jq makes of the JSON of an answer.
type expression func(w io.Writer, data any) error

// compile prepares --jq, so that an invalid one is found before the daemon is called.
func (a *App) compile(cmd *cobra.Command) (err error) {
	if a.jq == "" {
		return nil
	}
	a.expression, err = compileJQ(cmd, a.jq)
	switch {
	case err != nil:
		return Usage(cmd, "invalid --jq: %v", err)
	case cmd.Flags().Changed("output") && a.Output != FormatJSON:
		return Usage(cmd, "--jq needs -o json, not %s", a.Output)
	}
	a.Output = FormatJSON
	return nil
}

// printExpression prints the JSON of an answer as --jq has it.
func (a *App) printExpression(raw []byte) error {
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
