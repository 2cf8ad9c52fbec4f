package e2e

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/client"
)

// tcp is what a test needs to reach a daemon by TCP: an address, and files whose
// contents can be replaced.
type tcp struct {
	t       *testing.T
	ca      *testutil.Authority
	address string
	config  string
	dir     string
}

// overTCP returns a config that serves TCP too: dns:web.example may announce, and
// uri:spiffe://example/ops is an admin.
func overTCP(t *testing.T) *tcp {
	t.Helper()
	address := testutil.FreeAddress(t)
	w := &tcp{t: t, ca: testutil.NewAuthority(t, "clients"), address: address, dir: t.TempDir()}
	w.install(w.ca)
	w.config = atOnce + fmt.Sprintf(`
tcp:
  address: %s
  certificate: %s
  key: %s
  client_ca: %s
  online: [dns:web.example]
  admin: [uri:spiffe://example/ops]
`, address, w.file("cert.pem"), w.file("key.pem"), w.file("ca.pem"))
	return w
}

func (w *tcp) file(name string) string { return filepath.Join(w.dir, name) }

// install configures the daemon with a certificate of ca, and ca as the authority of its clients.
func (w *tcp) install(ca *testutil.Authority) {
	w.t.Helper()
	cert, key := ca.Issue(testutil.ForServer)
	for name, from := range map[string]string{"cert.pem": cert, "key.pem": key, "ca.pem": ca.File} {
		text, err := os.ReadFile(from)
		if err == nil {
			err = os.WriteFile(w.file(name), text, 0o600)
		}
		if err != nil {
			w.t.Fatal(err)
		}
	}
}

// dial returns a client with a certificate of ca.
func (w *tcp) dial(ca *testutil.Authority, change ...func(*x509.Certificate)) *client.Client {
	w.t.Helper()
	cert, key := ca.Issue(change...)
	c, err := client.Dial("tcp://"+w.address, client.Certificate(cert, key, ca.File))
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = c.Close() })
	return c
}

// ctl runs gpctl by TCP with a certificate of ca.
func (w *tcp) ctl(ca *testutil.Authority, change func(*x509.Certificate), args ...string) result {
	w.t.Helper()
	cert, key := ca.Issue(change)
	return w.gpctl(nil, append([]string{"--address", "tcp://" + w.address, "--cert", cert, "--key", key, "--ca", w.ca.File}, args...)...)
}

func (w *tcp) gpctl(env []string, args ...string) result {
	w.t.Helper()
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(w.t.Context(), gpctl, args...)
	cmd.Env, cmd.Stdout, cmd.Stderr = environment(env...), &out, &errs
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		w.t.Fatal(err)
	}
	return result{cmd.ProcessState.ExitCode(), out.String(), errs.String()}
}

var (
	webHolder = testutil.Named("web.example")
	opsHolder = testutil.WithURI("spiffe://example/ops")
)

// longWait is the longest max_wait. The client gives up some time after it, which must not
// happen on a busy machine.
const longWait = 10 * time.Second

func TestTCPServesHoldersOfListedCertificates(t *testing.T) {
	t.Parallel()
	w := overTCP(t)
	d := start(t, w.config)
	pid := d.startOffline()

	// An inference server on another host announces and completes.
	web := w.dial(w.ca, webHolder)
	since := d.revision()
	lease, err := web.Acquire(t.Context(), client.Request{GPUs: client.OwnGPUs(), Label: "llm", MaxWait: longWait})
	if err != nil || !lease.Protected() {
		t.Fatalf("acquired %+v, %v", lease, err)
	}
	d.awaitTarget(pid, since, suspended)
	d.checkFrozen(pid)
	r := w.ctl(w.ca, opsHolder, "lease", "list")
	if r.Code != 0 || !strings.Contains(r.Out, "dns:web.example") || !strings.Contains(r.Out, "llm") {
		t.Errorf("gpctl lease list by TCP: %+v", r)
	}
	if err := lease.Release(t.Context()); err != nil {
		t.Error(err)
	}
	d.awaitTarget(pid, since, running)

	// Its lease ends with its connection.
	since = d.revision()
	if _, err := web.Acquire(t.Context(), client.Request{GPUs: client.OwnGPUs(), MaxWait: longWait}); err != nil {
		t.Fatal(err)
	}
	d.awaitTarget(pid, since, suspended)
	if err := web.Close(); err != nil {
		t.Error(err)
	}
	d.awaitTarget(pid, since, running)
	d.checkRuns(pid)

	// Admin verbs are for admins, and both outcomes are in the audit log.
	if r := w.ctl(w.ca, opsHolder, "drain", "on"); r.Code != 0 {
		t.Errorf("gpctl drain by TCP: %+v", r)
	}
	if r := w.ctl(w.ca, webHolder, "drain", "off"); r.Code != 5 || !strings.Contains(r.Err, `add "dns:web.example" to tcp.admin`) {
		t.Errorf("gpctl drain by an online certificate: %+v", r)
	}
	if r := w.ctl(w.ca, testutil.Named("db.example"), "status"); r.Code != 5 || !strings.Contains(r.Err, `add "dns:db.example" to tcp.admin`) {
		t.Errorf("gpctl status by a stranger: %+v", r)
	}
	d.check(0, "", "drain", "off") // by the socket
	type line struct {
		Level, Outcome, Method, Verb, Certificate, Subject, Reason string
		UID                                                        *uint32
		Exe                                                        string
	}
	d.eventually("the audit log of four calls", func() bool {
		return strings.Count(strings.Join(d.log.all(), "\n"), `"audit":true`) >= 4
	})
	root := uint32(os.Getuid())
	var got []line
	for _, text := range d.log.all() {
		var l struct {
			line
			Audit   bool
			Msg     string
			Address string
			Cgroup  string
		}
		if json.Unmarshal([]byte(text), &l) != nil || !l.Audit {
			continue
		}
		if l.Msg != "admin call" || (l.Certificate != "") != strings.HasPrefix(l.Address, "127.0.0.1:") || (l.UID != nil) != (l.Cgroup != "") {
			t.Errorf("audit line %s", text)
		}
		got = append(got, l.line)
	}
	if diff := cmp.Diff([]line{
		{Level: "info", Outcome: "done", Method: "SetDrain", Verb: "drain true", Certificate: "uri:spiffe://example/ops", Subject: "O=Example"},
		{Level: "warn", Outcome: "refused", Method: "SetDrain", Certificate: "dns:web.example", Subject: "O=Example", Reason: "ADMIN_RIGHT_MISSING"},
		{Level: "warn", Outcome: "refused", Method: "GetStatus", Certificate: "dns:db.example", Subject: "O=Example", Reason: "ADMIN_RIGHT_MISSING"},
		{Level: "info", Outcome: "done", Method: "SetDrain", Verb: "drain false", UID: &root, Exe: gpctl},
	}, got); diff != "" {
		t.Errorf("audit log (-want +got):\n%s", diff)
	}
	d.stopJob(pid)
}

func TestTCPRefusesEveryOtherCertificate(t *testing.T) {
	t.Parallel()
	w := overTCP(t)
	d := start(t, w.config)
	foreign := testutil.NewAuthority(t, "clients")
	as := func(change func(*x509.Certificate)) func(*x509.Certificate) {
		return func(c *x509.Certificate) {
			opsHolder(c)
			change(c)
		}
	}
	for _, tc := range []struct {
		name   string
		ca     *testutil.Authority
		change func(*x509.Certificate)
		says   string
	}{
		{"expired", w.ca, as(testutil.Valid(-time.Hour, -time.Minute)), "expired certificate"},
		{"not yet valid", w.ca, as(testutil.Valid(time.Minute, time.Hour)), "expired certificate"},
		{"foreign", foreign, opsHolder, "unknown certificate authority"},
		{"for servers", w.ca, as(func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} }), "bad certificate"},
	} {
		r := w.ctl(tc.ca, tc.change, "drain", "on")
		if r.Code != 5 || !strings.Contains(r.Err, tc.says) || !strings.Contains(r.Err, "--cert") {
			t.Errorf("%s: %+v, want exit status 5 and %q", tc.name, r, tc.says)
		}
	}
	conn, err := grpc.NewClient(w.address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	if _, err := gpreemptv1.NewOnlineServiceClient(conn).NotifyOnline(ctx, announcement()); status.Code(err) != codes.Unavailable {
		t.Errorf("plain TCP: %v", err)
	}
	d.eventually("each refusal is in the log", func() bool { return strings.Count(d.log.String(), `"client connection refused"`) >= 5 })
	if d.status().GetDraining() {
		t.Error("somebody got through")
	}

	// The ways to give gpctl an address.
	cert, key := w.ca.Issue(opsHolder)
	env := []string{"GPREEMPT_ADDRESS=tcp://" + w.address, "GPREEMPT_CERT=" + cert, "GPREEMPT_KEY=" + key, "GPREEMPT_CA=" + w.ca.File}
	for _, tc := range []struct {
		name string
		env  []string
		args []string
		code int
		says string
	}{
		{"environment", env, []string{"status", "-o", "wide"}, 0, "tcp://" + w.address},
		{"the socket's flag goes first", env, []string{"--socket", d.socket, "status", "-o", "wide"}, 0, d.socket},
		{"doctor", env, []string{"doctor"}, 0, ""},
		{"two daemons", nil, []string{"--socket", d.socket, "--address", "tcp://" + w.address, "status"}, 2, "two daemons"},
		{"no key", env[:2], []string{"status"}, 2, "missing --key"},
		{"a certificate for a socket", nil, []string{"--cert", cert, "status"}, 2, "--cert needs --address"},
		{"what asks no daemon needs no key", env[:1], []string{"version"}, 0, ""},
		{"no scheme", env[1:], []string{"--address", w.address, "status"}, 2, "tcp://HOST:PORT"},
		{"a missing file", env, []string{"--cert", "/nowhere.pem", "status"}, 2, "/nowhere.pem"},
		{"another's authority", env, []string{"--ca", foreign.File, "status"}, 3, "--ca"},
		{"no daemon", env, []string{"--address", "tcp://127.0.0.1:1", "status"}, 3, "tcp.address"},
	} {
		if r := w.gpctl(tc.env, tc.args...); r.Code != tc.code || !strings.Contains(r.Out+r.Err, tc.says) {
			t.Errorf("%s: %+v, want exit status %d and %q", tc.name, r, tc.code, tc.says)
		}
	}
}

func TestReloadAppliesCertificatesAndNames(t *testing.T) {
	t.Parallel()
	w := overTCP(t)
	d := start(t, w.config)
	before := w.dial(w.ca, webHolder)
	lease, err := before.Online().NotifyOnline(t.Context(), announcement())
	if err != nil {
		t.Fatal(err)
	}

	// An invalid certificate file changes nothing and is reported.
	if err := os.WriteFile(w.file("ca.pem"), []byte("nonsense"), 0o600); err != nil {
		t.Fatal(err)
	}
	d.reload(w.config)
	d.eventually("the warning", func() bool { return d.warned("CERTIFICATE_REJECTED") != nil })
	if r := w.ctl(w.ca, opsHolder, "status"); r.Code != 0 || !strings.Contains(r.Out, "CERTIFICATE_REJECTED") {
		t.Errorf("with the certificates from before: %+v", r)
	}

	// New authorities: connections with certificates of the old ones are closed.
	old := w.ca
	w.ca = testutil.NewAuthority(t, "new clients")
	w.install(w.ca)
	d.reload(w.config)
	d.eventually("the warning is gone", func() bool { return d.warned("CERTIFICATE_REJECTED") == nil })
	if end := d.awaitEnd(lease.GetLeaseId()); end != gpreemptv1.LeaseEnd_LEASE_END_DISCONNECTED {
		t.Errorf("the lease of the old certificate ended as %v", end)
	}
	if r := w.ctl(old, opsHolder, "status"); r.Code == 0 {
		t.Errorf("the old authority still counts: %+v", r)
	}
	after := w.dial(w.ca, webHolder)
	if _, err := after.Online().NotifyOnline(t.Context(), announcement()); err != nil {
		t.Fatal(err)
	}

	// A name that is taken off the list has no right at the next call.
	d.reload(strings.ReplaceAll(w.config, "dns:web.example", "dns:other.example"))
	d.eventually("the name lost its right", func() bool {
		_, err := after.Online().NotifyOnline(t.Context(), announcement())
		return status.Code(err) == codes.PermissionDenied
	})

	// The address needs a restart.
	d.reload(strings.ReplaceAll(w.config, w.address, "127.0.0.1:1"))
	d.eventually("the warning", func() bool { return strings.Contains(d.warned("RESTART_NEEDED").GetText(), "tcp.address") })
	if r := w.ctl(w.ca, opsHolder, "status"); r.Code != 0 {
		t.Errorf("by the address from before: %+v", r)
	}
}

func TestDaemonDoesNotStartWithTCPItCannotServe(t *testing.T) {
	t.Parallel()
	w := overTCP(t)
	if err := os.Remove(w.file("key.pem")); err != nil {
		t.Fatal(err)
	}
	if said := refused(t, testutil.TempSocketDir(t), w.config); !strings.Contains(said, w.file("key.pem")) || !strings.Contains(said, "tcp.address") {
		t.Errorf("it says %s", said)
	}
	w.install(w.ca)
	taken, err := net.Listen("tcp", w.address)
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	if said := refused(t, testutil.TempSocketDir(t), w.config); !strings.Contains(said, "address already in use") {
		t.Errorf("it says %s", said)
	}
	bare, _, _ := strings.Cut(w.config, "  certificate:")
	if said := refused(t, testutil.TempSocketDir(t), bare); !strings.Contains(said, "tcp.certificate") || !strings.Contains(said, "TCP needs certificates") {
		t.Errorf("it says %s", said)
	}
}
