// Package hazard hides what is known to go wrong when queues are preempted: on
// which GPU, with which kernel and firmware, and what to do about it.
package hazard

import (
	_ "embed"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Action is what may be done to a GPU. The zero value is the safe one.
type Action uint8

// The actions, the safest first.
const (
	// Deny: the mechanism is not used on processes with queues on the GPU.
	Deny Action = iota
	// Limit: it holds at most one process of the GPU at a time.
	Limit
	// Allow: nothing is known against it.
	Allow
)

var actionNames = []string{"deny", "limit", "allow"}

func (a Action) String() string {
	if int(a) < len(actionNames) {
		return actionNames[a]
	}
	return fmt.Sprintf("action(%d)", uint8(a))
}

// Mechanisms names those a row can be about.
func Mechanisms() []string { return []string{"dbgtrap", "criu", "freezer"} }

// defaultMechanisms are those that take queues off a GPU; the freezer lets them run
// dry and does not touch the GPU's scheduler.
var defaultMechanisms = []string{"dbgtrap", "criu"}

// Host is what all GPUs of a machine share.
type Host struct {
	// Kernel is uname -r.
	Kernel string
	// Driver is the version of the amdgpu module; "" for the kernel's own driver,
	// which has none.
	Driver string
}

// GPU is what the table asks of a GPU. A firmware version is 0 when not known.
type GPU struct {
	ID gpreempt.GPUID
	// GFX is gfx_target_version: major*10000 + minor*100 + step; 0 when not known.
	GFX uint32
	// APU tells that the GPU shares the die and the memory of a CPU.
	APU bool
	// MEC and SDMA are fw_version and sdma_fw_version of the topology, as the kernel
	// read them from the firmware files; MES and MESKIQ are the lower 12 bits, which
	// is what sysfs shows (amdgpu_ucode.c: FW_VERSION_ATTR).
	MEC, SDMA, MES, MESKIQ uint32
}

// Row is one line of the table. What it leaves out holds for every GPU; a
// condition on firmware does not hold where the version is not known.
type Row struct {
	// ID names the row; unique among the rows parsed together.
	ID  string
	GFX []GFXRange
	// APU reports whether the GPU must be an APU or must not; nil for both.
	APU *bool
	// Kernel is compared with the version of the kernel the driver's code is of:
	// the running one, or for a DKMS driver the driver's version, which AMD numbers
	// after the kernel it took the code from.
	Kernel KernelRange
	// Driver is DKMS, InTree or "" for both.
	Driver                 string
	MES, MESKIQ, MEC, SDMA FirmwareRange
	// Mechanisms the row is about.
	Mechanisms []string
	Action     Action
	// Why is one sentence. Issues are public threads, as OWNER/REPOSITORY#NUMBER.
	Why    string
	Issues []string
	// Remedy says what to do; "" when nothing is to be done.
	Remedy string
}

// Where the driver comes from.
const (
	InTree = "in-tree"
	DKMS   = "dkms"
)

// holds reports whether the row speaks of this GPU.
func (r Row) holds(h Host, g GPU) bool {
	kernel, driver := h.Kernel, InTree
	if h.Driver != "" {
		kernel, driver = h.Driver, DKMS
	}
	return slices.ContainsFunc(r.GFX, func(x GFXRange) bool { return x.Contains(g.GFX) }) &&
		(r.APU == nil || *r.APU == g.APU) &&
		(r.Driver == "" || r.Driver == driver) &&
		r.Kernel.Contains(kernel) &&
		r.MES.Contains(g.MES) && r.MESKIQ.Contains(g.MESKIQ) && r.MEC.Contains(g.MEC) && r.SDMA.Contains(g.SDMA)
}

// Conditions writes what the row asks for, in the words of the file.
func (r Row) Conditions() string {
	var gfx []string
	for _, x := range r.GFX {
		gfx = append(gfx, x.String())
	}
	parts := []string{"gfx [" + strings.Join(gfx, ", ") + "]"}
	if r.APU != nil {
		parts = append(parts, fmt.Sprintf("apu %t", *r.APU))
	}
	for _, c := range []struct{ key, text string }{
		{"driver", r.Driver},
		{"kernel", r.Kernel.String()},
		{"mes", r.MES.String()},
		{"mes_kiq", r.MESKIQ.String()},
		{"mec", r.MEC.String()},
		{"sdma", r.SDMA.String()},
	} {
		if c.text != "" {
			parts = append(parts, c.key+" "+c.text)
		}
	}
	return strings.Join(parts, ", ")
}

// String writes the whole row in one line, but for its ID.
func (r Row) String() string {
	s := fmt.Sprintf("%s %s if %s: %s", r.Action, strings.Join(r.Mechanisms, ", "), r.Conditions(), r.Why)
	if len(r.Issues) > 0 {
		s += " (" + strings.Join(r.Issues, ", ") + ")"
	}
	if r.Remedy != "" {
		s += " " + r.Remedy
	}
	return s
}

// Verdict is what the table says of one mechanism on one GPU.
type Verdict struct {
	Action Action
	// Row is the row that decided; its ID is "" when no row is about the mechanism.
	Row Row
	// Site tells that the row is the site's own, not built in.
	Site bool
	// Reason says it in one line: the GPU, the row, why, and the issues.
	Reason string
}

// Table is rows in the order they are looked at. It does not change.
type Table struct {
	rows []Row
	site int // of them, from the front
}

//go:embed hazards.yaml
var builtIn []byte

var defaultTable = sync.OnceValue(func() *Table {
	rows, err := Parse("hazards.yaml", builtIn)
	if err != nil {
		panic("hazard: the built-in table is wrong: " + err.Error())
	}
	return &Table{rows: rows}
})

// Default returns the built-in table. Its last row denies dbgtrap and criu on every
// GPU no other row is about.
func Default() *Table { return defaultTable() }

// Rows returns the rows, in the order they are looked at.
func (t *Table) Rows() []Row { return slices.Clone(t.rows) }

// With returns a table that looks at the override rows first.
func (t *Table) With(override []Row) *Table {
	return &Table{rows: slices.Concat(override, t.rows), site: len(override) + t.site}
}

// Judge returns the word of the first row that is about the mechanism and whose
// conditions all hold. A mechanism no row is about is allowed.
func (t *Table) Judge(h Host, g GPU, mechanism string) Verdict {
	for i, r := range t.rows {
		if slices.Contains(r.Mechanisms, mechanism) && r.holds(h, g) {
			return Verdict{Action: r.Action, Row: r, Site: i < t.site, Reason: reason(h, g, r)}
		}
	}
	return Verdict{Action: Allow, Reason: "no row of the hazard table is about " + mechanism + " here"}
}

func reason(h Host, g GPU, r Row) string {
	s := GFXName(g.GFX)
	if g.MES != 0 {
		s += fmt.Sprintf(" with MES firmware %#x", g.MES)
	}
	if s += " on kernel " + h.Kernel; h.Driver != "" {
		s += " with the DKMS driver " + h.Driver
	}
	s += ", hazard " + r.ID + ": " + r.Why
	if len(r.Issues) > 0 {
		s += " (" + strings.Join(r.Issues, ", ") + ")"
	}
	return s
}
