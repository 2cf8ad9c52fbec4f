package daemon

import (
	"context"
	"os"
	"strings"
	"syscall"

	systemd "github.com/coreos/go-systemd/v22/daemon"

	"github.com/gpreempt/gpreempt/internal/auth"
	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/internal/config"
	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// hasTerminal reports whether this process has a controlling terminal.
func hasTerminal() bool {
	terminal, err := os.OpenFile("/dev/tty", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		return false
	}
	_ = terminal.Close() // nothing was written
	return true
}

// reloadOnHangup applies the changed config file on SIGHUP. If that is of the end of the terminal, it ends the
// daemon: it would hold the host's lock, and nobody would see it.
func (d *daemon) reloadOnHangup(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-d.hangups:
			if d.left != nil && d.left() {
				d.end()
				return
			}
			d.notify(systemd.SdNotifyReloading)
			d.reload()
			d.notify(systemd.SdNotifyReady)
		}
	}
}

// reload applies the changes of the config file that need no restart. If the file or a
// file that it names is invalid, nothing changes, and the warning stays until a reload
// succeeds.
func (d *daemon) reload() {
	r, err := d.prepare()
	if err != nil {
		d.logs.Changes().Error("reload failed; nothing changed", log.Err(err))
		d.warnings.set("reload", err.warning)
		return
	}
	d.apply(r)
	var restart []string
	for _, c := range r.changes {
		d.logs.Changes().Info("config changed", log.Config(c.Key), log.From(c.From), log.To(c.To), log.Live(c.Live))
		if !c.Live {
			restart = append(restart, c.Key)
		}
	}
	d.logs.Changes().Info("config reloaded", log.Changes(len(r.changes)))
	d.warnings.set("reload")
	if len(restart) > 0 {
		d.warnings.set("reload", gpreempt.WarnRestartNeeded.Warn("changed in the config file but not in force: "+strings.Join(restart, ", ")))
	}
}

// reloadError is why a config file cannot be applied.
type reloadError struct {
	error
	warning gpreempt.Warning
}

// prepared is a config file that has been checked: applying it cannot fail.
type prepared struct {
	// config has the running values of the keys that need a restart.
	config  config.Config
	changes []config.Change
	rules   *classify.Classifier
	access  *auth.Policy
	// unknown are names in access that this host does not know.
	unknown []string
	// certificates is nil without TCP.
	certificates *auth.Certificates
}

// prepare reads the config file and all that can fail in it.
func (d *daemon) prepare() (prepared, *reloadError) {
	// A warning is one line.
	oneLine := func(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }
	cfg, err := d.opts.load()
	if err != nil {
		return prepared{}, &reloadError{err, gpreempt.WarnConfigRejected.Warn("the config file was not applied: " + oneLine(err))}
	}
	old := *d.config.Load()
	r := prepared{config: config.WithRestartKeys(old, cfg), changes: config.Changes(old, cfg)}
	if r.rules, err = classify.New(cfg.Rules, cfg.Jobs); err != nil {
		return prepared{}, &reloadError{err, gpreempt.WarnConfigRejected.Warn("the rules were not applied: " + oneLine(err))}
	}
	if d.certificates != nil && cfg.TCP.Certificate != "" { // else TCP ends with a restart
		if r.certificates, err = auth.ReadCertificates(certificateFiles(cfg.TCP)); err != nil {
			return prepared{}, &reloadError{err, gpreempt.WarnCertificateRejected.Warn("the config file was not applied: " + oneLine(err))}
		}
	}
	r.access, r.unknown = lookUpAccess(cfg)
	return r, nil
}

// apply puts every live key into force, also those that have not changed: names of groups and files
// may stand for something else. It cannot fail. Keys that are read at each use need no line here.
func (d *daemon) apply(r prepared) {
	c := &r.config
	d.config.Store(c)
	d.logs.SetLevel(c.Log.Level)
	if r.certificates != nil {
		d.certificates.Use(r.certificates)
		d.warnings.set("key", keyWarnings(c.TCP)...)
	}
	d.setAccess(r.access, r.unknown, c.Socket)
	d.server.RightsChanged()
	d.runner.SetLimits(c.Limits.Leases)
	// It is compared with the policy in force, because a reload ends a policy that an admin set.
	var inForce scheduler.Policy
	d.runner.View(func(core *scheduler.Core) { inForce = core.Policy() })
	if c.Policy != inForce {
		d.runner.Post(scheduler.PolicyChanged{Policy: c.Policy})
	}
	d.setHQDBudget(c.HQDBudget)
	if h := d.hazards.Load(); h != nil {
		h.SetRows(c.Safety.Hazards)
		d.sessions.Reassess()
	}
	d.setRules(r.rules)
	d.checkEffect()
}
