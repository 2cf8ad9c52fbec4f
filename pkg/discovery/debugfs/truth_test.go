package debugfs_test

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
	"github.com/gpreempt/gpreempt/pkg/discovery/registers"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// capture reads a text captured on a real host, and into truth its values decoded by hand,
// all of which must have a field there.
func capture(t testing.TB, name string, truth any) []byte {
	t.Helper()
	dir := os.Getenv("GPREEMPT_CAPTURES")
	up := ""
	for range 7 {
		if dir != "" {
			break
		}
		up = filepath.Join(up, "..")
		if info, err := os.Stat(filepath.Join(up, "shared", "captures")); err == nil && info.IsDir() {
			dir = filepath.Join(up, "shared", "captures")
		}
	}
	if dir == "" {
		t.Skip("no captures from real hosts here: set GPREEMPT_CAPTURES to a directory that has debugfs/" + name)
	}
	path := filepath.Join(dir, "debugfs", name)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Skipf("the capture is not readable: %v", err)
	}
	sidecar, err := os.ReadFile(path + ".truth.json")
	if err != nil {
		t.Skipf("what the capture holds is not readable: %v", err)
	}
	file := struct {
		Capture, Origin, Note string
		SHA256                string
		Bytes                 int
		Excerpt               any
		Truth                 any
	}{Truth: truth}
	d := json.NewDecoder(bytes.NewReader(sidecar))
	d.DisallowUnknownFields()
	if err := d.Decode(&file); err != nil {
		t.Fatalf("%s.truth.json: %v", name, err)
	}
	if sum := sha256.Sum256(b); hex.EncodeToString(sum[:]) != file.SHA256 || len(b) != file.Bytes || name != file.Capture {
		t.Fatalf("%s is not the file of its truth", name)
	}
	return b
}

// truthQueue is a compute queue in the truth.
type truthQueue struct {
	MQDBase       string `json:"mqd_base"`
	ActiveBit     int    `json:"active_bit"`
	Active        string `json:"hqd_active_raw,omitempty"`
	VMID          int    `json:"vmid"`
	VMIDRaw       string `json:"vmid_raw"`
	PipePriority  uint32 `json:"pipe_priority"`
	QueuePriority uint32 `json:"queue_priority"`
	Quantum       string `json:"quantum_raw"`
	RingBase      string `json:"ring_base"`
	RingBytes     uint64 `json:"ring_bytes"`
	RingPackets   uint64 `json:"ring_aql_packets"`
	Rptr          uint32 `json:"rptr_dw"`
	Wptr          uint64 `json:"wptr_dw"`
	RptrReport    string `json:"rptr_report_addr"`
	WptrPoll      string `json:"wptr_poll_addr"`
	DoorbellRaw   string `json:"doorbell_control_raw"`
	Doorbell      uint32 `json:"doorbell_offset_dw"`
	DoorbellEn    int    `json:"doorbell_en"`
	PQControl     string `json:"pq_control_raw"`
	Empty         int    `json:"pq_empty"`
	NoUpdateRptr  int    `json:"no_update_rptr"`
	AQL           int    `json:"aql"`
	Dequeue       uint32 `json:"dequeue_request"`
	Error         string `json:"hqd_error"`
	CWSRBase      string `json:"cwsr_base"`
	CWSRSize      uint64 `json:"cwsr_size"`
	StackSize     uint32 `json:"ctl_stack_size"`
	StackOffset   uint32 `json:"ctl_stack_offset"`
	WaveOffset    uint32 `json:"wg_state_offset"`
	Persistent    string `json:"persistent_state_raw"`
	QSwitch       int    `json:"qswitch_mode"`
	truthMQDFields
	truthPlace
}

type truthMQDFields struct {
	Header     string    `json:"header,omitempty"`
	Initiator  string    `json:"dispatch_initiator,omitempty"`
	Dim        [3]uint32 `json:"dim"`
	NumThread  [3]uint32 `json:"num_thread"`
	LogicalXCC uint32    `json:"logic_xcc_id"`
	Chunk      uint32    `json:"tg_chunk_size"`
	Stride     uint64    `json:"mqd_stride"`
}

type truthPlace struct {
	Inst     int    `json:"inst"`
	MEC      int    `json:"mec,omitempty"`
	Pipe     int    `json:"pipe"`
	Queue    int    `json:"queue"`
	FirstReg string `json:"first_reg,omitempty"`
}

func hexed[T uint32 | uint64](v T) string { return fmt.Sprintf("0x%x", v) }

func bit(b bool) int {
	if b {
		return 1
	}
	return 0
}

func asTruth(c *registers.Compute) truthQueue {
	r := c.Registers
	q := truthQueue{
		MQDBase: hexed(c.MQD), ActiveBit: bit(c.Active), Active: hexed(r[2]), VMID: c.VMID, VMIDRaw: hexed(r[3]),
		PipePriority: c.PipePriority, QueuePriority: c.QueuePriority, Quantum: hexed(r[7]),
		RingBase: hexed(c.RingBase), RingBytes: c.RingBytes, RingPackets: c.RingBytes / 64, Rptr: c.ReadPosition, Wptr: c.WritePosition,
		RptrReport: hexed(c.ReadPointer), WptrPoll: hexed(c.WritePointer), DoorbellRaw: hexed(r[15]), Doorbell: c.Doorbell,
		DoorbellEn: bit(c.DoorbellEnabled), PQControl: hexed(r[17]), Empty: bit(c.Empty), NoUpdateRptr: bit(c.NoUpdateReadPointer),
		AQL: bit(c.AQL), Dequeue: c.DequeueRequest, Error: hexed(c.Error), CWSRBase: hexed(c.SaveArea), CWSRSize: c.SaveBytes,
		StackSize: c.ControlStackBytes, StackOffset: c.ControlStackOffset, WaveOffset: c.WaveStateOffset, Persistent: hexed(r[4]),
		QSwitch: bit(c.SaveWaves),
	}
	if c.Image {
		q.truthMQDFields = truthMQDFields{
			Header: hexed(c.Words[0]), Initiator: hexed(c.DispatchInitiator), Dim: c.Grid, NumThread: c.Workgroup,
			LogicalXCC: c.LogicalXCC, Chunk: c.Chunk, Stride: c.Stride,
		}
	}
	return q
}

type truthMQDs struct {
	Kind       string            `json:"kind"`
	NProcesses int               `json:"n_processes"`
	Processes  []truthMQDProcess `json:"processes"`
}

type truthMQDProcess struct {
	PID     int32          `json:"pid"`
	PASID   string         `json:"pasid_field_text"`
	NQueues int            `json:"n_queues"`
	ByType  map[string]int `json:"queues_by_type"`
	Devices []string       `json:"devices"`
	Queues  []truthMQD     `json:"queues"`
}

type truthMQD struct {
	Index        int            `json:"index_in_file"`
	Line         int            `json:"header_line"`
	Type         string         `json:"type"`
	GPUHex       string         `json:"gpu_id_hex"`
	GPU          gpreempt.GPUID `json:"gpu_id"`
	Blocks       int            `json:"n_xcc_blocks"`
	Bytes        int            `json:"bytes_per_block"`
	RingBase     string         `json:"ring_base"`
	RingBytes    uint64         `json:"ring_bytes"`
	Priority     int            `json:"priority"`
	PipePriority uint32         `json:"pipe_priority"`
	Doorbell     uint32         `json:"doorbell_offset_dw"`
	Rptr         uint32         `json:"rptr_dw"`
	Wptr         uint64         `json:"wptr_dw"`
	Saved        bool           `json:"state_saved_once"`
	PerXCC       []truthQueue   `json:"per_xcc"`
	Creation     int            `json:"creation_order_by_doorbell"`
}

func TestCapturedMQDsDecodeToTheirTruth(t *testing.T) {
	for _, name := range []string{"mqds_active_16streams.txt", "mqds_empty_no_process.txt"} {
		t.Run(name, func(t *testing.T) {
			var want truthMQDs
			d, err := debugfs.ParseMQDs(capture(t, name, &want))
			if err != nil {
				t.Fatal(err)
			}
			if diff := gocmp.Diff([]debugfs.Warning(nil), d.Warnings); diff != "" {
				t.Errorf("warnings (-want +got):\n%s", diff)
			}
			got := truthMQDs{Kind: "debugfs_mqds", NProcesses: len(d.Processes), Processes: []truthMQDProcess{}}
			for _, p := range d.Processes {
				got.Processes = append(got.Processes, mqdTruth(t, p))
			}
			if diff := gocmp.Diff(want, got, gocmp.AllowUnexported(truthQueue{})); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func mqdTruth(t *testing.T, p debugfs.MQDProcess) truthMQDProcess {
	t.Helper()
	got := truthMQDProcess{PID: p.PID, PASID: strconv.Itoa(int(p.PASID)), NQueues: len(p.Queues), ByType: map[string]int{}}
	var doorbells []uint32
	for i, q := range p.Queues {
		kind := q.Kind.String()
		got.ByType[strings.ToUpper(kind[:1])+kind[1:]]++
		if gpu := fmt.Sprintf("%x", uint32(q.GPU)); !slices.Contains(got.Devices, gpu) {
			got.Devices = append(got.Devices, gpu)
		}
		var xccs []truthQueue
		var first registers.Compute
		for x, words := range q.XCCs {
			c, err := registers.DecodeCompute(words)
			if err != nil {
				t.Fatal(err)
			}
			if !c.Valid || !c.Image {
				t.Errorf("queue %d, XCC %d: not a valid image", i, x)
			}
			if x == 0 {
				first = c
			}
			xccs = append(xccs, asTruth(&c))
		}
		priority, exact := first.Priority(false)
		if !exact {
			t.Errorf("queue %d: the priority of a kernel that writes it is not exact", i)
		}
		doorbells = append(doorbells, first.Doorbell)
		got.Queues = append(got.Queues, truthMQD{
			Index: i, Line: q.Line, Type: kind, GPUHex: fmt.Sprintf("%x", uint32(q.GPU)), GPU: q.GPU, Blocks: len(q.XCCs), Bytes: 4 * len(q.XCCs[0]),
			RingBase: hexed(first.RingBase), RingBytes: first.RingBytes, Priority: int(priority), PipePriority: first.PipePriority,
			Doorbell: first.Doorbell, Rptr: first.ReadPosition, Wptr: first.WritePosition, Saved: first.VMID != 0, PerXCC: xccs,
		})
	}
	slices.Sort(doorbells)
	for i := range got.Queues {
		got.Queues[i].Creation, _ = slices.BinarySearch(doorbells, got.Queues[i].Doorbell)
	}
	return got
}

type truthHQDs struct {
	Kind      string      `json:"kind"`
	NNodes    int         `json:"n_nodes"`
	Nodes     []truthNode `json:"nodes"`
	Active    int         `json:"total_active_cp_slots"`
	ActiveHIQ int         `json:"total_active_incl_hiq"`
}

type truthNode struct {
	Node    int                 `json:"node"`
	GPUHex  string              `json:"gpu_id_hex"`
	GPU     gpreempt.GPUID      `json:"gpu_id"`
	NHIQ    int                 `json:"n_hiq"`
	NCP     int                 `json:"n_cp_slots"`
	NSDMA   int                 `json:"n_sdma_slots"`
	XCC     map[string]truthXCC `json:"xcc"`
	Active  int                 `json:"active_cp_slots"`
	Rings   int                 `json:"active_cp_queues_distinct_rings"`
	CP      []truthQueue        `json:"cp_active"`
	CPStale []truthStale        `json:"cp_stale_inactive_nonzero"`
	HIQ     []truthHIQ          `json:"hiq"`
	SDMA    []truthSDMA         `json:"sdma_rb_enable_slots"`
}

type truthXCC struct {
	Slots  int `json:"cp_slots"`
	Active int `json:"active"`
	Stale  int `json:"stale"`
}

type truthStale struct {
	truthPlace
	MQDBase       string `json:"mqd_base"`
	RingBase      string `json:"ring_base"`
	VMIDRaw       string `json:"vmid_raw"`
	QueuePriority uint32 `json:"queue_priority"`
	ActiveBit     int    `json:"active_bit"`
}

type truthHIQ struct {
	truthPlace
	ActiveBit int    `json:"active_bit"`
	RingBase  string `json:"ring_base"`
	RingBytes uint64 `json:"ring_bytes"`
	Rptr      uint32 `json:"rptr_dw"`
	Wptr      uint64 `json:"wptr_dw"`
}

type truthSDMA struct {
	Engine  int    `json:"engine"`
	RLC     int    `json:"rlc"`
	Control string `json:"rb_cntl_raw"`
	Bytes   uint64 `json:"rb_bytes"`
	VMID    int    `json:"vmid"`
	Base    string `json:"rb_base"`
	Rptr    uint64 `json:"rptr"`
	Wptr    uint64 `json:"wptr"`
	Context string `json:"context_status_raw"`
	Idle    int    `json:"idle"`
}

func TestCapturedHQDsDecodeToTheirTruth(t *testing.T) {
	for _, name := range []string{"hqds_active_16streams.txt", "hqds_idle_after_exit.txt", "hqds_idle_baseline.txt"} {
		t.Run(name, func(t *testing.T) {
			var want truthHQDs
			d, err := debugfs.ParseHQDs(capture(t, name, &want))
			if err != nil {
				t.Fatal(err)
			}
			if diff := gocmp.Diff([]debugfs.Warning(nil), d.Warnings); diff != "" {
				t.Errorf("warnings (-want +got):\n%s", diff)
			}
			got := hqdTruth(t, &d)
			if diff := gocmp.Diff(want, got, gocmp.AllowUnexported(truthQueue{}, truthStale{}, truthHIQ{})); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func hqdTruth(t *testing.T, d *debugfs.HQDDump) truthHQDs {
	t.Helper()
	got := truthHQDs{Kind: "debugfs_hqds", NNodes: len(d.Nodes)}
	slots := d.Slots()
	rings := map[int]map[uint64]bool{}
	for _, n := range d.Nodes {
		if n.Stopped {
			t.Errorf("node %d is stopped", n.Node)
		}
		got.Nodes = append(got.Nodes, truthNode{
			Node: n.Node, GPUHex: fmt.Sprintf("%x", uint32(n.GPU)), GPU: n.GPU, XCC: map[string]truthXCC{},
			CP: []truthQueue{}, CPStale: []truthStale{}, SDMA: []truthSDMA{},
		})
		rings[n.Node] = map[uint64]bool{}
	}
	for i := range slots {
		s := &slots[i]
		n := &got.Nodes[slices.IndexFunc(got.Nodes, func(n truthNode) bool { return n.Node == s.Node && n.GPU == s.GPU })]
		c := &s.Compute
		place := truthPlace{Inst: s.XCC, Pipe: s.Pipe, Queue: s.Queue}
		switch s.Kind {
		case debugfs.SlotHIQ:
			n.NHIQ++
			got.ActiveHIQ += bit(s.State == debugfs.Live)
			place.MEC = s.MEC
			n.HIQ = append(n.HIQ, truthHIQ{place, bit(c.Active), hexed(c.RingBase), c.RingBytes, c.ReadPosition, c.WritePosition})
			if got := c.BacklogDwords(); got != 0 {
				t.Errorf("node %d XCC %d: the idle HIQ has a backlog of %d dwords: its read position wraps, its write position does not", s.Node, s.XCC, got)
			}
		case debugfs.SlotCP:
			n.NCP++
			x := n.XCC[strconv.Itoa(s.XCC)]
			x.Slots++
			switch s.State {
			case debugfs.Live:
				x.Active++
				n.Active++
				got.Active++
				got.ActiveHIQ++
				rings[s.Node][c.RingBase] = true
				whole := registers.Of(*c)
				q := asTruth(&whole)
				place.FirstReg = hexed(s.Address)
				q.truthPlace = place
				n.CP = append(n.CP, q)
			case debugfs.Stale:
				x.Stale++
				n.CPStale = append(n.CPStale, truthStale{place, hexed(c.MQD), hexed(c.RingBase), hexed(c.Registers[3]), c.QueuePriority, bit(c.Active)})
			case debugfs.Empty:
			}
			n.XCC[strconv.Itoa(s.XCC)] = x
		case debugfs.SlotSDMA:
			n.NSDMA++
			if s.State == debugfs.Live {
				t.Errorf("node %d, SDMA engine %d queue %d is reported as live", s.Node, s.Pipe, s.Queue)
			}
			if !s.SDMA.Enabled {
				continue
			}
			if s.State != debugfs.Stale {
				t.Errorf("node %d, SDMA engine %d queue %d is %s, want stale", s.Node, s.Pipe, s.Queue, s.State)
			}
			n.SDMA = append(n.SDMA, truthSDMA{
				s.Pipe, s.Queue, hexed(s.SDMA.Words[0]), s.SDMA.RingBytes, s.SDMA.VMID, hexed(s.SDMA.RingBase),
				s.SDMA.ReadPosition, s.SDMA.WritePosition, hexed(s.SDMA.Context), bit(s.SDMA.Idle),
			})
		}
	}
	for i := range got.Nodes {
		got.Nodes[i].Rings = len(rings[got.Nodes[i].Node])
	}
	return got
}

// The two captures are of the same time: each of the five queues is in a slot of each XCC.
func TestCapturedSlotsAreMatchedToTheirQueues(t *testing.T) {
	var mqdsTruth truthMQDs
	m, err := debugfs.ParseMQDs(capture(t, "mqds_active_16streams.txt", &mqdsTruth))
	if err != nil {
		t.Fatal(err)
	}
	var hqdsTruth truthHQDs
	h, err := debugfs.ParseHQDs(capture(t, "hqds_active_16streams.txt", &hqdsTruth))
	if err != nil {
		t.Fatal(err)
	}
	// The snapshot of the driver according to the truth; ids by the order of creation.
	var known []debugfs.Known
	for _, q := range mqdsTruth.Processes[0].Queues {
		x := q.PerXCC[0]
		known = append(known, debugfs.Known{
			ID: uint32(q.Creation), GPU: q.GPU, Type: gpreempt.QueueCompute, RingBytes: q.RingBytes,
			Snapshot: &gpreempt.QueueInfo{
				Source: gpreempt.FromSnapshot, RingBase: number(t, x.RingBase), ReadPointer: number(t, x.RptrReport),
				WritePointer: number(t, x.WptrPoll), SaveArea: number(t, x.CWSRBase),
			},
		})
	}
	infos := debugfs.MatchQueues(known, m.Processes[0].Queues, nil)
	key := gpreempt.ProcessKey{PID: 94314, Start: 1}
	var owners []gpreempt.QueueEntry
	for i, info := range infos {
		want := *known[i].Snapshot
		x := mqdsTruth.Processes[0].Queues[i].PerXCC[0]
		want.Source |= gpreempt.FromMQD
		want.AQL, want.MQD = true, number(t, x.MQDBase)
		want.Doorbell = x.Doorbell
		want.Priority, want.PriorityKnown, want.PriorityExact = gpreempt.PriorityNormal, true, true
		if diff := gocmp.Diff(want, info); diff != "" {
			t.Errorf("queue %d (-want +got):\n%s", known[i].ID, diff)
		}
		owners = append(owners, gpreempt.QueueEntry{Queue: gpreempt.Queue{Process: key, ID: known[i].ID, GPU: known[i].GPU}, Info: info})
	}
	slots := h.Slots()
	found := map[int]int{}
	for i, match := range debugfs.MatchSlots(slots, owners) {
		s := &slots[i]
		if live := s.Kind == debugfs.SlotCP && s.State == debugfs.Live; live != (match.Owner >= 0) {
			t.Errorf("node %d XCC %d pipe %d queue %d, live %t: owner %d, %s", s.Node, s.XCC, s.Pipe, s.Queue, live, match.Owner, match.How)
			continue
		}
		if match.Owner < 0 {
			continue
		}
		found[match.Owner]++
		if got, want := s.Compute.RingBase, owners[match.Owner].Info.RingBase; got != want {
			t.Errorf("XCC %d pipe %d queue %d: ring %#x matched to %#x (%s)", s.XCC, s.Pipe, s.Queue, got, want, match.How)
		}
	}
	if diff := gocmp.Diff(map[int]int{0: 4, 1: 4, 2: 4, 3: 4, 4: 4}, found); diff != "" {
		t.Errorf("slots of each queue (-want +got):\n%s", diff)
	}

	// The same with sysfs only: four queues have a ring of 1 MiB, one has 4 KiB.
	for i := range known {
		known[i].Snapshot = nil
	}
	slices.SortFunc(known, func(a, b debugfs.Known) int { return cmp.Compare(a.ID, b.ID) })
	for i, info := range debugfs.MatchQueues(known, m.Processes[0].Queues, nil) {
		if certain := info.Source == gpreempt.FromMQD; certain != (known[i].ID == 0) || certain == (info.Note != "") {
			t.Errorf("queue %d of %d bytes: %+v", known[i].ID, known[i].RingBytes, info)
		}
	}
}

func number(t *testing.T, hexed string) uint64 {
	t.Helper()
	v, err := strconv.ParseUint(hexed, 0, 64)
	if err != nil {
		t.Fatal(err)
	}
	return v
}
