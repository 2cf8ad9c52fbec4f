package daemon

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

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
	after := openFiles(t)
	for late := time.Now().Add(20 * time.Second); after > before && time.Now().Before(late); after = openFiles(t) {
		runtime.Gosched() // a goroutine may be about to close one
	}
	if after > before {
		t.Errorf("%d descriptors are open, and were %d before", after, before)
	}
	if _, err := os.Lstat(opts.Socket); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the socket is still there: %v", err)
	}
}

// A private key that others can read is named, with the command that changes it, by config
// check, the doctor and the daemon, until it is changed.
func TestPrivateKeyThatOthersCanReadIsAWarning(t *testing.T) {
	ca := testutil.NewAuthority(t, "clients")
	cert, key := ca.Issue(testutil.ForServer)
	text := noGroups + "tcp: {address: \"" + testutil.FreeAddress(t) + "\", certificate: " + cert + ", key: " + key + ", client_ca: " + ca.File + "}\n"
	d := newDaemon(t, text)
	l, err := d.listenTCP(t.Context(), d.config.Load().TCP)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	// shown returns what the three print about the key.
	shown := func() (all []string) {
		_ = d.reloadWith(t, text)
		for _, w := range d.warnings.list() {
			all = append(all, w.Code+": "+w.Text+": "+w.Remedy)
		}
		for _, c := range Diagnose(t.Context(), d.opts).GetChecks() {
			if c.GetId() == "private-key" {
				all = append(all, c.GetStatus().String()+": "+c.GetFound()+": "+c.GetRemedy())
			}
		}
		var errs strings.Builder
		check := Command()
		check.SetArgs([]string{"config", "check", d.opts.ConfigPath})
		check.SetOut(io.Discard)
		check.SetErr(&errs)
		if err := check.ExecuteContext(t.Context()); err != nil {
			t.Fatal(err)
		}
		if errs.Len() > 0 {
			all = append(all, errs.String())
		}
		return all
	}
	if got := shown(); got != nil {
		t.Errorf("a key of mode 0600: %q", got)
	}
	if err := os.Chmod(key, 0o644); err != nil {
		t.Fatal(err)
	}
	problem := fmt.Sprintf("the private key %s has owner %d and mode 0644, so other users can read or replace it: "+
		"chmod 0600 %s; issue another key if a user who could read it is not trusted", key, os.Geteuid(), key)
	if diff := cmp.Diff([]string{
		"PRIVATE_KEY_EXPOSED: " + problem, "CHECK_STATUS_WARN: " + problem, d.opts.ConfigPath + ": warning: tcp.key: " + problem + "\n",
	}, shown()); diff != "" {
		t.Errorf("a key of mode 0644 (-want +got):\n%s", diff)
	}
}
