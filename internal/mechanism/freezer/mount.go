package freezer

import (
	"os"
	"path/filepath"
	"strings"
)

// mount is where the cgroup v2 hierarchy is mounted.
type mount struct {
	// root is the cgroup mounted at point.
	root, point string
}

// below returns the path of a cgroup from the mount point; false when it is not below it.
func (m *mount) below(path string) (string, bool) {
	switch {
	case m == nil:
		return "", false
	case m.root == "/":
		return path, true
	}
	rest, ok := strings.CutPrefix(path, m.root)
	return rest, ok && (rest == "" || rest[0] == '/')
}

// mounted finds the hierarchy, nil when it is not mounted. It caches a hierarchy that it
// found.
func (m *Mechanism) mounted() (*mount, error) {
	if mnt := m.found.Load(); mnt != nil {
		return mnt, nil
	}
	mnt, err := findMount(m.cfg.Root)
	if mnt != nil {
		m.found.Store(mnt)
	}
	return mnt, err
}

func findMount(root string) (*mount, error) {
	text, err := os.ReadFile(filepath.Join(root, "proc/self/mountinfo"))
	if err != nil {
		return nil, err
	}
	return parseMounts(string(text)), nil
}

// parseMounts reads /proc/self/mountinfo, whose lines are (proc_pid_mountinfo(5)):
//
//	36 35 98:0 /root /point options optional-fields - cgroup2 source options
//
// It returns nil when the hierarchy is not mounted.
func parseMounts(text string) *mount {
	for line := range strings.Lines(text) {
		where, what, found := strings.Cut(line, " - ")
		fields := strings.Split(where, " ") // other white space may be part of a path
		if found && len(fields) >= 5 && strings.HasPrefix(what, "cgroup2 ") {
			return &mount{unescape(fields[3]), unescape(fields[4])}
		}
	}
	return nil
}

// unescape decodes the characters that the kernel escapes.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace
