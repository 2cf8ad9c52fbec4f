package discovery

import "fmt"

// Quantum is how long a queue runs before the next of the same priority on its pipe
// (CP_HQD_QUANTUM).
type Quantum struct {
	// Enabled is false for a queue that runs until it is empty.
	Enabled bool
	// Scale is the unit of Duration, 0 to 63: 1 is milliseconds (QUANTUM_SCALE_1MS of the
	// driver's cik_regs.h). The meaning of 0 is not public.
	Scale, Duration uint8
}

// DecodeQuantum decodes the register CP_HQD_QUANTUM.
func DecodeQuantum(register uint32) Quantum {
	return Quantum{Enabled: register&1 != 0, Scale: uint8(register >> 4 & 1), Duration: uint8(register >> 8 & 0x3f)}
}

// String returns the quantum for display: "1 ms", "off", or both fields when the unit is
// unknown.
func (q Quantum) String() string {
	switch {
	case !q.Enabled:
		return "off"
	case q.Scale == 1:
		return fmt.Sprintf("%d ms", q.Duration)
	}
	return fmt.Sprintf("%d of scale %d", q.Duration, q.Scale)
}

// MarshalText returns String.
func (q Quantum) MarshalText() ([]byte, error) { return []byte(q.String()), nil }
