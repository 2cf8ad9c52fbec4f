package scheduler

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// A record of the shadow policy names its process and the owner of its lease, so that the report needs no process and no lease that lives.
func TestShadowRecordsNameProcessAndOwner(t *testing.T) {
	policy, err := PresetByName("shadow")
	if err != nil {
		t.Fatal(err)
	}
	c := New(policy, Limits{LeasesTotal: 1, LeasesPerUser: 1, LeasesPerClient: 1})
	var got []Shadowed
	step := func(at Time, ev Event) {
		for _, a := range c.Step(at, ev) {
			if a.Kind == ActRecord && a.Record.Kind == RecordShadow {
				got = append(got, *a.Record.Shadow)
			}
		}
	}
	job := gpreempt.ProcessKey{PID: 7, Start: 1}
	client := ClientID{PID: 9, Start: 2}
	step(0, TargetSeen{Target: job, Class: gpreempt.Offline, GPUs: []gpreempt.GPUID{1, 2}, Comm: "python", By: "rule train", Queues: 1})
	step(time.Second, LeaseRequested{Lease: 1, Client: client, GPUs: []gpreempt.GPUID{1}, Priority: 11, TTL: time.Minute, Label: "chat"})
	step(2*time.Second, LeaseFinished{Lease: 1, End: EndCompleted})
	step(3*time.Second, Tick{}) // the linger is over
	step(4*time.Second, Pin{Target: job, Cause: CauseByHand, For: time.Second})
	of := Shadowed{Comm: "python", By: "rule train", GPUs: 2}
	lease, byHand := of, of
	lease.Client, lease.Label, byHand.Cause = client, "chat", CauseByHand
	for n := range got {
		if n == 1 { // why it would run again is in the record
			got[n].Cause = ""
		}
	}
	if diff := cmp.Diff([]Shadowed{lease, of, byHand}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
