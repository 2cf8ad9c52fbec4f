package e2e

import (
	"encoding/csv"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
)

// trialRun is what the tests read of the folder of a run: run.json, and the rows of the CSV files
// beside it.
type trialRun struct {
	Arms []struct {
		Name, Kind, Mechanism, Policy string
		Repeats                       []*trialRepeat
	}
	Missing map[string]string
	Faults  []any
}

type trialRepeat struct {
	Seconds, Work float64
	// WorkUnit is that of Work.
	WorkUnit string `json:"work_unit"`
	// The rows of the CSV files, each by the names of its columns.
	Requests, Suspends, Resumes, Samples []map[string]string `json:"-"`
}

// trialSummary is what the tests read of an arm in the output of gplab.
type trialSummary struct {
	Arm                         string
	Latency, Announce, Suspends struct {
		N    int
		Mean float64
	}
	Readings map[string]float64
}

// trialVerdict is that of the output of gplab.
type trialVerdict struct {
	Result, Origin      string
	Reasons, Unverified []string
}

// readRun reads the folder of a run.
func readRun(dir string) (*trialRun, error) {
	text, err := os.ReadFile(filepath.Join(dir, "run.json"))
	if err != nil {
		return nil, err
	}
	run := &trialRun{}
	if err := json.Unmarshal(text, run); err != nil {
		return nil, err
	}
	for name, rows := range map[string]func(*trialRepeat) *[]map[string]string{
		"requests": func(r *trialRepeat) *[]map[string]string { return &r.Requests },
		"suspends": func(r *trialRepeat) *[]map[string]string { return &r.Suspends },
		"resumes":  func(r *trialRepeat) *[]map[string]string { return &r.Resumes },
		"samples":  func(r *trialRepeat) *[]map[string]string { return &r.Samples },
	} {
		if err := run.readRows(filepath.Join(dir, name+".csv"), rows); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	return run, nil
}

func (run *trialRun) readRows(path string, rows func(*trialRepeat) *[]map[string]string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	lines, err := csv.NewReader(file).ReadAll()
	if err != nil || len(lines) == 0 {
		return err
	}
	for _, line := range lines[1:] {
		row := map[string]string{}
		for i, name := range lines[0] {
			row[name] = line[i]
		}
		repeat, err := strconv.Atoi(row["repeat"])
		if err != nil {
			return err
		}
		found := false
		for _, arm := range run.Arms {
			if arm.Name == row["arm"] && repeat < len(arm.Repeats) {
				list := rows(arm.Repeats[repeat])
				*list, found = append(*list, row), true
			}
		}
		if !found {
			return fmt.Errorf("a row of arm %q, repeat %d, which run.json does not have", row["arm"], repeat)
		}
	}
	return nil
}

// valueOf returns a number of a row, -1 for another text.
func valueOf(row map[string]string, name string) float64 {
	n, err := strconv.ParseFloat(row[name], 64)
	if err != nil {
		return -1
	}
	return n
}
