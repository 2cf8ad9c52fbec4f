package daemon

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/gpreempt/gpreempt/internal/testutil"
)

// openFiles counts the descriptors of this process.
func openFiles(t *testing.T) int {
	t.Helper()
	open, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	return len(open)
}

func TestTCPAddressThatIsTakenIsAnErrorAndLeaksNoDescriptor(t *testing.T) {
	var lc net.ListenConfig
	l, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	ca := testutil.NewAuthority(t, "clients")
	cert, key := ca.Issue(testutil.ForServer)
	opts := simulated(t, testutil.TempSocketDir(t))
	write(t, opts.ConfigPath, noGroups+"tcp: {address: \""+l.Addr().String()+"\", certificate: "+cert+", key: "+key+", client_ca: "+ca.File+"}\n")
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // the collector would close what was forgotten
	before := openFiles(t)
	if err := Run(t.Context(), opts); err == nil || !strings.Contains(err.Error(), "tcp.address must be a free address") {
		t.Errorf("the daemon ends with %v, want an error about tcp.address", err)
	}
	if after := openFiles(t); after != before {
		t.Errorf("%d descriptors are open, and were %d before", after, before)
	}
	if _, err := os.Lstat(opts.Socket); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the socket is still there: %v", err)
	}
}
