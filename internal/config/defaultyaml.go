package config

import (
	"fmt"
	"strings"
)

// DefaultYAML returns a file with the values of Default and an explanation of every key.
// Keys that are commented out have no space after the #.
func DefaultYAML() []byte {
	var b strings.Builder
	comment(&b, "", "Configuration of gpreemptd. Every key has its default value here; a key that you remove has it too. "+
		"Durations have a unit: 20ms, 1.5s, 10m. After a change: systemctl reload gpreemptd; the log lists the "+
		"changes. Some need a restart: systemctl restart gpreemptd.")
	c, current := Default(), ""
	for _, f := range fields {
		s, indent := section(f.key), ""
		if s != current {
			current = s
			if s == "discovery" {
				// Rules follow the policy, because most users edit them.
				commentedSection(&b, "rules", rulesExample)
				commentedSection(&b, "safety", safetyExample)
			}
			b.WriteString("\n")
			comment(&b, "", sections[s])
			b.WriteString(s + ":\n")
		} else if s == "" {
			b.WriteString("\n")
		}
		if s != "" {
			indent = "  "
		}
		doc := f.doc
		if f.max > 0 {
			doc = fmt.Sprintf("%s %d to %d.", doc, f.min, f.max)
		}
		if !f.live {
			doc += " Needs a restart."
		}
		comment(&b, indent, doc)
		mark := ""
		if s == "policy" && f.key != policyPrefix+"preset" {
			// A knob that is not a comment would not follow a changed preset.
			mark = "#"
		}
		line := fmt.Sprintf("%s%s%s: %s\n", indent, mark, strings.TrimPrefix(f.key, s+"."), text(f.at(&c)))
		if list, ok := f.at(&c).(*[]string); ok && len(line) > columns {
			line = fmt.Sprintf("%s%s:\n", indent, strings.TrimPrefix(f.key, s+"."))
			for _, item := range *list {
				line += indent + "  - " + item + "\n"
			}
		}
		b.WriteString(line)
	}
	return []byte(b.String())
}

func commentedSection(b *strings.Builder, name string, example []string) {
	b.WriteString("\n")
	comment(b, "", sections[name])
	for _, line := range example {
		b.WriteString("#" + line + "\n")
	}
}

// columns is the length of the longest line.
const columns = 100

// comment writes doc as comment lines. A line break in it starts a new line.
func comment(b *strings.Builder, indent, doc string) {
	for paragraph := range strings.SplitSeq(doc, "\n") {
		line := indent + "#"
		for word := range strings.FieldsSeq(paragraph) {
			if len(line)+1+len(word) > columns {
				b.WriteString(line + "\n")
				line = indent + "#"
			}
			line += " " + word
		}
		b.WriteString(line + "\n")
	}
}
