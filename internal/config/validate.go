package config

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
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
	for name, list := range map[string][]string{"online_groups": c.Access.OnlineGroups, "admin_groups": c.Access.AdminGroups, "admin_users": c.Access.AdminUsers} {
		for i, principal := range list {
			if problem := nameProblem(principal); problem != "" {
				ps.add(fmt.Sprintf("access.%s[%d]", name, i), problem, "write a name as in /etc/passwd or /etc/group, or a decimal id")
			}
		}
	}
	ps.tcp(c.TCP)
	ps.mechanisms(c.Mechanisms)
	ps.policy(c.Policy)
	if !isAddressOrEmpty(c.Metrics.Address) {
		ps.add("metrics.address", yamlfile.Quoted(c.Metrics.Address)+" is not an address to listen on", "write HOST:PORT, such as 127.0.0.1:9477")
	}
	ps.rules(c)
	return ps.Errors
}

func (ps *problems) tcp(t TCP) {
	if !isAddressOrEmpty(t.Address) {
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

// isAddressOrEmpty reports whether address is HOST:PORT or :PORT, or "".
func isAddressOrEmpty(address string) bool {
	if address == "" {
		return true
	}
	host, port, err := net.SplitHostPort(address)
	n, bad := strconv.ParseUint(port, 10, 16)
	return err == nil && bad == nil && n != 0 && (host == "" || net.ParseIP(host) != nil || nameProblem(host) == "")
}

func (ps *problems) mechanisms(names []string) {
	known := append(safety.Mechanisms(), mechanism.NVChannels) // which is about other GPUs than the hazard table
	for i, name := range names {
		key := fmt.Sprintf("mechanisms[%d]", i)
		switch {
		case !slices.Contains(known, name):
			ps.add(key, yamlfile.Quoted(name)+" is not a mechanism", yamlfile.Choose(name, known))
		case slices.Contains(names[:i], name):
			ps.add(key, name+" is given twice", "keep one of them: the first that works is used")
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
	knobs, defaults := yamlfile.Keys(&p), yamlfile.Keys(&base)
	for {
		ke, invalid := errors.AsType[*scheduler.KnobError](p.Validate())
		if !invalid {
			return
		}
		ps.add("policy."+ke.Knob, ke.Problem, cmp.Or(ke.Remedy, "write another value, or remove it to use the preset's"))
		i := slices.IndexFunc(knobs, func(k yamlfile.Key) bool { return k.Name == ke.Knob })
		if i < 0 || knobs[i].Value.Equal(defaults[i].Value) {
			return // the preset's value contradicts another knob
		}
		knobs[i].Value.Set(defaults[i].Value)
	}
}

// rules adds the errors of the rules of both kinds.
func (ps *problems) rules(c Config) {
	for i, r := range c.Rules {
		key := fmt.Sprintf("rules[%d].", i)
		if r.OnResist.Enforced() && r.Class != gpreempt.Offline {
			ps.add(key+"on_resist", "only offline processes are suspended", "remove it, or write class: offline")
		}
		if len(r.Name) > 64 || strings.ContainsFunc(r.Name, func(c rune) bool { return !unicode.IsPrint(c) }) {
			ps.add(key+"name", yamlfile.Quoted(r.Name)+" is not a name", "use at most 64 printable characters")
		}
	}
	_, err := classify.New(c.Rules, c.Jobs)
	joined, _ := err.(interface{ Unwrap() []error })
	if joined == nil {
		return
	}
	for _, one := range joined.Unwrap() {
		if e, ok := errors.AsType[*classify.RuleError](one); ok {
			ps.add(ruleKey(e), e.Problem, e.Remedy)
		}
	}
}

// ruleKey returns the key of an error in a rule.
func ruleKey(e *classify.RuleError) string {
	switch {
	case e.Of != "rule":
		return fmt.Sprintf("jobs[%d].%s", e.Index, e.Field)
	case slices.Contains([]string{"name", "match", "class", "priority"}, e.Field):
		return fmt.Sprintf("rules[%d].%s", e.Index, e.Field)
	}
	return fmt.Sprintf("rules[%d].match.%s", e.Index, e.Field)
}
