package term

import (
	"bytes"
	"encoding/json"
	"testing"
	"unicode"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

// hostile has commands of a terminal in 7 and 8 bits, changes of direction, and characters
// that look like none.
const hostile = "a\x1b]0;PWN\x07\x7f\u0085\u009b31m\u202e\u2066\u200b\u2028\ufeff\U000e0001 \U0001f600 é\n\\u009b"

// JSON and YAML have every character of a daemon, and none that a terminal acts on.
func TestNoCharacterForATerminalIsInJSONOrYAML(t *testing.T) {
	raw, err := Marshal(&gpreemptv1.Target{Comm: hostile})
	if err != nil {
		t.Fatal(err)
	}
	other, err := Marshal(map[string]string{"comm": hostile})
	if err != nil {
		t.Fatal(err)
	}
	var indented, line, document bytes.Buffer
	for _, err := range []error{WriteJSON(&indented, raw), WriteLine(&line, &gpreemptv1.Target{Comm: hostile}), writeYAML(&document, raw)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, tc := range map[string]struct {
		text      []byte
		unmarshal func([]byte, any) error
	}{
		"message": {raw, json.Unmarshal}, "value": {other, json.Unmarshal}, "indented": {indented.Bytes(), json.Unmarshal},
		"line": {line.Bytes(), json.Unmarshal}, "YAML": {document.Bytes(), yaml.Unmarshal},
	} {
		if i := bytes.IndexFunc(tc.text, func(r rune) bool { return r != '\n' && r < 0x10000 && !unicode.IsPrint(r) }); i >= 0 {
			t.Errorf("%s: %q", name, tc.text[i:])
		}
		var read map[string]any
		if err := tc.unmarshal(tc.text, &read); err != nil {
			t.Fatalf("%s: %v in %s", name, err, tc.text)
		}
		if diff := cmp.Diff(hostile, read["comm"]); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
