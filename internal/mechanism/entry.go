package mechanism

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// An entry is a text of two lines, the second being JSON and the checksum that of
// the second with its newline:
//
//	gpreempt-pause 1 crc32c=5d3f0c21
//	{"mechanism":"freezer","pid":4242,"start":123456,...}
const (
	magic   = "gpreempt-pause"
	version = 1
	// maxSize is the largest size of a file in bytes: more than the longest cgroup path
	// needs.
	maxSize = 64 << 10
	// draftPrefix begins the name of a file that is being written.
	draftPrefix = ".draft-"
)

// record is the second line.
type record struct {
	Mechanism string    `json:"mechanism"`
	PID       int32     `json:"pid"`
	Start     uint64    `json:"start"`
	Cgroup    string    `json:"cgroup,omitempty"`
	CgroupID  uint64    `json:"cgroup_id,omitempty"`
	Home      string    `json:"home,omitempty"`
	At        time.Time `json:"at"`
	BootID    string    `json:"boot_id"`
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// What is wrong with a file.
var (
	errTorn    = errors.New("it is damaged")
	errForeign = errors.New("it is not an entry of this journal")
	errNewer   = errors.New("a newer gpreemptd wrote it")
)

// BadEntry is a file of the journal that cannot be read.
type BadEntry struct {
	Path string
	Err  error
	// Used is set if the process in the name of the file is resumed. It is not if another
	// user could have written the file, or if the program knows no such mechanism.
	Used bool
}

// Error names the file, the problem and the remedy.
func (e *BadEntry) Error() string {
	next := "it is ignored: remove it"
	if named := nameOnly(filepath.Base(e.Path)); named.NameOnly && e.Used {
		next = fmt.Sprintf("process %d, from the name of the file, is resumed without the details of its pause: check that it runs, and restart it if not", named.Target.PID)
	} else if named.NameOnly {
		next = fmt.Sprintf("it is ignored, and process %d, from its name, is not resumed: check that it runs, and restart it if not; then remove the file", named.Target.PID)
	}
	if errors.Is(e.Err, errNewer) {
		next += "; run the gpreemptd that wrote the file with --cleanup, which removes it"
	}
	return fmt.Sprintf("journal of pauses: %s: %v; %s", e.Path, e.Err, next)
}

// Unwrap returns the problem.
func (e *BadEntry) Unwrap() error { return e.Err }

// name returns the name of the file of the entry.
func (e JournalEntry) name() string { return fileName(e.Target, e.Mechanism) }

func fileName(target gpreempt.ProcessKey, mechanism string) string {
	return fmt.Sprintf("%d-%d.%s", target.PID, target.Start, mechanism)
}

// nameOnly returns the entry that the name of a file describes, and the zero JournalEntry for a
// name that Begin does not use.
func nameOnly(name string) JournalEntry {
	process, mechanism, _ := strings.Cut(name, ".")
	pid, start, _ := strings.Cut(process, "-")
	p, errPID := strconv.ParseInt(pid, 10, 32)
	s, errStart := strconv.ParseUint(start, 10, 64)
	e := JournalEntry{Mechanism: mechanism, Target: gpreempt.ProcessKey{PID: int32(p), Start: s}, NameOnly: true}
	if errPID != nil || errStart != nil || e.checkName() != nil || e.name() != name {
		return JournalEntry{}
	}
	return e
}

// check returns why e is not a valid entry.
func (e JournalEntry) check() error {
	if err := e.checkName(); err != nil {
		return err
	}
	switch {
	case (e.Cgroup == "") != (e.CgroupID == 0):
		return errors.New("a cgroup has a path and an id, or neither")
	case e.Cgroup != "" && (e.Cgroup[0] != '/' || path.Clean(e.Cgroup) != e.Cgroup || e.Cgroup == "/"):
		return fmt.Errorf("%q is not the path of a cgroup that can be frozen", e.Cgroup)
	case e.Home != "" && (e.Cgroup == "" || e.Home[0] != '/' || path.Clean(e.Home) != e.Home):
		return fmt.Errorf("%q is not the path of a cgroup", e.Home)
	case len(e.Home) > 4096 || strings.ToValidUTF8(e.Home, "") != e.Home || len(e.Cgroup) > 4096 || strings.ToValidUTF8(e.Cgroup, "") != e.Cgroup:
		return errors.New("the path of the cgroup is too long or not valid UTF-8")
	case e.At.UTC().Year() < 1 || e.At.UTC().Year() > 9999:
		return fmt.Errorf("%v is not a valid time", e.At)
	case e.BootID == "":
		return errors.New("the boot id is missing")
	}
	return nil
}

// checkName returns why e cannot have a file.
func (e JournalEntry) checkName() error {
	bad := strings.ContainsFunc(e.Mechanism, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '-'
	})
	switch {
	case bad || e.Mechanism == "" || len(e.Mechanism) > 64:
		return fmt.Errorf("%q is not a valid name of a mechanism", e.Mechanism)
	case e.Target.PID <= 0 || e.Target.Start == 0:
		return fmt.Errorf("%v is not a valid process", e.Target)
	}
	return nil
}

// encode returns the text of an entry that passed check.
func (e JournalEntry) encode() []byte {
	body, err := json.Marshal(record{e.Mechanism, e.Target.PID, e.Target.Start, e.Cgroup, e.CgroupID, e.Home, e.At.UTC(), e.BootID})
	if err != nil {
		panic(err) // numbers, strings and a time in the years JSON has
	}
	return seal(append(body, '\n'))
}

// seal prepends the first line to the second.
func seal(body []byte) []byte {
	return fmt.Appendf(nil, "%s %d crc32c=%08x\n%s", magic, version, crc32.Checksum(body, castagnoli), body)
}

// decode reads what encode wrote.
func decode(text []byte) (JournalEntry, error) {
	head, body, _ := bytes.Cut(text, []byte("\n"))
	word, rest, _ := strings.Cut(string(head), " ")
	number, sum, _ := strings.Cut(rest, " ")
	v, err := strconv.ParseUint(number, 10, 31)
	switch {
	case len(text) == 0:
		return JournalEntry{}, fmt.Errorf("%w: it is empty", errTorn)
	case word != magic && strings.HasPrefix(magic, string(text)):
		return JournalEntry{}, fmt.Errorf("%w: it ends early", errTorn)
	case word != magic:
		return JournalEntry{}, fmt.Errorf("%w: it does not begin with %s", errForeign, magic)
	case err != nil || v == 0:
		return JournalEntry{}, fmt.Errorf("%w: its format number is missing", errTorn)
	case v > version:
		return JournalEntry{}, fmt.Errorf("%w: its format is %d, and this version reads %d", errNewer, v, version)
	case sum != fmt.Sprintf("crc32c=%08x", crc32.Checksum(body, castagnoli)):
		return JournalEntry{}, fmt.Errorf("%w: its checksum does not match", errTorn)
	}
	var r record
	d := json.NewDecoder(bytes.NewReader(body))
	d.DisallowUnknownFields()
	if err := d.Decode(&r); err != nil {
		return JournalEntry{}, fmt.Errorf("%w: %w", errForeign, err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return JournalEntry{}, fmt.Errorf("%w: data follows the entry", errForeign)
	}
	e := JournalEntry{
		Mechanism: r.Mechanism, Target: gpreempt.ProcessKey{PID: r.PID, Start: r.Start},
		Cgroup: r.Cgroup, CgroupID: r.CgroupID, Home: r.Home, At: r.At, BootID: r.BootID,
	}
	if err := e.check(); err != nil {
		return JournalEntry{}, fmt.Errorf("%w: %w", errForeign, err)
	}
	return e, nil
}
