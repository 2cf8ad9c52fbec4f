package evidence

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
)

// The files in the folder of a run. The samples are in CSV files beside them, a row for each,
// logs/ has what the processes of the run wrote, and kfd/ what the driver did.
const (
	RunFile  = "run.json"
	PlanFile = "plan.yaml"
	PIDsFile = "pids.json"
	LogsDir  = "logs"
	KFDDir   = "kfd"
)

// MaxFile bounds a file of a run, in bytes: some million requests.
const MaxFile = 256 << 20

// document is the content of run.json: the run without its samples, and the number of rows in
// each CSV file, by which a damaged file is detected.
type document struct {
	Run
	Rows map[string]int `json:"rows"`
}

// Write writes a run to a folder, which it makes if it does not exist. Each file is replaced as
// a whole, and run.json last: after a crash the folder has the run as it was, or as it is.
func Write(dir string, run *Run) error {
	files, err := encode(run)
	if err != nil {
		return fmt.Errorf("cannot write the run to %s: %w", dir, err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // G301: the figures are no secret
		return fmt.Errorf("cannot write the run: %w: choose another folder", err)
	}
	for _, f := range files {
		if f.name == RunFile {
			// The rows that it counts must not be lost without it.
			if err := syncDir(dir); err != nil {
				return fmt.Errorf("cannot write the run: %w", err)
			}
		}
		if err := replace(dir, f.name, f.data); err != nil {
			return fmt.Errorf("cannot write %s: %w", filepath.Join(dir, f.name), err)
		}
	}
	return syncDir(dir)
}

// file is a file of a run.
type file struct {
	name string
	data []byte
}

// encode returns the files of a run, in the order in which they must be written.
func encode(run *Run) (files []file, err error) {
	if err := run.check(); err != nil {
		return nil, err
	}
	doc := document{Run: *run, Rows: map[string]int{}}
	doc.Format = Format
	doc.Arms = slices.Clone(run.Arms)
	for i := range doc.Arms {
		doc.Arms[i].Repeats = slices.Clone(doc.Arms[i].Repeats)
		for j := range doc.Arms[i].Repeats {
			r := &doc.Arms[i].Repeats[j]
			r.Requests, r.Suspends, r.Resumes, r.Samples, r.Spans = nil, nil, nil, nil, nil
		}
	}
	for _, t := range tables {
		var text bytes.Buffer
		if doc.Rows[t.file], err = t.encode(&text, run); err != nil {
			return nil, fmt.Errorf("%s: %w", t.file, err)
		}
		files = append(files, file{t.file, text.Bytes()})
	}
	files = append(files, file{PlanFile, []byte(run.Plan)})
	text, err := json.MarshalIndent(doc, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("%s: %w", RunFile, err)
	}
	return append(files, file{RunFile, append(text, '\n')}), nil
}

// Append adds a finished repeat of the named arm to a run, and writes the run to its folder, so
// that an interrupted run can be continued.
func Append(dir string, run *Run, arm string, r *Repeat) error {
	i := slices.IndexFunc(run.Arms, func(a Arm) bool { return a.Name == arm })
	if i < 0 {
		return fmt.Errorf("the run has no arm %q", arm)
	}
	run.Arms[i].Repeats = append(run.Arms[i].Repeats, *r)
	return Write(dir, run)
}

// replace replaces a file as a whole.
func replace(dir, name string, data []byte) (err error) {
	tmp, err := os.CreateTemp(dir, "."+name+"-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(tmp.Name()))
		}
	}()
	_, err = tmp.Write(data)
	if err = errors.Join(err, tmp.Chmod(0o644), tmp.Sync(), tmp.Close()); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), filepath.Join(dir, name))
}

// syncDir makes the names of a folder last through a loss of power.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// Read reads the run in a folder. The error wraps fs.ErrNotExist when the folder has none.
func Read(dir string) (*Run, error) {
	run, err := ReadFS(folder(dir))
	if err != nil {
		return nil, fmt.Errorf("cannot read the run in %s: %w", dir, err)
	}
	return run, nil
}

// ReadFS is Read from a file system.
func ReadFS(dir fs.FS) (*Run, error) {
	text, err := fs.ReadFile(dir, RunFile)
	if err != nil {
		return nil, err
	}
	var version struct{ Format int }
	if err := json.Unmarshal(text, &version); err != nil {
		return nil, fmt.Errorf("%s: %w", RunFile, err)
	}
	if version.Format != Format {
		return nil, fmt.Errorf("%s has format %d and this program reads %d: use the gplab that wrote it", RunFile, version.Format, Format)
	}
	var doc document
	strict := json.NewDecoder(bytes.NewReader(text))
	strict.DisallowUnknownFields()
	if err := strict.Decode(&doc); err != nil {
		return nil, fmt.Errorf("%s: %w", RunFile, err)
	}
	run := &doc.Run
	if err := run.check(); err != nil {
		return nil, fmt.Errorf("%s: %w", RunFile, err)
	}
	for i := range run.Arms {
		for j := range run.Arms[i].Repeats {
			r := &run.Arms[i].Repeats[j]
			r.Requests, r.Suspends, r.Resumes, r.Samples, r.Spans = nil, nil, nil, nil, nil
		}
	}
	run.Faults, run.Alarms = none(run.Faults), none(run.Alarms)
	for _, t := range tables {
		if err := t.read(dir, run, doc.Rows[t.file]); err != nil {
			return nil, fmt.Errorf("%s: %w", t.file, err)
		}
	}
	return run, nil
}

// none returns nil for an empty list, which is what a file without the list has.
func none[T any](list []T) []T {
	if len(list) == 0 {
		return nil
	}
	return list
}

// check returns an error for a run that cannot be in a file.
func (run *Run) check() error {
	if !slices.Contains([]Origin{Simulated, Emulated, Hardware}, run.Origin) {
		return fmt.Errorf("the origin %q is not known: it must be %s, %s or %s", run.Origin, Simulated, Emulated, Hardware)
	}
	names := map[string]bool{}
	for _, arm := range run.Arms {
		switch {
		case arm.Name == "" || names[arm.Name]:
			return fmt.Errorf("two arms have the name %q: each needs a name of its own", arm.Name)
		case clean(arm.Name) != arm.Name:
			return fmt.Errorf("the name %q of an arm has control characters", arm.Name)
		case !slices.Contains([]ArmKind{OfflineAlone, OnlineAlone, Shared, StreamPriority, Protected, Baseline}, arm.Kind):
			return fmt.Errorf("arm %q is of the unknown kind %q", arm.Name, arm.Kind)
		}
		names[arm.Name] = true
		for i, r := range arm.Repeats {
			if !finite(r.Seconds, r.Work) {
				return fmt.Errorf("repeat %d of arm %q has a figure that is not a number", i, arm.Name)
			}
		}
	}
	return nil
}

func finite(values ...float64) bool {
	return !slices.ContainsFunc(values, func(v float64) bool { return math.IsNaN(v) || math.IsInf(v, 0) })
}

// read reads the rows of a file into the repeats of a run. Rows of repeats that the run does not
// have are those of a repeat whose writing was interrupted.
func (t *table) read(dir fs.FS, run *Run, want int) error {
	f, err := dir.Open(t.file)
	if errors.Is(err, fs.ErrNotExist) && want == 0 {
		return nil
	}
	if err != nil {
		return err
	}
	n, err := t.decode(f, run)
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if n != want {
		return fmt.Errorf("it has %d rows of this run and not %d: the file is damaged", n, want)
	}
	return nil
}

// WriteJSON writes a value to a file of the folder of a run, as a whole.
func WriteJSON(dir, name string, v any) error {
	var text bytes.Buffer
	enc := json.NewEncoder(&text)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	err := enc.Encode(v)
	if err == nil {
		err = replace(dir, name, text.Bytes())
	}
	if err != nil {
		return fmt.Errorf("cannot write %s: %w", filepath.Join(dir, name), err)
	}
	return nil
}
