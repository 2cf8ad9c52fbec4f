package accept

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Verdict is what came of a stage, or of all.
type Verdict string

// The verdicts. On a machine without hardware no stage passes: it is Emulated.
const (
	Pass        Verdict = "PASS"
	Emulated    Verdict = "EMULATED"
	Fail        Verdict = "FAIL"
	NotRun      Verdict = "NOT RUN"
	Interrupted Verdict = "INTERRUPTED"
)

// Row is a stage in the report.
type Row struct {
	Stage    string  `json:"stage"`
	Verdict  Verdict `json:"verdict"`
	Why      string  `json:"why,omitzero"`
	Criteria string  `json:"criteria"`
	// Limit and Took are in seconds.
	Limit float64 `json:"limit_s"`
	Took  float64 `json:"took_s,omitzero"`
	// Notes are what the stage found, Controls what its negative controls noticed.
	Notes    []string  `json:"notes,omitempty"`
	Controls []string  `json:"controls,omitempty"`
	Measures []Measure `json:"measures,omitempty"`
}

// Measure summarises samples, in microseconds unless the name says otherwise. Spread is the
// difference between the largest and the smallest median of the repeats.
type Measure struct {
	Name    string  `json:"name"`
	N       int     `json:"n"`
	Repeats int     `json:"repeats"`
	Min     float64 `json:"min"`
	P50     float64 `json:"p50"`
	P99     float64 `json:"p99"`
	Max     float64 `json:"max"`
	Spread  float64 `json:"spread"`
	// File has the raw samples, a line for each repeat.
	File string `json:"file"`
}

// Report is the content of the file report.json.
type Report struct {
	Verdict Verdict `json:"verdict"`
	// Machine is "hardware", or what takes its place.
	Machine string    `json:"machine"`
	GPU     uint32    `json:"gpu"`
	Quick   bool      `json:"quick,omitzero"`
	Seed    uint64    `json:"seed"`
	Version string    `json:"version"`
	Program string    `json:"program_sha256"`
	Began   time.Time `json:"began"`
	Rows    []Row     `json:"rows"`
}

// writer writes a report after every change: the file is complete, with the sums of all its
// parts, whenever the program or the host ends.
type writer struct {
	path   string
	report Report
	files  map[string][]byte
}

// verdict returns the verdict of all rows: that of the worst.
func (r *Report) verdict() Verdict {
	worst := Pass
	if r.Machine != hardware {
		worst = Emulated
	}
	ran := false
	for _, row := range r.Rows {
		switch row.Verdict {
		case Fail:
			return Fail
		case Interrupted:
			worst = Interrupted
		case Pass, Emulated:
			ran = true
		case NotRun:
			if row.Why == notReached {
				worst = Interrupted
			}
		}
	}
	if !ran && worst != Interrupted {
		return NotRun
	}
	return worst
}

// save writes the whole report to a new file, which replaces the old one. Both are on the
// disk before it returns.
func (w *writer) save() (digest string, err error) {
	w.report.Verdict = w.report.verdict()
	text, err := json.MarshalIndent(w.report, "", "  ")
	if err != nil {
		return "", err
	}
	files := maps.Clone(w.files)
	files["report.json"] = append(text, '\n')
	files["report.txt"] = []byte(w.report.text())
	archive, err := pack(files, w.report.Began)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(archive)
	return hex.EncodeToString(sum[:]), replace(w.path, archive)
}

// pack returns a compressed archive of the files and of MANIFEST, which has their sums in
// the form of sha256sum.
func pack(files map[string][]byte, at time.Time) ([]byte, error) {
	var manifest bytes.Buffer
	names := slices.Sorted(maps.Keys(files))
	for _, name := range names {
		fmt.Fprintf(&manifest, "%x  %s\n", sha256.Sum256(files[name]), name)
	}
	files["MANIFEST"] = manifest.Bytes()
	var out bytes.Buffer
	zip := gzip.NewWriter(&out)
	archive := tar.NewWriter(zip)
	for _, name := range append(names, "MANIFEST") {
		header := tar.Header{Name: name, Mode: 0o644, Size: int64(len(files[name])), ModTime: at}
		if err := archive.WriteHeader(&header); err != nil {
			return nil, err
		}
		if _, err := archive.Write(files[name]); err != nil {
			return nil, err
		}
	}
	err := errors.Join(archive.Close(), zip.Close())
	return out.Bytes(), err
}

// replace replaces a file and waits until that is on the disk.
func replace(path string, content []byte) (err error) {
	next, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(next.Name()))
		}
	}()
	_, err = next.Write(content)
	if err = errors.Join(err, next.Sync(), next.Close()); err != nil {
		return err
	}
	if err := os.Rename(next.Name(), path); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// Verify reads a report and compares the sums of its manifest. It returns the report.
func Verify(in io.Reader) (Report, error) {
	zip, err := gzip.NewReader(in)
	if err != nil {
		return Report{}, err
	}
	files := map[string][]byte{}
	for archive := tar.NewReader(zip); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return Report{}, err
		}
		if files[header.Name], err = io.ReadAll(archive); err != nil {
			return Report{}, err
		}
	}
	var sums strings.Builder
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if name != "MANIFEST" {
			fmt.Fprintf(&sums, "%x  %s\n", sha256.Sum256(files[name]), name)
		}
	}
	if sums.String() != string(files["MANIFEST"]) {
		return Report{}, errors.New("the files differ from the sums in MANIFEST")
	}
	var r Report
	return r, json.Unmarshal(files["report.json"], &r)
}

// text returns the report for people.
func (r *Report) text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "gpaccept %s\nmachine: %s\nGPU: %d\nseed: %d\nbegan: %s\n", r.Version, r.Machine, r.GPU, r.Seed, r.Began.Format(time.RFC3339))
	if r.Quick {
		b.WriteString("QUICK: fewer cycles than an acceptance has\n")
	}
	if r.Machine != hardware {
		b.WriteString("No hardware was involved: nothing here says that a GPU passes, and no figure is one of a GPU.\n")
	}
	fmt.Fprintf(&b, "\nverdict: %s\n\n", r.Verdict)
	for _, row := range r.Rows {
		b.WriteString(row.line())
		for _, n := range slices.Concat(row.Notes, row.Controls) {
			fmt.Fprintf(&b, "    %s\n", n)
		}
		for _, m := range row.Measures {
			fmt.Fprintf(&b, "    %-44s n=%-6d p50 %10.1f  p99 %10.1f  max %10.1f  spread of medians %.1f\n", m.Name, m.N, m.P50, m.P99, m.Max, m.Spread)
		}
	}
	b.WriteString("\nCriteria:\n")
	for _, row := range r.Rows {
		fmt.Fprintf(&b, "  %s: %s\n", row.Stage, row.Criteria)
	}
	return b.String()
}

// line returns the row in a line.
func (r Row) line() string {
	line := fmt.Sprintf("%-11s %-22s", r.Verdict, r.Stage)
	if r.Took > 0 {
		line += fmt.Sprintf(" %6.1f s", r.Took)
	}
	if r.Why != "" {
		line += "  " + r.Why
	}
	return strings.TrimRight(line, " ") + "\n"
}

// measure summarises the samples of some repeats.
func measure(name, file string, repeats [][]float64) Measure {
	var all, medians []float64
	for _, r := range repeats {
		if len(r) > 0 {
			all, medians = append(all, r...), append(medians, quantile(r, 0.5))
		}
	}
	if len(all) == 0 {
		return Measure{Name: name, File: file}
	}
	return Measure{
		Name: name, File: file, N: len(all), Repeats: len(medians),
		Min: slices.Min(all), P50: quantile(all, 0.5), P99: quantile(all, 0.99), Max: slices.Max(all),
		Spread: slices.Max(medians) - slices.Min(medians),
	}
}

// quantile is the nearest-rank quantile.
func quantile(samples []float64, q float64) float64 {
	sorted := slices.SortedFunc(slices.Values(samples), cmp.Compare)
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}
