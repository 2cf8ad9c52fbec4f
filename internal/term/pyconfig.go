package term

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

// PythonFile is the default name of a file of WritePython, with PID for the number.
const PythonFile = "queue_config_pid_PID.py"

// PythonQueue is a queue of a Python file.
type PythonQueue struct {
	Address uint64  // of its ring, 0 if it is unknown
	ID      *uint32 // nil if it is unknown
	PID     int32
	Active  *bool // nil if it is unknown
}

// pythonMagic is the first line of every file that WritePython writes. A file without it is not
// replaced.
const pythonMagic = "# Queues of one process, written by gpctl or gplab.\n"

// pythonText returns the text of a configuration that programs like queue_finder
// import: the list queues. about are comment lines, which may contain any characters.
func pythonText(queues []PythonQueue, about []string) string {
	var b strings.Builder
	b.WriteString(pythonMagic)
	// Python interprets "coding:" in a comment of the first two lines as the encoding
	// of the file.
	b.WriteString("#\n")
	for _, line := range about {
		b.WriteString(strings.TrimRight("# "+Printable(line), " ") + "\n")
	}
	b.WriteString("\nqueues = [\n")
	for _, q := range queues {
		addr, id, active := "None", "None", "None"
		if q.Address != 0 {
			addr = fmt.Sprintf("0x%016x", q.Address)
		}
		if q.ID != nil {
			id = fmt.Sprint(*q.ID)
		}
		if q.Active != nil {
			active = map[bool]string{true: "True", false: "False"}[*q.Active]
		}
		fmt.Fprintf(&b, "    {'addr': %s, 'queue_id': %s, 'pid': %d, 'is_active': %s},\n", addr, id, q.PID, active)
	}
	b.WriteString("]\n")
	return b.String()
}

// WritePython writes the queues to path, completely or not at all, below comment lines about them.
// It replaces only a file that it wrote.
func WritePython(path string, queues []PythonQueue, about []string) error {
	if err := mayReplace(path); err != nil {
		return err
	}
	return ReplaceFile(path, "--python-config=FILE", func(w io.Writer) error {
		_, err := io.WriteString(w, pythonText(queues, about))
		return err
	})
}

// mayReplace returns an error for a file that WritePython did not write.
func mayReplace(path string) error {
	foreign := func(what string) error {
		return &Failure{
			Code: ExitRefused, Message: fmt.Sprintf("cannot replace %s: it %s", path, what), Next: "choose another file with --python-config=FILE",
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
		return foreign("was not written by gpctl or gplab")
	}
	return nil
}
