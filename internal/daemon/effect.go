package daemon

import (
	"errors"
	"io/fs"
	"reflect"
	"slices"
	"strings"
	"sync"

	"github.com/gpreempt/gpreempt/internal/config"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// without is what of a config has no effect on this host, as it was last looked at.
type without struct {
	mu     sync.Mutex // guards all below
	config *config.Config
	facts  config.Facts
}

// checkEffect warns of what the config has that can have no effect. It costs little while neither the
// config nor the facts have changed.
func (d *daemon) checkEffect() {
	facts := config.Facts{GPUs: d.inventory.GPUs()}
	if d.backend.simulated == "" {
		facts.NoRuntime, facts.NoSlurm = lacks(d.backend.root)
	}
	for _, w := range d.warnings.list() {
		if slices.Contains([]string{gpreempt.WarnDebugfsMissing.Code, gpreempt.WarnDebugfsDenied.Code, gpreempt.WarnMQDsUnreadable.Code}, w.Code) {
			facts.Debugfs, facts.DebugfsRemedy = "debugfs cannot be read (see the warning "+w.Code+")", w.Remedy
		}
	}
	cfg := d.config.Load()
	d.without.mu.Lock()
	defer d.without.mu.Unlock()
	if d.without.config == cfg && reflect.DeepEqual(d.without.facts, facts) {
		return
	}
	d.without.config, d.without.facts = cfg, facts
	var texts []string
	for _, e := range cfg.WithoutEffect(facts) {
		texts = append(texts, e.Error())
	}
	d.warnings.set("effect", about(gpreempt.WarnWithoutEffect, "", texts)...)
}

// lacks reports whether a host has no socket of a container runtime, and no records of Slurm jobs.
func lacks(root fs.FS) (runtime, slurm bool) {
	has := func(path string) bool {
		_, err := fs.Stat(root, strings.TrimPrefix(path, "/"))
		return err == nil
	}
	return !slices.ContainsFunc(runtimeSockets, has), !has(discovery.SlurmRecords)
}

// facts returns what a config can be about on a host, without its daemon. Without a GPU it is not the host
// that the file is for, and only its users are known.
func (h Host) facts(cfg config.Config) config.Facts {
	f := config.Facts{}
	_, f.Unknown = cfg.Access.LookUp()
	root := h.files()
	gpus, err := discovery.NewFS(root).GPUs()
	if err != nil || len(gpus) == 0 {
		return f
	}
	f.GPUs = gpus
	f.NoRuntime, f.NoSlurm = lacks(root)
	if _, err := fs.Stat(root, debugfs.MQDs); errors.Is(err, fs.ErrNotExist) {
		f.Debugfs, f.DebugfsRemedy = "/"+debugfs.MQDs+" does not exist", gpreempt.WarnDebugfsMissing.Remedy
	}
	return f
}
