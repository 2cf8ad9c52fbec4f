package daemon

import (
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

// statusInterval is the shortest time between two status messages to systemd.
const statusInterval = time.Second

// statusMax bounds the warnings in the status, in bytes.
const statusMax = 500

// beat feeds the watchdog from the scheduler's loop, and sends the status.
func (d *daemon) beat() {
	if d.backend.kmap != nil {
		d.backend.kmap.Beat()
	}
	if d.backend.nvidia != nil {
		d.backend.nvidia.Beat()
	}
	state := systemd.SdNotifyWatchdog
	if now := time.Now(); now.Sub(d.statusAt) >= statusInterval {
		d.statusAt = now
		d.reported.log(d.logs.Changes(), d.listWarnings())
		state += "\nSTATUS=" + d.status()
	}
	// Without room in the socket the message is dropped: systemd has earlier ones to read, the next
	// beat is soon, and leases must not wait.
	if err := sdNotify(state, 10*time.Millisecond); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		d.log.Warn("cannot notify systemd", log.State(state), log.Err(err))
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
func (d *daemon) status() string {
	var leases, suspended int
	d.runner.View(func(c *scheduler.Core) { leases, suspended = c.LeaseCount(), c.Away() })
	return statusLine(d.backend.name, len(d.inventory.GPUs()), leases, suspended, d.listWarnings())
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
