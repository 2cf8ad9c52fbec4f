package arch

import (
	"go/ast"
	"os"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// forms are those that an announcement has on its way to the driver and back: docs/architecture.md has
// the list. What the scheduler's core makes of it is one, the lease.
var forms = []string{
	"NotifyOnlineRequest", "announcement", "LeaseRequested", "lease", "Action", "order", "request", "[]uint32",
	"TrapSuspendQueuesArgs", "QueueResult", "message", "Suspended", "Answer", "NotifyOnlineResponse",
}

// mostForms bounds forms.
const mostForms = 14

// passage is a function that an announcement passes.
type passage struct {
	dir, function string
	// calls are the functions that it must call itself, so that none is put between.
	calls []string
	// makes are the structs of this module that it makes, sorted: forms, and what does not carry the
	// announcement on.
	makes []string
}

var passages = []passage{
	{"internal/server", "onlineService.NotifyOnline", []string{"prepare", "announce"}, nil},
	{"internal/server", "Server.prepare", nil, []string{"LeaseRequested", "allTaken", "announcement"}},
	{"internal/server", "Server.announce", []string{"submit", "countedAnswer"}, nil},
	{"internal/server", "Server.submit", []string{"Announce"}, nil},
	{"pkg/scheduler", "Runner.Announce", []string{"Admit", "step"}, []string{"Refusal"}},
	{"pkg/scheduler", "Runner.step", []string{"Step", "Suspend", "reply"}, nil},
	{"internal/targets", "Sessions.Suspend", []string{"order"}, []string{"order"}},
	{"internal/targets", "Sessions.order", []string{"hand"}, nil},
	{"internal/targets", "Sessions.hand", nil, []string{"Suspended"}},
	{"internal/targets", "actor.run", []string{"do"}, nil},
	{"internal/targets", "actor.do", []string{"suspend"}, nil},
	{"internal/targets", "actor.suspend", []string{"Suspend", "post"}, nil},
	{"internal/targets", "actor.post", []string{"result", "Post"}, []string{"Suspended"}},
	{"internal/mechanism/helper", "session.Suspend", []string{"call"}, []string{"request"}},
	{"internal/mechanism/helper", "session.call", []string{"call"}, nil},
	{"internal/mechanism/helper", "Pool.call", []string{"Call"}, nil},
	{"internal/mechanism/helper", "worker.do", []string{"Suspend", "Report"}, []string{"message"}},
	{"internal/mechanism/helper", "worker.result", nil, []string{"message"}},
	{"internal/mechanism/helper", "helper.take", nil, []string{"Report"}},
	{"internal/mechanism/dbgtrap", "session.Suspend", []string{"suspend"}, nil},
	{"internal/mechanism/dbgtrap", "debuggee.suspend", []string{"suspendAll"}, nil},
	{"internal/mechanism/dbgtrap", "debuggee.suspendAll", []string{"suspendRounds", "done"}, nil},
	{"internal/mechanism/dbgtrap", "debuggee.suspendRounds", []string{"snapshot", "next", "suspendQueues", "take"}, []string{"HardwareError", "endingError"}},
	{"internal/mechanism/dbgtrap", "suspendPass.next", nil, nil},
	{"internal/mechanism/dbgtrap", "debuggee.suspendQueues", []string{"Suspend"}, nil},
	{"pkg/kfd", "Device.Suspend", []string{"trapQueues"}, []string{"TrapSuspendQueuesArgs"}},
	{"pkg/kfd", "Device.trapQueues", nil, []string{"QueueResult"}},
	{"internal/server", "Server.countedAnswer", nil, []string{"NotifyOnlineResponse", "Stages", "Timing"}},
}

func TestAnnouncementHasFewForms(t *testing.T) {
	if len(forms) > mostForms {
		t.Errorf("an announcement has %d forms: at most %d", len(forms), mostForms)
	}
	module, err := loadModule()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range passages {
		calls, makes, found := module.body(p.dir, p.function)
		if !found {
			t.Errorf("%s has no %s: which function does an announcement pass now?", p.dir, p.function)
			continue
		}
		for _, call := range p.calls {
			if !slices.Contains(calls, call) {
				t.Errorf("%s: %s does not call %s: is there a form of the announcement between?", p.dir, p.function, call)
			}
		}
		if diff := cmp.Diff(p.makes, makes); diff != "" {
			t.Errorf("%s: structs that %s makes (-want +got): one that carries the announcement on is a form:\n%s", p.dir, p.function, diff)
		}
	}
	text, err := os.ReadFile("../../docs/architecture.md")
	if err != nil {
		t.Fatal(err)
	}
	if list := "`" + strings.Join(forms, "`, `") + "`"; !strings.Contains(strings.Join(strings.Fields(string(text)), " "), list) {
		t.Errorf("docs/architecture.md has not the forms of an announcement: %s", list)
	}
}

// body returns the names of what a function or method, RECEIVER.NAME, calls, and of the structs of this
// module that it makes, sorted; both once.
func (t *tree) body(dir, function string) (calls, makes []string, found bool) {
	receiver, name, _ := strings.Cut(function, ".")
	for _, f := range t.packages[dir].code() {
		for _, d := range f.syntax.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok || fn.Name.Name != name || fn.Recv == nil || !receives(fn.Recv.List[0].Type, receiver) {
				continue
			}
			found = true
			ast.Inspect(fn.Body, func(n ast.Node) bool {
				var made ast.Expr
				switch n := n.(type) {
				case *ast.CallExpr:
					switch called := n.Fun.(type) {
					case *ast.Ident:
						calls = append(calls, called.Name)
						if called.Name == "new" && len(n.Args) == 1 {
							made = n.Args[0]
						}
					case *ast.SelectorExpr:
						calls = append(calls, called.Sel.Name)
					}
				case *ast.CompositeLit:
					made = n.Type
				case *ast.ValueSpec:
					made = n.Type
				}
				if s := t.structNamed(dir, f, made); s != "" {
					makes = append(makes, s)
				}
				return true
			})
		}
	}
	slices.Sort(calls)
	slices.Sort(makes)
	return slices.Compact(calls), slices.Compact(makes), found
}

// receives reports whether the type of a receiver is name or a pointer to it.
func receives(x ast.Expr, name string) bool {
	if star, ok := x.(*ast.StarExpr); ok {
		x = star.X
	}
	return isName(x, name)
}

// structNamed returns the name of a struct of this module, also of the elements of a list; "" for
// another type.
func (t *tree) structNamed(dir string, f file, x ast.Expr) string {
	name := ""
	switch x := x.(type) {
	case *ast.StarExpr:
		return t.structNamed(dir, f, x.X)
	case *ast.ArrayType:
		return t.structNamed(dir, f, x.Elt)
	case *ast.Ident:
		name = x.Name
	case *ast.SelectorExpr:
		of, ok := x.X.(*ast.Ident)
		if !ok {
			return ""
		}
		dir = ""
		for imported, local := range f.imports {
			if own, ok := t.own(imported); ok && (local == of.Name || local == "" && path.Base(imported) == of.Name) {
				dir = own
			}
		}
		name = x.Sel.Name
	}
	p := t.packages[dir]
	if p == nil {
		return ""
	}
	for _, f := range p.files {
		for _, d := range f.syntax.Decls {
			g, ok := d.(*ast.GenDecl)
			if !ok {
				continue
			}
			for _, s := range g.Specs {
				if s, ok := s.(*ast.TypeSpec); ok && s.Name.Name == name {
					if _, is := s.Type.(*ast.StructType); is {
						return name
					}
				}
			}
		}
	}
	return ""
}
