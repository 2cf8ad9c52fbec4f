package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"

	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// forPrograms tells that the output is a message, not a table.
func (a *app) forPrograms() bool { return a.output == formatJSON || a.output == formatYAML }

// show prints an answer: the whole message for programs, what people prints for
// people.
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

// writeJSON puts the proto's JSON into one layout: protojson varies its own on
// purpose.
func writeJSON(w io.Writer, m proto.Message, indent string) error {
	data, err := marshal(m)
	if err != nil {
		return fmt.Errorf("cannot write the answer as JSON: %w", err)
	}
	var out bytes.Buffer
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

// writeYAML writes the same data in the same order: JSON is YAML, in a style
// that is dropped here.
func writeYAML(w io.Writer, m proto.Message) error {
	data, err := marshal(m)
	if err != nil {
		return fmt.Errorf("cannot write the answer as YAML: %w", err)
	}
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
	// Empty lists and mappings have no other way to be written.
	if len(n.Content) > 0 || n.Kind == yaml.ScalarNode {
		n.Style = 0
	}
	for _, c := range n.Content {
		plain(c)
	}
}
