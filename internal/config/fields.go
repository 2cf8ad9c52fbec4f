package config

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// field is a key of the file. The parser, the comparison of two files and the reload use
// the table below; rules, jobs and safety.hazards have their own format. gpreemptd.yaml explains
// the keys.
type field struct {
	// key is "section.name", or "name" at the top.
	key string
	// live reports whether a running daemon can apply a new value; else a change needs a
	// restart. This is the only place that says so.
	live bool
	// min and max bound an int.
	min, max int
	// at returns a pointer to the value: *string, *int, *float64, *bool, *[]string,
	// *Mechanisms, *time.Duration or a pointer to an enum of the scheduler.
	at func(*Config) any
}

const policyPrefix = "policy."

// fields has every key except those in rules, jobs and safety.hazards, in the order of the
// default file.
var fields = []field{
	{key: "socket", at: func(c *Config) any { return &c.Socket }},
	{key: "mechanisms", at: func(c *Config) any { return &c.Mechanisms }},
	{key: "access.online_groups", live: true, at: func(c *Config) any { return &c.Access.OnlineGroups }},
	{key: "access.admin_groups", live: true, at: func(c *Config) any { return &c.Access.AdminGroups }},
	{key: "access.online_users", live: true, at: func(c *Config) any { return &c.Access.OnlineUsers }},
	{key: "access.admin_users", live: true, at: func(c *Config) any { return &c.Access.AdminUsers }},
	{key: "access.container_admins", live: true, at: func(c *Config) any { return &c.Access.ContainerAdmins }},
	{key: "tcp.address", at: func(c *Config) any { return &c.TCP.Address }},
	{key: "tcp.certificate", live: true, at: func(c *Config) any { return &c.TCP.Certificate }},
	{key: "tcp.key", live: true, at: func(c *Config) any { return &c.TCP.Key }},
	{key: "tcp.client_ca", live: true, at: func(c *Config) any { return &c.TCP.ClientCA }},
	{key: "tcp.online", live: true, at: func(c *Config) any { return &c.TCP.Online }},
	{key: "tcp.admin", live: true, at: func(c *Config) any { return &c.TCP.Admin }},
	{key: "limits.leases_per_client", live: true, min: 1, max: 100_000, at: func(c *Config) any { return &c.Limits.Leases.LeasesPerClient }},
	{key: "limits.leases_per_user", live: true, min: 1, max: 100_000, at: func(c *Config) any { return &c.Limits.Leases.LeasesPerUser }},
	{key: "limits.leases_total", live: true, min: 1, max: 100_000, at: func(c *Config) any { return &c.Limits.Leases.LeasesTotal }},
	{key: "limits.streams_per_client", live: true, min: 1, max: 1000, at: func(c *Config) any { return &c.Limits.Clients.StreamsPerClient }},
	{key: "limits.requests_per_second", live: true, min: 0, max: 1_000_000, at: func(c *Config) any { return &c.Limits.Clients.RequestsPerSecond }},
	{key: "limits.burst", live: true, min: 0, max: 1_000_000, at: func(c *Config) any { return &c.Limits.Clients.Burst }},
	{key: "limits.requests_per_user", live: true, min: 0, max: 1_000_000, at: func(c *Config) any { return &c.Limits.Clients.RequestsPerUser }},
	{key: "limits.connections_per_user", live: true, min: 1, max: 100_000, at: func(c *Config) any { return &c.Limits.Clients.ConnectionsPerUser }},
	{key: "limits.connections_total", live: true, min: 1, max: 100_000, at: func(c *Config) any { return &c.Limits.Clients.ConnectionsTotal }},
	{key: "limits.max_message_bytes", min: 4096, max: 16 << 20, at: func(c *Config) any { return &c.Limits.MaxMessageBytes }},
	{key: "policy.preset", live: true, at: func(c *Config) any { return &c.Policy.Preset }},
	{key: "policy.suspend_when", live: true, at: func(c *Config) any { return &c.Policy.SuspendWhen }},
	{key: "policy.linger", live: true, at: func(c *Config) any { return &c.Policy.Linger }},
	{key: "policy.linger_max", live: true, at: func(c *Config) any { return &c.Policy.LingerMax }},
	{key: "policy.share_floor", live: true, at: func(c *Config) any { return &c.Policy.ShareFloor }},
	{key: "policy.share_window", live: true, at: func(c *Config) any { return &c.Policy.ShareWindow }},
	{key: "policy.max_suspend", live: true, at: func(c *Config) any { return &c.Policy.MaxSuspend }},
	{key: "policy.min_run", live: true, at: func(c *Config) any { return &c.Policy.MinRun }},
	{key: "policy.gang", live: true, at: func(c *Config) any { return &c.Policy.Gang }},
	{key: "policy.attach_after", live: true, at: func(c *Config) any { return &c.Policy.AttachAfter }},
	{key: "policy.shadow", live: true, at: func(c *Config) any { return &c.Policy.Shadow }},
	{key: "policy.max_wait", live: true, at: func(c *Config) any { return &c.Policy.MaxWait }},
	{key: "policy.default_ttl", live: true, at: func(c *Config) any { return &c.Policy.DefaultTTL }},
	{key: "policy.max_ttl", live: true, at: func(c *Config) any { return &c.Policy.MaxTTL }},
	{key: "hqd_budget.online", live: true, min: 0, max: 100, at: func(c *Config) any { return &c.HQDBudget.Online }},
	{key: "hqd_budget.offline", live: true, min: 0, max: 100, at: func(c *Config) any { return &c.HQDBudget.Offline }},
	{key: "hqd_budget.spare", live: true, min: 0, max: 100, at: func(c *Config) any { return &c.HQDBudget.Spare }},
	{key: "hqd_budget.alarm_free", live: true, min: 0, max: 100, at: func(c *Config) any { return &c.HQDAlarm }},
	{key: "discovery.interval", live: true, at: func(c *Config) any { return &c.Discovery.Interval }},
	{key: "discovery.idle_interval", live: true, at: func(c *Config) any { return &c.Discovery.IdleInterval }},
	{key: "discovery.mqds_interval", live: true, at: func(c *Config) any { return &c.Discovery.MQDsInterval }},
	{key: "nvidia.copy_engines", at: func(c *Config) any { return &c.NVIDIA.CopyEngines }},
	{key: "containers.sockets", at: func(c *Config) any { return &c.Containers.Sockets }},
	{key: "containers.kubelet", at: func(c *Config) any { return &c.Containers.Kubelet }},
	{key: "containers.kubelet_token", at: func(c *Config) any { return &c.Containers.KubeletToken }},
	{key: "containers.kubelet_ca", at: func(c *Config) any { return &c.Containers.KubeletCA }},
	{key: "metrics.address", at: func(c *Config) any { return &c.Metrics.Address }},
	{key: "log.level", live: true, at: func(c *Config) any { return &c.Log.Level }},
}

// keys are all keys in the order of errors: fields, then the lists.
var keys = func() []string {
	var all []string
	for _, f := range fields {
		all = append(all, f.key)
	}
	return append(all, "rules", "jobs", "safety.hazards")
}()

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
	case *scheduler.SuspendWhen:
		return api.EnumName(gpreemptv1.SuspendWhen(*v))
	case *scheduler.Linger:
		return api.EnumName(gpreemptv1.Linger(*v))
	case *scheduler.GangScope:
		return api.EnumName(gpreemptv1.GangScope(*v))
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
