// Package safedir makes directories in which no other user can replace a file.
package safedir

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// Error is a directory in which another user could replace a file, or what leads to it.
type Error struct {
	// Path is the directory, or the symbolic link or file on the way to it.
	Path string
	// Problem begins with a verb, and Remedy is an imperative.
	Problem, Remedy string
}

// Error names path, problem and remedy.
func (e *Error) Error() string { return e.Path + " " + e.Problem + ": " + e.Remedy }

// maxLinks is how many symbolic links a path may lead through (MAXSYMLINKS).
const maxLinks = 40

// Make makes a directory, and those above it that are missing, with mode 0755. It returns an
// *Error unless each component of the path, and of the symbolic links in it, belongs to root or to
// the user of this program, and only its owner may write to it. A sticky directory, such as
// /tmp, may be writable for others, who cannot replace the next component.
func Make(path string) error {
	if !filepath.IsAbs(path) {
		return &Error{path, "is not an absolute path", "write one that begins with /"}
	}
	at, links := "/", 0
	rest := components(path)
	if err := check(at); err != nil {
		return err
	}
	for len(rest) > 0 {
		next := filepath.Join(at, rest[0])
		rest = rest[1:]
		if err := os.Mkdir(next, 0o755); err != nil && !errors.Is(err, fs.ErrExist) { //nolint:gosec // G301: clients must reach the socket
			// A directory that exists on a read-only file system can be in use.
			if _, exists := os.Lstat(next); exists != nil {
				return err
			}
		}
		if err := check(next); err != nil {
			return err
		}
		target, err := os.Readlink(next)
		if err != nil { // it is not a link
			at = next
			continue
		}
		if links++; links > maxLinks {
			return &Error{path, "leads through too many symbolic links", "remove the loop"}
		}
		if filepath.IsAbs(target) {
			at = "/"
		}
		rest = slices.Concat(components(target), rest)
	}
	return nil
}

func components(path string) []string {
	return strings.FieldsFunc(path, func(r rune) bool { return r == '/' })
}

// check returns why another user could replace what is below a path: nil for a symbolic link
// that only its owner can replace.
func check(path string) error {
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	switch mode := info.Mode(); {
	case !ok:
		return &Error{path, "has no owner", "choose another path"}
	case !trusted(stat.Uid):
		return &Error{path, fmt.Sprintf("belongs to user %d", stat.Uid), fmt.Sprintf("chown it to root, or choose another path: user %d can replace everything below it", stat.Uid)}
	case mode.Type() == fs.ModeSymlink:
		return nil
	case !mode.IsDir():
		return &Error{path, "is not a directory", "move it away, or choose another path"}
	case mode.Perm()&0o022 != 0 && mode&fs.ModeSticky == 0:
		return &Error{path, fmt.Sprintf("is writable for other users (mode %04o)", mode.Perm()), "chmod go-w " + path + ", or choose another path"}
	}
	return nil
}

// trusted reports whether a user may own a directory: root and the user of this program may. In a
// user namespace that does not map all users, the kernel shows the files of the others,
// root's among them, as those of one user.
func trusted(uid uint32) bool {
	if uid == 0 || int(uid) == os.Geteuid() {
		return true
	}
	mapped, err := os.ReadFile("/proc/self/uid_map")
	overflow, errOverflow := os.ReadFile("/proc/sys/kernel/overflowuid")
	return err == nil && errOverflow == nil &&
		!slices.Equal(strings.Fields(string(mapped)), []string{"0", "0", "4294967295"}) &&
		strings.TrimSpace(string(overflow)) == fmt.Sprint(uid)
}
