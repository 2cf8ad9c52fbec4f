// Package safety has the known problems of preemption by GPU, kernel and firmware, and the
// messages of the kernel log about GPUs that fail. It checks whether a host is supported:
// kernel, driver, GPUs, rights and processes.
package safety

import (
	_ "embed"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Action is what is allowed on a GPU. The zero value is the safe one.
type Action uint8

// The actions, the safest first.
const (
	// Deny: the mechanism is not used on processes with queues on the GPU.
	Deny Action = iota
	// Limit: the mechanism is attached to at most one process of the GPU at a time.
	Limit
	// Allow: no problem of preemption itself is known.
	Allow
	// Note: decides nothing. It is shown with the row that decides.
	Note
)

var actionNames = []string{"deny", "limit", "allow", "note"}

func (a Action) String() string { return gpreempt.Word(a, "action", actionNames...) }

// Mechanisms returns the mechanisms that a row about GPUs of AMD can be about.
func Mechanisms() []string {
	return mechanism.Names(func(k mechanism.Kind) bool { return k.Configured && k.Driver != "nvidia" })
}

// defaultMechanisms are those that unmap queues. The freezer only stops the program, and
// does not use the GPU's scheduler.
var defaultMechanisms = mechanism.Names(func(k mechanism.Kind) bool { return k.Driver == "kfd" })

// Host has the facts that all GPUs of a host share.
type Host struct {
	// Kernel is uname -r.
	Kernel string
	// Driver is the version of the amdgpu module; "" for the kernel's own driver, which has
	// no version.
	Driver string
	// NVIDIA is the version of the nvidia module; "" if it is unknown, or without its GPUs.
	NVIDIA string
}

// GPU has the facts of a GPU that rows use. An unknown firmware version is 0.
type GPU struct {
	ID gpreempt.GPUID
	// NVIDIA is the name of a GPU of the NVIDIA driver, such as "NVIDIA H200"; "" for others. It
	// has no other facts.
	NVIDIA string
	// GFX is gfx_target_version: major*10000 + minor*100 + step; 0 if unknown.
	GFX uint32
	// APU reports whether the GPU shares the die and the memory of a CPU.
	APU bool
	// MEC and SDMA are fw_version and sdma_fw_version of the topology, as the kernel
	// read them from the firmware files; MES and MESKIQ are the lower 12 bits, which
	// is what sysfs shows (amdgpu_ucode.c: FW_VERSION_ATTR).
	MEC, SDMA, MES, MESKIQ uint32
}

// Row is one row of the table, about GPUs of AMD (GFX) or of NVIDIA (NVIDIA). A missing condition
// holds for every GPU; a condition on firmware does not hold for an unknown version.
type Row struct {
	// ID is unique among the rows of a file.
	ID  string     `yaml:"id" need:"write a unique name, such as site-gfx1100"`
	GFX []GFXRange `yaml:"gfx" write:"write a list of names such as gfx942, families such as gfx11xx, spans such as gfx1100-gfx1103, or gfx*" filled:"list the GPUs, [gfx*] for all"`
	// APU reports whether the GPU must be an APU or must not; nil for both.
	APU *bool `yaml:"apu"`
	// Kernel is compared with the kernel version of the driver's code: that of the running
	// kernel, or for a DKMS driver the driver's version, which AMD numbers after the kernel
	// of its code.
	Kernel KernelRange `yaml:"kernel" write:"write comparisons such as \">=6.5 <7.0\""`
	// Driver is DKMS, InTree or "" for both.
	Driver string `yaml:"driver" words:"in-tree,dkms"`
	// Process is the kind of process that the row is about, such as GPUWithoutVM; "" for
	// all. CheckProcess reads rows about a kind, and Check only the others.
	Process string        `yaml:"process" words:"gpu-without-vm"`
	MES     FirmwareRange `yaml:"mes" write:"write comparisons such as \">=0x40 <0x80\"; 0 means unknown"`
	MESKIQ  FirmwareRange `yaml:"mes_kiq" write:"write comparisons such as \">=0x40 <0x80\"; 0 means unknown"`
	MEC     FirmwareRange `yaml:"mec" write:"write comparisons such as \">=0x40 <0x80\"; 0 means unknown"`
	SDMA    FirmwareRange `yaml:"sdma" write:"write comparisons such as \">=0x40 <0x80\"; 0 means unknown"`
	// Mechanisms the row is about.
	Mechanisms []string `yaml:"mechanisms" write:"write a list of mechanisms" filled:"write a list of mechanisms"`
	// NVIDIA is compared with the version of the NVIDIA driver.
	NVIDIA KernelRange `yaml:"nvidia" write:"write comparisons such as \"=580\" or \">=590.48 <600\""`
	// Models are words of the names of GPUs of NVIDIA; none for all.
	Models []string `yaml:"model" write:"write a list of words of the GPU's name, such as [H100, H200]" filled:"write words of the GPU's name, such as [H100, H200]"`
	Action Action   `yaml:"action" words:"deny,limit,allow,note" need:"write allow, limit or deny"`
	// Why is one sentence. Issues are public reports, as OWNER/REPOSITORY#NUMBER.
	Why    string   `yaml:"why" need:"write the reason in a sentence; it is shown to users"`
	Issues []string `yaml:"issues" write:"write a list of OWNER/REPOSITORY#NUMBER" filled:"write a list of OWNER/REPOSITORY#NUMBER"`
	// Read names the functions of the driver and the versions of their source that were read.
	Read string `yaml:"read"`
	// Searched is the day of a search for public reports, its terms and its result, as
	// "2026-11-28: ...".
	Searched string `yaml:"searched"`
	// Remedy says what to do; "" for nothing.
	Remedy string `yaml:"remedy"`
}

// Values of Row.Driver.
const (
	InTree = "in-tree"
	DKMS   = "dkms"
)

// GPUWithoutVM is a process that has a queue on a GPU, and no VM on the one that is checked,
// which comes later in the driver's list for the process.
const GPUWithoutVM = "gpu-without-vm"

// holds reports whether all conditions of the row hold for a GPU.
func (r Row) holds(h Host, g GPU) bool {
	if r.NVIDIA != "" && g.NVIDIA != "" {
		named := func(word string) bool { return slices.Contains(r.Models, word) }
		return r.NVIDIA.Contains(h.NVIDIA) && (len(r.Models) == 0 || slices.ContainsFunc(strings.Fields(g.NVIDIA), named))
	}
	kernel, driver := h.Kernel, InTree
	if h.Driver != "" {
		kernel, driver = h.Driver, DKMS
	}
	return g.NVIDIA == "" && slices.ContainsFunc(r.GFX, func(x GFXRange) bool { return x.Contains(g.GFX) }) &&
		(r.APU == nil || *r.APU == g.APU) &&
		(r.Driver == "" || r.Driver == driver) &&
		r.Kernel.Contains(kernel) &&
		r.MES.Contains(g.MES) && r.MESKIQ.Contains(g.MESKIQ) && r.MEC.Contains(g.MEC) && r.SDMA.Contains(g.SDMA)
}

// Result is the result of a check of one mechanism on one GPU.
type Result struct {
	Action Action
	// Row is the row that decided; its ID is "" if no row is about the mechanism.
	Row Row
	// Reason is one line: the GPU, the row, why, and the issues.
	Reason string
	// Notes are the rows that note something about the GPU and the mechanism.
	Notes []Row
}

// Noted returns the notes in one line, "" without one.
func (r Result) Noted() string {
	var texts []string
	for _, row := range r.Notes {
		texts = append(texts, "note "+row.ID+": "+row.Why)
	}
	return strings.Join(texts, " ")
}

// Table has rows in the order in which they are checked. It does not change.
type Table struct{ rows []Row }

//go:embed hazards.yaml
var builtIn []byte

var defaultTable = sync.OnceValue(func() *Table {
	rows, err := Parse("hazards.yaml", builtIn)
	if err != nil {
		panic("safety: the built-in table is invalid: " + err.Error())
	}
	return &Table{rows: rows}
})

// Default returns the built-in table. Its last rows deny dbgtrap, criu and nvchannels on every GPU
// without another row.
func Default() *Table { return defaultTable() }

// With returns a table that checks the override rows first.
func (t *Table) With(override []Row) *Table {
	return &Table{rows: slices.Concat(override, t.rows)}
}

// Check returns the result of the first row that is about the mechanism and whose
// conditions all hold, without notes, and all notes. A mechanism without a row is allowed.
func (t *Table) Check(h Host, g GPU, mechanism string) Result {
	return t.CheckProcess(h, g, "", mechanism)
}

// CheckProcess is Check by the rows about a kind of process.
func (t *Table) CheckProcess(h Host, g GPU, process, mechanism string) Result {
	result := Result{Action: Allow, Reason: "the hazard table has no row about " + mechanism + " here"}
	decided := false
	for _, r := range t.rows {
		if r.Process != process || !slices.Contains(r.Mechanisms, mechanism) || !r.holds(h, g) {
			continue
		}
		switch {
		case r.Action == Note:
			result.Notes = append(result.Notes, r)
		case !decided:
			decided = true
			result.Action, result.Row, result.Reason = r.Action, r, reason(h, g, r)
		}
	}
	return result
}

func reason(h Host, g GPU, r Row) string {
	s := gpreempt.GFXName(g.GFX)
	if g.MES != 0 {
		s += fmt.Sprintf(" with MES firmware %#x", g.MES)
	}
	if s += " on kernel " + h.Kernel; h.Driver != "" {
		s += " with the DKMS driver " + h.Driver
	}
	if g.NVIDIA != "" {
		s = g.NVIDIA + " with driver " + h.NVIDIA
	}
	s += ", hazard " + r.ID + ": " + r.Why
	if len(r.Issues) > 0 {
		s += " (" + strings.Join(r.Issues, ", ") + ")"
	}
	return s
}
