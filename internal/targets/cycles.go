package targets

import (
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// What dbgtrap costs every GPU that a target can see, in runlist cycles: a cycle takes all
// queues of all processes off the GPU and puts them on again. ENABLE refreshes the runlist
// of each (kfd_dbg_trap_activate); DISABLE, and the end of the target, do so three times:
// for the launch mode, for the flags and for the traps (kfd_dbg_trap_deactivate with
// kfd_dbg_trap_set_wave_launch_mode and kfd_dbg_trap_set_flags; Linux 6.12).
const (
	attachCycles  = 1
	releaseCycles = 3
)

// disturb counts cycles on the GPUs of others. Those of a process that has left are the
// ones it had when it was attached to.
func (s *Sessions) disturb(target gpreempt.ProcessKey, h *holding, cycles int) {
	if h.name != mechanism.DBGTrap {
		return
	}
	if gpus, known := s.cfg.Bystanders(target); known {
		h.bystanders = gpus
	}
	for _, gpu := range h.bystanders {
		s.cfg.Disturbed(gpu, cycles)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if st := s.states[target]; st != nil {
		st.AttachCycles += uint64(cycles * len(h.bystanders))
	}
}
