package cli

import (
	"encoding/json"
	"io"
)

// encode writes v as indented JSON.
func encode(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}
