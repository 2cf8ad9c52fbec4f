package classify

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
)

func TestGlobMatches(t *testing.T) {
	tests := []struct {
		pattern string
		yes, no []string
	}{
		{"abc", []string{"abc"}, []string{"", "ab", "abcd", "xabc", "ABC"}},
		{"*", []string{"", "a", "a/b c\n"}, nil},
		{"a*", []string{"a", "ab", "a/b"}, []string{"", "ba"}},
		{"*a", []string{"a", "ba", "aba"}, []string{"", "ab"}},
		{"a*b*c", []string{"abc", "axbxc", "abbcc", "abcbc"}, []string{"ab", "acb", "abcx"}},
		{"*ab*", []string{"ab", "aab", "xaaby"}, []string{"", "ba", "a b"}},
		{"**", []string{"", "x"}, nil},
		{"?", []string{"a", "é", "/", "\xff"}, []string{"", "ab"}},
		{"a?c", []string{"abc", "a/c"}, []string{"ac", "abbc"}},
		{"[abc]", []string{"a", "b", "c"}, []string{"", "d", "ab"}},
		{"[a-c]x", []string{"ax", "bx", "cx"}, []string{"dx", "-x"}},
		{"[!a-c]", []string{"d", "!", "é"}, []string{"a", "b", ""}},
		{"[^a-c]", []string{"d", "^"}, []string{"a"}},
		{"[]]", []string{"]"}, []string{"", "[]"}},
		{"[!]]", []string{"a"}, []string{"]"}},
		{"[a-]", []string{"a", "-"}, []string{"b"}},
		{"[-a]", []string{"a", "-"}, []string{"b"}},
		{"[[]*[]]", []string{"[]", "[x]"}, []string{"[", "]["}},
		{"[*]", []string{"*"}, []string{"a"}},
		{"[α-ω]", []string{"β"}, []string{"b"}},
		{`a\*`, []string{`a\`, `a\b`}, []string{"a*"}},
		{"a]", []string{"a]"}, []string{"a"}},
	}
	for _, test := range tests {
		g, err := compileGlob(test.pattern)
		if err != nil {
			t.Errorf("%q: %+v", test.pattern, *err)
			continue
		}
		for _, text := range test.yes {
			if !g.matches(text) {
				t.Errorf("%q does not match %q", test.pattern, text)
			}
		}
		for _, text := range test.no {
			if g.matches(text) {
				t.Errorf("%q matches %q", test.pattern, text)
			}
		}
	}
}

// reference translates a glob that compiles into a regular expression.
func reference(pattern string) *regexp.Regexp {
	member := func(r rune) string { return fmt.Sprintf(`\x{%x}`, r) }
	var out strings.Builder
	out.WriteString(`(?s)\A`)
	for pattern != "" {
		r := []rune(pattern)
		switch r[0] {
		case '*':
			out.WriteString(".*")
			pattern = string(r[1:])
		case '?':
			out.WriteString(".")
			pattern = string(r[1:])
		case '[':
			r = r[1:]
			out.WriteString("[")
			if r[0] == '!' || r[0] == '^' {
				out.WriteString("^")
				r = r[1:]
			}
			for first := true; first || r[0] != ']'; first = false {
				if len(r) > 2 && r[1] == '-' && r[2] != ']' {
					out.WriteString(member(r[0]) + "-" + member(r[2]))
					r = r[3:]
				} else {
					out.WriteString(member(r[0]))
					r = r[1:]
				}
			}
			out.WriteString("]")
			pattern = string(r[1:])
		default:
			out.WriteString(member(r[0]))
			pattern = string(r[1:])
		}
	}
	out.WriteString(`\z`)
	return regexp.MustCompile(out.String())
}

func FuzzGlobAgreesWithRegexp(f *testing.F) {
	for _, pattern := range []string{"*train*", "a?c", "[a-c]x", "[!]]", "[a-]*", "[^]-a]", "py[thon", "[z-a]", "é*ω"} {
		f.Add(pattern, "a train of ]-x")
	}
	f.Add("*a*b*c*d*", "aabbccddee")
	f.Add("[-]?", "-\xff")
	f.Fuzz(func(t *testing.T, pattern, text string) {
		g, err := compileGlob(pattern)
		if err != nil {
			return
		}
		// Texts in which the characters of the pattern occur find more.
		for _, text := range []string{text, pattern, pattern + text, strings.NewReplacer("*", "", "?", text).Replace(pattern)} {
			want := pattern == "" || reference(pattern).MatchString(text)
			if got := g.matches(text); got != want {
				t.Errorf("%q matches %q: %v, want %v", pattern, text, got, want)
			}
		}
		if g.shortest < 0 || g.shortest > len([]rune(pattern)) {
			t.Errorf("%q: shortest %d", pattern, g.shortest)
		}
	})
}

// A matcher that tried every length of every run would take exponential time.
func TestManyRunsTakeNoExponentialTime(t *testing.T) {
	g, err := compileGlob(strings.Repeat("a*", 50) + "b")
	if err != nil {
		t.Fatalf("%+v", *err)
	}
	if g.matches(strings.Repeat("a", 4096)) {
		t.Error("matched a text without b")
	}
}
