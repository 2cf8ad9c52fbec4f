package safety

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestKnownMachines(t *testing.T) {
	newKernel, oldKernel := Host{Kernel: "7.2.13-amd64"}, Host{Kernel: "6.12.43+deb13-amd64"}
	tests := []struct {
		name      string
		host      Host
		gpu       GPU
		mechanism string
		want      string
	}{
		{"MI300X", oldKernel, GPU{GFX: 90402}, "dbgtrap", "allow cdna"},
		{"MI210, criu", oldKernel, GPU{GFX: 90010}, "criu", "allow cdna"},
		{"MI355X", newKernel, GPU{GFX: 90500}, "dbgtrap", "allow cdna"},
		{"MI50", oldKernel, GPU{GFX: 90006}, "dbgtrap", "limit gfx9-one-debug-vmid"},
		{"MI100, criu", oldKernel, GPU{GFX: 90008}, "criu", "allow gfx9-whole-process"},
		{"Strix Halo, old firmware", newKernel, GPU{GFX: 110501, APU: true, MES: 0x80}, "dbgtrap", "deny gfx1151-mes-80"},
		{"Strix Halo, broken firmware", newKernel, GPU{GFX: 110501, APU: true, MES: 0x83}, "criu", "deny gfx1151-mes-83"},
		{"Strix Halo, good firmware, old kernel", oldKernel, GPU{GFX: 110501, APU: true, MES: 0x88}, "dbgtrap", "deny gfx1151-save-area"},
		{"Strix Halo, repaired", newKernel, GPU{GFX: 110501, APU: true, MES: 0x88}, "dbgtrap", "limit gfx1151-repaired"},
		{"Strix Halo, firmware not known", newKernel, GPU{GFX: 110501, APU: true}, "dbgtrap", "deny gfx1151-unresponsive"},
		{
			"Strix Halo, DKMS driver on an old kernel",
			Host{Kernel: "6.8.0-137-generic", Driver: "7.1.3.31500000"},
			GPU{GFX: 110501, APU: true, MES: 0x88},
			"dbgtrap", "limit gfx1151-repaired",
		},
		{
			"Strix Halo, old DKMS driver on a new kernel",
			Host{Kernel: "7.0.0-29-generic", Driver: "6.19.4"},
			GPU{GFX: 110501, APU: true, MES: 0x88},
			"dbgtrap", "deny gfx1151-save-area",
		},
		{"780M", newKernel, GPU{GFX: 110003, APU: true, MES: 0x80}, "dbgtrap", "deny gfx1103-remove-queue"},
		{"890M", newKernel, GPU{GFX: 110500, APU: true, MES: 0x90}, "dbgtrap", "deny apu"},
		{"7900 XTX, new kernel", newKernel, GPU{GFX: 110000, MES: 0x55}, "dbgtrap", "limit gfx110x-half-the-cus"},
		{"7900 XTX, criu", newKernel, GPU{GFX: 110000, MES: 0x55}, "criu", "deny gfx1100-many-processes"},
		{"7900 XTX, old kernel", oldKernel, GPU{GFX: 110000, MES: 0x55}, "dbgtrap", "deny gfx1100-many-processes"},
		{"7800 XT, old kernel", oldKernel, GPU{GFX: 110001, MES: 0x55}, "dbgtrap", "deny rdna"},
		{"7600 XT", newKernel, GPU{GFX: 110002, MES: 0x55}, "dbgtrap", "deny gfx1102-preemption-failed"},
		{"R9700", newKernel, GPU{GFX: 120001, MES: 0x70}, "dbgtrap", "deny gfx1201-mes-queue"},
		{"V620", newKernel, GPU{GFX: 100300}, "dbgtrap", "deny gfx1030-oversubscribed"},
		{"6700 XT, new kernel", newKernel, GPU{GFX: 100301}, "dbgtrap", "limit gfx10-one-debug-vmid"},
		{"6700 XT, old kernel", oldKernel, GPU{GFX: 100301}, "dbgtrap", "deny rdna"},
		{"Steam Deck", newKernel, GPU{GFX: 100303, APU: true}, "dbgtrap", "deny apu"},
		{"a GPU of the future", newKernel, GPU{GFX: 130000}, "dbgtrap", "deny unknown"},
		{"a Fiji", newKernel, GPU{GFX: 80003}, "criu", "deny unknown"},
		{"no GFX version", newKernel, GPU{}, "dbgtrap", "deny unknown"},
		{"a release candidate", Host{Kernel: "7.0.0-rc6"}, GPU{GFX: 110501, APU: true, MES: 0x88}, "dbgtrap", "deny gfx1151-save-area"},
		{"no kernel version", Host{}, GPU{GFX: 110501, APU: true, MES: 0x88}, "dbgtrap", "deny gfx1151-save-area"},
		{"the freezer on a bad GPU", newKernel, GPU{GFX: 110003, APU: true}, "freezer", "allow "},
		{"the simulation", newKernel, GPU{GFX: 110003, APU: true}, "sim", "allow "},
	}
	for _, tt := range tests {
		v := Default().Check(tt.host, tt.gpu, tt.mechanism)
		if got := v.Action.String() + " " + v.Row.ID; got != tt.want {
			t.Errorf("%s: %s, want %s", tt.name, got, tt.want)
		}
		if v.Reason == "" {
			t.Errorf("%s: no reason", tt.name)
		}
	}
}

func TestReasonNamesTheMachineTheRowAndTheIssue(t *testing.T) {
	v := Default().Check(Host{Kernel: "6.14.0-37-generic"}, GPU{GFX: 110501, APU: true, MES: 0x83}, "dbgtrap")
	want := "gfx1151 with MES firmware 0x83 on kernel 6.14.0-37-generic, hazard gfx1151-mes-83: This MES firmware does not answer " +
		"REMOVE_QUEUE, queues cannot be evicted and the GPU is reset. (ROCm/legacy-rocm-build#5724)"
	if diff := cmp.Diff(want, v.Reason); diff != "" {
		t.Errorf("Reason (-want +got):\n%s", diff)
	}
	v = Default().Check(Host{Kernel: "6.8", Driver: "6.16.6"}, GPU{}, "criu")
	want = "a GPU of unknown architecture on kernel 6.8 with the DKMS driver 6.16.6, hazard unknown: Preemption has not been tested on this GPU."
	if diff := cmp.Diff(want, v.Reason); diff != "" {
		t.Errorf("Reason (-want +got):\n%s", diff)
	}
}

// Rows about a kind of process are not about others, and only a row about the kind allows it.
func TestProcessWithoutAVMHasRowsOfItsOwn(t *testing.T) {
	host, gpu := Host{Kernel: "6.12.117"}, GPU{GFX: 90402}
	row := func(process string) []Row {
		return []Row{{ID: "site", GFX: []GFXRange{"gfx*"}, Process: process, Kernel: "=6.12.117", Mechanisms: defaultMechanisms, Action: Allow}}
	}
	var got []string
	for _, table := range []*Table{Default(), Default().With(row("")), Default().With(row(GPUWithoutVM))} {
		for _, process := range []string{"", GPUWithoutVM} {
			r := table.CheckProcess(host, gpu, process, "dbgtrap")
			got = append(got, r.Action.String()+" "+r.Row.ID)
		}
	}
	want := []string{"allow cdna", "deny gpu-without-vm", "allow site", "deny gpu-without-vm", "allow cdna", "allow site"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("results (-want +got):\n%s", diff)
	}
}

// A row that an earlier one hides is an error in the order of the table.
func TestEveryRowDecidesForSomeMachine(t *testing.T) {
	table := Default()
	hosts, gpus := machines(table)
	hosts, gpus = append(hosts, Host{NVIDIA: "580.159.04"}), append(gpus, GPU{NVIDIA: "NVIDIA H200"}, GPU{NVIDIA: "NVIDIA A100"})
	for _, row := range table.rows {
		for _, mechanism := range row.Mechanisms {
			if !slices.ContainsFunc(hosts, func(h Host) bool {
				return slices.ContainsFunc(gpus, func(g GPU) bool {
					r := table.CheckProcess(h, g, row.Process, mechanism)
					return r.Row.ID == row.ID || slices.Contains(ids(r.Notes), row.ID)
				})
			}) {
				t.Errorf("row %s decides for no machine that asks about %s", row.ID, mechanism)
			}
		}
	}
}

func ids(rows []Row) []string {
	var all []string
	for _, row := range rows {
		all = append(all, row.ID)
	}
	return all
}

// What can happen to others differs by scheduler, kernel and kind of queue. It decides nothing.
func TestNotesAreOfTheGPUAndTheKernel(t *testing.T) {
	tests := []struct {
		name   string
		kernel string
		gfx    uint32
		want   string
	}{
		{"MI300X, 6.12", "6.12.117", 90402, "allow cdna [hws-queue-reset]"},
		{"MI300X, 7.2", "7.2.13", 90402, "allow cdna [hws-queue-reset sdma-queue-reset]"},
		{"MI355X, 7.3", "7.3.4", 90500, "allow cdna [hws-queue-reset sdma-queue-reset]"},
		{"MI250X, 7.3", "7.3.4", 90010, "allow cdna [hws-queue-reset]"},
		{"MI100, 7.3", "7.3.4", 90008, "limit gfx9-one-debug-vmid [hws-queue-reset]"},
		{"6700 XT, 7.3", "7.3.4", 100301, "limit gfx10-one-debug-vmid [hws-queue-reset]"},
		{"7900 XTX, 6.12", "6.12.117", 110000, "deny gfx1100-many-processes [mes-removal-resets]"},
		{"7900 XTX, 7.2", "7.2.13", 110000, "limit gfx110x-half-the-cus [mes-removal-ignored]"},
		{"7900 XTX, 7.3", "7.3.4", 110000, "limit gfx110x-half-the-cus [mes-removal-suspends-all]"},
		{"R9700, 7.3", "7.3.4", 120001, "deny gfx1201-mes-queue [mes-removal-suspends-all]"},
		{"MI300X, before what was read", "6.8.0", 90402, "allow cdna []"},
	}
	for _, tt := range tests {
		r := Default().Check(Host{Kernel: tt.kernel}, GPU{GFX: tt.gfx, MES: 0x80}, "dbgtrap")
		if got := fmt.Sprintf("%s %s %v", r.Action, r.Row.ID, ids(r.Notes)); got != tt.want {
			t.Errorf("%s: %s, want %s", tt.name, got, tt.want)
		}
	}
}

// A note of the site is shown with what decides, too, and does not hide it.
func TestNoteOfTheSiteDecidesNothing(t *testing.T) {
	site, err := Parse("site.yaml", []byte("- {id: ours, gfx: [gfx*], action: note, why: Seen in our lab.}\n"))
	if err != nil {
		t.Fatal(err)
	}
	r := Default().With(site).Check(Host{Kernel: "6.8"}, GPU{GFX: 90402}, "dbgtrap")
	if got, want := fmt.Sprint(r.Action, " ", r.Row.ID, " ", r.Noted()), "allow cdna note ours: Seen in our lab."; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// machines returns one of every kind that the table distinguishes, and others.
func machines(table *Table) ([]Host, []GPU) {
	kernels, firmware := []string{"6.5.0", "99.0"}, []uint32{0, 0xfff}
	gfx := []uint32{0}
	for _, row := range table.rows {
		_ = comparisons(string(row.Kernel), func(_, version string) error {
			kernels = append(kernels, version)
			return nil
		})
		for _, r := range []FirmwareRange{row.MES, row.MESKIQ, row.MEC, row.SDMA} {
			_ = comparisons(string(r), func(_, version string) error {
				bound, err := strconv.ParseUint(version, 0, 32)
				if err != nil {
					panic(err) // the table has been parsed
				}
				v := uint32(bound)
				firmware = append(firmware, v, v-1, v+1)
				return nil
			})
		}
		for _, x := range row.GFX {
			first, last, err := x.bounds()
			if err != nil {
				panic(err) // the table has been parsed
			}
			gfx = append(gfx, first, last)
		}
	}
	slices.Sort(gfx)
	var hosts []Host
	for _, k := range kernels {
		hosts = append(hosts, Host{Kernel: k}, Host{Kernel: "6.8", Driver: k})
	}
	var gpus []GPU
	for _, x := range slices.Compact(gfx) {
		for _, fw := range firmware {
			for _, apu := range []bool{false, true} {
				gpus = append(gpus, GPU{GFX: x, APU: apu, MES: fw, MESKIQ: fw, MEC: fw, SDMA: fw})
			}
		}
	}
	return hosts, gpus
}

// The last row denies preemption on GPUs that are not known to work.
func TestNothingIsAllowedOnAGPUWithoutARow(t *testing.T) {
	hosts, gpus := machines(Default())
	for _, mechanism := range []string{"dbgtrap", "criu"} {
		for _, h := range hosts {
			for _, g := range gpus {
				if v := Default().Check(h, g, mechanism); v.Row.ID == "" {
					t.Fatalf("%+v %+v %s: %s by no row", h, g, mechanism, v.Action)
				}
			}
		}
	}
}

func TestRowsOfTheSiteAreCheckedFirst(t *testing.T) {
	site, err := Parse("site.yaml", []byte(`
- id: ours
  gfx: [gfx1103]
  kernel: ">=7.0.14"
  mechanisms: [criu]
  action: allow
  why: Soaked for a week.
- id: never
  gfx: [gfx*]
  mechanisms: [freezer]
  action: deny
  why: Jobs here do not survive it.
`))
	if err != nil {
		t.Fatal(err)
	}
	type result struct {
		action Action
		id     string
	}
	table := Default().With(site)
	gpu := GPU{GFX: 110003, APU: true}
	var got []result
	for _, q := range []struct{ kernel, mechanism string }{
		{"7.0.14-8-pve", "criu"},
		{"7.0.13", "criu"},
		{"7.0.14-8-pve", "dbgtrap"},
		{"7.0.14-8-pve", "freezer"},
	} {
		v := table.Check(Host{Kernel: q.kernel}, gpu, q.mechanism)
		got = append(got, result{v.Action, v.Row.ID})
	}
	want := []result{{Allow, "ours"}, {Deny, "gfx1103-remove-queue"}, {Deny, "gfx1103-remove-queue"}, {Deny, "never"}}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(result{})); diff != "" {
		t.Errorf("results (-want +got):\n%s", diff)
	}
	if n, m := len(Default().rows), len(table.rows); m != n+2 {
		t.Errorf("%d rows with 2 more than %d", m, n)
	}
}

func TestEveryRowSaysWhatToDo(t *testing.T) {
	for _, row := range Default().rows {
		if row.Action != Allow && row.Remedy == "" {
			t.Errorf("row %s has no remedy", row.ID)
		}
		for _, sentence := range []string{row.Why, row.Read, row.Searched, row.Remedy} {
			if sentence != "" && !strings.HasSuffix(sentence, ".") {
				t.Errorf("row %s: %q is not a sentence", row.ID, sentence)
			}
		}
	}
}

// A row says where its knowledge is from: a report, the driver's source, a measurement or a search. A
// row that allows says what was searched for, when, and what was found. The last row about each
// driver denies for lack of evidence.
func TestEveryRowNamesItsEvidence(t *testing.T) {
	for _, row := range Default().rows {
		byDefault := row.ID == "unknown" || row.ID == "nvidia-unmeasured"
		if row.Read == "" && row.Searched == "" && len(row.Issues) == 0 && !byDefault {
			t.Errorf("row %s names no evidence", row.ID)
		}
		if row.Action == Allow && row.Searched == "" {
			t.Errorf("row %s allows, and does not say what was searched for and when", row.ID)
		}
		if row.Searched != "" {
			if _, err := time.Parse(time.DateOnly, row.Searched[:len(time.DateOnly)]); err != nil {
				t.Errorf("row %s: %v", row.ID, err)
			}
		}
	}
}

func TestTheZeroActionIsTheSafeOne(t *testing.T) {
	var a Action
	if got := fmt.Sprint(a, Limit, Allow, Note, Action(9)); got != "deny limit allow note action(9)" {
		t.Error(got)
	}
}
