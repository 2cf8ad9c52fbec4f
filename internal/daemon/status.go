package daemon

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	systemd "github.com/coreos/go-systemd/v22/daemon"

	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

const (
	// statusInterval is the shortest time between two looks at the warnings, and statusIdle the
	// longest: warnings that end by time alone, and those of parts that cannot wake, are seen then.
	statusInterval = time.Second
	statusIdle     = 5 * time.Second
)

// statusMax bounds the warnings in the status, in bytes.
const statusMax = 500

// beat feeds the watchdog from the scheduler's loop.
func (d *daemon) beat() {
	if d.backend.nvidia != nil {
		d.backend.nvidia.Beat()
	}
	// Without room in the socket the message is dropped: systemd has earlier ones to read, the next
	// beat is soon, and leases must not wait.
	if err := sdNotify(systemd.SdNotifyWatchdog, 10*time.Millisecond); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		d.log.Warn("cannot notify systemd", log.State(systemd.SdNotifyWatchdog), log.Err(err))
	}
}

// watchWarnings logs what is raised and cleared, and sends the status to systemd, when something has
// changed: a state of the scheduler, or the warnings of a part. It is not on the scheduler's loop,
// whose deadlines would wait for a look at all targets.
func (d *daemon) watchWarnings(ctx context.Context) {
	raised, last := reported{}, ""
	for ctx.Err() == nil {
		wait, cancel := context.WithTimeout(ctx, statusIdle)
		d.warnings.wake(cancel) // first, so that no change is missed
		revision := d.events.Revision()
		d.checkEffect()
		now := d.listWarnings()
		raised.log(d.logs.Changes(), now)
		if status := d.status(now); status != last {
			last = status
			d.notify("STATUS=" + status)
		}
		_ = d.events.Wait(wait, revision) // or a wake-up, or the time
		cancel()
		select {
		case <-ctx.Done():
		case <-time.After(statusInterval):
		}
	}
}

// notifyTime bounds the wait for a systemd that does not read, for a state that is not repeated.
const notifyTime = 5 * time.Second

// notify sends a state to systemd. An error is only logged.
func (d *daemon) notify(state string) {
	if err := sdNotify(state, notifyTime); err != nil {
		d.log.Warn("cannot notify systemd", log.State(state), log.Err(err))
	}
}

// sdNotify is systemd.SdNotify with a bound for the wait until the socket has room.
func sdNotify(state string, atMost time.Duration) error {
	name := os.Getenv("NOTIFY_SOCKET")
	if name == "" {
		return nil
	}
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: name, Net: "unixgram"})
	if err != nil {
		return err
	}
	if err = conn.SetWriteDeadline(time.Now().Add(atMost)); err == nil {
		_, err = conn.Write([]byte(state))
	}
	return errors.Join(err, conn.Close())
}

// status returns the text of systemctl status. The name of the backend shows whether the
// machine is simulated or emulated.
func (d *daemon) status(warnings []gpreempt.Warning) string {
	var leases, suspended int
	d.runner.View(func(c *scheduler.Core) { leases, suspended = c.LeaseCount(), c.Away() })
	return statusLine(d.backend.name, len(d.inventory.GPUs()), leases, suspended, warnings)
}

func statusLine(backend string, gpus, leases, suspended int, warnings []gpreempt.Warning) string {
	line := fmt.Sprintf("%s: GPUs %d, leases %d, suspended targets %d", backend, gpus, leases, suspended)
	if len(warnings) == 0 {
		return line
	}
	var errors, all []string
	for _, w := range warnings {
		all = append(all, w.Text)
		if w.Severity == "error" {
			errors = append(errors, w.Text)
		}
	}
	if len(errors) > 0 {
		all = errors
	}
	text := strings.ReplaceAll(strings.Join(all, "; "), "\n", " ")
	return fmt.Sprintf("%s, warnings %d (gpctl status): %s", line, len(warnings), text[:min(len(text), statusMax)])
}
