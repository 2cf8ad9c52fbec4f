package config

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Live is a running daemon that has read another file. Each method puts the new values of the
// keys that name it into force.
type Live interface {
	Access()
	Certificates()
	LeaseLimits()
	Policy()
	HQDBudget()
	Hazards()
	Rules()
	LogLevel()
}

// action puts keys into force in a running daemon. It cannot fail.
type action struct{ do func(Live) }

var (
	access       = &action{Live.Access}
	certificates = &action{Live.Certificates}
	leaseLimits  = &action{Live.LeaseLimits}
	policy       = &action{Live.Policy}
	hqdBudget    = &action{Live.HQDBudget}
	hazards      = &action{Live.Hazards}
	rules        = &action{Live.Rules}
	logLevel     = &action{Live.LogLevel}
	// atUse is of keys that the daemon reads from its Config at each use.
	atUse = &action{func(Live) {}}
)

// field is a key of the file. The parser, the comparison of two files and the reload use
// the table below; rules, jobs and safety.hazards have their own format. gpreemptd.yaml explains
// the keys.
type field struct {
	// key is "section.name", or "name" at the top.
	key string
	// live puts a new value into force; nil: a change needs a restart. This is the only place
	// that says so.
	live *action
	// min and max bound an int.
	min, max int
	// at returns a pointer to the value: *string, *int, *float64, *bool, *[]string,
	// *Mechanisms or *time.Duration.
	at func(*Config) any
}

const policyPrefix = "policy."

// fields has every key except those in rules, jobs and safety.hazards, in the order of the
// default file.
var fields = []field{
	{key: "socket", at: func(c *Config) any { return &c.Socket }},
	{key: "mechanisms", at: func(c *Config) any { return &c.Mechanisms }},
	{key: "access.online_groups", live: access, at: func(c *Config) any { return &c.Access.OnlineGroups }},
	{key: "access.admin_groups", live: access, at: func(c *Config) any { return &c.Access.AdminGroups }},
	{key: "access.admin_users", live: access, at: func(c *Config) any { return &c.Access.AdminUsers }},
	{key: "access.container_admins", live: access, at: func(c *Config) any { return &c.Access.ContainerAdmins }},
	{key: "tcp.address", at: func(c *Config) any { return &c.TCP.Address }},
	{key: "tcp.certificate", live: certificates, at: func(c *Config) any { return &c.TCP.Certificate }},
	{key: "tcp.key", live: certificates, at: func(c *Config) any { return &c.TCP.Key }},
	{key: "tcp.client_ca", live: certificates, at: func(c *Config) any { return &c.TCP.ClientCA }},
	{key: "tcp.online", live: access, at: func(c *Config) any { return &c.TCP.Online }},
	{key: "tcp.admin", live: access, at: func(c *Config) any { return &c.TCP.Admin }},
	{key: "limits.leases_per_user", live: leaseLimits, min: 1, max: 100_000, at: func(c *Config) any { return &c.Limits.Leases.LeasesPerUser }},
	{key: "limits.requests_per_user", live: atUse, min: 0, max: 1_000_000, at: func(c *Config) any { return &c.Limits.Clients.RequestsPerUser }},
	{key: "policy.preset", live: policy, at: func(c *Config) any { return &c.Policy.Preset }},
	{key: "policy.linger", live: policy, at: func(c *Config) any { return &c.Policy.Linger }},
	{key: "policy.share_floor", live: policy, at: func(c *Config) any { return &c.Policy.ShareFloor }},
	{key: "policy.max_suspend", live: policy, at: func(c *Config) any { return &c.Policy.MaxSuspend }},
	{key: "policy.attach_after", live: policy, at: func(c *Config) any { return &c.Policy.AttachAfter }},
	{key: "policy.max_wait", live: policy, at: func(c *Config) any { return &c.Policy.MaxWait }},
	{key: "hqd_budget", live: hqdBudget, min: 0, max: 90, at: func(c *Config) any { return &c.HQDBudget }},
	{key: "discovery.mqds_interval", live: atUse, at: func(c *Config) any { return &c.Discovery.MQDsInterval }},
	{key: "containers.kubelet", at: func(c *Config) any { return &c.Containers.Kubelet }},
	{key: "metrics.address", at: func(c *Config) any { return &c.Metrics.Address }},
	{key: "log.level", live: logLevel, at: func(c *Config) any { return &c.Log.Level }},
}

// lists are the keys with a format of their own.
var lists = []field{list("rules", rules), list("jobs", rules), list("safety.hazards", hazards)}

func list(key string, live *action) field { return field{live: live, key: key} }

// keys are all keys in the order of errors: fields, then the lists.
var keys = func() []string {
	var all []string
	for _, f := range slices.Concat(fields, lists) {
		all = append(all, f.key)
	}
	return all
}()

// Apply puts the values of all live keys into force, also those that have not changed: names of
// groups and files may stand for something else.
func Apply(to Live) {
	done := map[*action]bool{nil: true}
	for _, f := range slices.Concat(fields, lists) {
		if !done[f.live] {
			done[f.live] = true
			f.live.do(to)
		}
	}
}

// LiveKeys returns the keys that Apply puts into force.
func LiveKeys() (live []string) {
	for _, f := range slices.Concat(fields, lists) {
		if f.live != nil {
			live = append(live, f.key)
		}
	}
	return live
}

// section returns the first part of a dotted key, "" for a key at the top.
func section(key string) string {
	s, _, nested := strings.Cut(key, ".")
	if !nested {
		return ""
	}
	return s
}

// text returns the value at p in the form of the file.
func text(p any) string {
	switch v := p.(type) {
	case *string:
		if *v == "" {
			return `""`
		}
		return *v
	case *int:
		return strconv.Itoa(*v)
	case *float64:
		return strconv.FormatFloat(*v, 'g', -1, 64)
	case *bool:
		return strconv.FormatBool(*v)
	case *[]string:
		return "[" + strings.Join(*v, ", ") + "]"
	case *Mechanisms:
		return "[" + strings.Join(*v, ", ") + "]"
	case *time.Duration:
		return durationText(*v)
	}
	panic(fmt.Sprintf("config: no text for a %T", p))
}

// durationText returns a duration in the form of the file: 1m0s is 1m.
func durationText(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}
