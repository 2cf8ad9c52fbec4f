package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/testutil"
)

// timeout bounds every wait. It only decides how long a broken test takes. On a host that is
// so busy that a call of the driver takes 2 s, the daemon takes the GPU for hung and suspends
// nothing on it for 30 s, perhaps several times. softGPUMain, for an emulated CPU, changes it.
var timeout = 2 * time.Minute

// atOnce is a config in which nothing but leases decides: no share floor, no
// linger, jobs called train* are offline, and mechanisms are attached to them at once.
const atOnce = `
access:
  online_groups: []
  admin_groups: []
policy:
  preset: strict
  linger: 0s
  attach_after: 0s
rules:
  - name: training
    match:
      comm: "train*"
    class: offline
`

// daemon is a running gpreemptd and the test's own connection to it.
type daemon struct {
	t       *testing.T
	socket  string
	config  string
	process *exec.Cmd
	log     *lines
	// exited is closed when the process is gone.
	exited   chan struct{}
	over     bool // the process was waited for, and its end judged
	busyHost bool // it has the times of busyHostDaemon

	conn   *grpc.ClientConn
	online gpreemptv1.OnlineServiceClient
	admin  gpreemptv1.AdminServiceClient
	sim    *simulation // nil unless kfdemu serve-sim runs the daemon
	events *eventLog
}

// start runs a daemon with a config and waits until it serves. The test ends with
// an orderly stop of it.
func start(t *testing.T, config string, args ...string) *daemon {
	t.Helper()
	dir := testutil.TempSocketDir(t)
	return startIn(t, dir, config, args...)
}

// startIn is start with the directory for config and socket given.
func startIn(t *testing.T, dir, config string, args ...string) *daemon {
	t.Helper()
	d := launch(t, dir, config, args...)
	d.awaitServing()
	d.events = watchEvents(t, d.admin)
	return d
}

// launch runs a daemon and waits for nothing.
func launch(t *testing.T, dir, config string, args ...string) *daemon {
	t.Helper()
	d := prepare(t, dir, config, args...)
	d.run()
	return d
}

// onHost, as an argument of start and its like, runs the shipped daemon, which looks for
// GPUs on the host. Without it kfdemu serve-sim runs the daemon on a simulated machine.
const onHost = "on the host"

// prepare makes everything ready to run a daemon.
func prepare(t *testing.T, dir, config string, args ...string) *daemon {
	t.Helper()
	d := &daemon{
		t: t, socket: filepath.Join(dir, "gpreemptd.sock"), config: filepath.Join(dir, "gpreemptd.yaml"),
		log: &lines{}, exited: make(chan struct{}),
	}
	d.writeConfig(config)
	program, verb := simBinary, "serve-sim"
	if len(args) > 0 && args[0] == onHost {
		program, verb, args = gpreemptd, "serve", args[1:]
	}
	d.process = exec.Command(program, append([]string{verb, "--socket", d.socket, "--config", d.config}, args...)...)
	if program == simBinary {
		d.sim, d.busyHost = newSimulation(t, d.process), true
	}
	d.process.Env = environment("TMPDIR=" + dir) // a daemon that is killed leaves its directory
	d.process.Stderr = d.log
	return d
}

// run starts the process. The test ends with an orderly stop of it.
func (d *daemon) run() {
	d.t.Helper()
	if err := d.process.Start(); err != nil {
		d.t.Fatal(err)
	}
	go func() {
		_ = d.process.Wait() // its end is checked by ProcessState
		close(d.exited)
	}()
	d.t.Cleanup(func() {
		if !d.over {
			d.stop()
		}
		if d.t.Failed() {
			d.t.Logf("what gpreemptd wrote:\n%s", d.log)
		}
	})
	d.conn = dial(d.t, d.socket)
	d.online = gpreemptv1.NewOnlineServiceClient(d.conn)
	d.admin = gpreemptv1.NewAdminServiceClient(d.conn)
}

// dial returns a new connection to a socket, which need not be there yet.
func dial(t *testing.T, socket string) *grpc.ClientConn {
	t.Helper()
	conn, err := connect(socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

func connect(socket string, more ...grpc.DialOption) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix:"+socket, append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 10 * time.Millisecond, Multiplier: 1.5, MaxDelay: 100 * time.Millisecond},
			MinConnectTimeout: timeout,
		}),
	}, more...)...)
}

// awaitServing waits for what a load balancer would: SERVING from the health
// service, for the server and for each of its services.
func (d *daemon) awaitServing() {
	d.t.Helper()
	ctx, cancel := context.WithTimeout(d.t.Context(), timeout)
	defer cancel()
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		select {
		case <-d.exited:
			cancel()
		case <-stop:
		}
	}()
	for _, service := range []string{"", gpreemptv1.OnlineService_ServiceDesc.ServiceName, gpreemptv1.AdminService_ServiceDesc.ServiceName} {
		watch, err := grpc_health_v1.NewHealthClient(d.conn).
			Watch(ctx, &grpc_health_v1.HealthCheckRequest{Service: service}, grpc.WaitForReady(true))
		for err == nil {
			var resp *grpc_health_v1.HealthCheckResponse
			if resp, err = watch.Recv(); resp.GetStatus() == grpc_health_v1.HealthCheckResponse_SERVING {
				break
			}
		}
		if err != nil {
			d.t.Fatalf("gpreemptd does not serve %q: %v; it wrote:\n%s", service, err, d.log)
		}
	}
}

func (d *daemon) writeConfig(text string) {
	d.t.Helper()
	// Another reload may be under way: it reads the old file or the new one.
	next := d.config + ".next"
	if err := os.WriteFile(next, []byte(text), 0o600); err != nil {
		d.t.Fatal(err)
	}
	if err := os.Rename(next, d.config); err != nil {
		d.t.Fatal(err)
	}
}

// reload replaces the config file and has it read again.
func (d *daemon) reload(text string) {
	d.t.Helper()
	d.writeConfig(text)
	d.signal(syscall.SIGHUP)
}

func (d *daemon) signal(s syscall.Signal) {
	d.t.Helper()
	if err := d.process.Process.Signal(s); err != nil {
		d.t.Fatalf("signal %v: %v", s, err)
	}
}

// stop ends the daemon as systemd would, and checks that it ends well.
func (d *daemon) stop() {
	d.t.Helper()
	d.signal(syscall.SIGINT)
	d.checkExit(0)
	var last struct{ Msg string }
	all := d.log.all()
	if len(all) > 0 {
		_ = json.Unmarshal([]byte(all[len(all)-1]), &last) // what is no JSON is not the line wanted
	}
	if want := "stopped, nothing is suspended"; last.Msg != want {
		d.t.Errorf("the last log line says %q, want %q", last.Msg, want)
	}
	if _, err := os.Lstat(d.socket); !errors.Is(err, os.ErrNotExist) {
		d.t.Errorf("the socket outlived the daemon: %v", err)
	}
}

// kill ends the daemon as a crash would.
func (d *daemon) kill() {
	d.t.Helper()
	d.signal(syscall.SIGKILL)
	d.checkExit(-1)
}

// checkExit waits for the end of the process. -1 stands for death by a signal.
func (d *daemon) checkExit(code int) {
	d.t.Helper()
	d.over = true
	select {
	case <-d.exited:
	case <-time.After(timeout):
		d.signal(syscall.SIGQUIT) // it writes the stacks of its goroutines
		d.signal(syscall.SIGCONT) // a test may have stopped it
		<-d.exited
		d.t.Fatalf("gpreemptd did not end within %v; it wrote:\n%s", timeout, d.log)
	}
	if got := d.process.ProcessState.ExitCode(); got != code {
		d.t.Errorf("gpreemptd ended with %v, want exit status %d; it wrote:\n%s", d.process.ProcessState, code, d.log)
	}
}

// refused runs a daemon that must not start, and returns what it wrote.
func refused(t *testing.T, dir, config string, args ...string) string {
	t.Helper()
	d := launch(t, dir, config, args...)
	d.checkExit(1)
	return d.log.String()
}

// result is how a run of gpctl went.
type result struct {
	Code     int
	Out, Err string
}

// ctl runs gpctl.
func (d *daemon) ctl(args ...string) result {
	d.t.Helper()
	return d.client(gpctl, args...)
}

// lab runs gplab.
func (d *daemon) lab(args ...string) result {
	d.t.Helper()
	return d.client(gplab, args...)
}

func (d *daemon) client(program string, args ...string) result {
	d.t.Helper()
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(d.t.Context(), program, append([]string{"--socket", d.socket}, args...)...)
	cmd.Env, cmd.Stdout, cmd.Stderr = environment(), &out, &errs
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		d.t.Fatal(err)
	}
	return result{cmd.ProcessState.ExitCode(), out.String(), errs.String()}
}

// ctlJSON runs gpctl -o json and reads its answer into m.
func (d *daemon) ctlJSON(m proto.Message, args ...string) {
	d.t.Helper()
	r := d.ctl(append([]string{"-o", "json"}, args...)...)
	if r.Code != 0 {
		d.t.Fatalf("gpctl %v: exit status %d: %s", args, r.Code, r.Err)
	}
	if err := protojson.Unmarshal([]byte(r.Out), m); err != nil {
		d.t.Fatalf("gpctl %v: %v in %s", args, err, r.Out)
	}
}

func (d *daemon) status() *gpreemptv1.GetStatusResponse {
	d.t.Helper()
	st, err := d.admin.GetStatus(d.t.Context(), &gpreemptv1.GetStatusRequest{})
	if err != nil {
		d.t.Fatal(err)
	}
	return st
}

// fds counts the open descriptors of the daemon.
func (d *daemon) fds() int {
	d.t.Helper()
	n, err := filesOf(int32(d.process.Process.Pid))
	if err != nil {
		d.t.Fatal(err)
	}
	return n
}

// openFiles returns what the descriptors of the daemon refer to.
func (d *daemon) openFiles() (files []string) {
	d.t.Helper()
	names, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", d.process.Process.Pid))
	if err != nil {
		d.t.Fatal(err)
	}
	for _, name := range names {
		file, err := os.Readlink(name)
		if err == nil { // else it has been closed meanwhile
			files = append(files, file)
		}
	}
	return files
}

// filesOf returns the number of open files of a process.
func filesOf(pid int32) (int, error) {
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	return len(entries), err
}

// eventually waits until cond holds: it looks again after each event, and now
// and then for what leaves none.
func (d *daemon) eventually(what string, cond func() bool) {
	d.t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	late := time.After(timeout)
	for {
		next := d.events.next()
		if cond() {
			return
		}
		select {
		case <-next:
		case <-tick.C:
		case <-d.exited:
			d.t.Fatalf("%s: gpreemptd is gone", what)
		case <-late:
			d.t.Fatalf("%s: not within %v", what, timeout)
		}
	}
}

// lines is what a process wrote, line by line.
type lines struct {
	mu   sync.Mutex // guards all below
	text []byte
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text = append(l.text, p...)
	return len(p), nil
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(l.text)
}

// take returns what was written, and forgets it.
func (l *lines) take() (text []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	text, l.text = l.text, nil
	return text
}

func (l *lines) all() []string {
	return strings.Split(strings.TrimSuffix(l.String(), "\n"), "\n")
}
