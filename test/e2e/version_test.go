package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"

	"github.com/gpreempt/gpreempt/emu/kfdemu"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/discovery"
)

// version1 has what clients and daemons of version 1 wrote: docs/api.md, "Versions". make versions
// writes api.binpb and calls.json.
var version1 = filepath.Join("testdata", "version1")

// recordedCall is a call of a client of version 1, and its answer. "LEASE" in a request is the last lease's ID, and
// anything in an answer is a value that differs between two runs.
type recordedCall struct {
	Method  string
	Request json.RawMessage
	Answer  any
}

const anything = "*"

var (
	// identities are fields that are there in each run, with another value.
	identities = []string{"leaseId", "targetId", "pid", "clientPid", "version"}
	// passing are fields that depend on when the call is made, and words for people.
	passing = []string{
		"timing", "held", "inState", "runsWithin", "learnedSuspend", "suspendedTotal", "sources", "goroutineCount", "bootId", "clock",
		"eventRevision", "inventoryRevision", "revision", "mappedQueueCount", "offlineMappedQueueCount", "freeSlotCount", "memoryEvictions",
		"mechanismWhy", "decidedBy", "message", "next",
	}
	timeText = regexp.MustCompile(`^(-?[0-9.]+s|\d{4}-\d\d-\d\dT.*Z)$`)
)

// recordable returns what of an answer is the same in each run.
func recordable(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for k, value := range v {
			text, _ := value.(string)
			switch {
			case slices.Contains(passing, k):
				delete(v, k)
			case slices.Contains(identities, k), timeText.MatchString(text):
				v[k] = anything
			default:
				v[k] = recordable(value)
			}
		}
	case []any:
		for i := range v {
			v[i] = recordable(v[i])
		}
	}
	return v
}

// lacks returns what a client of the recorded answer misses in another one: a later daemon may say more.
func lacks(where string, recorded, got any) (missing []string) {
	switch want := recorded.(type) {
	case map[string]any:
		has, _ := got.(map[string]any)
		for _, k := range slices.Sorted(maps.Keys(want)) {
			missing = append(missing, lacks(where+"."+k, want[k], has[k])...)
		}
	case []any:
		has, _ := got.([]any)
		if len(has) != len(want) {
			return []string{fmt.Sprintf("%s has %d elements, want %d", where, len(has), len(want))}
		}
		for i := range want {
			missing = append(missing, lacks(fmt.Sprintf("%s[%d]", where, i), want[i], has[i])...)
		}
	default:
		if want == anything && got != nil || cmp.Equal(want, got) {
			return nil
		}
		return []string{fmt.Sprintf("%s is %v, want %v", where, got, want)}
	}
	return missing
}

// olderClient calls a daemon with the messages of the recorded version.
type olderClient struct {
	files *protoregistry.Files
	conn  grpc.ClientConnInterface
	lease string
}

// call makes a call, or sends one frame of a Session and receives its answer.
func (c *olderClient) call(ctx context.Context, r recordedCall) (answer any, err error) {
	service, method, _ := strings.Cut(strings.TrimPrefix(r.Method, "/"), "/")
	found, err := c.files.FindDescriptorByName(protoreflect.FullName(service))
	if err != nil {
		return nil, err
	}
	m := found.(protoreflect.ServiceDescriptor).Methods().ByName(protoreflect.Name(method))
	request, reply := dynamicpb.NewMessage(m.Input()), dynamicpb.NewMessage(m.Output())
	if err := protojson.Unmarshal([]byte(strings.ReplaceAll(string(r.Request), "LEASE", c.lease)), request); err != nil {
		return nil, err
	}
	if m.IsStreamingServer() {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		stream, err := c.conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: m.IsStreamingClient()}, r.Method)
		if err == nil {
			err = stream.SendMsg(request)
		}
		if err == nil && !m.IsStreamingClient() {
			err = stream.CloseSend()
		}
		if err == nil {
			err = stream.RecvMsg(reply)
		}
		if err != nil {
			return nil, err
		}
	} else if err := c.conn.Invoke(ctx, r.Method, request, reply); err != nil {
		return nil, err
	}
	if id := m.Output().Fields().ByName("lease_id"); id != nil {
		c.lease = reply.Get(id).String()
	}
	text, err := protojson.Marshal(reply) // without fields that the recorded version did not have
	if err == nil {
		err = json.Unmarshal(text, &answer)
	}
	return answer, err
}

func descriptorsOf(t *testing.T, path string) *protoregistry.Files {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var set descriptorpb.FileDescriptorSet
	if err := proto.Unmarshal(text, &set); err != nil {
		t.Fatal(err)
	}
	files, err := protodesc.NewFiles(&set)
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// A client that was built with the messages of version 1 gets the answers that it got then.
func TestClientOfVersion1IsServed(t *testing.T) {
	t.Parallel()
	file := filepath.Join(version1, "calls.json")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var calls []recordedCall
	if err := json.Unmarshal(text, &calls); err != nil {
		t.Fatal(err)
	}
	d := start(t, atOnce)
	d.startOffline()
	c := &olderClient{files: descriptorsOf(t, filepath.Join(version1, "api.binpb")), conn: d.conn}
	for i, r := range calls {
		answer, err := c.call(t.Context(), r)
		if err != nil {
			t.Fatalf("%s %s: %v", r.Method, r.Request, err)
		}
		if *update {
			calls[i].Answer = recordable(answer)
		} else if missing := lacks(r.Method, r.Answer, answer); len(missing) > 0 {
			t.Errorf("a client of version 1 misses:\n%s", strings.Join(missing, "\n"))
		}
	}
	if *update {
		text, err := json.MarshalIndent(calls, "", "\t")
		if err == nil {
			err = os.WriteFile(file, append(text, '\n'), 0o600)
		}
		if err != nil {
			t.Error(err)
		}
	}
}

// A config file with every key of version 1 is valid, and a key that only a later version has is
// refused with its line: at the start, and at a reload without an effect.
func TestConfigOfVersion1IsValidAndALaterKeyIsNamed(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(filepath.Join(version1, "gpreemptd.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	check := func(text string) result {
		path := filepath.Join(t.TempDir(), "gpreemptd.yaml")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		r := runProgram(t, gpreemptd, "config", "check", path)
		r.Out, r.Err = strings.ReplaceAll(r.Out, path, "FILE"), strings.ReplaceAll(r.Err, path, "FILE")
		return r
	}
	if got := check(string(text)); got.Code != 0 || !strings.HasPrefix(got.Out, "FILE: valid") { // warnings are of names that this host may lack
		t.Errorf("the file of version 1: %+v", got)
	}
	later := check("log: {level: debug}\nlater: 1\n")
	if later.Code != 1 || !strings.Contains(later.Err, "FILE:2:1: later: unknown key") {
		t.Errorf("a key of a later version: %+v", later)
	}
}

// The journal that a daemon of version 1 left is understood, and an older daemon finds the process of
// an entry of ours by the name of its file: TestProcessWithADamagedEntryIsResumed.
func TestProcessInAJournalOfVersion1IsResumed(t *testing.T) {
	m := emulate(t, kfdemu.Config{})
	dir := testutil.TempSocketDir(t)
	job := m.work("--duration", "500")
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", job.PID))
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := discovery.ParseProcStat(stat)
	if err != nil {
		t.Fatal(err)
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		t.Fatal(err)
	}
	recorded, err := os.ReadFile(filepath.Join(version1, "journal", "4242-123456.freezer"))
	if err != nil {
		t.Fatal(err)
	}
	ours := strings.NewReplacer("4242", fmt.Sprint(job.PID), "123456", fmt.Sprint(parsed.Start), "0d5e4b05-0000-4000-8000-3cf0a5b4d1a7", strings.TrimSpace(string(boot)))
	head, body, _ := strings.Cut(string(recorded), "\n")
	sealed := func(body string) string {
		return fmt.Sprintf("gpreempt-pause 1 crc32c=%08x", crc32.Checksum([]byte(body), crc32.MakeTable(crc32.Castagnoli)))
	}
	if head != sealed(body) {
		t.Fatalf("the recorded entry begins with %q, want %q", head, sealed(body))
	}
	body = ours.Replace(body)
	journal := filepath.Join(dir, "journal")
	if err := os.Mkdir(journal, 0o700); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(journal, ours.Replace("4242-123456.freezer"))
	if err := os.WriteFile(file, []byte(sealed(body)+"\n"+body), 0o600); err != nil {
		t.Fatal(err)
	}
	job.signal(syscall.SIGSTOP)
	m.eventually("the job is stopped", func() bool { return procState(t, job.PID) == "T" })
	if r := cleanup(dir); r != (result{0, oneRunsAgain, ""}) {
		t.Errorf("--cleanup: %+v", r)
	}
	m.awaitProgress(job)

	// What is written now has no key that a reader of version 1 refuses, or a later number.
	again, file := stopped(t, m, dir)
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	keys := func(body string) []string {
		var all map[string]any
		if err := json.Unmarshal([]byte(body), &all); err != nil {
			t.Fatal(err)
		}
		return slices.Sorted(maps.Keys(all))
	}
	head, body, _ = strings.Cut(string(text), "\n")
	if diff := cmp.Diff(keys(string(recorded[strings.Index(string(recorded), "\n"):])), keys(body)); strings.HasPrefix(head, "gpreempt-pause 1 ") && diff != "" {
		t.Errorf("keys of version 1 (-recorded +written):\n%s", diff)
	}
	if r := cleanup(dir); r != (result{0, oneRunsAgain, ""}) {
		t.Errorf("--cleanup: %+v", r)
	}
	m.awaitProgress(again)
	for _, w := range []*worker{job, again} {
		w.stop()
	}
}

// runProgram runs one that needs no daemon.
func runProgram(t *testing.T, program string, args ...string) result {
	t.Helper()
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(t.Context(), program, args...)
	cmd.Env, cmd.Stdout, cmd.Stderr = environment(), &out, &errs
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return result{cmd.ProcessState.ExitCode(), out.String(), errs.String()}
}

// What gpctl of version 1 exported is read, and a later format is refused by its number.
func TestEventsOfVersion1AreRead(t *testing.T) {
	t.Parallel()
	recorded := filepath.Join(version1, "events.jsonl")
	if *update {
		d := start(t, atOnce)
		d.startOffline()
		for range 3 {
			d.complete(d.announce(t.Context()).GetLeaseId())
		}
		if err := os.WriteFile(recorded, []byte(d.ctl("events", "export").Out), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if r := runProgram(t, gplab, "plan", "--events", recorded, "--slo", "30ms"); r.Code != 0 || !strings.Contains(r.Out, "POLICY") {
		t.Errorf("the export of version 1: %+v", r)
	}
	text, err := os.ReadFile(recorded)
	if err != nil {
		t.Fatal(err)
	}
	later := filepath.Join(t.TempDir(), "events.jsonl")
	if err := os.WriteFile(later, []byte(strings.Replace(string(text), `"format":1`, `"format":2`, 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	if r := runProgram(t, gplab, "plan", "--events", later, "--slo", "30ms"); r.Code == 0 || !strings.Contains(r.Err, "the format is 2") {
		t.Errorf("a later format: %+v", r)
	}
}
