package hiplog_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/lab/hiplog"
)

// FuzzScan checks for any text that the records do not depend on the sizes of the reads, and
// that the analysis is consistent.
func FuzzScan(f *testing.F) {
	for _, prefix := range []string{v56, v57, v63, v63Level, slip, bare, rocr} {
		for _, message := range []string{oldDispatch, newDispatch, created(0x7f8acd210000, 1), "hipMalloc: Returned hipSuccess : 0x1: duration: 34 us"} {
			f.Add(prefix + message + "\n")
			f.Add(prefix[:30] + prefix + message[:40] + prefix + "\r\n" + message)
		}
	}
	f.Add(at(1, "acquireQueue refCount: 0x7f8acd210000 (1)") + at(2, "releaseQueue refCount:0x7f8acd210000 (0)") +
		at(3, "Deleting hardware queue 0x7f8acd210000 with refCount 0") + at(4, "Setting CU mask 0xff for hardware queue 0x7f8acd210000"))
	f.Add(at(1, "Number of allocated hardware queues with low priority: 0, with normal priority: 1, with high priority: 0, maximum per priority is: 4") +
		at(2, "Graph ShaderName : f<a::b>(), device id : 0") + at(3, "Command (KernelExecution) enqueued: 0x1 to queue: 0x2"))
	f.Add("│ \x1b[0;34mProcess ID: 77\x1b[0m\r" + v63Level + "\x00\x00\xff\x1b[3" + v63)
	f.Fuzz(func(t *testing.T, log string) {
		log = "\n" + log // the bytes of an archive are for FuzzOpen
		records, totals := scan(t, log)
		for _, r := range records {
			if bytes.ContainsAny(r.Message, "\n\x1b\x00") {
				t.Errorf("message %q", r.Message)
			}
			if (r.Kind == hiplog.Dispatch || r.Kind == hiplog.Barrier) && !strings.Contains(string(r.Message), " Header ") {
				t.Errorf("%d from %q", r.Kind, r.Message)
			}
		}
		if totals.Bytes != uint64(len(log)) || totals.Records != uint64(len(records)) || totals.OtherLines > totals.Lines {
			t.Errorf("%+v of %d bytes and %d records", totals, len(log), len(records))
		}
		var again []hiplog.Record
		slow, err := hiplog.Scan(iotest.HalfReader(strings.NewReader(log)), func(r *hiplog.Record) error {
			kept := *r
			kept.Source, kept.Message, kept.Mask, kept.Name = slices.Clone(r.Source), slices.Clone(r.Message), slices.Clone(r.Mask), slices.Clone(r.Name)
			again = append(again, kept)
			return nil
		})
		if err != nil || !cmp.Equal(slow, totals) || !cmp.Equal(records, again) {
			t.Errorf("in pieces: %v %+v, at once %+v", err, slow, totals)
		}
		a := analyze(t, log)
		check(t, a)
		c := hiplog.Compare(a, a)
		if c.Common+c.Unknown < len(a.Queues)-c.OnlyA || c.Advice.Strategy == "" {
			t.Errorf("with itself: %d common, %d unknown, %d alone of %d", c.Common, c.Unknown, c.OnlyA, len(a.Queues))
		}
	})
}

// check reports inconsistencies of an analysis.
func check(t *testing.T, a *hiplog.Analysis) {
	t.Helper()
	raw, err := json.Marshal(a)
	if err != nil || !json.Valid(raw) {
		t.Fatal(err)
	}
	var dispatches, ofProcesses uint64
	for _, q := range a.Queues {
		dispatches += q.Dispatches
		i := q.Intervals
		if ordered := slices.IsSorted([]uint64{i.Min, i.P50, i.P95, i.P99, i.Max}); !ordered || i.Count > 0 && i.Count+i.OutOfOrder+1 != q.Dispatches {
			t.Errorf("%+v of %d dispatches", i, q.Dispatches)
		}
		kernels := q.Kernels.Others
		for _, k := range q.Kernels.Top {
			kernels += k.Count
		}
		if q.Kernels.Total != q.Dispatches || kernels > q.Kernels.Total {
			t.Errorf("%d kernels, %d of them in the list, for %d dispatches", q.Kernels.Total, kernels, q.Dispatches)
		}
		if q.HWq == 0 && len(q.SWqs) == 0 {
			t.Errorf("a queue without an address: %s", fmt.Sprint(q))
		}
	}
	for _, p := range a.Processes {
		ofProcesses += p.Dispatches
	}
	if dispatches != ofProcesses {
		t.Errorf("%d dispatches to queues, %d of processes", dispatches, ofProcesses)
	}
}

// FuzzOpen passes any bytes to the decompressors.
func FuzzOpen(f *testing.F) {
	text, err := io.ReadAll(newGenerator(2 << 10))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(gzipped(f, text))
	f.Add(zstandard(f, text))
	f.Add(append([]byte{0x50, 0x2a, 0x4d, 0x18, 2, 0, 0, 0, 'h', 'i'}, zstandard(f, text)...))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := hiplog.Open(bytes.NewReader(data))
		if err != nil {
			return
		}
		// A few bytes can expand to gigabytes.
		n, err := io.Copy(io.Discard, io.LimitReader(r, 1<<20))
		if archive := bytes.HasPrefix(data, []byte{0x1f, 0x8b}) || len(data) > 3 && (data[0] == 0x28 || data[0]>>4 == 5); !archive &&
			(err != nil || n != int64(min(len(data), 1<<20))) {
			t.Errorf("%d of %d bytes of text, %v", n, len(data), err)
		}
		if err := r.Close(); err != nil {
			t.Logf("closing: %v", err)
		}
	})
}
