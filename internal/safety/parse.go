package safety

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"unicode"

	"github.com/gpreempt/gpreempt/internal/config/yamlfile"
	"github.com/gpreempt/gpreempt/internal/mechanism"
)

// maxText bounds a sentence, in bytes.
const maxText = 600

// Parse parses a list of rows, the form of hazards.yaml. name is the file's name in
// errors. The error is a yamlfile.Errors with every error in the file.
func Parse(name string, data []byte) ([]Row, error) {
	p := yamlfile.New(name)
	var rows []Row
	if list := p.Document(data); list != nil {
		p.Decode(list, &rows)
	}
	Check(p, "", rows)
	if err := p.Err(); err != nil {
		return nil, err
	}
	return rows, nil
}

var (
	idForm = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,63}$`)
	// searchForm begins with a day that exists, roughly.
	searchForm = regexp.MustCompile(`^20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01]): .`)
	issueForm  = regexp.MustCompile(`^[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+#[0-9]{1,9}$`)
)

// amdKeys are the keys that rows with nvidia do not have.
var amdKeys = []string{"gfx", "apu", "kernel", "driver", "process", "mes", "mes_kiq", "mec", "sdma", "mechanisms"}

// Check adds the errors of rows that were decoded from a file's list at key, and completes the rows.
func Check(p *yamlfile.Parser, key string, rows []Row) {
	ids := map[string]bool{}
	for i := range rows {
		r, path := &rows[i], fmt.Sprintf("%s[%d].", key, i)
		fail := func(key, problem, remedy string) {
			p.Place(&yamlfile.Error{Key: path + key, Problem: problem, Remedy: remedy})
		}
		switch {
		case !idForm.MatchString(r.ID):
			fail("id", yamlfile.Quoted(r.ID)+" is not a valid row name", "use small letters, digits and dashes")
		case ids[r.ID]:
			fail("id", r.ID+" is also another row", "choose for each row a unique name")
		}
		ids[r.ID] = true
		switch nvidia := p.Given(path + "nvidia"); {
		case nvidia:
			for _, amd := range amdKeys {
				if p.Given(path + amd) {
					fail(amd, "is about GPUs of AMD, and nvidia about others", "remove one of them")
				}
			}
			r.Mechanisms = []string{mechanism.NVChannels}
		case p.Given(path + "model"):
			fail("model", "is for GPUs of NVIDIA", `add the driver's version, such as nvidia: "=580"`)
		case len(r.GFX) == 0:
			fail("gfx", "is missing", "list the GPUs, such as [gfx1100] or [gfx11xx]; [gfx*] for all")
		case len(r.Mechanisms) == 0:
			r.Mechanisms = slices.Clone(defaultMechanisms)
		}
		for n, name := range r.Mechanisms {
			at := fmt.Sprintf("mechanisms[%d]", n)
			if !slices.Contains(Mechanisms(), name) && !p.Given(path+"nvidia") {
				fail(at, yamlfile.Quoted(name)+" is not known here", yamlfile.Choose(name, Mechanisms()))
			} else if slices.Contains(r.Mechanisms[:n], name) {
				fail(at, name+" is given twice", "keep one of them")
			}
		}
		for key, text := range map[string]string{"why": r.Why, "read": r.Read, "searched": r.Searched, "remedy": r.Remedy} {
			unprintable := strings.ContainsFunc(text, func(c rune) bool { return !unicode.IsPrint(c) })
			if p.Given(path+key) && (strings.TrimSpace(text) == "" || len(text) > maxText || unprintable) {
				fail(key, "is not a sentence", fmt.Sprintf("write 1 to %d printable bytes in one line; `>-` folds lines into one", maxText))
			}
		}
		if p.Given(path+"searched") && !searchForm.MatchString(r.Searched) {
			fail("searched", "does not begin with a day", "write the day, the terms and the result, such as `2026-11-28: ...`")
		}
		for n, issue := range r.Issues {
			if !issueForm.MatchString(issue) {
				fail(fmt.Sprintf("issues[%d]", n), yamlfile.Quoted(issue)+" is not a public issue", "write OWNER/REPOSITORY#NUMBER")
			}
		}
	}
}
