package nvrm_test

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/nvrm"
)

// recording is what a real driver answered while TestTheDriverBehavesAsExpected ran, with the
// variable GPREEMPT_NVIDIA_RECORD=FILE. It is a nvrm.Sys that records, or one that answers again.
type recording struct {
	// Driver is the first line of /proc/driver/nvidia/version.
	Driver string
	Files  []int
	Newest nvrm.Handle
	// Calls are the answers by request, in order; of questions about objects only those that exist.
	Calls map[string][]string
	// Misses counts the other questions by their status.
	Misses map[string]int
	// Runs are the answers of rig.runs.
	Runs []bool
	// Channels are those of the first scans.
	Channels []nvrm.Channel

	mu   sync.Mutex
	real nvrm.Sys // nil when it answers
}

func (r *recording) Open(key gpreempt.ProcessKey) (nvrm.Process, error) {
	if r.real == nil {
		return recordedProcess{r: r}, nil
	}
	p, err := r.real.Open(key)
	return recordedProcess{p, r}, err
}

func (r *recording) NewestClient() (h nvrm.Handle, err error) {
	if r.real != nil {
		r.Newest, err = r.real.NewestClient()
	}
	return r.Newest, err
}

func (r *recording) Confidential() (nvrm.Confidential, error) { return r.real.Confidential() }

type recordedProcess struct {
	nvrm.Process
	r *recording
}

func (p recordedProcess) Files() (all []int, err error) {
	if p.r.real != nil {
		p.r.Files, err = p.Process.Files()
	}
	return p.r.Files, err
}

func (p recordedProcess) Copy(number int) (nvrm.File, error) {
	if p.r.real == nil {
		return recordedFile{nil, p.r, number}, nil
	}
	f, err := p.Process.Copy(number)
	return recordedFile{f, p.r, number}, err
}

func (p recordedProcess) Close() {
	if p.r.real != nil {
		p.Process.Close()
	}
}

type recordedFile struct {
	nvrm.File
	r      *recording
	number int
}

func (f recordedFile) Close() error {
	if f.r.real == nil {
		return nil
	}
	return f.File.Close()
}

func (f recordedFile) Control(client, object nvrm.Handle, cmd nvrm.Command, params []byte) error {
	f.r.mu.Lock()
	defer f.r.mu.Unlock()
	text := func() string { return hex.EncodeToString(bytes.TrimRight(params, "\x00")) }
	request := fmt.Sprintf("%d %v %v %#x %s", f.number, client, object, uint32(cmd), text())
	if f.r.real == nil {
		return f.answer(request, client, cmd, params)
	}
	err := f.File.Control(client, object, cmd, params)
	var status nvrm.Status
	if err != nil && !errors.As(err, &status) {
		return err
	}
	if status != nvrm.OK && cmd == nvrm.GetHandleInfo {
		f.r.Misses[status.Error()]++
		return err
	}
	answer := fmt.Sprintf("%#x %s", uint32(status), text())
	if was := f.r.Calls[request]; cmd == nvrm.DisableChannels || !slices.Contains(was, answer) {
		f.r.Calls[request] = append(was, answer)
	}
	return err
}

// answer takes the next recorded answer of a request; the last one stays.
func (f recordedFile) answer(request string, client nvrm.Handle, cmd nvrm.Command, params []byte) error {
	answers := f.r.Calls[request]
	if len(answers) == 0 && cmd == nvrm.GetHandleInfo {
		own := fmt.Sprintf("%d %v ", f.number, client)
		for other := range f.r.Calls {
			if strings.HasPrefix(other, own) {
				if nvrm.Params[nvrm.HandleInfo](params).Index > nvrm.IndexClass {
					return nvrm.InvalidArgument
				}
				return nvrm.ObjectNotFound
			}
		}
		return nvrm.InvalidClient
	}
	if len(answers) == 0 {
		return fmt.Errorf("the request %s was not recorded", request)
	}
	if len(answers) > 1 {
		f.r.Calls[request] = answers[1:]
	}
	var status uint32
	if _, err := fmt.Sscanf(answers[0], "%v", &status); err != nil {
		return err
	}
	_, text, _ := strings.Cut(answers[0], " ")
	out, err := hex.DecodeString(text)
	if err != nil {
		return err
	}
	clear(params)
	copy(params, out)
	if status != uint32(nvrm.OK) {
		return nvrm.Status(status)
	}
	return nil
}

// record returns a recording of the real driver that is saved at the end of the test, and a
// function that records an answer of runs; both do nothing without the variable.
func record(t *testing.T) (nvrm.Sys, *recording) {
	path := os.Getenv("GPREEMPT_NVIDIA_RECORD")
	if path == "" {
		return nvrm.Kernel(), nil
	}
	text, err := os.ReadFile("/proc/driver/nvidia/version")
	if err != nil {
		t.Fatal(err)
	}
	first, _, _ := strings.Cut(string(text), "\n")
	return nil, &recording{Driver: first, Calls: map[string][]string{}, Misses: map[string]int{}, real: nvrm.Kernel()}
}

func (r *recording) save(t *testing.T) {
	text, err := json.MarshalIndent(r, "", " ")
	if err == nil {
		err = os.WriteFile(os.Getenv("GPREEMPT_NVIDIA_RECORD"), append(text, '\n'), 0o600)
	}
	if err != nil {
		t.Error(err)
	}
}

// TestRecordedDriversBehaveAsExpected has the package talk to what real drivers answered: the same
// requests, byte for byte, and the same channels.
func TestRecordedDriversBehaveAsExpected(t *testing.T) {
	paths, err := filepath.Glob("testdata/recorded-*.json")
	if err != nil || len(paths) == 0 {
		t.Fatal("no recordings", err)
	}
	for _, path := range paths {
		t.Run(filepath.Base(path), func(t *testing.T) {
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			var r recording
			if err := json.Unmarshal(text, &r); err != nil {
				t.Fatal(err)
			}
			if _, err := nvrm.ParseVersion(r.Driver + "\n"); err != nil {
				t.Error(err)
			}
			for status := range r.Misses {
				if status != nvrm.ObjectNotFound.Error() && status != nvrm.InvalidClient.Error() && status != nvrm.InvalidArgument.Error() {
					t.Errorf("%d questions about objects were answered by %s", r.Misses[status], status)
				}
			}
			rig := rigOf(t, &r, key)
			rig.runs = func() bool {
				if len(r.Runs) == 0 {
					t.Fatal("more questions than answers")
				}
				first := r.Runs[0]
				r.Runs = r.Runs[1:]
				return first
			}
			all, unknown := rig.view.Channels()
			if diff := cmp.Diff(r.Channels, all); diff != "" || unknown != 0 {
				t.Errorf("%d channels with an unknown GPU; (-recorded +got):\n%s", unknown, diff)
			}
			check(t, rig)
		})
	}
}
