package safety

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/config/yamlfile"
)

func TestEveryKeyIsRead(t *testing.T) {
	got, err := Parse("site.yaml", []byte(`
- id: all-of-it
  gfx: [gfx90a, gfx11xx]
  apu: false
  kernel: ">=6.5 <7.0-rc2"
  driver: dkms
  mes: ">=0x40 <0x80"
  mes_kiq: "=0x6f"
  mec: ">459"
  sdma: "<=18"
  mechanisms: [criu, freezer]
  action: limit
  why: >-
    One sentence
    on two lines.
  issues: [ROCm/amdgpu#227, a.b/c_d#1]
  read: f of Linux 7.3.
  searched: "2026-11-28: all, none."
  remedy: Another.
- {id: least, gfx: ["gfx*"], action: allow, why: Short.}
`))
	if err != nil {
		t.Fatal(err)
	}
	want := []Row{
		{
			ID: "all-of-it", GFX: []GFXRange{"gfx90a", "gfx11xx"}, APU: new(false),
			Kernel: ">=6.5 <7.0-rc2", Driver: DKMS,
			MES: ">=0x40 <0x80", MESKIQ: "=0x6f", MEC: ">459", SDMA: "<=18",
			Mechanisms: []string{"criu", "freezer"}, Action: Limit,
			Why: "One sentence on two lines.", Issues: []string{"ROCm/amdgpu#227", "a.b/c_d#1"},
			Read: "f of Linux 7.3.", Searched: "2026-11-28: all, none.", Remedy: "Another.",
		},
		{ID: "least", GFX: []GFXRange{"gfx*"}, Mechanisms: []string{"dbgtrap", "criu"}, Action: Allow, Why: "Short."},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("Parse (-want +got):\n%s", diff)
	}
}

func TestFilesWithoutContentHaveNoRows(t *testing.T) {
	for _, text := range []string{"", "# nothing\n", "---\n", "~\n", "[]\n"} {
		if rows, err := Parse("f", []byte(text)); len(rows) > 0 || err != nil {
			t.Errorf("%q: %v, %v", text, rows, err)
		}
	}
}

func TestErrorsHavePlaceAndRemedy(t *testing.T) {
	const rest = ", why: W., action: deny}\n"
	tests := []struct{ name, text, want string }{
		{"not a list", "id: a\n", "1:1: is a mapping: write a list, such as [0, 1] or lines that begin with a dash"},
		{"not a row", "- 5\n", `1:3: [0]: is the number 5: write keys and values, one ` + "`key: value` a line; the keys here are id, gfx, apu, kernel, driver, process, mes, mes_kiq, mec, sdma, mechanisms, nvidia, model, action, why, issues, read, searched, remedy"},
		{
			"unknown key", "- {id: a, gfx: [gfx900], because: x" + rest,
			"1:26: [0].because: unknown key: the keys here are id, gfx, apu, kernel, driver, process, mes, mes_kiq, mec, sdma, mechanisms, nvidia, model, action, why, issues, read, searched, remedy",
		},
		{"given twice", "- {id: a, gfx: [gfx900], id: b" + rest, "1:26: [0].id: is given twice, first on line 1: keep one of them"},
		{"no action", "- id: a\n  gfx: [gfx900]\n  why: W.\n", "1:3: [0].action: is missing: write allow, limit or deny"},
		{"no gfx", "- id: a\n  why: W.\n  action: deny\n", "1:3: [0].gfx: is missing: list the GPUs, such as [gfx1100] or [gfx11xx]; [gfx*] for all"},
		{"no id", "- {gfx: [gfx900]" + rest, "1:3: [0].id: is missing: write a unique name, such as site-gfx1100"},
		{"no reason", "- {id: a, gfx: [gfx900], action: deny}\n", "1:3: [0].why: is missing: write the reason in a sentence; it is shown to users"},
		{"bad id", "- {id: A b, gfx: [gfx900]" + rest, `1:8: [0].id: "A b" is not a valid row name: use small letters, digits and dashes`},
		{
			"same id", "- {id: a, gfx: [gfx900]" + rest + "- {id: a, gfx: [gfx900]" + rest,
			"2:8: [1].id: a is also another row: choose for each row a unique name",
		},
		{
			"bad gfx", "- {id: a, gfx: [gfx900, navi31]" + rest,
			`1:25: [0].gfx[1]: "navi31" is not the name of a GPU architecture, a family or a span: write a list of names such as gfx942, families such as gfx11xx, spans such as gfx1100-gfx1103, or gfx*`,
		},
		{"empty gfx", "- {id: a, gfx: []" + rest, "1:16: [0].gfx: is empty: list the GPUs, [gfx*] for all"},
		{"gfx alone", "- {id: a, gfx: gfx900" + rest, `1:16: [0].gfx: is the text "gfx900": write a list of names such as gfx942, families such as gfx11xx, spans such as gfx1100-gfx1103, or gfx*`},
		{"apu", "- {id: a, gfx: [gfx900], apu: yes" + rest, `1:31: [0].apu: is the text "yes": write true or false`},
		{"kernel", "- {id: a, gfx: [gfx900], kernel: \"7.0\"" + rest, `1:34: [0].kernel: "7.0" is not a comparison: write comparisons such as ">=6.5 <7.0"`},
		{"kernel number", "- {id: a, gfx: [gfx900], kernel: 7.0" + rest, `1:34: [0].kernel: is the number 7.0: write comparisons such as ">=6.5 <7.0"`},
		{"driver", "- {id: a, gfx: [gfx900], driver: amd" + rest, `1:34: [0].driver: "amd" is not known here: write in-tree or dkms`},
		{"firmware", "- {id: a, gfx: [gfx900], mes: \"=0x\"" + rest, `1:31: [0].mes: "0x" is not a firmware version: write comparisons such as ">=0x40 <0x80"; 0 means unknown`},
		{"mechanism", "- {id: a, gfx: [gfx900], mechanisms: [gdb]" + rest, `1:39: [0].mechanisms[0]: "gdb" is not known here: write dbgtrap, criu or freezer`},
		{"mechanism twice", "- {id: a, gfx: [gfx900], mechanisms: [criu, criu]" + rest, "1:45: [0].mechanisms[1]: criu is given twice: keep one of them"},
		{"action", "- {id: a, gfx: [gfx900], action: forbid, why: W.}\n", `1:34: [0].action: "forbid" is not known here: write deny, limit, allow or note`},
		{"why is a number", "- {id: a, gfx: [gfx900], why: 5, action: deny}\n", `1:31: [0].why: is the number 5: write a text; put it in quotes if it looks like a number`},
		{"empty why", "- {id: a, gfx: [gfx900], why: \" \", action: deny}\n", "1:31: [0].why: is not a sentence: write 1 to 600 printable bytes in one line; `>-` folds lines into one"},
		{
			"searched, without a day", "- {id: a, gfx: [gfx900], searched: \"in November: none\"" + rest,
			"1:36: [0].searched: does not begin with a day: write the day, the terms and the result, such as `2026-11-28: ...`",
		},
		{"issue", "- {id: a, gfx: [gfx900], issues: [\"#5\"]" + rest, `1:35: [0].issues[0]: "#5" is not a public issue: write OWNER/REPOSITORY#NUMBER`},
		{"nvidia and gfx", "- {id: a, gfx: [gfx900], nvidia: \"=580\"" + rest, "1:16: [0].gfx: is about GPUs of AMD, and nvidia about others: remove one of them"},
		{"nvidia and mechanisms", "- {id: a, nvidia: \"=580\", mechanisms: [criu]" + rest, "1:39: [0].mechanisms: is about GPUs of AMD, and nvidia about others: remove one of them"},
		{"nvidia number", "- {id: a, nvidia: 580" + rest, `1:19: [0].nvidia: is the number 580: write comparisons such as "=580" or ">=590.48 <600"`},
		{"model of AMD", "- {id: a, gfx: [gfx900], model: [MI300X]" + rest, `1:33: [0].model: is for GPUs of NVIDIA: add the driver's version, such as nvidia: "=580"`},
		{"no model", "- {id: a, nvidia: \"=580\", model: []" + rest, "1:34: [0].model: is empty: write words of the GPU's name, such as [H100, H200]"},
		{"alias", "- {id: &x a, gfx: [gfx900], remedy: *x" + rest, "1:37: [0].remedy: is an alias (*x), which this file does not use: write a text; put it in quotes if it looks like a number"},
		{"second document", "[]\n---\n[]\n", "2:1: a second YAML document begins here: keep one document in the file"},
		{"not YAML", "- [\n", "1: not valid YAML: did not find expected node content: check indentation, colons and quotes there and just above"},
	}
	for _, tt := range tests {
		_, err := Parse("h.yaml", []byte(tt.text))
		if err == nil {
			t.Errorf("%s: accepted", tt.name)
			continue
		}
		if diff := cmp.Diff(tt.want, strings.TrimPrefix(strings.TrimPrefix(err.Error(), "h.yaml:"), " ")); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
}

func TestHostileFilesAreRefusedQuickly(t *testing.T) {
	for name, text := range map[string]string{
		"deep nesting":  strings.Repeat("[", 100_000),
		"many mistakes": "[" + strings.Repeat("{x: 1},", 10_000) + "]",
		"long texts":    "- {" + strings.Repeat("k", 1000) + ": 1, id: " + strings.Repeat("i", 10_000) + "}",
	} {
		_, err := Parse("f", []byte(text))
		if err == nil {
			t.Errorf("%s: accepted", name)
		} else if n := len(err.Error()); n > 10_000 {
			t.Errorf("%s: an error of %d bytes", name, n)
		}
	}
}

// FuzzParse checks that errors have their place, and that rows can be used and their
// ranges parsed again.
func FuzzParse(f *testing.F) {
	f.Add([]byte("- id: a\n  gfx: [gfx10xx]\n  apu: true\n  mes: \"=0x83\"\n  driver: dkms\n  mechanisms: [criu]\n  action: limit\n  why: >-\n    W.\n  issues: [a/b#1]\n"))
	f.Add([]byte("- {id: a, gfx: [gfx1100-gfx1103, gfx9xx], kernel: \">=6 <7.0-rc1\", action: allow, why: W.}\n"))
	f.Add([]byte("- &a {id: a, gfx: [*a], mes: \"=0x83\"}\n---\n"))
	f.Add([]byte("- {id: a, nvidia: \">=575 <600\", model: [H100], action: allow, why: W.}\n"))
	f.Add([]byte("\"")) // the library names no line
	f.Fuzz(func(t *testing.T, data []byte) {
		rows, err := Parse("f", data)
		if err != nil {
			if e, ok := errors.AsType[*yamlfile.Error](err); ok && (e.File != "f" || e.Line == 0 || e.Problem == "" || e.Remedy == "") {
				t.Fatalf("an incomplete error: %#v", e)
			}
			return
		}
		for _, row := range rows {
			if row.ID == "" || row.Why == "" || len(row.GFX)+len(row.NVIDIA) == 0 || len(row.Mechanisms) == 0 || row.Action > Note {
				t.Fatalf("an incomplete row: %+v", row)
			}
			for _, x := range row.GFX {
				if first, last, err := x.bounds(); err != nil || !x.Contains(first) || !x.Contains(last) {
					t.Fatalf("%s: %v", x, err)
				}
			}
			gpu := GPU{NVIDIA: "NVIDIA H200"}
			if len(row.NVIDIA) == 0 {
				first, _, _ := row.GFX[0].bounds()
				gpu = GPU{GFX: first, MES: 1}
			}
			Default().With([]Row{row}).Check(Host{Kernel: "6.12", NVIDIA: "580"}, gpu, row.Mechanisms[0])
		}
	})
}
