package server

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/auth"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// startAudited starts a host and returns its audit log.
func startAudited(t *testing.T, opts ...option) (*host, *observer.ObservedLogs) {
	t.Helper()
	core, logs := observer.New(zap.DebugLevel)
	return startHost(t, append(opts, func(c *Config, _ *scheduler.Limits) { c.Audit = zap.New(core) })...), logs
}

// line returns a line of the audit log without the fields that differ from run to run.
func line(e observer.LoggedEntry) map[string]any {
	m := e.ContextMap()
	for _, key := range []string{"start", "exe", "cgroup", "serial", "address", "gid", "error"} {
		delete(m, key)
	}
	m["message"], m["level"] = e.Message, e.Level.String()
	return m
}

func linesOf(logs *observer.ObservedLogs) (lines []map[string]any) {
	for _, e := range logs.TakeAll() {
		lines = append(lines, line(e))
	}
	return lines
}

func TestEveryChangeByAnAdminIsAudited(t *testing.T) {
	h, logs := startAudited(t)
	admin, target := h.admin(t), offline.String()
	ctx := t.Context()
	lease, err := admin.CreateLease(ctx, &gpreemptv1.CreateLeaseRequest{Announce: minute(gpuB)})
	if err != nil {
		t.Fatal(err)
	}
	id := lease.GetAnnounced().GetLeaseId()
	for _, call := range []func() error{
		func() error {
			_, err := admin.ReleaseLease(ctx, &gpreemptv1.ReleaseLeaseRequest{LeaseId: id})
			return err
		},
		func() error {
			_, err := admin.SuspendTarget(ctx, &gpreemptv1.SuspendTargetRequest{TargetId: target, Ttl: durationpb.New(time.Second)})
			return err
		},
		func() error {
			_, err := admin.ResumeTarget(ctx, &gpreemptv1.ResumeTargetRequest{TargetId: target})
			return err
		},
		func() error {
			_, err := admin.ClassifyTarget(ctx, &gpreemptv1.ClassifyTargetRequest{TargetId: target, Class: gpreemptv1.Class_CLASS_ONLINE})
			return err
		},
		func() error {
			_, err := admin.SetPolicy(ctx, &gpreemptv1.SetPolicyRequest{Preset: "strict"})
			return err
		},
		func() error {
			_, err := admin.SetDrain(ctx, &gpreemptv1.SetDrainRequest{Drain: true})
			return err
		},
	} {
		if err := call(); err != nil {
			t.Fatal(err)
		}
	}
	// A read is not audited.
	if _, err := admin.GetStatus(ctx, &gpreemptv1.GetStatusRequest{}); err != nil {
		t.Fatal(err)
	}
	// A failed change is audited.
	if _, err := admin.SuspendTarget(ctx, &gpreemptv1.SuspendTargetRequest{TargetId: "1\nfake"}); err == nil {
		t.Error("the suspend of an invalid target succeeded")
	}

	suspended := strings.TrimPrefix(id, h.server.leasePrefix)
	if suspended != "1" {
		t.Fatalf("the lease is number %s", suspended)
	}
	done := func(method, request, verb string, more ...any) map[string]any {
		m := map[string]any{
			"message": "admin call", "level": "info", "audit": true, "outcome": "done", "method": method, "request": request, "verb": verb,
			"uid": uint32(os.Getuid()), "pid": int32(os.Getpid()),
		}
		for i := 0; i < len(more); i += 2 {
			m[more[i].(string)] = more[i+1]
		}
		return m
	}
	want := []map[string]any{
		done("CreateLease", `{"announce":{"gpus":[{"gpu_id":200}],"ttl":"60s","max_wait":"0s"}}`, "lease create on GPUs [200] for 1m0s, priority 11", "lease", id),
		done("ReleaseLease", fmt.Sprintf(`{"lease_id":%q}`, id), "lease release "+id, "lease", id),
		done("SuspendTarget", fmt.Sprintf(`{"target_id":%q,"ttl":"1s"}`, target), "target suspend "+target+" for 1s", "target", target),
		done("ResumeTarget", fmt.Sprintf(`{"target_id":%q}`, target), "target resume "+target+", hold 0s", "target", target),
		done("ClassifyTarget", fmt.Sprintf(`{"target_id":%q,"class":"CLASS_ONLINE"}`, target), "target classify "+target+" online, priority 11", "target", target),
		done("SetPolicy", `{"preset":"strict"}`, "policy set: strict"),
		done("SetDrain", `{"drain":true}`, "drain true"),
		{
			"message": "admin call", "level": "info", "audit": true, "outcome": "failed", "method": "SuspendTarget", "request": `{"target_id":"1\nfake"}`,
			"reason": "UNKNOWN_TARGET", "uid": uint32(os.Getuid()), "pid": int32(os.Getpid()),
		},
	}
	if diff := cmp.Diff(want, linesOf(logs)); diff != "" {
		t.Errorf("audit log (-want +got):\n%s", diff)
	}
}

func TestAuditHasTheOriginOfTheCaller(t *testing.T) {
	h, logs := startAudited(t)
	if _, err := h.admin(t).SetDrain(t.Context(), &gpreemptv1.SetDrainRequest{}); err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cgroup, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	m := logs.All()[0].ContextMap()
	if m["exe"] != exe || m["start"] != h.anyConnection().peer.Key().Start || m["gid"] != uint32(os.Getgid()) {
		t.Errorf("line %v, want program %s, start and group", m, exe)
	}
	if path, ok := m["cgroup"].(string); !ok || path == "" || !strings.Contains(string(cgroup), ":"+path) {
		t.Errorf("control group %v, want one of\n%s", m["cgroup"], cgroup)
	}
}

func TestCallsByCertificateAreAuditedWithSubjectAndAddress(t *testing.T) {
	h, logs := startAudited(t)
	r := h.openTCP(t)
	for _, name := range []string{"ops", "web"} {
		c := r.dial(map[string]func(*x509.Certificate){"ops": ops, "web": web}[name])
		_, err := c.Admin().SetDrain(t.Context(), &gpreemptv1.SetDrainRequest{})
		if (err == nil) != (name == "ops") {
			t.Errorf("%s: %v", name, err)
		}
	}
	var addresses []string
	for _, e := range logs.All() {
		addresses = append(addresses, e.ContextMap()["address"].(string))
	}
	if len(addresses) != 2 || addresses[0] == addresses[1] || !strings.HasPrefix(addresses[0], "127.0.0.1:") {
		t.Errorf("addresses %q", addresses)
	}
	want := []map[string]any{
		{
			"message": "admin call", "level": "info", "audit": true, "outcome": "done", "method": "SetDrain", "request": "{}", "verb": "drain false",
			"certificate": "uri:spiffe://example/ops", "subject": "O=Example",
		},
		{
			"message": "admin call", "level": "warn", "audit": true, "outcome": "refused", "method": "SetDrain", "request": "{}",
			"reason": "ADMIN_RIGHT_MISSING", "certificate": "dns:web.example", "subject": "O=Example",
		},
	}
	if diff := cmp.Diff(want, linesOf(logs)); diff != "" {
		t.Errorf("audit log (-want +got):\n%s", diff)
	}
}

func TestManyRefusalsAreAuditedInFewLines(t *testing.T) {
	h, logs := startAudited(t)
	h.setRights(auth.Policy{OwnerUID: uint32(os.Getuid()), OnlineGIDs: []uint32{uint32(os.Getgid())}})
	conn := h.dialAsNobody(t)
	admin := gpreemptv1.NewAdminServiceClient(conn)
	if _, err := admin.GetPolicy(t.Context(), &gpreemptv1.GetPolicyRequest{}); err != nil {
		t.Fatal(err)
	}
	h.setRights(auth.Policy{OwnerUID: 1 << 30})
	const calls = 500
	for range calls {
		_, err := admin.SetDrain(t.Context(), &gpreemptv1.SetDrainRequest{Drain: true})
		want(t, err, gpreempt.CodePermissionDenied, gpreempt.ReasonNotAdmin)
	}
	// A read without the right is refused too, also as a stream.
	st, err := admin.WatchEvents(testutil.Context(t), &gpreemptv1.WatchEventsRequest{NoFollow: true})
	if err == nil {
		_, err = st.Recv()
	}
	want(t, err, gpreempt.CodePermissionDenied, gpreempt.ReasonNotAdmin)
	// Calls of the online service are not in the audit log.
	_, err = gpreemptv1.NewOnlineServiceClient(conn).NotifyOnline(t.Context(), minute(gpuA))
	want(t, err, gpreempt.CodePermissionDenied, gpreempt.ReasonNotOnline)
	_ = conn.Close()
	h.server.clients.wait()

	lines := linesOf(logs)
	var logged uint64
	for _, l := range lines {
		if l["outcome"] != "refused" || l["message"] != "admin call" || l["level"] != "warn" {
			t.Fatalf("line %v", l)
		}
		if l["method"] != nil {
			logged++
		}
		if n, ok := l["unlogged"].(uint64); ok {
			logged += n
		}
	}
	if logged != calls+1 {
		t.Errorf("the audit log accounts for %d refusals, want %d", logged, calls+1)
	}
	if n := len(lines); n > calls/2 {
		t.Errorf("%d lines for %d refusals", n, calls)
	}
	if got := h.verbs(t); len(got) > 0 {
		t.Errorf("%d refusals are in the event log", len(got))
	}
}

// A user with many processes once had as many limits: 2,335 lines a second.
func TestRefusalsOfAllProcessesOfAUserShareOneLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zap.DebugLevel)
		s := &Server{cfg: Config{Audit: zap.New(core)}, unidentified: newLogLimiter()}
		users := map[uint32]*user{7: {refusals: newLogLimiter()}, 8: {refusals: newLogLimiter()}}
		refuse := func(times int, uid uint32) {
			for n := range times {
				p := auth.Process{UID: uid, PID: 1<<30 + int32(n)} // of no process of this host
				s.auditRefusal(&connection{peer: p, client: newClient(clientOf(p), p, users[uid])}, adminPrefix+"SetDrain", nil, errNoIdentity)
			}
		}
		summary := func() map[string]uint64 {
			sum := map[string]uint64{}
			for _, l := range linesOf(logs) {
				sum[fmt.Sprint("lines of ", l["uid"])]++
				if n, ok := l["unlogged"].(uint64); ok {
					sum[fmt.Sprint("unlogged of ", l["uid"])] += n
				}
			}
			return sum
		}
		refuse(1000, 7)
		refuse(5, 8)
		time.Sleep(time.Second)
		refuse(100, 7)
		s.auditSkipped(users[7])
		for range 100 {
			s.auditRefusal(nil, adminPrefix+"SetDrain", nil, errNoIdentity)
		}
		want := map[string]uint64{"lines of 7": 20 + 10 + 1, "unlogged of 7": 980 + 90, "lines of 8": 5, "lines of <nil>": 20}
		if diff := cmp.Diff(want, summary()); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	})
}

func TestCallsAboveTheRateAreAudited(t *testing.T) {
	h, logs := startAudited(t)
	h.setLimits(func(l *Limits) { l.RequestsPerSecond, l.Burst = 1, 1 })
	admin := h.admin(t)
	const calls = 10
	for range calls {
		_, _ = admin.SetDrain(t.Context(), &gpreemptv1.SetDrainRequest{}) // most are refused
	}
	reasons := map[any]int{}
	for _, e := range logs.All() {
		reasons[e.ContextMap()["reason"]]++
	}
	if reasons["RATE_LIMITED"] < 1 || len(logs.All()) != calls {
		t.Errorf("lines %v, want one for each call, with RATE_LIMITED", reasons)
	}
}

func TestPanicOfAnAdminCallIsAudited(t *testing.T) {
	p := &panicking{}
	h, logs := startAudited(t, func(c *Config, _ *scheduler.Limits) { c.Scheduler = p })
	p.Scheduler = h.runner
	p.on.Store(true)
	_, err := h.admin(t).ReleaseLease(t.Context(), &gpreemptv1.ReleaseLeaseRequest{LeaseId: "000000000000feed-1"})
	want(t, err, gpreempt.CodeInternal, gpreempt.ReasonInternal)
	if m := logs.All()[0].ContextMap(); m["outcome"] != "panicked" || m["method"] != "ReleaseLease" {
		t.Errorf("line %v", m)
	}
}

func TestAuditWritesARequestInOneBoundedLine(t *testing.T) {
	hostile := "1\n{\"audit\":true}\x1b[2J\u202e"
	text := requestText(&gpreemptv1.SuspendTargetRequest{TargetId: hostile})
	if strings.ContainsAny(text, "\n\x1b") {
		t.Errorf("written as %q", text)
	}
	var back map[string]string
	if err := json.Unmarshal([]byte(text), &back); err != nil || back["target_id"] != hostile {
		t.Errorf("read back as %q, %v", back, err)
	}
	long := requestText(&gpreemptv1.SuspendTargetRequest{TargetId: strings.Repeat("é", 10_000)})
	if len(long) > maxAudited+len("...") || !strings.HasSuffix(long, "...") {
		t.Errorf("%d bytes of a long request", len(long))
	}
	if text := requestText(&gpreemptv1.SuspendTargetRequest{TargetId: "\xff"}); !strings.HasPrefix(text, "unreadable: ") {
		t.Errorf("a request that is not UTF-8: %s", text)
	}
}

func TestCallWithoutIdentityIsAudited(t *testing.T) {
	h, logs := startAudited(t)
	handler := h.server.unary(gpreemptv1.AdminService_SetDrain_FullMethodName,
		func(any, context.Context, func(any) error, grpc.UnaryServerInterceptor) (any, error) {
			t.Error("the handler was called")
			return nil, nil
		})
	err := handler(nil, &stream{ctx: t.Context()})
	want(t, err, gpreempt.CodeUnauthenticated, gpreempt.ReasonNoIdentity)
	if diff := cmp.Diff([]map[string]any{{
		"message": "admin call", "level": "warn", "audit": true, "outcome": "refused", "method": "SetDrain", "reason": "PEER_IDENTITY_MISSING",
	}}, linesOf(logs)); diff != "" {
		t.Errorf("audit log (-want +got):\n%s", diff)
	}
}
