package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

// emulated is a machine with emulated GPUs, a gpreemptd as it is shipped, and programs with
// queues; all are real processes that make real system calls.
type emulated struct {
	b        *bench
	dir      string // for sockets and the daemon's runtime directory
	socket   string // the machine's
	metrics  string // address of the daemon's metrics
	children []*child
	daemon   *child
	conn     *grpc.ClientConn // to the daemon
}

// errCannotEmulate reports why this host cannot run an emulated machine.
type errCannotEmulate struct{ error }

// emulate starts a machine and the daemon.
func (b *bench) emulate(ctx context.Context) (*emulated, error) {
	return b.emulateWith(ctx, configText)
}

// emulateWith starts a machine and a daemon with this config.
func (b *bench) emulateWith(ctx context.Context, text string) (m *emulated, err error) {
	if err := b.build(ctx, "./cmd/gpreemptd", "./emu/cmd/kfdemu"); err != nil {
		return nil, err
	}
	if out, err := exec.CommandContext(ctx, b.program("kfdemu"), "check", "--trace").CombinedOutput(); err != nil {
		return nil, errCannotEmulate{fmt.Errorf("kfdemu check: %w: %s", err, strings.TrimSpace(string(out)))}
	}
	m = &emulated{b: b}
	if m.dir, err = os.MkdirTemp(b.dir, "emulated-"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.close())
		}
	}()
	machine, err := m.launch(ctx, "machine", "run", "--", "sh", "-c", "trap '' TERM; echo $KFDEMU_SOCKET; exec cat")
	if err != nil {
		return nil, err
	}
	says, err := machine.hear()
	if err != nil {
		return nil, err
	}
	m.socket = strings.TrimSpace(says)
	socket := filepath.Join(m.dir, "gpreemptd.sock")
	if m.metrics, err = freeAddress(ctx); err != nil {
		return nil, err
	}
	config, err := b.writeConfig(text + fmt.Sprintf("metrics: {address: %q}\n", m.metrics))
	if err != nil {
		return nil, err
	}
	if m.daemon, err = m.launch(ctx, "gpreemptd", "exec", "--socket", m.socket, "--", b.program("gpreemptd"), "serve", "--config", config, "--socket", socket); err != nil {
		return nil, err
	}
	if m.conn, err = dial(socket); err != nil {
		return nil, err
	}
	return m, nil
}

// freeAddress returns an address that was free when it was called.
func freeAddress(ctx context.Context) (string, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	return l.Addr().String(), nil
}

func (b *bench) program(name string) string { return filepath.Join(b.dir, name) }

// launch runs kfdemu.
func (m *emulated) launch(ctx context.Context, name string, args ...string) (*child, error) {
	c, err := launch(ctx, m.dir, "emulated-"+name, []string{"RUNTIME_DIRECTORY=" + m.dir}, m.b.program("kfdemu"), args...)
	if err == nil {
		m.children = append(m.children, c)
	}
	return c, err
}

// job starts a program named train with queues on the machine, and waits until the queues
// exist.
func (m *emulated) job(ctx context.Context, sample string, args ...string) error {
	train := m.b.program("train")
	if err := os.Link(m.b.program("kfdemu"), train); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	c, err := m.launch(ctx, "train"+strconv.Itoa(len(m.children)), append([]string{"exec", "--socket", m.socket, "--", train, sample}, args...)...)
	if err != nil {
		return err
	}
	_, err = c.hear()
	return err
}

// close ends the programs, the daemon and then the machine.
func (m *emulated) close() error {
	var all error
	if m.conn != nil {
		all = m.conn.Close()
	}
	for _, c := range slices.Backward(m.children) {
		all = errors.Join(all, c.stop())
	}
	m.children, m.conn = nil, nil
	return all
}

// driverTime returns how long the daemon has waited for its driver since it started, from
// its metrics.
func (m *emulated) driverTime(ctx context.Context) (time.Duration, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+m.metrics+"/metrics", http.NoBody)
	if err != nil {
		return 0, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer func() { _ = resp.Body.Close() }()
	const name = "gpreempt_driver_call_seconds_total "
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		if value, is := strings.CutPrefix(lines.Text(), name); is {
			seconds, err := strconv.ParseFloat(value, 64)
			return time.Duration(seconds * float64(time.Second)), err
		}
	}
	return 0, fmt.Errorf("the daemon's metrics have no %s", name)
}

// throughDriver is section h.
func (b *bench) throughDriver(ctx context.Context) (err error) {
	m, err := b.emulate(ctx)
	if cannot, ok := errors.AsType[errCannotEmulate](err); ok {
		b.report.Skipped = append(b.report.Skipped, "h: "+cannot.Error())
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.close()) }()
	if err := m.job(ctx, "work", "--queues", "2", "--duration", "2000", "--occupancy", "500000", "--runtime"); err != nil {
		return err
	}
	if err := awaitTargets(ctx, gpreemptv1.NewAdminServiceClient(m.conn), 1); err != nil {
		return err
	}
	of := func(part string) *series { return b.series("h", "DbgtrapOnKfdemu/part="+part) }
	this := &announcements{m: m, total: of("Total"), driver: of("DriverCalls"), own: of("Own")}
	// A bare echo at the same pace: what gRPC and the wake-ups of two idle processes cost.
	conn, err := dial(echoSocket(b.dir))
	if err != nil {
		return err
	}
	defer conn.Close()
	bare := b.series("h", "BareUnary")
	echo := gpreemptv1.NewOnlineServiceClient(conn)
	const warmUp = 10
	perRepeat := b.rounds(150)
	all := []*series{this.total, this.driver, this.own, bare}
	for i := range warmUp + b.repeats*perRepeat {
		if err := this.announce(ctx); err != nil {
			return err
		}
		if err := bare.time(func() error {
			_, err := echo.NotifyOnline(ctx, announcement)
			return err
		}); err != nil {
			return err
		}
		for _, s := range all {
			if i < warmUp {
				s.samples = nil
			} else if len(s.samples) == perRepeat {
				s.endRepeat()
			}
		}
	}
	b.figure("h", "NotifyOnline by dbgtrap on kfdemu, p50", "µs", micros(p50, this.total))
	b.figure("h", "the emulated driver's calls in it, p50", "µs", micros(p50, this.driver))
	b.figure("h", "a bare unary echo at the same pace, p50", "µs", micros(p50, bare))
	b.figure("h", "the daemon's own share, p50", "µs", micros(p50, this.own)).atMost(150)
	b.figure("h", "the daemon's own share, p99", "µs", micros(p99, this.own)).atMost(1000)
	return nil
}

// announcements are the measured calls of one daemon: how long NotifyOnline took, how much
// of that its driver calls took, and the rest.
type announcements struct {
	m                  *emulated
	total, driver, own *series
}

func (s *announcements) announce(ctx context.Context) error {
	online := gpreemptv1.NewOnlineServiceClient(s.m.conn)
	before, err := s.m.driverTime(ctx)
	if err != nil {
		return err
	}
	var answer *gpreemptv1.NotifyOnlineResponse
	if err := s.total.time(func() (err error) {
		answer, err = online.NotifyOnline(ctx, announcement)
		return err
	}); err != nil {
		return err
	}
	if err := quiet(answer, 1); err != nil {
		return err
	}
	after, err := s.m.driverTime(ctx)
	if err != nil {
		return err
	}
	if _, err := online.Complete(ctx, &gpreemptv1.CompleteRequest{LeaseId: answer.GetLeaseId()}); err != nil {
		return err
	}
	s.driver.add(after - before)
	s.own.add(s.total.last() - (after - before))
	return running(ctx, gpreemptv1.NewAdminServiceClient(s.m.conn))
}

// running waits until every target runs; Complete does not wait.
func running(ctx context.Context, admin gpreemptv1.AdminServiceClient) error {
	for ; ; time.Sleep(time.Millisecond) {
		list, err := admin.ListTargets(ctx, &gpreemptv1.ListTargetsRequest{})
		if err != nil || !slices.ContainsFunc(list.GetTargets(), func(t *gpreemptv1.Target) bool {
			return t.GetState() != gpreemptv1.TargetState_TARGET_STATE_RUNNING
		}) {
			return err
		}
	}
}
