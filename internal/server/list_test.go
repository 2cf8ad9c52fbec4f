package server

import (
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/auth"
	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/internal/targets"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Others' command lines have tokens and paths, and a client in another pid namespace, or
// on a host with hidepid, cannot see them with ps.
func TestOnlineClientSeesOnlyWhatTheKernelShowsOfOthers(t *testing.T) {
	h := startHost(t)
	uid := uint32(os.Getuid())
	if uid == 0 {
		uid = nobody
	}
	h.rights = func() auth.Policy { return auth.Policy{OwnerUID: 1 << 30, OnlineGIDs: []uint32{uint32(os.Getgid())}} }
	of := func(key gpreempt.ProcessKey, uid uint32) discovery.Proc {
		return discovery.Proc{
			Process: gpreempt.Process{Key: key, Comm: "train", Cmdline: "train --token secret", Exe: "/home/a/train", UID: uid, Env: map[string]string{"RANK": "3"}},
			Queues:  []gpreempt.Queue{{Process: key, ID: 0, GPU: gpuA, Type: gpreempt.QueueCompute, RingBytes: 4096}},
		}
	}
	h.setProcs(of(offline, uid+1), of(other, uid))
	torch := classify.Job{UID: 7, Rule: "torch", By: "secret"}
	h.directory.set(offline, targets.Facts{Job: torch, JobName: "torch-1"})
	h.directory.set(other, targets.Facts{Job: torch, JobName: "torch-1"})
	h.directory.steps = []classify.Step{{By: "rule batch", Class: gpreempt.Offline, Matches: true, Decides: true, Detail: "its token is secret"}}
	type shown struct {
		Comm, Cmdline, Exe, Detail string
		Env                        map[string]string
		Job, Why                   string
	}
	admin := gpreemptv1.NewAdminServiceClient(h.dialAsNobody(t))
	var listed, explained []shown
	list, err := admin.ListTargets(t.Context(), &gpreemptv1.ListTargetsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range list.GetTargets() {
		listed = append(listed, shown{m.GetComm(), m.GetCmdline(), m.GetExe(), "", m.GetEnvironment(), m.GetJob().GetName(), m.GetJob().GetWhy()})
		e, err := admin.ExplainTarget(t.Context(), &gpreemptv1.ExplainTargetRequest{TargetId: m.GetTargetId()})
		if err != nil {
			t.Fatal(err)
		}
		m = e.GetTarget()
		explained = append(explained, shown{m.GetComm(), m.GetCmdline(), m.GetExe(), e.GetClassification()[0].GetDetail(), m.GetEnvironment(), m.GetJob().GetName(), m.GetJob().GetWhy()})
	}
	all := shown{"train", "train --token secret", "/home/a/train", "", map[string]string{"RANK": "3"}, "torch-1", "rule torch: secret, uid 7"}
	if diff := cmp.Diff([]shown{{Comm: "train", Job: "torch-1"}, all}, listed); diff != "" {
		t.Errorf("listed (-want +got):\n%s", diff)
	}
	all.Detail = "its token is secret"
	if diff := cmp.Diff([]shown{{Comm: "train", Detail: "shown only to admins and to the user of the process", Job: "torch-1"}, all}, explained); diff != "" {
		t.Errorf("explained (-want +got):\n%s", diff)
	}
}
