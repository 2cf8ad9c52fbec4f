package cli

import (
	_ "embed"
	"fmt"
	"io"
	"strings"
	"text/template"

	"github.com/gpreempt/gpreempt/lab/sim"
)

//go:embed simdoc.md
var validationTemplate string

// validationDocument writes docs/reference/validation.md.
func validationDocument(w io.Writer, v simValidation) error {
	missed := map[sim.Use]int{}
	rows := map[sim.Use]int{}
	for _, r := range v.Rows {
		rows[r.Use]++
		if !r.Met() {
			missed[r.Use]++
		}
	}
	t := template.Must(template.New("validation").Funcs(template.FuncMap{
		"value":   simValue,
		"percent": simError,
		"share":   func(f float64) string { return fmt.Sprintf("%.1f %%", 100*f) },
		"policy":  ourPolicy,
		"ratio": func(f float64) string {
			if f == 0 {
				return ""
			}
			return fmt.Sprintf("%.3f", f)
		},
		"verdict": func(met bool) string {
			if met {
				return "met"
			}
			return "**missed**"
		},
		"cell": func(s string) string { return strings.ReplaceAll(s, "|", "\\|") },
	}).Parse(validationTemplate))
	return t.Execute(w, map[string]any{
		"V": v, "Limit": 100 * sim.Limit, "HeldOut": rows[sim.HeldOut], "Missed": missed[sim.HeldOut], "MissedFits": missed[sim.Fitted], "Fitted": rows[sim.Fitted],
	})
}
