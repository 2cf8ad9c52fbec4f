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
	"github.com/gpreempt/gpreempt/internal/safety"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// maxSocketPath is the size of sockaddr_un's sun_path less its final zero.
const maxSocketPath = 107

// problems returns the invalid values.
func (c Config) problems() yamlfile.Errors {
	var es yamlfile.Errors
	add := func(key, problem, remedy string) {
		es = append(es, &yamlfile.Error{Key: key, Problem: problem, Remedy: remedy})
	}

	if problem, remedy := pathProblem(c.Socket); problem != "" {
		add("socket", problem, remedy)
	} else if len(c.Socket) > maxSocketPath {
		add("socket", fmt.Sprintf("the path is longer than %d bytes", maxSocketPath), "choose a shorter one, such as "+Default().Socket)
	}
	for _, f := range fields {
		switch v := f.at(&c).(type) {
		case *int:
			if *v < f.min || *v > f.max {
				add(f.key, fmt.Sprintf("%d is outside %d to %d", *v, f.min, f.max), "choose a number in that range")
			}
		case *[]string:
			if section(f.key) != "access" {
				continue
			}
			for _, name := range *v {
				if problem := nameProblem(name); problem != "" {
					add(f.key, problem, "write a name as in /etc/passwd or /etc/group, or a decimal id")
				}
			}
		}
	}
	es = append(es, tcpProblems(c.TCP)...)
	es = append(es, mechanismProblems(c.Mechanisms)...)
	if l := c.Limits.Leases; l.LeasesPerClient > l.LeasesTotal {
		add("limits.leases_per_client", fmt.Sprintf("%d is more than leases_total, %d", l.LeasesPerClient, l.LeasesTotal),
			"lower it or raise leases_total")
	}
	es = append(es, policyProblems(c.Policy)...)
	es = append(es, discoveryProblems(c.Discovery)...)
	es = append(es, containersProblems(c.Containers)...)
	if !isAddress(c.Metrics.Address) {
		add("metrics.address", yamlfile.Quoted(c.Metrics.Address)+" is not an address to listen on", "write HOST:PORT, such as 127.0.0.1:9477")
	}
	if levels := []string{"debug", "info", "warn", "error"}; !slices.Contains(levels, c.Log.Level) {
		add("log.level", yamlfile.Quoted(c.Log.Level)+" is not a log level", "write debug, info, warn or error")
	}
	return append(es, ruleProblems(c.Rules)...)
}

// pathProblem returns what is wrong with the path of a file; "" if it is valid.
func pathProblem(path string) (problem, remedy string) {
	if path != filepath.Clean(path) || !filepath.IsAbs(path) || strings.ContainsRune(path, 0) {
		return yamlfile.Quoted(path) + " is not a clean absolute path", "write an absolute path without // or .."
	}
	return "", ""
}

func tcpProblems(t TCP) yamlfile.Errors {
	var es yamlfile.Errors
	add := func(key, problem, remedy string) {
		es = append(es, &yamlfile.Error{Key: "tcp." + key, Problem: problem, Remedy: remedy})
	}
	if !isAddress(t.Address) {
		add("address", yamlfile.Quoted(t.Address)+" is not an address to listen on", "write HOST:PORT, such as 10.0.0.5:7443 or [::]:7443")
	}
	for _, file := range []struct{ key, path string }{{"certificate", t.Certificate}, {"key", t.Key}, {"client_ca", t.ClientCA}} {
		if file.path == "" {
			if t.Address != "" {
				add(file.key, "is missing: TCP needs certificates", "name the file, or remove address")
			}
			continue
		}
		if problem, remedy := pathProblem(file.path); problem != "" {
			add(file.key, problem, remedy)
		}
	}
	for _, list := range []struct {
		key   string
		names []string
	}{{"online", t.Online}, {"admin", t.Admin}} {
		for i, name := range list.names {
			kind, rest, _ := strings.Cut(name, ":")
			if !slices.Contains([]string{"uri", "dns", "cn"}, kind) || rest == "" || strings.ContainsFunc(rest, func(r rune) bool { return !unicode.IsPrint(r) }) {
				add(fmt.Sprintf("%s[%d]", list.key, i), yamlfile.Quoted(name)+" is not a certificate name", "write uri:URI, dns:NAME or cn:NAME")
			}
		}
	}
	return es
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

func discoveryProblems(d Discovery) yamlfile.Errors {
	var es yamlfile.Errors
	check := func(key string, v, least, most time.Duration, remedy string) {
		if v < least || v > most {
			es = append(es, &yamlfile.Error{
				Key:     "discovery." + key,
				Problem: fmt.Sprintf("%s is outside %s to %s", durationText(v), durationText(least), durationText(most)), Remedy: remedy,
			})
		}
	}
	check("interval", d.Interval, 10*time.Millisecond, 10*time.Second, "choose a duration in that range; 50ms suits most hosts")
	least := min(max(d.Interval, 10*time.Millisecond), 10*time.Second)
	check("idle_interval", d.IdleInterval, least, time.Minute, "choose a duration in that range, which begins with interval, or remove the key")
	if d.MQDsInterval != 0 {
		check("mqds_interval", d.MQDsInterval, 100*time.Millisecond, time.Hour, "choose a duration in that range, or 0s for never")
	}
	return es
}

func containersProblems(c Containers) yamlfile.Errors {
	var es yamlfile.Errors
	add := func(key, problem, remedy string) {
		es = append(es, &yamlfile.Error{Key: "containers." + key, Problem: problem, Remedy: remedy})
	}
	for i, path := range c.Sockets {
		key := fmt.Sprintf("sockets[%d]", i)
		problem, remedy := pathProblem(path)
		if rest, found := strings.CutPrefix(path, "unix://"); found {
			remedy = "write the path alone: " + yamlfile.Cut(rest)
		}
		switch {
		case problem != "":
			add(key, problem, remedy)
		case len(path) > maxSocketPath:
			add(key, fmt.Sprintf("the path is longer than %d bytes", maxSocketPath), "socket paths are shorter; make a symbolic link")
		case slices.Contains(c.Sockets[:i], path):
			add(key, yamlfile.Quoted(path)+" is given twice", "keep one of them")
		}
	}
	u, err := url.Parse(c.Kubelet)
	switch {
	case c.Kubelet == "":
	case err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "":
		add("kubelet", yamlfile.Quoted(c.Kubelet)+" is not the address of a kubelet", "write one such as https://127.0.0.1:10250")
	case u.Scheme == "http" && c.KubeletToken != "":
		add("kubelet", "a token is not sent in clear text", "use https://, or remove kubelet_token")
	}
	for _, file := range []struct{ key, path string }{{"kubelet_token", c.KubeletToken}, {"kubelet_ca", c.KubeletCA}} {
		if file.path == "" {
			continue
		}
		if problem, remedy := pathProblem(file.path); problem != "" {
			add(file.key, problem, remedy)
		} else if c.Kubelet == "" {
			add(file.key, "is set without kubelet", "write the address of the kubelet as kubelet, or remove this")
		}
	}
	return es
}

func mechanismProblems(ms Mechanisms) yamlfile.Errors {
	var es yamlfile.Errors
	known := safety.Mechanisms()
	for i, m := range ms {
		key := fmt.Sprintf("mechanisms[%d]", i)
		switch {
		case !slices.Contains(known, m):
			remedy := "choose from " + strings.Join(known, ", ")
			if near := yamlfile.Nearest(m, known); near != "" {
				remedy = "did you mean " + near + "?"
			}
			es = append(es, &yamlfile.Error{Key: key, Problem: yamlfile.Quoted(m) + " is not a mechanism", Remedy: remedy})
		case slices.Contains(ms[:i], m):
			es = append(es, &yamlfile.Error{Key: key, Problem: m + " is given twice", Remedy: "keep one of them: the first that works is used"})
		}
	}
	return es
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

// policyProblems returns the errors of the policy. The scheduler reports one at a time, so
// each invalid knob is replaced by the preset's value before the next check.
func policyProblems(p scheduler.Policy) yamlfile.Errors {
	var es yamlfile.Errors
	base, err := scheduler.PresetByName(p.Preset)
	if err != nil {
		base = scheduler.DefaultPolicy()
	}
	for {
		var ke *scheduler.KnobError
		if err := p.Validate(); !errors.As(err, &ke) {
			return es
		}
		key := policyPrefix + ke.Knob
		remedy := "remove it to use the preset's value"
		if ke.Knob == "default_ttl" {
			remedy = "default_ttl may be at most max_ttl"
		}
		i := slices.IndexFunc(fields, func(f field) bool { return f.key == key })
		if slices.ContainsFunc(es, func(e *yamlfile.Error) bool { return e.Key == key }) {
			return es // the preset's value contradicts another knob
		}
		es = append(es, &yamlfile.Error{Key: key, Problem: ke.Problem, Remedy: remedy})
		if i < 0 {
			return es
		}
		c, b := Config{Policy: p}, Config{Policy: base}
		reflect.ValueOf(fields[i].at(&c)).Elem().Set(reflect.ValueOf(fields[i].at(&b)).Elem())
		p = c.Policy
	}
}

// matchProblems returns the errors of the match of rules[i].
func matchProblems(i int, m classify.Match) yamlfile.Errors {
	_, err := classify.New([]classify.Rule{{Name: "x", Match: m}})
	var es yamlfile.Errors
	for _, e := range ruleErrors(err) {
		if e.Field == "match" {
			es = append(es, &yamlfile.Error{
				Key: fmt.Sprintf("rules[%d].match", i), Problem: "is empty, which would match every process",
				Remedy: "write " + strings.Join(matchKeys()[:3], ", ") + ` or another field; comm: "*" for every process`,
			})
			continue
		}
		es = append(es, &yamlfile.Error{Key: fmt.Sprintf("rules[%d].match.%s", i, e.Field), Problem: e.Problem, Remedy: e.Remedy})
	}
	return es
}

func ruleErrors(err error) []*classify.RuleError {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return nil
	}
	var all []*classify.RuleError
	for _, one := range joined.Unwrap() {
		if e, ok := errors.AsType[*classify.RuleError](one); ok {
			all = append(all, e)
		}
	}
	return all
}

func ruleProblems(rules []classify.Rule) yamlfile.Errors {
	var es yamlfile.Errors
	first := map[string]int{}
	for i, r := range rules {
		add := func(key, problem, remedy string) {
			es = append(es, &yamlfile.Error{Key: fmt.Sprintf("rules[%d].%s", i, key), Problem: problem, Remedy: remedy})
		}
		switch j, twice := first[r.Name]; {
		case r.Name == "":
			add("name", "is missing", "write a unique name")
		case len(r.Name) > 64 || strings.ContainsFunc(r.Name, func(c rune) bool { return !unicode.IsPrint(c) }):
			add("name", yamlfile.Quoted(r.Name)+" is not a name", "use at most 64 printable characters")
		case twice:
			add("name", fmt.Sprintf("%s is also the name of rules[%d]", yamlfile.Quoted(r.Name), j), "write a unique name for each rule")
		default:
			first[r.Name] = i
		}
		if r.Class > gpreempt.Offline {
			add("class", r.Class.String()+" is not known", "write online, offline or unmanaged")
		}
		if r.Priority != nil && *r.Priority > gpreempt.MaxPriority {
			add("priority", fmt.Sprintf("%d is outside 0 to %d", *r.Priority, gpreempt.MaxPriority), "choose a number in that range")
		}
		es = append(es, matchProblems(i, r.Match)...)
	}
	return es
}
