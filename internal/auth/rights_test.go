package auth

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// fullMethods returns the full names of the methods of a service.
func fullMethods(desc grpc.ServiceDesc) (all []string) {
	for _, m := range desc.Methods {
		all = append(all, "/"+desc.ServiceName+"/"+m.MethodName)
	}
	for _, s := range desc.Streams {
		all = append(all, "/"+desc.ServiceName+"/"+s.StreamName)
	}
	slices.Sort(all)
	return all
}

func TestEveryMethodNeedsARight(t *testing.T) {
	const nobody = Rights(0)
	got := map[string]Rights{}
	for _, desc := range []grpc.ServiceDesc{gpreemptv1.OnlineService_ServiceDesc, gpreemptv1.AdminService_ServiceDesc, healthpb.Health_ServiceDesc} {
		for _, method := range fullMethods(desc) {
			need, ok := Need(method)
			if !ok {
				t.Errorf("%s has no entry: add the right that it needs", method)
			}
			got[method] = need
		}
	}
	const online, admin, health = "/gpreempt.v1.OnlineService/", "/gpreempt.v1.AdminService/", "/grpc.health.v1.Health/"
	want := map[string]Rights{
		online + "NotifyOnline":  Online,
		online + "Complete":      Online,
		online + "Renew":         Online,
		online + "Session":       Online,
		admin + "GetStatus":      Read,
		admin + "ListGpus":       Read,
		admin + "ListTargets":    Read,
		admin + "ListQueues":     Read,
		admin + "ListHqds":       Admin,
		admin + "WatchQueues":    Read,
		admin + "ListLeases":     Read,
		admin + "ExplainTarget":  Read,
		admin + "GetPolicy":      Read,
		admin + "WatchEvents":    Read,
		admin + "GetStatistics":  Read,
		admin + "Diagnose":       Read,
		admin + "CreateLease":    Admin,
		admin + "ReleaseLease":   Admin,
		admin + "SuspendTarget":  Admin,
		admin + "ResumeTarget":   Admin,
		admin + "ClassifyTarget": Admin,
		admin + "SetPolicy":      Admin,
		admin + "SetDrain":       Admin,
		health + "Check":         nobody,
		health + "List":          nobody,
		health + "Watch":         nobody,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("needs (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(slices.Sorted(maps.Keys(want)), slices.Sorted(maps.Keys(methods))); diff != "" {
		t.Errorf("methods of the table and of the services (-want +got):\n%s", diff)
	}
}

func TestUnknownMethodsAreNotAllowed(t *testing.T) {
	for _, method := range []string{
		"", "/", "//", "gpreempt.v1.AdminService", "/gpreempt.v1.AdminService/", "/gpreempt.v1.AdminService/GetEverything",
		"/gpreempt.v2.OnlineService/NotifyOnline", "/grpc.health.v1.Health", "/grpc.health.v1.Health/", "/grpc.channelz.v1.Channelz/GetServers",
	} {
		if need, ok := Need(method); ok {
			t.Errorf("%q needs %v; want it unknown", method, need)
		}
	}
}

func TestRights(t *testing.T) {
	policy := Policy{
		OwnerUID:   1,
		OnlineGIDs: []uint32{100, 101}, AdminGIDs: []uint32{200},
		AdminUIDs:   []uint32{20},
		OnlineNames: []string{"dns:web.example", "uri:spiffe://example/web"}, AdminNames: []string{"cn:ops"},
	}
	const all = Online | Read | Admin
	for _, tc := range []struct {
		name string
		peer Peer
		want Rights
	}{
		{"another user", Process{UID: 5, GID: 5, Groups: []uint32{6, 7}}, 0},
		{"root", Process{UID: 0, GID: 5}, all},
		{"the owner", Process{UID: 1, GID: 5}, all},
		{"an admin user", Process{UID: 20, GID: 5}, all},
		{"an online group of its own", Process{UID: 5, GID: 101}, Online | Read},
		{"an online group among others", Process{UID: 5, GID: 5, Groups: []uint32{7, 100}}, Online | Read},
		{"an admin group of its own", Process{UID: 5, GID: 200}, all},
		{"an admin group among others", Process{UID: 5, GID: 5, Groups: []uint32{7, 200}}, all},
		{"online by group, admin by user", Process{UID: 20, GID: 100}, all},
		{"a uid equal to a gid", Process{UID: 200, GID: 20, Groups: []uint32{10, 0, 1}}, 0},
		{"root in a container", Process{UID: 0, Nested: true}, Online | Read},
		{"an admin user in a container", Process{UID: 20, GID: 5, Nested: true}, Online | Read},
		{"an admin group in a container", Process{UID: 5, GID: 200, Nested: true}, Online | Read},
		{"an online group in a container", Process{UID: 5, GID: 101, Nested: true}, Online | Read},
		{"another user in a container", Process{UID: 5, GID: 5, Nested: true}, 0},
		{"a listed certificate", Certificate{Names: []string{"dns:web.example"}}, Online},
		{"one of its names is listed", Certificate{Names: []string{"uri:other", "uri:spiffe://example/web", "cn:web"}}, Online},
		{"an admin's certificate", Certificate{Names: []string{"dns:ops.example", "cn:ops"}}, all},
		{"the name of another kind", Certificate{Names: []string{"cn:web.example", "dns:ops"}}, 0},
		{"part of a name", Certificate{Names: []string{"dns:web.example.org", "cn:dns:web.example", "dns:web", "dns:a.web.example", "dns:*.example"}}, 0},
		{"a certificate without names", Certificate{Subject: "O=web.example"}, 0},
		{"nobody", nil, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := policy.Rights(tc.peer); got != tc.want {
				t.Errorf("rights %b, want %b", got, tc.want)
			}
		})
	}
}

func TestEmptyPolicyHasRightsForRootOnly(t *testing.T) {
	if got := (Policy{}).Rights(Process{UID: 1000, GID: 0, Groups: []uint32{0}}); got != 0 {
		t.Errorf("a member of the root group has %b", got)
	}
	if got := (Policy{}).Rights(Process{}); got != Online|Read|Admin {
		t.Errorf("root has %b", got)
	}
	if got := (Policy{}).Rights(Certificate{Names: []string{""}}); got != 0 {
		t.Errorf("a certificate has %b", got)
	}
}

func TestAdminsInContainersKeepTheirRightsWhereThatIsConfigured(t *testing.T) {
	policy := Policy{AdminGIDs: []uint32{200}, ContainerAdmins: true}
	got := map[string]Rights{}
	for name, peer := range map[string]Process{"root": {Nested: true}, "admin": {UID: 5, GID: 200, Nested: true}, "other": {UID: 5, Nested: true}} {
		got[name] = policy.Rights(peer)
	}
	want := map[string]Rights{"root": Online | Read | Admin, "admin": Online | Read | Admin, "other": 0}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("rights (-want +got):\n%s", diff)
	}
}

func TestAllows(t *testing.T) {
	got := map[string]bool{}
	for _, have := range []Rights{0, Online, Online | Read, Online | Read | Admin} {
		for _, need := range []Rights{0, Online, Read, Admin} {
			if have.Allows(need) {
				got[fmt.Sprintf("%03b for %03b", have, need)] = true
			}
		}
	}
	want := map[string]bool{
		"000 for 000": true,
		"001 for 000": true, "001 for 001": true,
		"011 for 000": true, "011 for 001": true, "011 for 010": true,
		"111 for 000": true, "111 for 001": true, "111 for 010": true, "111 for 100": true,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("allowed (-want +got):\n%s", diff)
	}
}

func TestMemoryIsReadableForItsUserAndAdmins(t *testing.T) {
	policy := Policy{OwnerUID: 1, OnlineGIDs: []uint32{10}, AdminUIDs: []uint32{20}, OnlineNames: []string{"cn:web"}, AdminNames: []string{"cn:ops"}}
	got := map[string]bool{}
	for name, peer := range map[string]Peer{
		"its user": Process{UID: 30}, "another": Process{UID: 10, GID: 10}, "an admin": Process{UID: 20}, "root": Process{},
		"online by certificate": Certificate{Names: []string{"cn:web"}}, "admin by certificate": Certificate{Names: []string{"cn:ops"}}, "nobody": nil,
	} {
		got[name] = policy.MayReadMemory(peer, gpreempt.ProcessKey{}, 30)
	}
	want := map[string]bool{
		"its user": true, "another": false, "an admin": true, "root": true,
		"online by certificate": false, "admin by certificate": true, "nobody": false,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("may read (-want +got):\n%s", diff)
	}
	if (Policy{}).MayReadMemory(Certificate{}, gpreempt.ProcessKey{}, 0) {
		t.Error("a certificate reads the memory of root")
	}
}
