package hiplog_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/lab/hiplog"
)

// captures returns the directory of logs captured on real hosts.
func captures(t *testing.T) string {
	t.Helper()
	if dir := os.Getenv("GPREEMPT_CAPTURES"); dir != "" {
		return filepath.Join(dir, "amdlog")
	}
	up := ""
	for range 6 {
		dir := filepath.Join(up, "shared", "captures", "amdlog")
		if info, err := os.Stat(dir); err == nil && info.IsDir() {
			return dir
		}
		up = filepath.Join(up, "..")
	}
	t.Skip("no captures from real hosts here: set GPREEMPT_CAPTURES to a directory that has the folder amdlog")
	return ""
}

// truth is the content of a capture's sidecar.
type truth struct {
	Lines      uint64         `json:"lines"`
	Bytes      uint64         `json:"bytes"`
	Headers    uint64         `json:"clr_header_lines"`
	Levels     hiplog.Levels  `json:"levels"`
	PIDs       []int32        `json:"pids_in_header"`
	TIDs       []string       `json:"tids"`
	First      uint64         `json:"first_us"`
	Last       uint64         `json:"last_us"`
	HWqs       int            `json:"n_hwq"`
	Queues     []truthOfQueue `json:"hwqs"`
	Dispatches uint64         `json:"total_dispatch"`
	Barriers   uint64         `json:"total_barrier"`
	ANSI       uint64         `json:"ansi_lines"`
	// PIDsInText counts those of prefixes too.
	PIDsInText []int32 `json:"process_ids_in_text"`
}

type truthOfQueue struct {
	HWq         string   `json:"hwq"`
	SWq         *string  `json:"swq"`
	IDs         []uint32 `json:"ids"`
	CreatedLine *uint64  `json:"created_line"`
	CreatedUS   *uint64  `json:"created_us"`
	Size        *uint64  `json:"size_packets"`
	Priority    *int     `json:"hsa_priority"`
	Cooperative *int     `json:"cooperative"`
	Acquired    uint64   `json:"acquire"`
	Selected    uint64   `json:"selected"`
	Released    uint64   `json:"release"`
	MaxRefCount uint64   `json:"max_refcount"`
	DeletedLine *uint64  `json:"deleted_line"`
	Dispatches  uint64   `json:"dispatch"`
	Barriers    uint64   `json:"barrier"`
	ReadMin     *uint64  `json:"rptr_min"`
	ReadMax     *uint64  `json:"rptr_max"`
	WriteMin    *uint64  `json:"wptr_min"`
	WriteMax    *uint64  `json:"wptr_max"`
}

// truthOf converts an analysis to the form of a truth file.
func truthOf(a *hiplog.Analysis) truth {
	found := truth{
		Lines: a.Lines, Bytes: a.Bytes, Headers: a.Records, Levels: a.Levels, PIDs: a.PIDs, TIDs: []string{},
		First: a.FirstMicros, Last: a.LastMicros, HWqs: len(a.Queues), Queues: []truthOfQueue{}, ANSI: a.ColouredLines,
		PIDsInText: append([]int32{}, a.PIDsInText...),
	}
	for _, p := range a.Processes {
		for _, tid := range p.TIDs {
			found.TIDs = append(found.TIDs, tid.String())
		}
		found.Dispatches += p.Dispatches
		found.Barriers += p.Barriers
		if p.PID != 0 && !slices.Contains(found.PIDsInText, p.PID) {
			found.PIDsInText = append(found.PIDsInText, p.PID)
		}
	}
	for _, q := range a.Queues {
		fact := truthOfQueue{
			HWq: q.HWq.String(), IDs: q.IDs, Acquired: q.Acquired, Selected: q.Selected, Released: q.Released,
			MaxRefCount: q.MaxRefCount, Dispatches: q.Dispatches, Barriers: q.Barriers,
		}
		if q.Created != nil {
			swq, cooperative := q.SWqs[0].String(), 0
			priority := map[string]int{hiplog.PriorityLow: 0, hiplog.PriorityNormal: 1, hiplog.PriorityHigh: 2}[q.Priority]
			if *q.Cooperative {
				cooperative = 1
			}
			fact.SWq, fact.CreatedLine, fact.CreatedUS = &swq, &q.Created.Line, &q.Created.Micros
			fact.Size, fact.Priority, fact.Cooperative = &q.SizePackets, &priority, &cooperative
		}
		if q.Deleted != nil {
			fact.DeletedLine = &q.Deleted.Line
		}
		if q.ReadIndex != nil {
			fact.ReadMin, fact.ReadMax = &q.ReadIndex.Min, &q.ReadIndex.Max
			fact.WriteMin, fact.WriteMax = &q.WriteIndex.Min, &q.WriteIndex.Max
		}
		found.Queues = append(found.Queues, fact)
	}
	return found
}

func TestCapturesFromRealHostsMatchTheirTruth(t *testing.T) {
	dir := captures(t)
	files, err := filepath.Glob(filepath.Join(dir, "*.truth.json"))
	if err != nil || len(files) < 4 {
		t.Fatalf("%d truth files in %s, %v", len(files), dir, err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			raw, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			var sidecar struct {
				Truth *truth
				Bytes uint64
			}
			if err := json.Unmarshal(raw, &sidecar); err != nil {
				t.Fatal(err)
			}
			f, err := os.Open(file[:len(file)-len(".truth.json")])
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			a, err := hiplog.Analyze(f)
			if err != nil {
				t.Fatal(err)
			}
			if sidecar.Truth == nil { // not a HIP log
				if a.Records != 0 || len(a.Queues) != 0 || a.Bytes != sidecar.Bytes {
					t.Errorf("%d records, %d queues in %d bytes, want none in %d", a.Records, len(a.Queues), a.Bytes, sidecar.Bytes)
				}
				return
			}
			if diff := cmp.Diff(*sidecar.Truth, truthOf(a)); diff != "" {
				t.Errorf("analysis (-truth +got):\n%s", diff)
			}
			if a.TornLines+a.CutLines+a.NULBytes+a.Untracked != 0 {
				t.Errorf("%d torn and %d cut lines, %d NULs, %d untracked records in a complete log", a.TornLines, a.CutLines, a.NULBytes, a.Untracked)
			}
		})
	}
}

// The truth files do not contain kernels and streams; these are counted by hand.
func TestCapturedKernelsAndStreamsAreNamed(t *testing.T) {
	f, err := os.Open(filepath.Join(captures(t), "clr_level5_priorities_head.log"))
	if err != nil {
		t.Skipf("the capture is not readable: %v", err)
	}
	defer f.Close()
	a, err := hiplog.Analyze(f)
	if err != nil {
		t.Fatal(err)
	}
	got := []string{fmt.Sprint(a.Processes[0].Launches.Top)}
	for _, q := range a.Queues {
		got = append(got, fmt.Sprintf("%v %v %v %d", q.HWq, q.Streams, q.Kernels.Top, q.MaxBacklog.Packets))
	}
	want := []string{
		"[{dummy_kernel(int*, int) 5}]", // the excerpt ends before the fifth is dispatched
		"0x7f8acd200000 [0x1952020] [{dummy_kernel(int*, int) 1}] 1",
		"0x7f8acc600000 [0x20a2490] [{dummy_kernel(int*, int) 1}] 1",
		"0x7f8acc400000 [0x2099db0] [{dummy_kernel(int*, int) 1}] 1",
		"0x7f8acc200000 [0x208cd70] [{dummy_kernel(int*, int) 1}] 1",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("kernels, streams and backlogs (-want +got):\n%s", diff)
	}
}
