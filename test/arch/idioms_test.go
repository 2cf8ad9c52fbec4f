package arch

import (
	"bytes"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"regexp"
	"regexp/syntax"
	"slices"
	"strings"
	"testing"
)

// under limits TestNoIdioms to one folder, for whoever is at work on it:
//
//	go test ./test/arch -run TestNoIdioms -under internal/server
var under = flag.String("under", "", "check the idioms of this folder only")

// idiom is a way of saying something that docs/glossary.md replaces.
type idiom struct {
	// pattern matches prose: comments, string literals, documents. Case is ignored.
	pattern string
	// instead says what to write, or why not this.
	instead string
}

var idioms = []idiom{
	// Go's own words for functions and predicates.
	{`\btells? (whether|if|how|why|what|which|when|where)\b`, `"reports whether", "returns", "describes": Go's documentation has words for this`},
	{`\b(is|was|are|were|be|been|gets?) told\b`, `name the call or the message: "is notified", "receives", "reports"`},
	{`(?m)^\s*(// )?[A-Z]\w* gives\b`, `"returns"`},
	{`\bgives? (the|a|an|its|their|what|how|each|all|every|whether|nil|true|false|back)\b`, `"returns", "provides", "assigns"`},
	{`\bhears? (of|that|how|whether|what|about|once|when|why)\b`, `"is called when", "receives"`},
	{`\bpackage \w+ hides\b`, `say what the package does: "Package x implements ..."`},
	{`\b(of|with|from|by|for) who( |$)`, `name the actor: "of the caller", "by the operator"`},
	{`\bwhoever\b`, `name the actor: the caller, the operator, the client`},
	{`\bwho (runs?|holds?|calls?|asks?|waits?|wants?) (a|an|it|one|for|hosts?|this|them|the)\b`, `name the actor: the operator, the lease owner, the caller`},

	// Relative clauses without a noun, and negation without a verb.
	{`\b(is|are) none( of\b|[.,;:"]|$)`, `say what is missing: "no GPU", "is not a ..."`},
	{`\bis no (lease|number|duration|policy|preset|directory|file|constant|GPU|pid|process|target|queue|name|class|key|kernel package|socket|address|error|failure|mechanism|port|path|time|flag|boolean|integer)\b`, `"is not a ...", "invalid ...": the adjective form reads as a riddle`},
	{`\bthat is not there\b|\bthat are not there\b`, `"emulated", "missing", "absent"`},
	{`\bof which there (is|are)\b`, `say it in two sentences`},
	{`\bas far as\b`, `"if", "where", "to the extent that"; or leave it out`},
	{`\bhas the last word\b|\bhave the last word\b`, `"takes precedence"`},
	{`\bfor (whose|the) sake\b|\bown sake\b`, `"on behalf of", "because of"`},
	{`\bat the (latest|least|most|soonest)\b`, `"no later than", "at least", "at most"`},
	{`\bcannot be had\b|\bto be had\b`, `"is not available"`},
	{`\bis to be (had|seen|found|done)\b`, `use an active verb`},
	{`\bhas to do with\b|\bhave to do with\b`, `"depends on", "concerns"`},

	// Homely verbs for technical acts.
	{`\b(let|lets|letting) (it |them |the \w+ |a \w+ |its \w+ |all |everything |what \w+ )?go\b`, `"release", "detach"`},
	{`\b(let|lets|letting) (it |them |the \w+ |everything |all )?run( again)?\b`, `"resume"`},
	{`\bmend(s|ed|ing)?\b`, `"fix", "repair"`},
	{`\bvouch(es|ed|ing)?\b`, `"verified", "confirmed", "known to work"`},
	{`\bput(s|ting)? (it |them |everything |the \w+ )?back\b`, `"restore", "resume", "return"`},
	{`\bcame and went\b|\bcomes and goes\b|\bcome and go\b`, `"starts and stops", "appears and disappears"`},
	{`\bowes?\b|\bowed\b`, `"must still", "pending"`},
	{`\bpays? back\b|\bpaid back\b|\bpayback\b`, `"retries the resume"`},
	{`\bspoken to\b|\bspeaks? to\b`, `"uses the ABI of", "calls"`},
	{`\bbelieve[sd]?\b`, `"accepts", "trusts"`},
	{`\bcast(s)? out\b|\bthrow(s|n)? out\b|\bkick(s|ed)? out\b`, `"evict", "remove", "close"`},
	{`\bsee(s)? to it\b|\bseen to\b|\bsees to\b`, `"ensures", "handles"`},
	{`\bhold(s)? it against\b`, `say the consequence`},
	{`\btakes? the word of\b|\btakes? its word\b|\bhis word\b|\b(an )?admin'?s'? word\b`, `"admin override", "trusts"`},
	{`\btakes? note\b|\btook note\b`, `"records"`},
	{`\bfor good\b`, `"permanently"`},
	{`\bafter all\b`, `leave it out, or "eventually"`},
	{`\bin vain\b`, `"without effect"`},
	{`\bmakes? sure of\b`, `"ensures"`},
	{`\bleft behind\b|\bleaves? behind\b`, `"remaining", "abandoned", "not released"`},
	{`\b(goes|going|went|gone) on (running|working|with|as|until|while|for)\b`, `"continues"`},
	{`\bgets? on with\b`, `"works with"`},
	{`\bhappen(s|ed)? to (be|have)\b`, `leave it out`},
	{`\bis about to\b`, `"will", or name the step`},
	{`\bcomes? (to|into) (life|being|rest)\b`, `"starts", "becomes idle"`},
	{`\bcome to nothing\b|\bcomes to nothing\b`, `"has no effect"`},
	{`\bknock(s|ed|ing)?\b`, `"probe"`},
	{`\brouse[sd]?\b|\bstir(s|red)?\b`, `"wake", "notify"`},
	{`\b(is|be|was|been) judged\b|\bjudges? (it|them|a|the|each|every|whether)\b|\bjudged (anew|again|by)\b`, `"classified", "evaluated", "checked"`},
	{`\bin the picture\b|\bpicture of\b`, `"snapshot", "diagram"`},
	{`\bmakes? up for\b`, `"compensates"`},
	{`\bunwell\b|\bin trouble\b|\bill\b`, `"unhealthy", "reports errors"`},
	{`\bdeeds?\b`, `"action", "audit entry"`},
	{`\bwho is (in|on|at) it\b|\bwhat it is (about|like)\b`, `say the content`},
	{`\bsave for\b|\b(all|everything|nothing|anything|none|each|every \w+),? but for\b`, `"except"`},
	{`\bof its own accord\b|\bby hand again\b`, `"automatically"`},
	{`\bmistakes? in\b|\bwith a mistake\b|\bone mistake\b`, `"error in"; "invalid"`},
	{`\bis good\b[.:,;]?$|: good\b`, `"OK", "valid"`},
	{`\bgreedy\b`, `"exceeds its limits"`},
	{`\bmean(s)? harm\b|\brobbed\b`, `"malicious", "detached by another debugger"`},
	{`\bbetter known\b|\bknow better\b`, `say what is known`},
	{`\bin the way\b`, `name the obstacle: "blocks", "prevents"`},
	{`\bstands? in for\b`, `"replaces", "represents"`},
	{`\bquiesced?\b.*\bquiet\b|\bquiet\b.*\bquiesced?\b`, `one word for one thing: quiet (quiesced is the API field only)`},
}

// names are identifiers that docs/glossary.md replaces, as whole words of a
// camel-case name.
var names = []idiom{
	{`patients?`, `host, process reports`},
	{`knock`, `probe`},
	{`doorkeeper|door`, `drain listener, server credentials`},
	{`deeds?`, `audit entry`},
	{`lookout`, `SIGCHLD watcher`},
	{`rouse`, `wake`},
	{`campaign`, `suspend pass`},
	{`patience|patient`, `max skips, grace`},
	{`pay(Back|ing)`, `retry resume`},
	{`put(Off)`, `schedule retry`},
	{`attend`, `handle event`},
	{`stranded`, `resume incomplete`},
	{`unstick`, `resume foreign`},
	{`unquiet`, `requiesce`},
	{`survey(s|ed)?`, `probe, scan, choices: one word for each of its three meanings`},
	{`told`, `reported`},
	{`effortless`, `noop`},
	{`yardstick`, `jitter probe`},
	{`nursery`, `queue tracker`},
	{`blame`, `count collateral`},
	{`unseat`, `free slot`},
	{`disown`, `release orphan`},
	{`spoil`, `discard`},
	{`scarce`, `log limiter`},
	{`owes?|owed`, `pending`},
	{`moment`, `clock pair`},
}

// exempt are the places that quote idioms on purpose, and a page that is generated from
// files that are checked.
var exempt = []string{"test/arch/idioms_test.go", "docs/glossary.md", "docs/reference/api.md", "LICENSE"}

func TestNoIdioms(t *testing.T) {
	prose := make([]search, len(idioms))
	for i, id := range idioms {
		prose[i] = newSearch(t, id.pattern)
	}
	words := map[string]string{}
	for _, id := range names {
		for word := range strings.SplitSeq(strings.NewReplacer("(", "", ")", "", "?", "").Replace(id.pattern), "|") {
			words[strings.ToLower(word)] = id.instead
		}
	}
	for _, name := range readable(t, os.DirFS("../..")) {
		if !strings.HasPrefix(name, *under) || slices.Contains(exempt, name) {
			continue
		}
		data, err := os.ReadFile(path.Join("../..", name))
		if err != nil {
			t.Fatal(err)
		}
		lines := map[int][]string{}
		if path.Ext(name) == ".go" {
			lines = goProse(t, name, data, words)
		} else {
			for i, line := range bytes.Split(data, []byte("\n")) {
				if path.Ext(name) == ".py" {
					line = bytes.ReplaceAll(line, []byte(" is None"), []byte(" == None")) // an expression, not prose
				}
				lines[i+1] = []string{string(line)}
			}
		}
		for n := range lines {
			for _, text := range lines[n] {
				lower := strings.ToLower(text)
				for i, s := range prose {
					if m := s.find(text, lower); m != "" {
						t.Errorf("%s:%d: %q: write %s (docs/glossary.md)", name, n, strings.TrimSpace(m), idioms[i].instead)
					}
				}
			}
		}
	}
}

// search is an idiom's expression with literals, one of which is in every match:
// looking for those first makes the test fast enough for the race detector.
type search struct {
	re       *regexp.Regexp
	literals []string
}

func newSearch(t *testing.T, pattern string) search {
	t.Helper()
	pattern = `(?i)` + pattern
	parsed, err := syntax.Parse(pattern, syntax.Perl)
	if err != nil {
		t.Fatal(err)
	}
	literals := required(parsed)
	if literals == nil {
		t.Fatalf("a match of %s need not contain any text: name a word in it", pattern)
	}
	return search{regexp.MustCompile(pattern), literals}
}

// find returns the first match in a text, whose lower-case form is lower.
func (s search) find(text, lower string) string {
	if !slices.ContainsFunc(s.literals, func(l string) bool { return strings.Contains(lower, l) }) {
		return ""
	}
	return s.re.FindString(text)
}

// required returns lower-case texts of which every match of re contains one, and nil
// if a match may be without.
func required(re *syntax.Regexp) (literals []string) {
	switch re.Op {
	case syntax.OpLiteral:
		return []string{strings.ToLower(string(re.Rune))}
	case syntax.OpCapture, syntax.OpPlus:
		return required(re.Sub[0])
	case syntax.OpConcat:
		for _, sub := range re.Sub {
			if found := required(sub); found != nil && (literals == nil || shortest(found) > shortest(literals)) {
				literals = found
			}
		}
	case syntax.OpAlternate:
		for _, sub := range re.Sub {
			found := required(sub)
			if found == nil {
				return nil
			}
			literals = append(literals, found...)
		}
	}
	return literals
}

func shortest(texts []string) int {
	return len(slices.MinFunc(texts, func(a, b string) int { return len(a) - len(b) }))
}

// readable returns the files that are checked: what people read, but not what is
// generated or was captured from a machine.
func readable(t *testing.T, root fs.FS) (found []string) {
	t.Helper()
	err := fs.WalkDir(root, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() {
			switch path.Base(name) {
			case ".git", "build", "dist", "testdata", "gen", "node_modules":
				return fs.SkipDir
			}
			return nil
		}
		switch path.Ext(name) {
		case ".go", ".md", ".proto", ".yaml", ".yml", ".service", ".socket", ".sh", ".py", ".tpl":
			found = append(found, name)
		default:
			if path.Base(name) == "Makefile" || name == ".ci/run" {
				found = append(found, name)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// goProse returns comments and string literals by line, and reports identifiers
// that are declared with one of the words.
func goProse(t *testing.T, name string, source []byte, words map[string]string) map[int][]string {
	t.Helper()
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, name, source, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	lines := map[int][]string{}
	add := func(pos token.Pos, text string) {
		at := fset.Position(pos).Line
		for i, line := range strings.Split(text, "\n") {
			lines[at+i] = append(lines[at+i], line)
		}
	}
	for _, group := range file.Comments {
		for _, c := range group.List {
			add(c.Pos(), c.Text)
		}
	}
	seen := map[string]bool{}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.BasicLit:
			if n.Kind == token.STRING {
				add(n.Pos(), n.Value)
			}
		case *ast.Ident:
			if seen[n.Name] {
				break
			}
			seen[n.Name] = true
			for _, word := range camelWords(n.Name) {
				if instead, ok := words[word]; ok {
					t.Errorf("%s: identifier %s: %s (docs/glossary.md)", fset.Position(n.Pos()), n.Name, instead)
				}
			}
		}
		return true
	})
	return lines
}

var camel = regexp.MustCompile(`[A-Z]+[a-z0-9]*|[a-z0-9]+`)

// camelWords splits an identifier into its words and joined pairs of them, in
// lower case: "payBackNow" is pay, back, now, payback, backnow.
func camelWords(identifier string) []string {
	words := camel.FindAllString(identifier, -1)
	for i := range words {
		words[i] = strings.ToLower(words[i])
	}
	for i := len(words) - 1; i > 0; i-- {
		words = append(words, words[i-1]+words[i])
	}
	return words
}

func TestIdiomsAreFound(t *testing.T) {
	for _, line := range []string{
		"// New gives an executor.", "// it tells whether the GPU is free", "the mechanism lets go of it",
		"of who calls", "an MI300X that is not there", `"x" is no lease id`, "whatever fails, offline work is let run: everything but for one",
	} {
		matched := false
		for _, id := range idioms {
			s := newSearch(t, id.pattern)
			want, got := s.re.FindString(line), s.find(line, strings.ToLower(line))
			if got != want {
				t.Errorf("%s finds %q in %q, want %q", id.pattern, got, line, want)
			}
			matched = matched || want != ""
		}
		if !matched {
			t.Errorf("no idiom matches %q", line)
		}
	}
	if n := len(idioms) + len(names); n < 40 {
		t.Errorf("%d patterns, want at least 40", n)
	}
	for _, id := range slices.Concat(idioms, names) {
		if id.instead == "" {
			t.Errorf("pattern %q has no reason", id.pattern)
		}
	}
	if got, want := fmt.Sprint(camelWords("payBackNow")), "[pay back now backnow payback]"; got != want {
		t.Errorf("camelWords: %s, want %s", got, want)
	}
}
