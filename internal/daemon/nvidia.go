package daemon

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/mechanism/nvchannels"
	"github.com/gpreempt/gpreempt/internal/safety"
	"github.com/gpreempt/gpreempt/internal/targets"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/nvrm"
)

// openNVIDIA has the backend find the processes of the NVIDIA driver, and suspend them.
func (b *backend) openNVIDIA(h Host, log *zap.Logger) {
	version, err := nvrm.ReadVersion(b.root)
	if h.RM == nil {
		err = fs.ErrNotExist
	}
	if err != nil {
		b.warn(gpreempt.WarnNoMechanism.Warn("the mechanism nvchannels cannot be used: " + noNVIDIA(err)))
		return
	}
	b.channels = nvrm.NewSource(b.root, h.RM, b.owns)
	b.fs.Add(b.channels)
	b.name += "+" + nvrm.Driver
	b.nvidia = newNVIDIA(h, version, b.channels.Owner, b.pauses.journal, log)
}

func noNVIDIA(err error) string {
	if errors.Is(err, fs.ErrNotExist) {
		return "the NVIDIA driver is not loaded"
	}
	return err.Error()
}

// newNVIDIA returns the mechanism for a host's driver.
func newNVIDIA(h Host, version string, owner func(nvrm.Handle) gpreempt.ProcessKey, journal mechanism.Store, log *zap.Logger) *nvchannels.Mechanism {
	return nvchannels.New(nvchannels.Config{
		Sys: h.RM, Version: version, Journal: journal, Owner: owner, Start: h.Supervise,
		Refused: func() (why, remedy string) { return nvrm.Refused(h.files(), h.RM) }, Log: log.Named(mechanism.NVChannels),
	})
}

// examineNVIDIA returns what the doctor says of a host's NVIDIA driver, with the site's rows of the
// hazard table.
func examineNVIDIA(root fs.FS, sys nvrm.Sys, rows []safety.Row) (found, remedy string, usable bool) {
	version, err := nvrm.ReadVersion(root)
	if err != nil {
		return noNVIDIA(err), "load a known version of NVIDIA's open kernel module, or remove nvchannels from the config key mechanisms", false
	}
	gpus, err := nvrm.GPUs(root)
	if err != nil {
		return err.Error(), "", false
	}
	if len(gpus) == 0 {
		return "the NVIDIA driver has no GPU", "see dmesg | grep NVRM", false
	}
	if why, remedy := nvrm.Refused(root, sys); why != "" {
		return why, remedy, false
	}
	hazards, _ := targets.NewHazards(root, gpus, rows)
	results := hazards.Results(mechanism.NVChannels)
	var names []string
	for _, g := range gpus {
		result := results[g.ID]
		if result.Action == safety.Deny {
			names, remedy = append(names, g.Name+" (denied: "+result.Reason+")"), result.Row.Remedy
			continue
		}
		names, usable = append(names, g.Name), true
	}
	return fmt.Sprintf("driver %s, GPUs: %s. If gpreemptd and its supervisor both die, processes stay suspended until gpreemptd --cleanup",
		version, strings.Join(names, ", ")), remedy, usable
}
