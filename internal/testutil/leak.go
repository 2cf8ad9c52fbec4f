// Package testutil has helpers for tests: checks for leaked goroutines and file
// descriptors, short paths for sockets, certificates, and a fake OpenTelemetry collector.
package testutil

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// fdDir lists the open descriptors of this process.
const fdDir = "/proc/self/fd"

// VerifyMain runs the tests, and fails if goroutines or file descriptors remain after
// them. It returns the exit code:
//
//	func TestMain(m *testing.M) { os.Exit(testutil.VerifyMain(m)) }
//
// A failed run keeps its code and is not checked, because tests that stop early leak, and
// the leaks would hide the failure.
func VerifyMain(m *testing.M) int { return verifyMain(m, os.Stderr, endTime) }

// endTime is how long goroutines may take to end that are about to: goleak waits for less
// than half a second, which a busy host exceeds.
const endTime = 10 * time.Second

func verifyMain(m goleak.TestingM, stderr io.Writer, atMost time.Duration) int {
	before, err := openFDs()
	if err != nil {
		fmt.Fprintf(stderr, "testutil: cannot check for leaked file descriptors: %v\n", err)
		return 1
	}
	if code := m.Run(); code != 0 {
		return code
	}
	// Goroutines first: Find waits for those that are ending, which then close their
	// descriptors.
	late := time.Now().Add(atMost)
	err = goleak.Find()
	for err != nil && time.Now().Before(late) {
		err = goleak.Find()
	}
	if err != nil {
		fmt.Fprintf(stderr, "testutil: goroutines remain after the tests: %v\n", err)
		return 1
	}
	after, err := openFDs()
	if err != nil {
		fmt.Fprintf(stderr, "testutil: cannot check for leaked file descriptors: %v\n", err)
		return 1
	}
	if leaked := leakedFDs(before, after); len(leaked) > 0 {
		fmt.Fprintf(stderr, "testutil: file descriptors remain open after the tests:\n\t%s\n", strings.Join(leaked, "\n\t"))
		return 1
	}
	return 0
}

// openFDs returns the target of each open descriptor of this process.
func openFDs() (map[int]string, error) {
	entries, err := os.ReadDir(fdDir)
	if err != nil {
		return nil, err
	}
	fds := make(map[int]string, len(entries))
	for _, entry := range entries {
		fd, err := strconv.Atoi(entry.Name())
		if err != nil {
			return nil, fmt.Errorf("%s has an entry that is not a number: %q", fdDir, entry.Name())
		}
		target, err := os.Readlink(filepath.Join(fdDir, entry.Name()))
		if err != nil {
			continue // the descriptor of the listing itself, closed by now
		}
		fds[fd] = target
	}
	return fds, nil
}

// leakedFDs returns a line for each new descriptor in after. The runtime opens one epoll
// and one eventfd when it first polls, and keeps them; these are not leaks.
func leakedFDs(before, after map[int]string) []string {
	allowance := map[string]int{"anon_inode:[eventpoll]": 1, "anon_inode:[eventfd]": 1}
	for _, target := range before {
		if allowance[target] > 0 {
			allowance[target]--
		}
	}
	fds := make([]int, 0, len(after))
	for fd := range after {
		fds = append(fds, fd)
	}
	slices.Sort(fds)
	var leaked []string
	for _, fd := range fds {
		target := after[fd]
		if before[fd] == target {
			continue
		}
		if allowance[target] > 0 {
			allowance[target]--
			continue
		}
		leaked = append(leaked, fmt.Sprintf("fd %d -> %s", fd, target))
	}
	return leaked
}
