// gpreempt-node tells the Kubernetes scheduler what the daemon of a node can do: it publishes
// labels of the node and an extended resource, and removes them when the daemon does not answer.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"
)

// window is the time over which the free share is averaged.
const window = 5 * time.Minute

// resync is how often everything is sent although nothing has changed: somebody else may have
// changed the node.
const resync = 10 * time.Minute

// answerTime bounds a question to the daemon, or to the API server.
const answerTime = 5 * time.Second

func main() {
	var a agent
	var api apiServer
	flag.StringVar(&api.node, "node", "", "name of the node (required)")
	flag.StringVar(&api.url, "api", "https://kubernetes.default.svc", "URL of the API server")
	flag.StringVar(&api.dir, "credentials", "/var/run/secrets/gpreempt", "directory with the files token and ca.crt")
	flag.IntVar(&a.perGPU, "offline-per-gpu", 1, "offline pods for which a GPU has room, 0 to publish labels only")
	every := flag.Duration("every", 10*time.Second, "time between two questions to the daemon")
	flag.Parse()
	if api.node == "" || *every <= 0 || a.perGPU < 0 {
		fmt.Fprintln(os.Stderr, "gpreempt-node: -node is required, -every must be more than 0, and -offline-per-gpu 0 or more")
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	tick := time.NewTicker(*every)
	defer tick.Stop()
	a.ask, a.publish, a.share.size = askDaemon, api.publish, max(int(window / *every), 1)
	slog.Info("publishing", "node", api.node, "api", api.url, "every", *every, "offline_per_gpu", a.perGPU)
	a.run(ctx, tick.C)
}

// agent publishes what the daemon answers.
type agent struct {
	ask     func(context.Context) (state, error)
	publish func(context.Context, facts) error
	perGPU  int

	share      sampler
	published  facts
	refreshed  time.Time
	lastFailed string
}

// run publishes at each tick until ctx ends, and then removes everything.
func (a *agent) run(ctx context.Context, ticks <-chan time.Time) {
	for {
		a.step(ctx, time.Now())
		select {
		case <-ticks:
		case <-ctx.Done():
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), answerTime)
			defer cancel()
			a.note(a.publish(last, facts{}))
			return
		}
	}
}

// step asks the daemon, and publishes its answer if that is news or a resync is due.
func (a *agent) step(ctx context.Context, now time.Time) {
	ctx, cancel := context.WithTimeout(ctx, 2*answerTime)
	defer cancel()
	s, err := a.ask(ctx)
	wanted := facts{}
	if err == nil {
		wanted = s.facts(a.perGPU, a.share.add(s.free()))
	} else {
		a.share.forget()
	}
	if wanted != a.published || now.Sub(a.refreshed) >= resync {
		failed := a.publish(ctx, wanted)
		if failed == nil {
			if wanted != a.published {
				slog.Info("published", "mechanism", wanted.Mechanism, "policy", wanted.Policy, "free_share", wanted.FreeShare, "offline", wanted.Offline)
			}
			a.published, a.refreshed = wanted, now
		}
		err = errors.Join(err, failed)
	}
	a.note(err)
}

// note logs an error once.
func (a *agent) note(err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != a.lastFailed && err != nil {
		slog.Warn("not published", "error", text)
	}
	a.lastFailed = text
}

// askDaemon reads the answers of gpctl, which is in the same image.
func askDaemon(ctx context.Context) (s state, err error) {
	return s, errors.Join(ask(ctx, &s, "status"), ask(ctx, &s, "gpu", "list"))
}

func ask(ctx context.Context, into any, args ...string) error {
	out, err := exec.CommandContext(ctx, "gpctl", append([]string{"--timeout", answerTime.String(), "-o", "json"}, args...)...).Output()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return fmt.Errorf("gpctl %s: %w: %s", args[0], err, exit.Stderr)
	}
	if err != nil {
		return err
	}
	if err := json.Unmarshal(out, into); err != nil {
		return fmt.Errorf("the output of gpctl %s: %w", args[0], err)
	}
	return nil
}
