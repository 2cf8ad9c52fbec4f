package config

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/internal/config/yamlfile"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/safety"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// maxSocketPath is the size of sockaddr_un's sun_path less its final zero.
const maxSocketPath = 107

// minMQDsInterval and maxMQDsInterval bound the time between two reads of the queue dumps.
const (
	minMQDsInterval = 100 * time.Millisecond
	maxMQDsInterval = time.Hour
)

// problems collects errors.
type problems struct{ yamlfile.Errors }

func (ps *problems) add(key, problem, remedy string) {
	ps.Errors = append(ps.Errors, &yamlfile.Error{Key: key, Problem: problem, Remedy: remedy})
}

// path adds an error if the path of a file is not valid, and reports whether it is.
func (ps *problems) path(key, path string) bool {
	ok := path == filepath.Clean(path) && filepath.IsAbs(path) && !strings.ContainsRune(path, 0)
	if !ok {
		ps.add(key, yamlfile.Quoted(path)+" is not a clean absolute path", "write an absolute path without // or ..")
	}
	return ok
}

// problems returns the invalid values.
func (c Config) problems() yamlfile.Errors {
	var ps problems
	if ps.path("socket", c.Socket) && len(c.Socket) > maxSocketPath {
		ps.add("socket", fmt.Sprintf("the path is longer than %d bytes", maxSocketPath), "choose a shorter one, such as "+Default().Socket)
	}
	for _, f := range fields {
		switch v := f.at(&c).(type) {
		case *int:
			if *v < f.min || *v > f.max {
				ps.add(f.key, fmt.Sprintf("%d is outside %d to %d", *v, f.min, f.max), "choose a number in that range")
			}
		case *[]string:
			if section(f.key) != "access" {
				continue
			}
			for _, name := range *v {
				if problem := nameProblem(name); problem != "" {
					ps.add(f.key, problem, "write a name as in /etc/passwd or /etc/group, or a decimal id")
				}
			}
		}
	}
	ps.tcp(c.TCP)
	ps.mechanisms(c.Mechanisms)
	ps.policy(c.Policy)
	if d := c.Discovery.MQDsInterval; d != 0 && (d < minMQDsInterval || d > maxMQDsInterval) {
		ps.add("discovery.mqds_interval", fmt.Sprintf("%s is outside %s to %s", durationText(d), durationText(minMQDsInterval), durationText(maxMQDsInterval)),
			"choose a duration in that range, or 0s for never")
	}
	ps.kubelet(c.Containers.Kubelet)
	if !isAddress(c.Metrics.Address) {
		ps.add("metrics.address", yamlfile.Quoted(c.Metrics.Address)+" is not an address to listen on", "write HOST:PORT, such as 127.0.0.1:9477")
	}
	if levels := []string{"debug", "info", "warn", "error"}; !slices.Contains(levels, c.Log.Level) {
		ps.add("log.level", yamlfile.Quoted(c.Log.Level)+" is not a log level", "write debug, info, warn or error")
	}
	ps.rules(c.Rules)
	ps.jobs(c.Jobs)
	return ps.Errors
}

func (ps *problems) tcp(t TCP) {
	if !isAddress(t.Address) {
		ps.add("tcp.address", yamlfile.Quoted(t.Address)+" is not an address to listen on", "write HOST:PORT, such as 10.0.0.5:7443 or [::]:7443")
	}
	for _, file := range []struct{ key, path string }{{"certificate", t.Certificate}, {"key", t.Key}, {"client_ca", t.ClientCA}} {
		switch key := "tcp." + file.key; {
		case file.path != "":
			ps.path(key, file.path)
		case t.Address != "":
			ps.add(key, "is missing: TCP needs certificates", "name the file, or remove address")
		}
	}
	for _, list := range []struct {
		key   string
		names []string
	}{{"online", t.Online}, {"admin", t.Admin}} {
		for i, name := range list.names {
			kind, rest, _ := strings.Cut(name, ":")
			if !slices.Contains([]string{"uri", "dns", "cn"}, kind) || rest == "" || strings.ContainsFunc(rest, func(r rune) bool { return !unicode.IsPrint(r) }) {
				ps.add(fmt.Sprintf("tcp.%s[%d]", list.key, i), yamlfile.Quoted(name)+" is not a certificate name", "write uri:URI, dns:NAME or cn:NAME")
			}
		}
	}
}

// isAddress reports whether address is HOST:PORT or :PORT, or "".
func isAddress(address string) bool {
	if address == "" {
		return true
	}
	host, port, err := net.SplitHostPort(address)
	n, bad := strconv.ParseUint(port, 10, 16)
	return err == nil && bad == nil && n != 0 && (host == "" || net.ParseIP(host) != nil || nameProblem(host) == "")
}

func (ps *problems) kubelet(address string) {
	u, err := url.Parse(address)
	if address != "" && (err != nil || u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "") {
		ps.add("containers.kubelet", yamlfile.Quoted(address)+" is not the address of a kubelet", "write one such as https://127.0.0.1:10250")
	}
}

func (ps *problems) mechanisms(ms Mechanisms) {
	known := safety.Mechanisms()
	for i, m := range ms {
		key := fmt.Sprintf("mechanisms[%d]", i)
		switch {
		case !slices.Contains(known, m) && m != mechanism.NVChannels: // which is experimental, and not recommended
			remedy := "choose from " + strings.Join(known, ", ")
			if near := yamlfile.Nearest(m, known); near != "" {
				remedy = "did you mean " + near + "?"
			}
			ps.add(key, yamlfile.Quoted(m)+" is not a mechanism", remedy)
		case slices.Contains(ms[:i], m):
			ps.add(key, m+" is given twice", "keep one of them: the first that works is used")
		}
	}
}

func nameProblem(name string) string {
	switch {
	case name == "":
		return "a name is empty"
	case strings.ContainsFunc(name, func(r rune) bool {
		return !unicode.IsPrint(r) || unicode.IsSpace(r) || strings.ContainsRune(":,[]", r)
	}):
		return yamlfile.Quoted(name) + " is not a name"
	case strings.Trim(name, "0123456789") == "":
		if _, err := strconv.ParseUint(name, 10, 32); err != nil {
			return yamlfile.Cut(name) + " is too large for an id"
		}
	}
	return ""
}

// policy adds the errors of the policy. The scheduler reports one at a time, so
// each invalid knob is replaced by the preset's value before the next check.
func (ps *problems) policy(p scheduler.Policy) {
	base, err := scheduler.PresetByName(p.Preset)
	if err != nil {
		base = scheduler.DefaultPolicy()
	}
	for {
		var ke *scheduler.KnobError
		if err := p.Validate(); !errors.As(err, &ke) {
			return
		}
		key := policyPrefix + ke.Knob
		remedy := "remove it to use the preset's value"
		i := slices.IndexFunc(fields, func(f field) bool { return f.key == key })
		if slices.ContainsFunc(ps.Errors, func(e *yamlfile.Error) bool { return e.Key == key }) {
			return // the preset's value contradicts another knob
		}
		ps.add(key, ke.Problem, remedy)
		if i < 0 {
			return
		}
		c, b := Config{Policy: p}, Config{Policy: base}
		reflect.ValueOf(fields[i].at(&c)).Elem().Set(reflect.ValueOf(fields[i].at(&b)).Elem())
		p = c.Policy
	}
}

// match adds the errors of the match of a rule.
func (ps *problems) match(key string, m classify.Match) {
	_, err := classify.New([]classify.Rule{{Name: "x", Match: m}}, nil)
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return
	}
	for _, one := range joined.Unwrap() {
		e, ok := errors.AsType[*classify.RuleError](one)
		switch {
		case !ok:
		case e.Field == "match":
			ps.add(key, "is empty, which would match every process",
				"write "+strings.Join(matchKeys()[:3], ", ")+` or another field; comm: "*" for every process`)
		default:
			ps.add(key+"."+e.Field, e.Problem, e.Remedy)
		}
	}
}

func (ps *problems) jobs(rules []classify.JobRule) {
	_, err := classify.New(nil, rules)
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return
	}
	for _, one := range joined.Unwrap() {
		if e, ok := errors.AsType[*classify.RuleError](one); ok {
			ps.add(fmt.Sprintf("jobs[%d].%s", e.Index, e.Field), e.Problem, e.Remedy)
		}
	}
}

func (ps *problems) rules(rules []classify.Rule) {
	first := map[string]int{}
	for i, r := range rules {
		key := fmt.Sprintf("rules[%d].", i)
		if r.OnResist.Enforced() && r.Class != gpreempt.Offline {
			ps.add(key+"on_resist", "only offline processes are suspended", "remove it, or write class: offline")
		}
		switch j, twice := first[r.Name]; {
		case r.Name == "":
			ps.add(key+"name", "is missing", "write a unique name")
		case len(r.Name) > 64 || strings.ContainsFunc(r.Name, func(c rune) bool { return !unicode.IsPrint(c) }):
			ps.add(key+"name", yamlfile.Quoted(r.Name)+" is not a name", "use at most 64 printable characters")
		case twice:
			ps.add(key+"name", fmt.Sprintf("%s is also the name of rules[%d]", yamlfile.Quoted(r.Name), j), "write a unique name for each rule")
		default:
			first[r.Name] = i
		}
		if r.Class > gpreempt.Offline {
			ps.add(key+"class", r.Class.String()+" is not known", "write online, offline or unmanaged")
		}
		if r.Priority != nil && *r.Priority > gpreempt.MaxPriority {
			ps.add(key+"priority", fmt.Sprintf("%d is outside 0 to %d", *r.Priority, gpreempt.MaxPriority), "choose a number in that range")
		}
		ps.match(key+"match", r.Match)
	}
}
