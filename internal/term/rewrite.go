package term

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
)

// protojson writes 0 for facts that no source reported. gpctl writes null, which protojson reads
// as 0.

// member is a field of a JSON object; an object is a []member, in order.
type member struct {
	key   string
	value any
}

// withNulls rewrites the JSON of a message of the API.
func withNulls(raw []byte) ([]byte, error) {
	if !bytes.Contains(raw, []byte(`_address"`)) {
		return raw, nil
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber()
	v, err := readJSON(dec)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	err = printJSON(&out, v)
	return out.Bytes(), err
}

// readJSON reads a value.
func readJSON(dec *json.Decoder) (any, error) {
	token, err := dec.Token()
	if err != nil {
		return nil, err
	}
	switch token {
	case json.Delim('{'):
		object := []member{}
		for dec.More() {
			key, err := dec.Token()
			if err != nil {
				return nil, err
			}
			value, err := readJSON(dec)
			if err != nil {
				return nil, err
			}
			object = append(object, member{key.(string), value})
		}
		_, err = dec.Token()
		return known(object), err
	case json.Delim('['):
		list := []any{}
		for dec.More() {
			value, err := readJSON(dec)
			if err != nil {
				return nil, err
			}
			list = append(list, value)
		}
		_, err = dec.Token()
		return list, err
	}
	return token, nil
}

// known replaces the values of an object. Facts of a queue are those of its source; only mqds
// has a doorbell.
func known(object []member) []member {
	source, hasSource := "", false
	for _, m := range object {
		if m.key == "source" {
			source, hasSource = m.value.(string)
		}
	}
	for i, m := range object {
		switch {
		case strings.HasSuffix(m.key, "_address") && m.value == "0",
			hasSource && m.key == "aql" && source == "",
			hasSource && m.key == "doorbell_offset" && !strings.Contains(source, "mqds"):
			object[i].value = nil
		}
	}
	return object
}

// printJSON writes a value of readJSON.
func printJSON(w io.Writer, v any) error {
	separated := func(open, end string, n int, each func(i int) error) error {
		for i := range n {
			sep := ","
			if i == 0 {
				sep = open
			}
			if _, err := io.WriteString(w, sep); err != nil {
				return err
			}
			if err := each(i); err != nil {
				return err
			}
		}
		if n == 0 {
			end = open + end
		}
		_, err := io.WriteString(w, end)
		return err
	}
	switch v := v.(type) {
	case []member:
		return separated("{", "}", len(v), func(i int) error {
			key, err := Marshal(v[i].key)
			if err == nil {
				_, err = fmt.Fprintf(w, "%s:", key)
			}
			if err != nil {
				return err
			}
			return printJSON(w, v[i].value)
		})
	case []any:
		return separated("[", "]", len(v), func(i int) error { return printJSON(w, v[i]) })
	}
	raw, err := Marshal(v)
	if err == nil {
		_, err = w.Write(raw)
	}
	return err
}
