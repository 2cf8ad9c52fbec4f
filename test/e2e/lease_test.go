package e2e

import (
	"errors"
	"io"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

const (
	running   = gpreemptv1.TargetState_TARGET_STATE_RUNNING
	suspended = gpreemptv1.TargetState_TARGET_STATE_SUSPENDED
)

func TestAnnouncementSuspendsOfflineWorkUntilComplete(t *testing.T) {
	t.Parallel()
	d := start(t, atOnce)
	pid := d.startOffline()
	d.checkRuns(pid)
	since := d.revision()
	lease := d.announce(t.Context())

	want := &gpreemptv1.NotifyOnlineResponse{
		LeaseId: lease.GetLeaseId(), Quiesced: true, Reason: gpreemptv1.QuiesceReason_QUIESCE_REASON_DONE,
		SuspendedTargets: 1, GpuIds: lease.GetGpuIds(), Ttl: durationpb.New(time.Minute), Timing: lease.GetTiming(),
	}
	if diff := cmp.Diff(want, lease, protocmp.Transform()); diff != "" {
		t.Error(diff)
	}
	var targets gpreemptv1.ListTargetsResponse
	d.ctlJSON(&targets, "target", "list")
	if got := find(&targets, pid); got.GetState() != suspended || got.GetDecidedBy() != "rule training" {
		t.Errorf("gpctl shows %v, want it suspended and offline by the rule", got)
	}
	d.checkFrozen(pid)

	if end := d.complete(lease.GetLeaseId()).GetEnd(); end != gpreemptv1.LeaseEnd_LEASE_END_COMPLETED {
		t.Errorf("the lease ended as %v", end)
	}
	d.awaitTarget(pid, since, running)
	d.checkRuns(pid)
	d.stopJob(pid)
}

func TestJobThatStartsDuringALeaseIsSuspendedToo(t *testing.T) {
	t.Parallel()
	d := start(t, atOnce)
	lease := d.announce(t.Context())
	if lease.GetReason() != gpreemptv1.QuiesceReason_QUIESCE_REASON_NOTHING_TO_DO {
		t.Errorf("answered %v on empty GPUs", lease.GetReason())
	}
	since := d.revision()
	pid := d.startJob("trainer")
	d.awaitTarget(pid, since, suspended)
	d.checkFrozen(pid)
	d.complete(lease.GetLeaseId())
	d.awaitTarget(pid, since, running)
	d.checkRuns(pid)
	d.stopJob(pid)
}

func TestLeaseExpiresAndRenewKeepsItAlive(t *testing.T) {
	t.Parallel()
	d := start(t, atOnce)
	pid := d.startOffline()
	brief, kept := announcement(), ""
	for ttl := time.Second; kept == ""; ttl *= 2 {
		brief.Ttl = durationpb.New(ttl)
		began := time.Now()
		lease, err := d.online.NotifyOnline(t.Context(), brief)
		if err != nil {
			t.Fatal(err)
		}
		_, err = d.online.Renew(t.Context(), &gpreemptv1.RenewRequest{LeaseId: lease.GetLeaseId(), Ttl: durationpb.New(time.Minute)})
		switch took := time.Since(began); {
		case err == nil:
			kept = lease.GetLeaseId()
		case took < ttl:
			t.Fatalf("a lease of %v cannot be renewed after %v: %v", ttl, took, err)
		} // else it has expired before, on a busy host
	}
	// It is announced later with the same time to live, so when it has expired the
	// other one would have too.
	left, err := d.online.NotifyOnline(t.Context(), brief)
	if err != nil {
		t.Fatal(err)
	}
	if end := d.awaitEnd(left.GetLeaseId()); end != gpreemptv1.LeaseEnd_LEASE_END_EXPIRED {
		t.Errorf("the lease ended as %v, want it expired", end)
	}
	d.checkFrozen(pid)
	since := d.revision()
	if end := d.complete(kept).GetEnd(); end != gpreemptv1.LeaseEnd_LEASE_END_COMPLETED {
		t.Errorf("the renewed lease ended as %v, want it completed", end)
	}
	d.awaitTarget(pid, since, running)
	if end := d.complete(left.GetLeaseId()).GetEnd(); end != gpreemptv1.LeaseEnd_LEASE_END_EXPIRED {
		t.Errorf("completing the expired lease says %v", end)
	}

	// Without another lease, expiry resumes the job.
	since = d.revision()
	if left, err = d.online.NotifyOnline(t.Context(), brief); err != nil {
		t.Fatal(err)
	}
	d.awaitTarget(pid, since, suspended)
	d.awaitTarget(pid, since, running)
	if end := d.awaitEnd(left.GetLeaseId()); end != gpreemptv1.LeaseEnd_LEASE_END_EXPIRED {
		t.Errorf("the lease ended as %v, want it expired", end)
	}
	d.stopJob(pid)
}

func TestKilledClientLosesItsLeasesAtOnce(t *testing.T) {
	t.Parallel()
	d := start(t, atOnce)
	pid := d.startOffline()
	since := d.revision()
	p := d.startProcess()
	leases := []string{p.do("announce"), p.do("announce")}
	d.checkFrozen(pid)
	p.kill()
	for _, lease := range leases {
		if end := d.awaitEnd(lease); end != gpreemptv1.LeaseEnd_LEASE_END_CLIENT_DIED {
			t.Errorf("lease %s ended as %v, want CLIENT_DIED", lease, end)
		}
	}
	d.awaitTarget(pid, since, running)
	d.checkRuns(pid)
	d.stopJob(pid)
}

func TestKilledClientLosesTheLeasesOfItsSessionsAtOnce(t *testing.T) {
	t.Parallel()
	d := start(t, atOnce)
	pid := d.startOffline()
	since := d.revision()
	p := d.startProcess()
	lease := p.do("session")
	d.checkFrozen(pid)
	p.kill()
	if end := d.awaitEnd(lease); end != gpreemptv1.LeaseEnd_LEASE_END_CLIENT_DIED {
		t.Errorf("the lease ended as %v, want CLIENT_DIED", end)
	}
	d.awaitTarget(pid, since, running)
	d.stopJob(pid)
}

func TestClientThatClosesItsConnectionLosesItsLeases(t *testing.T) {
	t.Parallel()
	d := start(t, atOnce)
	pid := d.startOffline()
	since := d.revision()
	p := d.startProcess()
	lease := p.do("announce")
	d.checkFrozen(pid)
	if said := p.do("close"); said != "ok" {
		t.Fatal(said)
	}
	if end := d.awaitEnd(lease); end != gpreemptv1.LeaseEnd_LEASE_END_DISCONNECTED {
		t.Errorf("the lease ended as %v, want DISCONNECTED", end)
	}
	d.awaitTarget(pid, since, running)
	d.checkRuns(pid)
	d.stopJob(pid)
}

// The socket outlives the process that connected it, and the lease does not.
func TestDeadClientLosesItsLeasesAlthoughAChildHoldsItsSocket(t *testing.T) {
	t.Parallel()
	d := start(t, atOnce)
	pid := d.startOffline()
	since := d.revision()
	p := d.startProcess()
	lease := p.do("announce")
	if said := p.do("bequeath"); said != "ok" && said != "inherited" {
		t.Fatal(said)
	}
	if said := p.said(); said != "ok" && said != "inherited" {
		t.Fatal(said)
	}
	d.checkFrozen(pid)
	p.kill()
	if end := d.awaitEnd(lease); end != gpreemptv1.LeaseEnd_LEASE_END_CLIENT_DIED {
		t.Errorf("the lease ended as %v, want CLIENT_DIED", end)
	}
	d.awaitTarget(pid, since, running)
	if said := p.said(); said != "cut off" {
		t.Errorf("the heir says %q, want its socket closed by the daemon", said)
	}
	d.stopJob(pid)
}

func TestHalfClosedSessionEndsItsLeases(t *testing.T) {
	t.Parallel()
	d := start(t, atOnce)
	pid := d.startOffline()
	since := d.revision()
	stream, err := d.online.Session(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(announceFrame(7, announcement())); err != nil {
		t.Fatal(err)
	}
	resp, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	if resp.GetTag() != 7 || !resp.GetAnnounced().GetQuiesced() {
		t.Errorf("answered %v, want quiet GPUs under tag 7", resp)
	}
	d.checkFrozen(pid)
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if end := d.awaitEnd(resp.GetAnnounced().GetLeaseId()); end != gpreemptv1.LeaseEnd_LEASE_END_DISCONNECTED {
		t.Errorf("the lease ended as %v, want DISCONNECTED", end)
	}
	d.awaitTarget(pid, since, running)
	if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("the stream ended with %v, want EOF", err)
	}
	d.stopJob(pid)
}

func TestShutdownResumesEverythingFirst(t *testing.T) {
	t.Parallel()
	d := start(t, atOnce)
	one, other := d.startOffline(), d.startOffline()
	if n := d.announce(t.Context()).GetSuspendedTargets(); n != 2 {
		t.Fatalf("%d targets are suspended, want 2", n)
	}
	since := d.revision()
	d.stop()
	for _, pid := range []int32{one, other} {
		d.awaitTarget(pid, since, running)
	}
}
