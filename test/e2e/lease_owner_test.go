package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/internal/config"
	"github.com/gpreempt/gpreempt/internal/stat"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Rules of the documents, each played with a server in Python that announces its work.

// documentedRule is a rule in a document.
type documentedRule struct {
	where string
	classify.Rule
}

var (
	matchKey  = regexp.MustCompile(`(^|[\s{,` + "`" + `])match:(\s|$)`)
	inProse   = regexp.MustCompile("`(match: \\{.*\\})`")
	commented = regexp.MustCompile(`^(\s*)#`)
)

// documentedRules finds every rule in the documents, the manifests, the examples and the default
// config file: what stands around a key match.
func documentedRules(t *testing.T) (all []documentedRule) {
	t.Helper()
	const top = "../.."
	var files []string
	for _, root := range []string{"README.md", "README.zh-CN.md", "docs", "deploy", "examples", "bindings", "internal/config/gpreemptd.yaml"} {
		err := filepath.WalkDir(filepath.Join(top, root), func(path string, d fs.DirEntry, err error) error {
			if d != nil && d.Name() == "adr" {
				return fs.SkipDir // decisions show no rules to copy
			}
			if ext := filepath.Ext(path); err == nil && !d.IsDir() && slices.Contains([]string{".md", ".yaml", ".yml", ".tpl", ".j2", ".txt"}, ext) {
				files = append(files, path)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range files {
		lines := strings.Split(readText(t, path), "\n")
		for n, line := range lines {
			if !matchKey.MatchString(line) {
				continue
			}
			where := fmt.Sprintf("%s:%d", strings.TrimPrefix(path, top+"/"), n+1)
			cfg, err := config.Parse(where, []byte("rules:\n"+ruleAround(lines, n)))
			if err != nil || len(cfg.Rules) != 1 {
				t.Errorf("%s: this test does not understand the rule: %v\n%s", where, err, ruleAround(lines, n))
				continue
			}
			all = append(all, documentedRule{where, cfg.Rules[0]})
		}
	}
	return all
}

// ruleAround returns the item of a list that has the key match in a line.
func ruleAround(lines []string, n int) string {
	if prose := inProse.FindStringSubmatch(lines[n]); prose != nil {
		return "  - {name: prose, class: offline, " + prose[1] + "}\n"
	}
	plain := func(i int) string { return lines[i] }
	if commented.MatchString(lines[n]) {
		plain = func(i int) string { return commented.ReplaceAllString(lines[i], "$1 ") }
	}
	indent := func(s string) int { return len(s) - len(strings.TrimLeft(s, " ")) }
	first := n
	for first > 0 && !strings.HasPrefix(strings.TrimSpace(plain(first)), "- ") {
		first--
	}
	item := []string{plain(first)}
	for i := first + 1; i < len(lines) && indent(plain(i)) > indent(plain(first)) && strings.TrimSpace(plain(i)) != ""; i++ {
		item = append(item, plain(i))
	}
	for i := range item {
		item[i] = "  " + item[i][indent(plain(first)):]
	}
	return strings.Join(item, "\n") + "\n"
}

// byProgram is the part of a rule that is about the program of a process, and not about where it
// runs or for whom.
func byProgram(m classify.Match) classify.Match {
	return classify.Match{Comm: m.Comm, Cmdline: m.Cmdline, Exe: m.Exe}
}

func TestRulesOfTheDocumentsTellServersFromJobs(t *testing.T) {
	rules := documentedRules(t)
	if len(rules) < 20 {
		t.Errorf("%d rules are found in the documents; there were more", len(rules))
	}
	const python = "/usr/bin/python3.12"
	for _, server := range []gpreempt.Process{
		{Comm: "python3", Exe: python, Cmdline: "python3 serve.py"},
		{Comm: "python", Exe: python, Cmdline: "python -m uvicorn app:app --host 0.0.0.0"},
		{Comm: "vllm", Exe: python, Cmdline: "/usr/bin/python3 /usr/local/bin/vllm serve MODEL --middleware serve.Announce"},
		{Comm: "VLLM::EngineCor", Exe: python, Cmdline: "VLLM::EngineCore"},
		{Comm: "sglang::schedul", Exe: python, Cmdline: "sglang::scheduler_TP0"},
		{Comm: "tritonserver", Exe: "/opt/tritonserver/bin/tritonserver", Cmdline: "tritonserver --model-repository=models"},
	} {
		for _, rule := range rules {
			if byProgram(rule.Match).String() == "" || rule.Class != gpreempt.Offline {
				continue
			}
			only := rule.Rule
			only.Match = byProgram(rule.Match)
			c, err := classify.New([]classify.Rule{only}, nil)
			if err != nil {
				t.Fatal(err)
			}
			if d := c.Decide(&classify.Subject{Process: server}); d.Class != gpreempt.Unmanaged {
				t.Errorf("%s: the rule %s (%v) takes the server %q for offline work: match what only jobs have, such as cmdline: \"*train.py*\"",
					rule.where, rule.Name, rule.Match, server.Cmdline)
			}
		}
	}
}

// announcingServer is a server in Python with a process for its work on the GPU.
const announcingServer = `import json, subprocess, sys, time
import gpreempt
engine = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
pid = json.loads(engine.stdout.readline())["pid"]
chat = gpreempt.online(gpus=gpreempt.ALL, label="chat", max_wait=10, ttl=60)
print(json.dumps({"event": "ready", "pid": pid}), flush=True)
for line in sys.stdin:
    begun = time.monotonic()
    with chat as lease:
        engine.stdin.write("\n")
        engine.stdin.flush()
        engine.stdout.readline()
    took = time.monotonic() - begun
    print(json.dumps({"event": "answer", "ms": 1000 * took, "protected": lease.protected, "quiet": lease.quiet,
                      "suspended": lease.suspended_targets, "offline": lease.owner_offline}), flush=True)
`

// pythonServer is a running announcingServer.
type pythonServer struct {
	*worker
	// engine is its process with queues.
	engine int32
}

// requestResult is the result of a request.
type requestResult struct {
	MS        float64 `json:"ms"`
	Protected bool    `json:"protected"`
	Quiet     bool    `json:"quiet"`
	Suspended int     `json:"suspended"`
	Offline   bool    `json:"offline"`
}

// servePython starts a server on the machine. Its engine has the name of a Python, too.
func (m *emulated) servePython(d *daemon) pythonServer {
	m.t.Helper()
	dir := m.t.TempDir()
	engine, script := filepath.Join(dir, "python3"), filepath.Join(dir, "serve.py")
	bindings, err := filepath.Abs("../../bindings/python")
	if err != nil {
		m.t.Fatal(err)
	}
	for _, err := range []error{os.Symlink(kfdemuBinary, engine), os.WriteFile(script, []byte(announcingServer), 0o600)} {
		if err != nil {
			m.t.Fatal(err)
		}
	}
	cmd := m.Command(context.Background(), python(m.t), script, engine, "answer", "--packets", "10", "--duration", "200", "--runtime")
	cmd.Env = append(cmd.Env, "PYTHONPATH="+bindings, "PYTHONDONTWRITEBYTECODE=1", "GPREEMPT_SOCKET="+d.socket)
	w := m.spawn(cmd)
	s := pythonServer{w, w.await("ready").PID}
	d.eventually("the engine is known", func() bool {
		t := d.target(s.engine)
		return t != nil && (t.GetClass() != gpreemptv1.Class_CLASS_OFFLINE || t.GetMechanism() == "dbgtrap")
	})
	return s
}

// request has the server answer once.
func (s pythonServer) request() (r requestResult) {
	s.t.Helper()
	s.tell("")
	if err := json.Unmarshal([]byte(s.await("answer").Line), &r); err != nil {
		s.t.Fatal(err)
	}
	return r
}

// suspensions returns how often a process was suspended after a revision.
func (d *daemon) suspensions(pid int32, revision uint64) (n int) {
	d.t.Helper()
	last := d.revision()
	d.events.await("the last event", last-1, func(*gpreemptv1.Event) bool { return true })
	all, _, err := d.events.after(revision)
	if err != nil {
		d.t.Fatal(err)
	}
	for _, e := range all {
		if e.GetKind() == gpreemptv1.EventKind_EVENT_KIND_TARGET && pidOf(e.GetTargetId()) == pid && e.GetToTarget() == gpreemptv1.TargetState_TARGET_STATE_SUSPENDING {
			n++
		}
	}
	return n
}

// playedRules are the distinct configs to which the rules come down when the server runs where
// they apply, by config, with the places of the rules.
func playedRules(t *testing.T) map[string][]string {
	t.Helper()
	base, _, _ := strings.Cut(atOnce, "rules:")
	played := map[string][]string{}
	add := func(where, match string) {
		text := base + "rules:\n  - {name: training, match: {comm: \"train*\"}, class: offline}\n  - {name: played, match: {" + match + "}, class: offline}\n"
		played[text] = append(played[text], where)
	}
	for _, rule := range documentedRules(t) {
		m := rule.Match
		var words []string
		for _, field := range [][2]string{{"comm", m.Comm}, {"cmdline", m.Cmdline}, {"exe", m.Exe}} {
			if field[1] != "" {
				words = append(words, fmt.Sprintf("%s: %q", field[0], field[1]))
			}
		}
		switch {
		case rule.Class != gpreempt.Offline:
		case len(words) > 0:
			add(rule.where, strings.Join(words, ", "))
		default: // the server is in the place
			add(rule.where, fmt.Sprintf("uid: %d", os.Getuid()))
		}
	}
	add("any Python", `comm: "python*"`) // as users write it
	return played
}

func TestServerInPythonIsNotSuspendedByItsOwnLeaseUnderAnyRuleOfTheDocuments(t *testing.T) {
	played := playedRules(t)
	for _, text := range slices.Sorted(maps.Keys(played)) {
		t.Run(played[text][0], func(t *testing.T) {
			m := emulate(t, kfdemu.Config{Machine: "mi210"})
			job := m.work("--queues", "2", "--duration", "2000", "--runtime")
			d := m.start(text)
			d.offlineTarget(job, 2)
			server := m.servePython(d)
			since := d.revision()
			offline := d.target(server.engine).GetClass() == gpreemptv1.Class_CLASS_OFFLINE
			for range 10 {
				r := server.request()
				r.MS = 0
				if want := (requestResult{Protected: true, Quiet: true, Suspended: 1, Offline: offline}); r != want {
					t.Errorf("the answer is %+v, want %+v", r, want)
				}
			}
			if n := d.suspensions(server.engine, since); n != 0 {
				t.Errorf("its own leases suspended the server %d times", n)
			}
			if n := d.suspensions(job.PID, since); n == 0 {
				t.Error("no lease suspended the job")
			}
			if w := d.warned("OWNER_OFFLINE"); (w != nil) != offline {
				t.Errorf("offline %v, and the warning is %v", offline, w)
			}
			if offline {
				says(t, d.ctl("status").Out, "warning OWNER_OFFLINE: offline: process "+fmt.Sprint(server.engine), "try: have no offline rule match servers")
				says(t, d.ctl("doctor").Out, fmt.Sprintf("process %d announces its work", server.PID), "the warning OWNER_OFFLINE of gpctl status")
			}
			// The leases of others suspend the server too, if it is offline.
			others, err := d.admin.CreateLease(t.Context(), &gpreemptv1.CreateLeaseRequest{Announce: &gpreemptv1.NotifyOnlineRequest{
				Ttl: durationpb.New(time.Minute), MaxWait: durationpb.New(10 * time.Second),
			}})
			if err != nil {
				t.Fatal(err)
			}
			state := gpreemptv1.TargetState_TARGET_STATE_RUNNING
			if offline {
				state = gpreemptv1.TargetState_TARGET_STATE_SUSPENDED
			}
			if got := d.target(server.engine).GetState(); got != state {
				t.Errorf("during the lease of another the server is %v, want %v", got, state)
			}
			id := others.GetAnnounced().GetLeaseId()
			if _, err := d.admin.ReleaseLease(t.Context(), &gpreemptv1.ReleaseLeaseRequest{LeaseId: id}); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestServerUnderARuleThatCatchesItIsAsFastAsWithoutRules compares two machines with one server
// each, request by request. The ratio depends on how busy the host is, so it is only reported.
func TestServerUnderARuleThatCatchesItIsAsFastAsWithoutRules(t *testing.T) {
	lasts(t)
	requests := testutil.Number(t, "GPREEMPT_OWNER_REQUESTS", 50)
	base, _, _ := strings.Cut(atOnce, "rules:")
	start := func(rules string) (*daemon, pythonServer) {
		m := emulate(t, kfdemu.Config{Machine: "mi210"})
		d := m.start(base + rules)
		return d, m.servePython(d)
	}
	caught, server := start("rules:\n  - {name: training, match: {comm: \"python*\"}, class: offline, priority: 0}\n")
	_, free := start("rules: []\n")
	since := caught.revision()
	took := map[bool][]time.Duration{}
	for range requests {
		for with, s := range map[bool]pythonServer{true: server, false: free} { // in random order
			r := s.request()
			if want := (requestResult{MS: r.MS, Protected: true, Quiet: true, Offline: with}); r != want {
				t.Fatalf("with the rule %v: the answer is %+v, want %+v", with, r, want)
			}
			took[with] = append(took[with], time.Duration(r.MS*float64(time.Millisecond)))
		}
	}
	if n := caught.suspensions(server.engine, since); n != 0 {
		t.Errorf("its own leases suspended the server %d times", n)
	}
	for with := range took {
		slices.Sort(took[with])
	}
	p99 := func(with bool) time.Duration { return stat.Quantile(took[with], 0.99) }
	t.Logf("EMULATED: %d requests each: p50 %v with the rule, %v without; p99 %v and %v, ratio %.3f", requests,
		stat.Quantile(took[true], 0.5), stat.Quantile(took[false], 0.5), p99(true), p99(false), float64(p99(true))/float64(p99(false)))
}
