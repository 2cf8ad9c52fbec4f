package cli

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"syscall"

	"github.com/gpreempt/gpreempt/internal/term"
)

// pythonMagic is the first line of every file that gpctl queue find writes. A file
// without it is not replaced.
const pythonMagic = "# Queues of one process, written by gpctl queue find.\n"

// pythonConfig returns the text of a configuration that programs like queue_finder
// import: the list queues. about are comment lines, which may contain any characters.
func pythonConfig(queues []foundQueue, about []string) string {
	var b strings.Builder
	b.WriteString(pythonMagic)
	// Python interprets "coding:" in a comment of the first two lines as the encoding
	// of the file.
	b.WriteString("#\n")
	for _, line := range about {
		b.WriteString(strings.TrimRight("# "+term.Printable(line), " ") + "\n")
	}
	b.WriteString("\nqueues = [\n")
	for _, q := range queues {
		addr, id, active := "None", "None", "None"
		if q.queue.GetRingAddress() != 0 {
			addr = fmt.Sprintf("0x%016x", q.queue.GetRingAddress())
		}
		if !q.noID {
			id = fmt.Sprint(q.queue.GetQueueId())
		}
		if q.active != nil {
			active = map[bool]string{true: "True", false: "False"}[*q.active]
		}
		fmt.Fprintf(&b, "    {'addr': %s, 'queue_id': %s, 'pid': %d, 'is_active': %s},\n", addr, id, q.queue.GetPid(), active)
	}
	b.WriteString("]\n")
	return b.String()
}

// writePythonConfig writes content to path, completely or not at all. It replaces only
// a file that gpctl wrote.
func writePythonConfig(path, content string) error {
	if err := mayReplace(path); err != nil {
		return err
	}
	return term.ReplaceFile(path, "--python-config=FILE", func(w io.Writer) error {
		_, err := io.WriteString(w, content)
		return err
	})
}

// mayReplace returns an error for a file that gpctl did not write.
func mayReplace(path string) error {
	foreign := func(what string) error {
		return &term.Failure{
			Code: term.ExitRefused, Message: fmt.Sprintf("cannot replace %s: it %s", path, what), Next: "choose another file with --python-config=FILE",
		}
	}
	// Opening must not wait, as for a FIFO, or follow a link.
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case errors.Is(err, syscall.ELOOP):
		return foreign("is a symbolic link")
	case err != nil:
		return foreign("exists and cannot be read")
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return foreign("is not a regular file")
	}
	if line, err := bufio.NewReader(file).ReadString('\n'); err != nil || line != pythonMagic {
		return foreign("was not written by gpctl queue find")
	}
	return nil
}
