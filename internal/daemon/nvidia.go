package daemon

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/mechanism/nvchannels"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/nvrm"
)

// openNVIDIA has the backend find the processes of the NVIDIA driver, and suspend them.
func (b *backend) openNVIDIA(log *zap.Logger) {
	profile, err := nvrm.ReadProfile(b.root)
	if err != nil {
		b.warn(gpreempt.WarnNoMechanism.Warn("the mechanism nvchannels cannot be used: " + noNVIDIA(err)))
		return
	}
	b.fs.Add(nvrm.NewSource(b.root, nvrm.Kernel(), profile, b.owns))
	b.name += "+" + nvrm.Driver
	b.nvidia = newNVIDIA(profile, b.pauses.journal, log)
}

func noNVIDIA(err error) string {
	if errors.Is(err, fs.ErrNotExist) {
		return "the NVIDIA driver is not loaded"
	}
	return err.Error()
}

// newNVIDIA returns the mechanism for this host's driver. The journal is nil for one that only
// probes.
func newNVIDIA(profile nvrm.Profile, journal mechanism.Store, log *zap.Logger) *nvchannels.Mechanism {
	return nvchannels.New(nvchannels.Config{Sys: nvrm.Kernel(), Profile: profile, Journal: journal, Refused: nvrm.Refused, Log: log.Named(nvchannels.Name)})
}

// examineNVIDIAOf returns what the doctor says of a host's NVIDIA driver.
func examineNVIDIAOf(root fs.FS) func() (found, remedy string, usable bool) {
	return func() (string, string, bool) {
		profile, err := nvrm.ReadProfile(root)
		if err != nil {
			return noNVIDIA(err), "load a known version of NVIDIA's open kernel module, or remove nvchannels from the config key mechanisms", false
		}
		gpus, err := nvrm.GPUs(root)
		if err != nil {
			return err.Error(), "", false
		}
		if why, remedy := nvrm.RefusedBy(root); why != "" {
			return why, remedy, false
		}
		if _, err := nvrm.Kernel().NewestClient(); err != nil {
			return err.Error(), "run as root, and allow the device " + nvrm.ControlPath, false
		}
		measured := "read in its source, not measured"
		if profile.Measured {
			measured = "measured on a GPU of this branch"
		}
		var names []string
		for _, g := range gpus {
			names = append(names, g.Name)
		}
		return fmt.Sprintf("driver %s (%s), GPUs: %s. If gpreemptd and its supervisor both die, processes stay suspended until gpreemptd --cleanup",
			profile.Version, measured, strings.Join(names, ", ")), "", true
	}
}

// ofKFD returns the GPUs of KFD: the hazard table is about them.
func ofKFD(gpus []gpreempt.GPU) []gpreempt.GPU {
	return slices.DeleteFunc(slices.Clone(gpus), func(g gpreempt.GPU) bool { return g.Driver != "" })
}
