package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

// dumps is section p: what reading the driver's dumps costs with the default config and a job of 80 queues, of which nothing
// changes, and beside one that creates and destroys queues all the time.
func (b *bench) dumps(ctx context.Context) (err error) {
	cost := map[string][]float64{}
	for _, config := range []struct{ name, text string }{{"read", "\n"}, {"not read", "discovery: {debugfs: false}\n"}} {
		m, err := b.emulateWith(ctx, dumpsConfig+config.text)
		if cannot, ok := errors.AsType[errCannotEmulate](err); ok {
			b.report.Skipped = append(b.report.Skipped, "p: "+cannot.Error())
			return nil
		}
		if err != nil {
			return err
		}
		err = m.costOfDumps(ctx, b, config.name, cost)
		if err := errors.Join(err, m.close()); err != nil {
			return err
		}
	}
	for _, c := range []struct{ what, read string }{{"quiet", "quiet, read"}, {"beside a job that creates queues", "churn, read"}} {
		of := func(figure string) []float64 { return cost[c.read+": "+figure] }
		b.figure("p", "80 queues, "+c.what+": the helper, CPU", "% of a core", of("helper"))
		b.figure("p", "80 queues, "+c.what+": readings of mqds", "a minute", of("readings"))
		b.figure("p", "80 queues, "+c.what+": the longest reading", "ms", of("longest"))
	}
	with, without := cost["quiet, read: daemon"], cost["quiet, not read: daemon"]
	b.figure("p", "80 queues, quiet: the daemon, CPU", "% of a core", with)
	b.figure("p", "80 queues, quiet: the daemon without reading, CPU", "% of a core", without)
	return nil
}

const (
	dumpsConfig = "rules: [{name: training, match: {comm: train}, class: offline}]\n"
	// dumpsWindow is long enough for a reading of queues that do not change.
	dumpsWindow = time.Minute
)

// costOfDumps measures a window in which nothing changes and, where dumps are read, one with queues that appear and disappear.
func (m *emulated) costOfDumps(ctx context.Context, b *bench, config string, cost map[string][]float64) error {
	if err := m.job(ctx, "work", "--queues", "80", "--rate", "1", "--runtime"); err != nil {
		return err
	}
	admin := gpreemptv1.NewAdminServiceClient(m.conn)
	if err := awaitTargets(ctx, admin, 1); err != nil {
		return err
	}
	what := []string{"quiet, " + config}
	if config == "read" {
		what = append(what, "churn, "+config)
	}
	if err := pause(ctx, 10*time.Second); err != nil { // what is new has been read
		return err
	}
	for _, name := range what {
		if strings.HasPrefix(name, "churn") {
			if err := m.job(ctx, "work", "--queues", "2", "--rate", "10", "--churn", "--runtime"); err != nil {
				return err
			}
		}
		b.say("p: %s", name)
		if err := m.window(ctx, admin, name, cost); err != nil {
			return err
		}
	}
	return nil
}

// window measures the daemon and its helpers for a time.
func (m *emulated) window(ctx context.Context, admin gpreemptv1.AdminServiceClient, name string, cost map[string][]float64) error {
	before, err := m.spent()
	if err != nil {
		return err
	}
	first, _, err := readings(ctx, admin)
	if err != nil {
		return err
	}
	began := time.Now()
	var longest time.Duration
	for time.Since(began) < dumpsWindow {
		if err := pause(ctx, 100*time.Millisecond); err != nil {
			return err
		}
		_, took, err := readings(ctx, admin)
		if err != nil {
			return err
		}
		longest = max(longest, took)
	}
	last, _, err := readings(ctx, admin)
	if err != nil {
		return err
	}
	after, err := m.spent()
	if err != nil {
		return err
	}
	window := time.Since(began)
	percent := func(d time.Duration) float64 { return 100 * d.Seconds() / window.Seconds() }
	for figure, value := range map[string]float64{
		"daemon": percent(after.own - before.own), "helper": percent(after.children - before.children),
		"readings": float64(last-first) / window.Minutes(), "longest": float64(longest.Microseconds()) / 1000,
	} {
		cost[name+": "+figure] = append(cost[name+": "+figure], value)
	}
	return nil
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// readings returns how often mqds was read, and how long the last reading took.
func readings(ctx context.Context, admin gpreemptv1.AdminServiceClient) (n uint64, took time.Duration, err error) {
	status, err := admin.GetStatus(ctx, &gpreemptv1.GetStatusRequest{})
	for _, s := range status.GetSources() {
		if s.GetName() == "mqds" {
			return s.GetReadings(), s.GetTook().AsDuration(), err
		}
	}
	return 0, 0, err
}

// spent is CPU time of the daemon, and of its helpers that have ended.
type spent struct{ own, children time.Duration }

// spent returns that of the daemon.
func (m *emulated) spent() (spent, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", m.daemon.cmd.Process.Pid))
	if err != nil {
		return spent{}, err
	}
	_, rest, named := strings.Cut(string(text), "(gpreemptd) ")
	fields := strings.Fields(rest)
	if !named || len(fields) < 15 {
		return spent{}, fmt.Errorf("process %d is not the daemon: %s", m.daemon.cmd.Process.Pid, text)
	}
	var ticks [4]int64 // utime, stime, cutime and cstime of proc_pid_stat(5), in 1/100 s
	for i := range ticks {
		if ticks[i], err = strconv.ParseInt(fields[11+i], 10, 64); err != nil {
			return spent{}, err
		}
	}
	const tick = 10 * time.Millisecond
	return spent{time.Duration(ticks[0]+ticks[1]) * tick, time.Duration(ticks[2]+ticks[3]) * tick}, nil
}
