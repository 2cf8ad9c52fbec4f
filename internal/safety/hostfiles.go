package safety

import (
	"bytes"
	"strconv"
	"strings"
)

// holdsFlock reports whether a process holds a flock on a file, according to the text of
// /proc/locks. The file is identified by its inode number alone, because some file systems
// show another device number here.
//
//	3: FLOCK  ADVISORY  WRITE 4242 00:19:1337 0 EOF
//
// Lines of processes that wait have an arrow after the number.
func holdsFlock(b []byte, inode uint64, pid int32) bool {
	for line := range bytes.Lines(b) {
		f := strings.Fields(string(line))
		if len(f) < 6 || f[1] != "FLOCK" || f[4] != strconv.Itoa(int(pid)) {
			continue
		}
		if parts := strings.Split(f[5], ":"); parts[len(parts)-1] == strconv.FormatUint(inode, 10) {
			return true
		}
	}
	return false
}

// wholeRange reports whether the text of a uid_map maps every id to itself, as that
// of the first user namespace does.
func wholeRange(s string) bool {
	f := strings.Fields(s)
	return len(f) == 3 && f[0] == "0" && f[1] == "0" && f[2] == "4294967295"
}
