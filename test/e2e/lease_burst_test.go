package e2e

import (
	"testing"

	"github.com/gpreempt/gpreempt/emu/kfdemu"
)

// Leases follow one another faster than a suspend and a resume take, beside an online
// client that works all the time.
func TestLeasesInQuickSuccessionLoseNoPacket(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, machine, config string
		job                   []string
	}{
		{"HWS", "mi300x", atOnce, nil},
		{"MES", "rx7900xtx", atOnceRDNA, nil},
		{"queues that are created and destroyed", "mi300x", atOnce, []string{"--churn"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := emulate(t, kfdemu.Config{Machine: tc.machine})
			d := m.start(tc.config)
			online := m.serve("--duration", "200", "--occupancy", "300000", "--rate", "500", "--runtime")
			job := m.work(append(tc.job, "--queues", "2", "--sdma", "--duration", "700", "--runtime")...)
			d.offlineTarget(job, 3)
			for range 50 {
				lease := d.announce(t.Context())
				if tc.job == nil {
					m.checkEach(job, 3, offGPU)
				}
				m.awaitEach(online, 1, onGPU) // creating and destroying a job's queues unmaps it briefly
				d.complete(lease.GetLeaseId())
			}
			d.eventually("the job counts as running", func() bool { return d.target(job.PID).GetState() == running })
			m.awaitProgress(online)
			m.eventually("every queue runs", func() bool {
				for _, w := range []*worker{job, online} {
					for _, q := range m.flags(w.PID) {
						if q.Suspended {
							return false
						}
					}
				}
				return true
			})
			if s := d.target(job.PID).GetSuspends(); s < 50 {
				t.Errorf("the job was suspended %d times, want 50", s)
			}
			job.stop()
			online.stop()
			m.gone(d, job.PID)
			m.gone(d, online.PID)
			m.checkDebugs(d, 0)
		})
	}
}
