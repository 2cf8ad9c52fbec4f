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
)

// pythonMagic begins every file that gpctl queue find writes: what does not begin
// so is somebody else's and is not replaced.
const pythonMagic = "# Queues of one process, written by gpctl queue find.\n"

// pythonConfig is the text of a configuration that programs of the queue_finder
// kind import: the list queues. about are lines of comment; they may hold what others
// chose.
func pythonConfig(queues []foundQueue, about []string) string {
	var b strings.Builder
	b.WriteString(pythonMagic)
	// Python takes a comment of the first two lines that says "coding:" for the
	// encoding of the file.
	b.WriteString("#\n")
	for _, line := range about {
		b.WriteString(strings.TrimRight("# "+printable(line), " ") + "\n")
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

// writePythonConfig puts content where path says, whole or not at all. Only a file
// of its own kind is replaced.
func writePythonConfig(path, content string) error {
	if err := mayReplace(path); err != nil {
		return err
	}
	return replaceFile(path, "--python-config=FILE", func(w io.Writer) error {
		_, err := io.WriteString(w, content)
		return err
	})
}

// mayReplace refuses what gpctl did not write.
func mayReplace(path string) error {
	foreign := func(what string) error {
		return &failure{
			code: ExitRefused, message: fmt.Sprintf("%s %s: it stays as it is", path, what), next: "name another file with --python-config=FILE",
		}
	}
	// Whatever stands there, opening it must not wait or follow a link.
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case errors.Is(err, syscall.ELOOP):
		return foreign("is a link")
	case err != nil:
		return foreign("exists and cannot be read")
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return foreign("is no regular file")
	}
	if line, err := bufio.NewReader(file).ReadString('\n'); err != nil || line != pythonMagic {
		return foreign("was not written by gpctl queue find")
	}
	return nil
}
