package conformance

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// softgpuDir is where the driver built with emu/softgpu reports on its nodes, which have
// no GPU, and takes commands for them.
const softgpuDir = "/sys/kernel/debug/softgpu/"

// hasSoftGPU reports whether the running driver's nodes have no GPU.
func hasSoftGPU() (bool, error) {
	_, err := os.Stat(softgpuDir)
	return err == nil, ignore(err, fs.ErrNotExist)
}

// softLines returns a file of softgpuDir: in each line, the words at even places are the
// names of those that follow them; a name and its value may also be joined by "=".
func softLines(name string) ([]map[string]string, error) {
	text, err := os.ReadFile(softgpuDir + name)
	if err != nil {
		return nil, err
	}
	var lines []map[string]string
	for line := range strings.Lines(string(text)) {
		values, last := map[string]string{}, ""
		for _, word := range strings.Fields(line) {
			switch key, value, joined := strings.Cut(word, "="); {
			case joined:
				values[key] = value
			case last == "":
				last = word
			default:
				values[last], last = word, ""
			}
		}
		lines = append(lines, values)
	}
	return lines, nil
}

// control sends a command to the driver built with emu/softgpu.
func control(words ...any) error {
	command := fmt.Sprintln(words...)
	return os.WriteFile(softgpuDir+"control", []byte(command), 0)
}

// softSeen is what was seen of a node at the last look.
type softSeen struct {
	unmaps int64
	cycled map[string]int64 // by pid
}

// look returns the changes of a node since the last look. The scheduler unmaps all queues
// of a node at once, and adds and removes none.
func (h *kernelHost) look(gpu uint32) reply {
	now, r := softSeen{cycled: map[string]int64{}}, reply{Out: map[string]string{"adds": "0", "removes": "0"}}
	nodes, err := softLines("nodes")
	queues, err2 := softLines("queues")
	if err := errors.Join(err, err2); err != nil {
		return reply{Broken: err.Error()}
	}
	id := strconv.FormatUint(uint64(gpu), 10)
	for _, n := range nodes {
		if n["gpu"] != id {
			continue
		}
		now.unmaps, _ = strconv.ParseInt(n["unmaps"], 10, 64) // 0 if it is absent
		r.Out["grace"] = n["grace"]
		if n["grace"] == n["default"] {
			r.Out["grace"] = "default"
		} else if waits, err := strconv.ParseUint(n["grace"], 0, 32); err == nil {
			r.Out["grace"] = strconv.FormatUint(waits>>8&0xff, 10) // SCH_WAVE of CP_IQ_WAIT_TIMES2
		}
	}
	for _, q := range queues {
		if q["gpu"] == id {
			n, _ := strconv.ParseInt(q["cycled"], 10, 64)
			now.cycled[q["pid"]] += n
		}
	}
	before := h.seen[gpu]
	var cycled []string
	for _, p := range h.agents {
		if pid := strconv.Itoa(int(p.id)); now.cycled[pid] > before.cycled[pid] {
			cycled = append(cycled, pid)
		}
	}
	r.Out["cycled"] = strings.Join(cycled, ",")
	r.R = now.unmaps - before.unmaps
	h.seen[gpu] = now
	return r
}

// queue returns the state of a queue; the answer is 1 if it exists.
func (p *kernelProcess) queue(id uint32) reply {
	queues, err := softLines("queues")
	if err != nil {
		return reply{Broken: err.Error()}
	}
	for _, q := range queues {
		if q["pid"] != strconv.Itoa(int(p.id)) || q["queue"] != strconv.FormatUint(uint64(id), 10) {
			continue
		}
		status, err := strconv.ParseUint(q["status"], 0, 64)
		if err != nil {
			return reply{Broken: err.Error()}
		}
		q["status"] = showMask(kfd.ExceptionMask(status))
		if q["sent"], err = p.sent(id); err != nil {
			return reply{Broken: err.Error()}
		}
		return reply{R: 1, Out: q}
	}
	return reply{}
}

// sent returns the exceptions that the driver sent to the process about a queue: a word of
// its memory that the header of the queue's save area names.
func (p *kernelProcess) sent(queue uint32) (string, error) {
	p.mu.Lock()
	at, ok := p.payloads[queue]
	p.mu.Unlock()
	if !ok {
		return showMask(0), nil
	}
	memory, err := os.Open(fmt.Sprintf("/proc/%d/mem", p.id))
	if err != nil {
		return "", err
	}
	defer memory.Close() // nothing was written
	var word [8]byte
	if _, err := memory.ReadAt(word[:], int64(at)); err != nil {
		return "", err
	}
	return showMask(kfd.ExceptionMask(binary.NativeEndian.Uint64(word[:]))), nil
}

// raise raises exceptions of a queue as the hardware does.
func (p *kernelProcess) raise(gpu, queue uint32, mask uint64) error {
	return control("raise", p.id, gpu, queue, strconv.FormatUint(mask, 16))
}
