package conformance

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/testutil"
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
		for word := range strings.FieldsSeq(line) {
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

// softUnmap is an execution of UNMAP_QUEUES.
type softUnmap struct {
	number int64
	grace  uint64 // the register CP_IQ_WAIT_TIME2
	pids   []string
}

// softUnmaps returns the last ones of a GPU.
func softUnmaps(gpu uint32) ([]softUnmap, error) {
	lines, err := softLines("unmaps")
	if err != nil {
		return nil, err
	}
	var all []softUnmap
	for _, line := range lines {
		if number32(line["gpu"]) != gpu {
			continue
		}
		var u softUnmap
		if _, err := fmt.Sscan(line["unmap"]+" "+line["grace"], &u.number, &u.grace); err != nil {
			return nil, fmt.Errorf("unmaps: %v: %w", line, err)
		}
		u.pids = strings.Split(line["pids"], ",")
		all = append(all, u)
	}
	return all, nil
}

// look returns the changes of a node since the last look. HWS unmaps all queues
// of a node at once, and adds and removes none; MES adds and removes single ones.
func (h *kernelHost) look(gpu uint32) reply {
	var unmaps []softUnmap
	adds, removes := uint32(0), uint32(0)
	nodes, err := softLines("nodes")
	for _, n := range nodes {
		if number32(n["gpu"]) != gpu {
			continue
		}
		if h.holds["mes"] {
			now := [2]uint32{number32(n["adds"]), number32(n["removes"])}
			adds, removes = now[0]-h.single[gpu][0], now[1]-h.single[gpu][1]
			h.single[gpu] = now
		} else if n["unmaps"] != strconv.FormatInt(h.seen[gpu], 10) {
			unmaps, err = softUnmaps(gpu)
		}
	}
	if err != nil {
		return reply{Broken: err.Error()}
	}
	var grace []string
	took := map[string]bool{}
	r := reply{}
	for _, u := range unmaps {
		if u.number <= h.seen[gpu] {
			continue
		}
		r.R += u.number - h.seen[gpu]
		h.seen[gpu] = u.number
		for _, pid := range u.pids {
			took[pid] = true
		}
		if u.grace == h.waits {
			grace = append(grace, "default")
		} else {
			grace = append(grace, strconv.FormatUint(u.grace>>8&0xff, 10)) // SCH_WAVE
		}
	}
	var cycled []string
	for _, p := range h.agents {
		if pid := strconv.Itoa(int(p.id)); took[pid] {
			cycled = append(cycled, pid)
		}
	}
	r.Out = map[string]string{"adds": fmt.Sprint(adds), "removes": fmt.Sprint(removes), "grace": strings.Join(grace, ","), "cycled": strings.Join(cycled, ",")}
	return r
}

// prepareSoftGPU reads the state of the nodes that look compares with.
func (h *kernelHost) prepareSoftGPU() error {
	nodes, err := softLines("nodes")
	if err != nil {
		return err
	}
	for _, n := range nodes {
		if h.waits, err = strconv.ParseUint(n["grace"], 0, 32); err != nil {
			return fmt.Errorf("nodes: %v: %w", n, err)
		}
		gpu := number32(n["gpu"])
		h.ids, h.resets[gpu] = append(h.ids, gpu), number32(n["resets"])
		h.look(gpu)
	}
	return nil
}

func (h *kernelHost) hang(gpu uint32) error { return control("hang", gpu, 1) }

func (h *kernelHost) firmware(gpu, version uint32) error { return control("firmware", gpu, version) }

func (h *kernelHost) reset(gpu uint32) error { return control("reset", gpu) }

func (h *kernelHost) recover(gpu uint32) error {
	return eventually("the GPU is not reset", func() (bool, error) {
		nodes, err := softLines("nodes")
		if err != nil {
			return false, err
		}
		for _, n := range nodes {
			if number32(n["gpu"]) == gpu && number32(n["resets"]) > h.resets[gpu] {
				h.resets[gpu] = number32(n["resets"])
				return true, nil
			}
		}
		return false, nil
	})
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

func (p *kernelProcess) raise(gpu, queue uint32, mask uint64) error {
	return control("raise", p.id, gpu, queue, strconv.FormatUint(mask, 16))
}

// refuse has a queue not answer a preemption, until the driver resets it or destroys it.
func (p *kernelProcess) refuse(gpu, queue uint32) error {
	return control("refuse", gpu, fmt.Sprintf("%d:%d", p.id, queue))
}

func (p *kernelProcess) evict() error   { return control("evict", p.id) }
func (p *kernelProcess) restore() error { return control("restore", p.id) }

// The verbs hold and release are of tests only.
func init() {
	var release func() error // of the agent
	verbs["hold"] = func(d *doing) (int64, error) {
		// The driver has one object for the process, however often it is opened.
		fd, err := d.sys.Open(kfd.DevicePath, unix.O_RDWR|unix.O_CLOEXEC)
		if err == nil {
			release, err = testutil.HoldDriverLock(fd)
		}
		return 0, err
	}
	verbs["release"] = func(*doing) (int64, error) { return 0, release() }
}

func (p *kernelProcess) hold() error    { return p.obey("hold") }
func (p *kernelProcess) release() error { return p.obey("release") }

// obey has the main thread do a verb without arguments, which must succeed.
func (p *kernelProcess) obey(verb string) error {
	r, err := p.ask(order{Call: call{Verb: verb}})
	switch {
	case err != nil:
		return err
	case r.Reply.Broken != "":
		return errors.New(r.Reply.Broken)
	case r.Reply.Errno != 0:
		return fmt.Errorf("%s: %w", verb, r.Reply.Errno)
	}
	return nil
}

func (p *kernelProcess) fault(gpu uint32, address uint64) error {
	return control("fault", gpu, p.id, strconv.FormatUint(address, 16))
}

func (p *kernelProcess) signal(gpu, event uint32) error {
	return control("interrupt", gpu, p.id, event)
}
