package cluster

import "testing"

func TestPodRunsPacketsOnTheEmulatedGPU(t *testing.T) {
	n := cluster(t)
	n.namespace(t, "plain", "restricted")
	job := offline("plain", "job")
	n.create(t, job)
	n.working(t, job)
	if lost := n.end(t, job).lost(); lost != "" {
		t.Errorf("the job: %s", lost)
	}
}
