package trial

import (
	"fmt"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/lab/scenario"
)

// Version is the version of the format of plans.
const Version = 1

// DefaultProgress finds the progress of a job in its output: the number after "step".
const DefaultProgress = `(?i)\bstep[\s:=]*(\d+)`

// RequestByLine as Online.Request: a request is a line on the standard input of the command, and
// its answer a line that the command writes.
const RequestByLine = "stdin"

// Plan is what a trial does.
type Plan struct {
	Name  string `yaml:"name,omitempty"`
	About string `yaml:"about,omitempty"`
	// Online and Offline are the work.
	Online  Online  `yaml:"online,omitempty"`
	Offline Offline `yaml:"offline,omitempty"`
	// Arrivals say when requests begin; with Gaps, each begins a time between these two after the
	// one before, evenly distributed.
	Arrivals scenario.Arrivals `yaml:"arrivals,omitempty"`
	Gaps     Gaps              `yaml:"gaps,omitempty" write:"write two durations, such as [1s, 10s]"`
	// Count ends a repeat after so many requests, and Duration after that time, whichever is
	// first; 0 for no such bound.
	Count    int           `yaml:"count,omitempty"`
	Duration time.Duration `yaml:"duration,omitempty"`
	Arms     []Arm         `yaml:"arms,omitempty" write:"write a list of arms, such as [offline alone, shared, protected]"`
	// Repeats of each arm, interleaved.
	Repeats int `yaml:"repeats,omitempty"`
	// WarmUp is how long the jobs run before a repeat is measured.
	WarmUp time.Duration `yaml:"warm_up,omitempty"`
	// Profile is the name or the path of the profile for the verdict.
	Profile string `yaml:"profile,omitempty"`
	// GPUs are the gpu_ids that requests are announced for; empty: those of the offline jobs.
	GPUs []uint32 `yaml:"gpus,omitempty,flow" write:"write a list of gpu_ids, such as [34535]; gpctl gpu list shows them"`
	Seed uint64   `yaml:"seed,omitempty"`
	// NoKFDTrace omits the recording of the driver.
	NoKFDTrace bool `yaml:"no_kfd_trace,omitempty"`
	// HIPLog is AMD_LOG_LEVEL of the commands; 0: that of this process, else errors and warnings.
	HIPLog int `yaml:"hip_log,omitempty"`
}

// Gaps are the least and the most time between two requests.
type Gaps [2]time.Duration

// IsZero reports whether requests come without gaps of their own.
func (g Gaps) IsZero() bool { return g == Gaps{} }

// Online is the latency-critical work.
type Online struct {
	// Command is started for each repeat. Without Request it makes the requests itself, and writes
	// a line for each.
	Command string `yaml:"command,omitempty"`
	// Request is RequestByLine, a URL to GET, or a command that is run for each request.
	Request string `yaml:"request,omitempty"`
	// Ready matches the line after which Command can be used, and Answer the lines that are
	// answers, with RequestByLine. Empty: Command can be used at once, and all are answers.
	Ready  string `yaml:"ready,omitempty"`
	Answer string `yaml:"answer,omitempty"`
	// AnnouncedByCommand says that Command announces its work itself.
	AnnouncedByCommand bool `yaml:"announced_by_command,omitempty"`
	// Hold replaces command and request: each request is a lease that is held so long.
	Hold time.Duration `yaml:"hold,omitempty"`
	// MaxWait is that of the announcements; 0: the policy's.
	MaxWait time.Duration `yaml:"max_wait,omitempty"`
}

// Offline is the work that may be suspended.
type Offline struct {
	// Commands are started for each repeat.
	Commands []string `yaml:"commands,omitempty" write:"write a list of command lines"`
	// PIDs and Containers have jobs that run already.
	PIDs       []int32  `yaml:"pids,omitempty,flow" range:"1 2147483647" write:"write a list of pids, such as [4242]; gpctl target list shows them"`
	Containers []string `yaml:"containers,omitempty" write:"write a list of containers"`
	// Progress matches the lines by which a job reports its progress. Its first group is a number
	// that counts up, in Unit.
	Progress string `yaml:"progress,omitempty"`
	Unit     string `yaml:"unit,omitempty"`
}

// running reports whether the jobs run before and after the trial.
func (o *Offline) running() bool { return len(o.PIDs)+len(o.Containers) > 0 }

// none reports whether there is no offline work.
func (o *Offline) none() bool { return len(o.Commands) == 0 && !o.running() }

// Arm is one way to run the work.
type Arm struct {
	Kind evidence.ArmKind
	// Policy is a preset, and Mechanism what must suspend the jobs; "" for the daemon's. Only for
	// protected arms.
	Policy, Mechanism string
	// Queues replaces {queues} in the commands of offline jobs, and Processes is how often each
	// is started; 0 for 1.
	Queues, Processes int
}

// Name identifies the arm in its run.
func (a Arm) Name() string {
	name := string(a.Kind)
	if a.Policy != "" || a.Mechanism != "" {
		name += ":" + a.Policy
	}
	if a.Mechanism != "" {
		name += ":" + a.Mechanism
	}
	if a.Queues > 0 || a.Processes > 0 {
		name += fmt.Sprintf(", queues %d, processes %d", max(1, a.Queues), max(1, a.Processes))
	}
	return name
}

var armForm = regexp.MustCompile(`^(offline alone|online alone|shared|stream priority|protected(?::([a-z0-9-]*))?(?::([a-z0-9-]+))?)(?:, queues (\d{1,4}), processes (\d{1,2}))?$`)

// ParseArm parses the name of an arm: "offline alone", "online alone", "shared", "stream priority", or
// "protected[:POLICY[:MECHANISM]]", and after it ", queues N, processes N" if it has them.
func ParseArm(s string) (Arm, error) {
	m := armForm.FindStringSubmatch(s)
	if m == nil || m[2]+m[3] == "" && strings.HasSuffix(m[1], ":") {
		return Arm{}, fmt.Errorf("%q is not an arm: use %q, %q, %q, %q or protected[:POLICY[:MECHANISM]]", s, evidence.OfflineAlone, evidence.OnlineAlone, evidence.Shared,
			evidence.StreamPriority)
	}
	kind, _, _ := strings.Cut(m[1], ":")
	arm := Arm{Kind: evidence.ArmKind(kind), Policy: m[2], Mechanism: m[3]}
	if m[4] != "" {
		arm.Queues, _ = strconv.Atoi(m[4])
		arm.Processes, _ = strconv.Atoi(m[5])
	}
	return arm, nil
}

// MarshalText returns the name of the arm.
func (a Arm) MarshalText() ([]byte, error) { return []byte(a.Name()), nil }

// UnmarshalText is ParseArm.
func (a *Arm) UnmarshalText(text []byte) (err error) {
	*a, err = ParseArm(string(text))
	return err
}

// DefaultArms are the arms of a plan that names no others: all four, or those that its work allows.
func (p *Plan) DefaultArms() []Arm {
	arms := []Arm{{Kind: evidence.OfflineAlone}, {Kind: evidence.OnlineAlone}, {Kind: evidence.Shared}, {Kind: evidence.Protected}}
	if p.Offline.running() {
		return slices.Delete(arms, 1, 2)
	}
	return arms
}

// alreadyRunning is why there is no arm online alone.
const alreadyRunning = "the offline jobs run already"

// mostHIPLog is the highest AMD_LOG_LEVEL.
const mostHIPLog = 5

// Defaults of a plan.
const (
	defaultRepeats = 3
	defaultWarmUp  = time.Second
	defaultUnit    = "steps"
	// defaultCount is enough for a p99, of 100 samples, in the default repeats, with some to spare.
	defaultCount = 40
	// highestRate is the most requests per second that the trial chooses itself.
	highestRate = 10
)

// work says what is run, for people.
func (p *Plan) work() (all []string) {
	add := func(what, text string) {
		if text != "" {
			all = append(all, what+": "+text)
		}
	}
	add("online", p.Online.Command)
	add("request", p.Online.Request)
	for _, command := range p.Offline.Commands {
		add("offline", command)
	}
	for _, pid := range p.Offline.PIDs {
		add("offline", "pid "+strconv.Itoa(int(pid)))
	}
	for _, container := range p.Offline.Containers {
		add("offline", "container "+container)
	}
	return all
}

// makes reports whether the trial makes the requests.
func (p *Plan) makes() bool { return p.Online.Request != "" || p.Online.Hold > 0 }

// chosenRate reports whether the trial chooses the rate of the requests, by how long one takes.
func (p *Plan) chosenRate() bool { return p.makes() && p.Arrivals.Kind == "" && p.Gaps.IsZero() }

// emulatedWait is how long a request waits for quiet GPUs on an emulated machine, whose daemon and
// driver share the processors of this host.
const emulatedWait = 10 * time.Second

// suit sets the defaults that depend on what is measured.
func (p *Plan) suit(origin evidence.Origin) {
	if p.Profile == "" {
		p.Profile = evidence.DefaultProfileOf(origin)
	}
	if p.Online.MaxWait == 0 && origin == evidence.Emulated {
		p.Online.MaxWait = emulatedWait
	}
}

// Normalize sets the defaults of what is not set.
func (p *Plan) Normalize() {
	if len(p.Arms) == 0 {
		p.Arms = p.DefaultArms()
	}
	if p.Repeats == 0 {
		p.Repeats = defaultRepeats
	}
	if p.WarmUp == 0 {
		p.WarmUp = defaultWarmUp
	}
	if p.makes() && p.Count == 0 && p.Duration == 0 {
		p.Count = defaultCount
	}
	if p.Offline.Progress == "" {
		p.Offline.Progress = DefaultProgress
	}
	if p.Offline.Unit == "" {
		p.Offline.Unit = defaultUnit
	}
	if p.Name == "" {
		p.Name = "trial"
	}
	if p.Seed == 0 {
		p.Seed = 1
	}
}

// problem is an error of a plan: its key in the file, what is wrong, and what to do.
type problem struct{ key, problem, remedy string }

// problems returns the errors of a plan, after Normalize.
func (p *Plan) problems() (all []problem) {
	fail := func(key, remedy, format string, args ...any) {
		all = append(all, problem{key, fmt.Sprintf(format, args...), remedy})
	}
	switch o := &p.Online; {
	case o.Command == "" && !p.makes() && p.wants(evidence.OnlineAlone, evidence.Shared, evidence.StreamPriority, evidence.Protected):
		fail("online", "write the command line of your server, or a request", "there is no online work")
	case o.Hold > 0 && (o.Command != "" || o.Request != "" || o.AnnouncedByCommand):
		fail("online.hold", "remove it, or the command and request", "replaces command and request")
	case o.Hold > 0 && p.wants(evidence.OnlineAlone, evidence.Shared, evidence.StreamPriority):
		fail("online.hold", "leave out the arms online alone, shared and stream priority", "only leases are held, and these arms have none")
	case o.Request == RequestByLine && o.Command == "":
		fail("online.command", "write the command that reads the requests", "is missing")
	case o.Request == "" && o.Hold == 0 && (o.Answer != "" || o.Ready != ""):
		fail("online.request", "write stdin, a URL or a command, or remove ready and answer", "is missing")
	case isURL(o.Request):
		if u, err := url.Parse(o.Request); err != nil || u.Host == "" {
			fail("online.request", "write a URL such as http://127.0.0.1:8000/", "%q is not a URL", o.Request)
		}
	}
	for _, re := range []struct {
		key, text string
		groups    int
	}{{"online.ready", p.Online.Ready, 0}, {"online.answer", p.Online.Answer, 0}, {"offline.progress", p.Offline.Progress, 1}} {
		compiled, err := regexp.Compile(re.text)
		switch {
		case err != nil:
			fail(re.key, "write a regular expression as in Go", "%v", err)
		case compiled.NumSubexp() < re.groups:
			fail(re.key, `put the number in parentheses, such as "step (\\d+)"`, "has no group")
		}
	}
	if p.HIPLog < 0 || p.HIPLog > mostHIPLog {
		fail("hip_log", fmt.Sprintf("use 1 to %d", mostHIPLog), "%d is out of range", p.HIPLog)
	}
	p.timeProblems(fail)
	names := map[string]bool{}
	for i, arm := range p.Arms {
		key := fmt.Sprintf("arms[%d]", i)
		if names[arm.Name()] {
			fail(key, "remove one", "%q is given twice", arm.Name())
		}
		names[arm.Name()] = true
		switch {
		case arm.Kind == evidence.OnlineAlone && p.Offline.running():
			fail(key, "leave it out, or let the trial start the offline jobs", "online alone cannot be run: "+alreadyRunning)
		case arm.Kind == evidence.StreamPriority && p.Offline.running():
			fail(key, "leave it out, or let the trial start the offline jobs", "stream priority cannot be run: a stream has its priority from when it is made")
		case (arm.Kind == evidence.OfflineAlone || arm.Kind == evidence.Shared) && p.Offline.none():
			fail(key, "write the command lines of the offline jobs", "there is no offline work")
		case arm.Processes > 64 || arm.Queues > 1024 || arm.Processes < 0 || arm.Queues < 0:
			fail(key, "use at most 64 processes and 1024 queues", "too many processes or queues")
		}
	}
	return all
}

func (p *Plan) timeProblems(fail func(key, remedy, format string, args ...any)) {
	const longest = 7 * 24 * time.Hour
	switch {
	case p.Count < 0 || p.Count > scenarioRequests:
		fail("count", fmt.Sprintf("use at most %d", scenarioRequests), "%d is out of range", p.Count)
	case p.Duration < 0 || p.Duration > longest || p.WarmUp < 0 || p.WarmUp > longest:
		fail("duration", "use at most 168h", "%v is out of range", max(p.Duration, p.WarmUp))
	case p.Repeats < 1 || p.Repeats > 1000:
		fail("repeats", "use 1 to 1000", "%d is out of range", p.Repeats)
	case p.Count == 0 && p.Duration == 0:
		fail("count", "write a count or a duration, or online.request for requests that the trial makes", "nothing says when a repeat ends")
	}
	timed := p.Gaps != [2]time.Duration{}
	switch a := p.Arrivals; {
	case timed && (p.Gaps[0] <= 0 || p.Gaps[1] < p.Gaps[0]):
		fail("gaps", "write two durations, the shorter first", "%v and %v are not a range", p.Gaps[0], p.Gaps[1])
	case timed && a.Kind != "":
		fail("gaps", "remove arrivals or gaps", "contradicts arrivals")
	case a.Kind == scenario.Closed:
		fail("arrivals.kind", "use constant, poisson, gamma, bursts or trace", "closed arrivals are the simulator's")
	case !p.makes() && p.Duration == 0 && !timed && a.Kind == "" && p.wants(evidence.OfflineAlone):
		fail("duration", "write how long offline work alone is measured", "is missing, and there is no rate")
	case a.Kind != "" && a.Kind != scenario.Trace && !(a.Rate >= 1e-4 && a.Rate <= 1e5):
		fail("arrivals.rate", "use 0.0001 to 100000 requests per second", "%v is out of range", a.Rate)
	case a.Kind == scenario.Gamma && !(a.CV >= 0.01 && a.CV <= 100):
		fail("arrivals.cv", "use 0.01 to 100", "%v is out of range", a.CV)
	case a.Kind == scenario.Bursts && (a.Burst < 1 || a.BurstGap < 0 || time.Duration(float64(a.Burst)/a.Rate*float64(time.Second)) <= time.Duration(a.Burst-1)*a.BurstGap):
		fail("arrivals.burst", "choose a lower rate, a smaller burst or a shorter burst_gap", "bursts overlap")
	case a.Kind == scenario.Trace && a.Trace == "":
		fail("arrivals.trace", "write the path of a CSV file", "is missing")
	}
}

// scenarioRequests bounds the requests of a repeat.
const scenarioRequests = 10_000_000

// wants reports whether the plan has an arm of one of the kinds.
func (p *Plan) wants(kinds ...evidence.ArmKind) bool {
	return slices.ContainsFunc(p.Arms, func(arm Arm) bool { return slices.Contains(kinds, arm.Kind) })
}

// window returns how long a repeat is measured when requests take no time.
func (p *Plan) window() time.Duration {
	rate := p.rate()
	if p.Count > 0 && rate > 0 {
		d := time.Duration(float64(p.Count) / rate * float64(time.Second))
		if p.Duration == 0 || d < p.Duration {
			return d
		}
	}
	return p.Duration
}

// rate returns the mean rate of the requests in 1/s, 0 when it is not known.
func (p *Plan) rate() float64 {
	if sum := p.Gaps[0] + p.Gaps[1]; sum > 0 {
		return 2 / sum.Seconds()
	}
	if p.chosenRate() {
		return highestRate
	}
	return p.Arrivals.Rate
}

// Estimate returns about how long the trial takes.
func (p *Plan) Estimate() time.Duration {
	return time.Duration(len(p.Arms)*p.Repeats)*(p.window()+p.WarmUp+overhead) + overhead
}

// overhead is about what starting and ending the work of an arm takes.
const overhead = 3 * time.Second

func isURL(s string) bool { return strings.HasPrefix(s, "http://") || strings.HasPrefix(s, "https://") }
