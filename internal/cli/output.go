package cli

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// forPrograms reports whether the output is JSON or YAML.
func (a *app) forPrograms() bool { return a.output == formatJSON || a.output == formatYAML }

// show prints an answer: the whole message for programs, or by calling people.
func (a *app) show(m proto.Message, people func(p *printer)) error {
	switch a.output {
	case formatJSON:
		return writeJSON(a.Out, m, "  ")
	case formatYAML:
		return writeYAML(a.Out, m)
	}
	p := a.printer()
	people(p)
	return p.err
}

// showLine is show for one message of a stream: JSON on one line, YAML as one
// document.
func (a *app) showLine(m proto.Message, people func(p *printer)) error {
	switch a.output {
	case formatJSON:
		return writeJSON(a.Out, m, "")
	case formatYAML:
		if _, err := io.WriteString(a.Out, "---\n"); err != nil {
			return err
		}
	}
	return a.show(m, people)
}

func marshal(m proto.Message) ([]byte, error) {
	return protojson.MarshalOptions{UseProtoNames: true, EmitDefaultValues: true}.Marshal(m)
}

// extend returns the JSON of m followed by the fields of more. Both are objects with at
// least one field.
func extend(m proto.Message, more any) (json.RawMessage, error) {
	data, err := marshal(m)
	if err != nil {
		return nil, fmt.Errorf("cannot write the answer as JSON: %w", err)
	}
	rest, err := plainJSON(more)
	if err != nil {
		return nil, err
	}
	return slices.Concat(bytes.TrimSuffix(bytes.TrimSpace(data), []byte("}")), []byte(","), rest[1:]), nil
}

// plainJSON is json.Marshal without escapes for <, > and &, like protojson.
func plainJSON(v any) ([]byte, error) {
	var raw bytes.Buffer
	enc := json.NewEncoder(&raw)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, fmt.Errorf("cannot write the answer as JSON: %w", err)
	}
	return bytes.TrimSpace(raw.Bytes()), nil
}

// showData is show for data that is not a message.
func (a *app) showData(data any, people func(p *printer)) error {
	if !a.forPrograms() {
		p := a.printer()
		people(p)
		return p.err
	}
	raw, err := plainJSON(data)
	switch {
	case err != nil:
		return err
	case a.output == formatYAML:
		return layoutYAML(a.Out, raw)
	}
	return layoutJSON(a.Out, raw, "  ")
}

func writeJSON(w io.Writer, m proto.Message, indent string) error {
	data, err := marshal(m)
	if err != nil {
		return fmt.Errorf("cannot write the answer as JSON: %w", err)
	}
	return layoutJSON(w, data, indent)
}

// layoutJSON writes JSON in one layout: protojson varies its own on purpose.
func layoutJSON(w io.Writer, data []byte, indent string) error {
	var out bytes.Buffer
	var err error
	if indent == "" {
		err = json.Compact(&out, data)
	} else {
		err = json.Indent(&out, data, "", indent)
	}
	if err != nil {
		return fmt.Errorf("cannot write the answer as JSON: %w", err)
	}
	out.WriteByte('\n')
	_, err = w.Write(out.Bytes())
	return err
}

func writeYAML(w io.Writer, m proto.Message) error {
	data, err := marshal(m)
	if err != nil {
		return fmt.Errorf("cannot write the answer as YAML: %w", err)
	}
	return layoutYAML(w, data)
}

// layoutYAML writes JSON as YAML in the same order. JSON is YAML, in a style that is
// removed here.
func layoutYAML(w io.Writer, data []byte) error {
	var doc yaml.Node
	if err := yaml.Unmarshal(data, &doc); err != nil {
		return fmt.Errorf("cannot write the answer as YAML: %w", err)
	}
	plain(&doc)
	enc := yaml.NewEncoder(w)
	enc.SetIndent(2)
	if err := enc.Encode(&doc); err != nil {
		return fmt.Errorf("cannot write the answer as YAML: %w", err)
	}
	return enc.Close()
}

func plain(n *yaml.Node) {
	// Empty lists and mappings need the style.
	if len(n.Content) > 0 || n.Kind == yaml.ScalarNode {
		n.Style = 0
	}
	for _, c := range n.Content {
		plain(c)
	}
}

// replaceFile replaces the file at path by what write writes, completely or not at all.
// flag is the flag that names the path. The file is readable by everybody: it is of no
// use without access to the processes.
func replaceFile(path, flag string, write func(io.Writer) error) (err error) {
	tmp, err := os.CreateTemp(filepath.Dir(path), ".gpctl-*")
	if err != nil {
		return &failure{code: ExitFailure, message: fmt.Sprintf("cannot write %s: %v", path, err), next: "choose another path with " + flag}
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(tmp.Name()))
		}
	}()
	err = write(tmp)
	if err = errors.Join(err, tmp.Chmod(0o644), tmp.Sync(), tmp.Close()); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), path)
}
