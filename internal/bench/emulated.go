package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/kfdemu"
	"github.com/gpreempt/gpreempt/internal/kfdrules"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// emulated is a machine with emulated GPUs, the gpreemptd that users have, and programs
// with queues; all of them real processes that make real system calls.
type emulated struct {
	b        *bench
	socket   string // the machine's
	children []*child
	conn     *grpc.ClientConn // to the daemon
}

// errCannotEmulate tells why there can be no emulated machine here.
type errCannotEmulate struct{ error }

// emulate starts the machine and the daemon.
func (b *bench) emulate(ctx context.Context) (m *emulated, err error) {
	if err := b.build(ctx, "./cmd/gpreemptd", "./cmd/kfdemu"); err != nil {
		return nil, err
	}
	if out, err := exec.CommandContext(ctx, b.program("kfdemu"), "check", "--trace").CombinedOutput(); err != nil {
		return nil, errCannotEmulate{fmt.Errorf("kfdemu check: %w: %s", err, strings.TrimSpace(string(out)))}
	}
	m = &emulated{b: b}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.close())
		}
	}()
	machine, err := m.launch(ctx, "machine", "run", "--log", m.log(), "--", b.self, tellMachineCommand)
	if err != nil {
		return nil, err
	}
	says, err := machine.hear()
	if err != nil {
		return nil, err
	}
	m.socket = strings.TrimSpace(says)
	socket := filepath.Join(b.dir, "emulated.sock")
	config, err := b.writeConfig(config)
	if err != nil {
		return nil, err
	}
	if _, err = m.launch(ctx, "gpreemptd", "exec", "--socket", m.socket, "--", b.program("gpreemptd"), "serve", "--config", config, "--socket", socket); err != nil {
		return nil, err
	}
	if m.conn, err = dial(socket); err != nil {
		return nil, err
	}
	return m, nil
}

func (b *bench) program(name string) string { return filepath.Join(b.dir, name) }

// log is what happens on the machine, one event a line.
func (m *emulated) log() string { return filepath.Join(m.b.dir, "emulated.events") }

// launch runs kfdemu.
func (m *emulated) launch(ctx context.Context, name string, args ...string) (*child, error) {
	// The daemon's journal is of its machine.
	c, err := launch(ctx, m.b.dir, "emulated-"+name, []string{"RUNTIME_DIRECTORY=" + m.b.dir}, m.b.program("kfdemu"), args...)
	if err == nil {
		m.children = append(m.children, c)
	}
	return c, err
}

// job starts a program called train with queues on the machine, and gives its pid once
// it has them.
func (m *emulated) job(ctx context.Context, sample string, args ...string) (int32, error) {
	train := m.b.program("train")
	if err := os.Link(m.b.program("kfdemu"), train); err != nil && !errors.Is(err, os.ErrExist) {
		return 0, err
	}
	c, err := m.launch(ctx, "train"+strconv.Itoa(len(m.children)), append([]string{"exec", "--socket", m.socket, "--", train, sample}, args...)...)
	if err != nil {
		return 0, err
	}
	says, err := c.hear()
	if err != nil {
		return 0, err
	}
	var ready struct{ PID int32 }
	return ready.PID, json.Unmarshal([]byte(says), &ready)
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

// driverCalls reads, after close, how long the driver had for each announcement: from
// the resume before it to the suspension that ends it.
func (m *emulated) driverCalls(target int32) (each []time.Duration, err error) {
	file, err := os.Open(m.log())
	if err != nil {
		return nil, err
	}
	defer file.Close()
	var asked time.Duration
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		var e kfdemu.Event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			return nil, fmt.Errorf("%s: %w in %s", m.log(), err, lines.Text())
		}
		if e.Kind != kfdemu.EventCall || e.Target != target {
			continue
		}
		asked += time.Duration(e.Took * float64(time.Microsecond))
		switch e.Op {
		case string(kfdrules.TrapOp(kfd.TrapSuspendQueues)):
			each = append(each, asked)
		case string(kfdrules.TrapOp(kfd.TrapResumeQueues)):
			asked = 0
		}
	}
	return each, lines.Err()
}

// probe makes a call of the driver that does nothing now and then, until ctx ends, and
// says then how long each took, in nanoseconds, as JSON.
func probe(ctx context.Context, out io.Writer) error {
	device, err := kfd.Open()
	if err != nil {
		return err
	}
	defer device.Close()
	var calls series
	for again := time.NewTicker(5 * time.Millisecond); ctx.Err() == nil; {
		if err := calls.time(func() error {
			_, err := device.GetVersion()
			return err
		}); err != nil {
			return err
		}
		select {
		case <-again.C:
		case <-ctx.Done():
		}
	}
	return json.NewEncoder(out).Encode(calls.samples)
}

// throughDriver is section h.
func (b *bench) throughDriver(ctx context.Context) error {
	m, err := b.emulate(ctx)
	if cannot, ok := errors.AsType[errCannotEmulate](err); ok {
		b.report.Skipped = append(b.report.Skipped, "h: "+cannot.Error())
		return nil
	}
	if err != nil {
		return err
	}
	const first = 10 // are new to everybody
	perRepeat := b.rounds(150)
	total, nothing := b.series("h", "DbgtrapOnKfdemu/part=Total"), b.series("h", "CallOfKfdemu/call=GET_VERSION")
	var target int32
	measure := func() error {
		prober, err := m.launch(ctx, "probe", "exec", "--socket", m.socket, "--", b.self, probeCommand)
		if err != nil {
			return err
		}
		if target, err = m.job(ctx, "work", "--queues", "2", "--duration", "2000", "--occupancy", "500000", "--runtime"); err != nil {
			return err
		}
		admin := gpreemptv1.NewAdminServiceClient(m.conn)
		if err := awaitTargets(ctx, admin, 1); err != nil {
			return err
		}
		online := gpreemptv1.NewOnlineServiceClient(m.conn)
		for range first + b.repeats*perRepeat {
			var answer *gpreemptv1.NotifyOnlineResponse
			if err := total.time(func() (err error) {
				answer, err = online.NotifyOnline(ctx, announcement)
				return err
			}); err != nil {
				return err
			}
			if err := quiet(answer, 1); err != nil {
				return err
			}
			if _, err := online.Complete(ctx, &gpreemptv1.CompleteRequest{LeaseId: answer.GetLeaseId()}); err != nil {
				return err
			}
			if err := running(ctx, admin); err != nil {
				return err
			}
		}
		_ = prober.in.Close() // that ends it
		said, err := prober.hear()
		if err != nil {
			return err
		}
		return json.Unmarshal([]byte(said), &nothing.samples)
	}
	if err := errors.Join(measure(), m.close()); err != nil {
		return err
	}
	nothing.endRepeat()
	calls, err := m.driverCalls(target)
	if err != nil {
		return err
	}
	if len(calls) != len(total.samples) {
		return fmt.Errorf("%d announcements took %d suspensions, want as many", len(total.samples), len(calls))
	}
	driver, own := b.series("h", "DbgtrapOnKfdemu/part=EmulatedCalls"), b.series("h", "DbgtrapOnKfdemu/part=Own")
	took := total.samples[first:]
	calls = calls[first:]
	total.samples = nil
	for i := range took {
		total.samples, driver.samples, own.samples = append(total.samples, took[i]), append(driver.samples, calls[i]), append(own.samples, took[i]-calls[i])
		if (i+1)%perRepeat == 0 {
			total.endRepeat()
			driver.endRepeat()
			own.endRepeat()
		}
	}
	b.figure("h", "NotifyOnline by dbgtrap on kfdemu, p50", "µs", micros(p50, total))
	b.figure("h", "an intercepted ioctl that does nothing, p50", "µs", micros(p50, nothing))
	b.figure("h", "emulated ioctls in it, p50", "µs", micros(p50, driver))
	b.figure("h", "the daemon's own share, p50", "µs", micros(p50, own)).atMost(150)
	b.figure("h", "the daemon's own share, p99", "µs", micros(p99, own)).atMost(1000)
	return nil
}

// running waits until everything runs, which Complete does not.
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
