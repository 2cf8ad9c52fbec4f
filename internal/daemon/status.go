package daemon

import (
	"fmt"
	"strings"
	"time"

	systemd "github.com/coreos/go-systemd/v22/daemon"

	"github.com/gpreempt/gpreempt/internal/logkey"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// statusEvery is how often systemd is told how the daemon does, at the most.
const statusEvery = time.Second

// statusMax bounds what it is told of warnings, in bytes.
const statusMax = 500

// beat feeds the watchdog from the loop that matters, and says how it goes.
func (d *daemon) beat() {
	state := systemd.SdNotifyWatchdog
	if now := time.Now(); now.Sub(d.statusAt) >= statusEvery {
		d.statusAt = now
		d.told.tell(d.logs.Changes(), d.listWarnings())
		state += "\nSTATUS=" + d.status()
	}
	d.notify(state)
}

// notify tells systemd; that it cannot be told is no reason to stop.
func (d *daemon) notify(state string) {
	if _, err := systemd.SdNotify(false, state); err != nil {
		d.log.Warn("systemd could not be told", logkey.State(state), logkey.Err(err))
	}
}

// status is what systemctl status shows. The name of the backend tells a simulated or
// emulated machine.
func (d *daemon) status() string {
	var leases, away int
	d.runner.View(func(c *scheduler.Core) { leases, away = c.LeaseCount(), c.Away() })
	return statusLine(d.backend.name, len(d.inventory.GPUs()), leases, away, d.listWarnings())
}

func statusLine(backend string, gpus, leases, away int, warnings []gpreempt.Warning) string {
	line := fmt.Sprintf("%s: GPUs %d, leases %d, suspended targets %d", backend, gpus, leases, away)
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
