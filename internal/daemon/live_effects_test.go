package daemon

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// leases has two clients take leases in turn, and expects a reason for another one.
func leases(want gpreempt.Reason, first, second peer, n int) func(*live) func() {
	return func(l *live) func() {
		clients := []*grpc.ClientConn{l.client(first), l.client(second)}
		for i := range n {
			l.announce(clients[i%2], time.Minute)
		}
		return func() {
			_, err := gpreemptv1.NewOnlineServiceClient(clients[n%2]).NotifyOnline(testutil.Context(l), &gpreemptv1.NotifyOnlineRequest{})
			if why(err) != want {
				l.Errorf("another lease: %v, want %s", err, want)
			}
		}
	}
}

// requestsTogether has three clients of one user who call in turn, and expects that they are refused
// for what they send together.
func requestsTogether(l *live) func() {
	var clients []gpreemptv1.OnlineServiceClient
	for range 3 { // one has half of it
		clients = append(clients, gpreemptv1.NewOnlineServiceClient(l.client(peer{uid: nobody, gid: nobody})))
	}
	refused := func() (together bool) {
		for _, c := range clients {
			_, err := c.Complete(testutil.Context(l), &gpreemptv1.CompleteRequest{LeaseId: "x"})
			together = together || why(err) == gpreempt.ReasonRateLimited && strings.Contains(err.Error(), "together")
		}
		return together
	}
	for range 150 {
		if refused() {
			l.Fatal("the clients are refused before the rate is low")
		}
	}
	return func() { testutil.Until(l, "a refusal", refused) }
}

// shownPolicy compares a knob of the policy in force with the file.
func shownPolicy(name string) func(*live) func() {
	return func(l *live) func() {
		check := func() {
			l.Helper()
			answer, err := l.c.Admin().GetPolicy(testutil.Context(l), &gpreemptv1.GetPolicyRequest{})
			if err != nil {
				l.Fatal(err)
			}
			want := l.values["policy."+name]
			if got := knob(answer.GetPolicy(), name); got != want {
				l.Errorf("%s is %s, want %s", name, got, want)
			}
		}
		if name == "preset" { // else it is custom
			delete(l.values, "policy.attach_after")
			l.reload()
		}
		check()
		return check
	}
}

// knob returns a value of a policy in the form of the file.
func knob(p *gpreemptv1.Policy, name string) string {
	field := p.ProtoReflect().Descriptor().Fields().ByName(protoreflect.Name(name))
	switch v := p.ProtoReflect().Get(field).Interface().(type) {
	case protoreflect.Message:
		return v.Interface().(*durationpb.Duration).AsDuration().String()
	default:
		return fmt.Sprint(v)
	}
}

// parked has an idle job that the budget suspends without an announcement.
func parked(l *live) func() {
	job := l.h.start("trainer")
	l.h.target(l.c, job, "a mechanism is attached", held)
	if got := job.Suspended(); got != nil {
		l.Errorf("queues %v are suspended without a budget", got)
	}
	return func() { l.h.await("it is suspended", func() bool { return len(job.Suspended()) > 0 }) }
}

// source expects something of a source of queues.
func source(name string, want func(*gpreemptv1.Source) bool) func(*live) func() {
	return func(l *live) func() {
		is := func() bool {
			answer, err := l.c.Admin().GetStatus(testutil.Context(l), &gpreemptv1.GetStatusRequest{})
			if err != nil {
				l.Fatal(err)
			}
			return slices.ContainsFunc(answer.GetSources(), func(s *gpreemptv1.Source) bool { return s.GetName() == name && want(s) })
		}
		if is() {
			l.Errorf("%s is so with the old value", name)
		}
		return func() { testutil.Until(l, "what the new value means for "+name, is) }
	}
}

// targetOf expects something of a process.
func targetOf(comm string, want func(*gpreemptv1.Target) bool) func(*live) func() {
	return func(l *live) func() {
		job := l.h.start(comm)
		l.h.target(l.c, job, "it is not so with the old value", func(t *gpreemptv1.Target) bool { return !want(t) })
		return func() { l.h.target(l.c, job, "what the new value means for it", want) }
	}
}

// denied has a mechanism attached to a job when a row forbids it.
func denied(l *live) func() {
	job := l.h.start("trainer")
	l.h.target(l.c, job, "a mechanism is attached", held)
	return func() {
		l.h.target(l.c, job, "the row is in force", func(t *gpreemptv1.Target) bool {
			return strings.Contains(t.GetAttachError(), "hazard ours: Ours hangs.")
		})
		l.h.await("it is detached", func() bool { state, _ := job.KFD(); return !state.Enabled })
	}
}
