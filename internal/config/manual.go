package config

import (
	"fmt"
	"strings"
)

// Manual returns the manual page of the file in the Markdown of md2man, without its title:
// every key with its default and whether it needs a restart.
func Manual() string {
	var b strings.Builder
	b.WriteString("# NAME\ngpreemptd.yaml - configuration of gpreemptd\n\n# SYNOPSIS\n" + DefaultPath + "\n\n# DESCRIPTION\n" +
		"One YAML file. Every key is optional and has the default shown here. Durations have a unit: 20ms, 1.5s, 10m. " +
		"**gpreemptd config default** prints a file with all of this as comments; **gpreemptd config check** lists every " +
		"error in a file. After a change, **systemctl reload gpreemptd**; the log lists the changes. Keys marked " +
		"*restart* need **systemctl restart gpreemptd**.\n")
	c, current := Default(), ""
	for i, f := range fields {
		s := section(f.key)
		switch {
		case i == 0:
			b.WriteString("\n# KEYS AT THE TOP\n")
		case s != current:
			if s == "discovery" {
				listed(&b, "rules", rulesExample)
				listed(&b, "safety", safetyExample)
			}
			heading(&b, s)
		}
		current = s
		doc := f.doc
		if f.max > 0 {
			doc = fmt.Sprintf("%s %d to %d.", doc, f.min, f.max)
		}
		restart := ""
		if !f.live {
			restart = " (*restart*)"
		}
		fmt.Fprintf(&b, "\n**%s**, default %s\n: %s%s\n", plain(f.key), plain(text(f.at(&c))), plain(doc), restart)
	}
	b.WriteString("\n# SEE ALSO\n**gpreemptd(8)**, **gpreemptd-config-default(8)**, **gpctl(1)**, /usr/share/doc/gpreempt\n")
	return b.String()
}

func heading(b *strings.Builder, name string) {
	fmt.Fprintf(b, "\n# %s\n", strings.ToUpper(name))
	for line := range strings.SplitSeq(sections[name], "\n") {
		if item, ok := strings.CutPrefix(line, "- "); ok {
			fmt.Fprintf(b, "\n* %s\n", plain(item))
		} else {
			fmt.Fprintf(b, "\n%s\n", plain(line))
		}
	}
}

// listed writes a section with an example of its list.
func listed(b *strings.Builder, name string, example []string) {
	heading(b, name)
	b.WriteString("\nAn example:\n\n")
	for _, line := range example {
		b.WriteString("    " + line + "\n")
	}
}

var markdown = strings.NewReplacer(`\`, `\\`, `*`, `\*`, `_`, `\_`, "`", "\\`", `[`, `\[`, `]`, `\]`, `<`, `\<`, `>`, `\>`, `#`, `\#`)

// plain escapes a text for Markdown.
func plain(s string) string { return markdown.Replace(s) }
