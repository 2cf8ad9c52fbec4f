package term

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// ForPrograms reports whether the output is JSON or YAML.
func (a *App) ForPrograms() bool { return a.Output == FormatJSON || a.Output == FormatYAML }

// Show prints data: all of it for programs, or by calling people. data is a message of the
// API, or a value for encoding/json with names like those of messages.
func (a *App) Show(data any, people func(p *Printer)) error {
	if !a.ForPrograms() {
		p := a.Printer()
		people(p)
		return p.Err
	}
	raw, err := Marshal(data)
	switch {
	case err != nil:
		return err
	case a.expression != nil:
		return a.printExpression(raw)
	case a.Output == FormatYAML:
		return writeYAML(a.Out, raw)
	}
	return WriteJSON(a.Out, raw)
}

// ShowLine is show for one message of a stream: JSON on one line, YAML as one
// document.
func (a *App) ShowLine(m proto.Message, people func(p *Printer)) error {
	switch {
	case a.expression != nil:
	case a.Output == FormatJSON:
		return WriteLine(a.Out, m)
	case a.Output == FormatYAML:
		if _, err := io.WriteString(a.Out, "---\n"); err != nil {
			return err
		}
	}
	return a.Show(m, people)
}

// Marshal returns the JSON of a message, or of another value without escapes for <, > and
// &, like protojson.
func Marshal(v any) ([]byte, error) {
	if m, ok := v.(proto.Message); ok {
		raw, err := protojson.MarshalOptions{UseProtoNames: true, EmitDefaultValues: true}.Marshal(m)
		return escaped(raw), err
	}
	var raw bytes.Buffer
	enc := json.NewEncoder(&raw)
	enc.SetEscapeHTML(false)
	err := enc.Encode(v)
	return escaped(bytes.TrimSpace(raw.Bytes())), err
}

// Brief returns the JSON of a message without the fields that have their defaults.
func Brief(m proto.Message) ([]byte, error) {
	raw, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(m)
	return escaped(raw), err
}

// escaped returns JSON, or YAML in which such texts are in double quotes, with an escape for
// each character below U+10000 that is not printable: it has the same meaning, and no command
// for a terminal or change of direction. Encoders of JSON write those above U+001F as they are.
func escaped(text []byte) []byte {
	odd := func(r rune) bool { return !unicode.IsPrint(r) && r != '\n' && r < 0x10000 }
	if !bytes.ContainsFunc(text, odd) {
		return text
	}
	clean := make([]byte, 0, len(text)+64)
	for _, r := range string(text) {
		if odd(r) {
			clean = fmt.Appendf(clean, `\u%04x`, r)
		} else {
			clean = utf8.AppendRune(clean, r)
		}
	}
	return clean
}

// Extend returns the JSON of m followed by the fields of more. Both are objects with at
// least one field.
func Extend(m proto.Message, more any) (json.RawMessage, error) {
	data, err := Marshal(m)
	if err != nil {
		return nil, err
	}
	rest, err := Marshal(more)
	if err != nil {
		return nil, err
	}
	return slices.Concat(bytes.TrimSuffix(bytes.TrimSpace(data), []byte("}")), []byte(","), rest[1:]), nil
}

// WriteJSON writes JSON in one layout: protojson varies its own on purpose.
func WriteJSON(w io.Writer, data []byte) error {
	var out bytes.Buffer
	if err := json.Indent(&out, data, "", "  "); err != nil {
		return err
	}
	_, err := fmt.Fprintln(w, out.String())
	return err
}

// writeYAML writes JSON as YAML in the same order. JSON is YAML, in a style that is
// removed here.
func writeYAML(w io.Writer, data []byte) error {
	var doc yaml.Node
	if err := yaml.Unmarshal(data, &doc); err != nil {
		return err
	}
	plain(&doc)
	var out bytes.Buffer
	enc := yaml.NewEncoder(&out)
	enc.SetIndent(2)
	if err := errors.Join(enc.Encode(&doc), enc.Close()); err != nil {
		return err
	}
	_, err := w.Write(escaped(out.Bytes()))
	return err
}

func plain(n *yaml.Node) {
	// Empty lists and mappings need the style.
	if len(n.Content) > 0 || n.Kind == yaml.ScalarNode {
		n.Style = 0
	}
	if strings.ContainsFunc(n.Value, func(r rune) bool { return !unicode.IsPrint(r) }) {
		n.Style = yaml.DoubleQuotedStyle // the only one with escapes
	}
	for _, c := range n.Content {
		plain(c)
	}
}

// ReplaceRegular is replaceFile with --output-file, and refuses a path that has something else than
// a regular file: replacing would remove a device or a pipe, which root may do.
func ReplaceRegular(path string, write func(io.Writer) error) error {
	if info, err := os.Lstat(path); err == nil && !info.Mode().IsRegular() {
		return &Failure{Code: ExitRefused, Message: path + " is not a regular file", Next: "choose another path with --output-file, or redirect standard output"}
	}
	return ReplaceFile(path, "--output-file", write)
}

// ReplaceFile replaces the file at path by what write writes, completely or not at all.
// flag is the flag that names the path. Every user may read the file: it is of no
// use without access to the processes.
func ReplaceFile(path, flag string, write func(io.Writer) error) (err error) {
	tmp, err := os.CreateTemp(filepath.Dir(path), ".gpreempt-*")
	if err != nil {
		return &Failure{Code: ExitFailure, Message: fmt.Sprintf("cannot write %s: %v", path, err), Next: "choose another path with " + flag}
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

// WriteLine writes a message as JSON on one line.
func WriteLine(w io.Writer, m proto.Message) error {
	raw, err := Marshal(m)
	if err != nil {
		return err
	}
	return WriteCompact(w, raw)
}

// WriteCompact writes JSON on one line.
func WriteCompact(w io.Writer, raw []byte) error {
	var line bytes.Buffer
	if err := json.Compact(&line, raw); err != nil {
		return err
	}
	line.WriteByte('\n')
	_, err := w.Write(line.Bytes())
	return err
}

// ExportFormat is the version of the format of gpctl events export.
const ExportFormat = 1
