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

// field is a key of the file. The parser, the default file, the manual page, the comparison
// of two files and the reload use the table below; rules and safety.hazards have their own
// format.
type field struct {
	// key is "section.name", or "name" at the top.
	key string
	// doc says what the key does; the range of an int is added to it.
	doc string
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

// fields has every key except those in rules and safety.hazards, in the order of the
// default file.
var fields = []field{
	{
		key: "socket",
		doc: "Unix socket of the daemon, an absolute path of at most 107 bytes.",
		at:  func(c *Config) any { return &c.Socket },
	},
	{
		key: "mechanisms",
		doc: "Enabled mechanisms; the first that works on a process is used. dbgtrap (the kernel's debug " +
			"interface: interrupts running kernels; if gpreemptd dies, the kernel driver resumes everything), criu " +
			"(pauses a whole process as for a checkpoint: needs no debug support), freezer (stops the " +
			"program, not its queues: works everywhere, but kernels that were submitted run to their end). If gpreemptd " +
			"dies, processes suspended by criu or freezer stay paused until it is started again. [] suspends nothing.",
		at: func(c *Config) any { return &c.Mechanisms },
	},
	{
		key: "access.online_groups", live: true,
		doc: "Groups whose members may announce online work. Names or numeric ids, here and below. The socket belongs to " +
			"the first of them: only its members and root can connect.",
		at: func(c *Config) any { return &c.Access.OnlineGroups },
	},
	{
		key: "access.admin_groups", live: true,
		doc: "Groups whose members have all rights. They must be members of the first online group too.",
		at:  func(c *Config) any { return &c.Access.AdminGroups },
	},
	{
		key: "access.online_users", live: true,
		doc: "Users who may announce online work, in addition. They must be members of the first online group too.",
		at:  func(c *Config) any { return &c.Access.OnlineUsers },
	},
	{
		key: "access.admin_users", live: true,
		doc: "Users who have all rights, in addition. They must be members of the first online group too.",
		at:  func(c *Config) any { return &c.Access.AdminUsers },
	},
	{
		key: "tcp.address",
		doc: `Address to listen on, HOST:PORT, such as 10.0.0.5:7443 or [::]:7443; "" serves only the socket. TLS 1.3 ` +
			"with a certificate on each side is required.",
		at: func(c *Config) any { return &c.TCP.Address },
	},
	{
		key: "tcp.certificate", live: true,
		doc: "PEM file with the daemon's certificate, followed by the intermediate certificates. It is read again at each " +
			"reload, like the next two.",
		at: func(c *Config) any { return &c.TCP.Certificate },
	},
	{
		key: "tcp.key", live: true,
		doc: "PEM file with its private key.",
		at:  func(c *Config) any { return &c.TCP.Key },
	},
	{
		key: "tcp.client_ca", live: true,
		doc: "PEM file with the certificates of the authorities of clients. Use an authority for this purpose only.",
		at:  func(c *Config) any { return &c.TCP.ClientCA },
	},
	{
		key: "tcp.online", live: true,
		doc: "Names of certificates with the right to announce online work: uri:URI and dns:NAME for an alternative name, " +
			"cn:NAME for the common name. The whole name must match; there are no wildcards.",
		at: func(c *Config) any { return &c.TCP.Online },
	},
	{
		key: "tcp.admin", live: true,
		doc: "Names of certificates with all rights.",
		at:  func(c *Config) any { return &c.TCP.Admin },
	},
	{
		key: "limits.leases_per_client", live: true, min: 1, max: 100_000,
		doc: "Live leases of one process, or of one certificate.",
		at:  func(c *Config) any { return &c.Limits.Leases.LeasesPerClient },
	},
	{
		key: "limits.leases_per_user", live: true, min: 1, max: 100_000,
		doc: "Live leases of all processes of one user; at least leases_per_client.",
		at:  func(c *Config) any { return &c.Limits.Leases.LeasesPerUser },
	},
	{
		key: "limits.leases_total", live: true, min: 1, max: 100_000,
		doc: "Live leases of all processes.",
		at:  func(c *Config) any { return &c.Limits.Leases.LeasesTotal },
	},
	{
		key: "limits.streams_per_client", live: true, min: 1, max: 1000,
		doc: "Open streams (sessions, watches) of one process.",
		at:  func(c *Config) any { return &c.Limits.Clients.StreamsPerClient },
	},
	{
		key: "limits.requests_per_second", live: true, min: 1, max: 1_000_000,
		doc: "Calls and session frames per second of one process, on average.",
		at:  func(c *Config) any { return &c.Limits.Clients.RequestsPerSecond },
	},
	{
		key: "limits.burst", live: true, min: 1, max: 1_000_000,
		doc: "Calls of one process above that rate.",
		at:  func(c *Config) any { return &c.Limits.Clients.Burst },
	},
	{
		key: "limits.requests_per_user", live: true, min: 1, max: 1_000_000,
		doc: "Calls and session frames per second of all processes of one user, on average; at least " +
			"requests_per_second. The burst is in proportion.",
		at: func(c *Config) any { return &c.Limits.Clients.RequestsPerUser },
	},
	{
		key: "limits.connections_per_user", live: true, min: 1, max: 100_000,
		doc: "Open connections of all processes of one user.",
		at:  func(c *Config) any { return &c.Limits.Clients.ConnectionsPerUser },
	},
	{
		key: "limits.connections_total", live: true, min: 1, max: 100_000,
		doc: "Open connections of all users. Each needs two file descriptors of the daemon.",
		at:  func(c *Config) any { return &c.Limits.Clients.ConnectionsTotal },
	},
	{
		key: "limits.max_message_bytes", min: 4096, max: 16 << 20,
		doc: "Largest accepted request, in bytes.",
		at:  func(c *Config) any { return &c.Limits.MaxMessageBytes },
	},
	{
		key: "policy.preset", live: true,
		doc: "Policy to start from: balanced (waits for the announced eta, lingers if that is cheaper, keeps 10 % " +
			"of the time for offline work), strict (online work first, at any cost), slo (suspends only if " +
			"the SLO is at risk), share (half of the time for offline work), shadow (decides and reports, never " +
			"acts). It sets the knobs below; set one to change it.",
		at: func(c *Config) any { return &c.Policy.Preset },
	},
	{
		key: "policy.suspend_when", live: true,
		doc: "When offline work is suspended for a new lease: at-once, eta (at the announced eta minus the " +
			"learned suspend time) or slack (at the last moment that still meets the announced SLO).",
		at: func(c *Config) any { return &c.Policy.SuspendWhen },
	},
	{
		key: "policy.linger", live: true,
		doc: "How long offline work stays suspended after the last lease: none, fixed (linger_max) or adaptive (until " +
			"the next announcement is overdue, if it is expected sooner than a resume and suspend would cost).",
		at: func(c *Config) any { return &c.Policy.Linger },
	},
	{
		key: "policy.linger_max", live: true,
		doc: "Bound of the linger, 0s to 1s.",
		at:  func(c *Config) any { return &c.Policy.LingerMax },
	},
	{
		key: "policy.share_floor", live: true,
		doc: "Minimum share of the time that offline work runs, whatever leases exist, 0 to 0.95.",
		at:  func(c *Config) any { return &c.Policy.ShareFloor },
	},
	{
		key: "policy.share_window", live: true,
		doc: "Period over which the share floor is averaged, 100ms to 10m.",
		at:  func(c *Config) any { return &c.Policy.ShareWindow },
	},
	{
		key: "policy.max_suspend", live: true,
		doc: "Longest duration of one suspension, 10ms to 10m.",
		at:  func(c *Config) any { return &c.Policy.MaxSuspend },
	},
	{
		key: "policy.min_run", live: true,
		doc: "Shortest time that offline work runs after max_suspend or the share floor has resumed it, 1ms to 1m.",
		at:  func(c *Config) any { return &c.Policy.MinRun },
	},
	{
		key: "policy.gang", live: true,
		doc: "What is suspended together: process (all queues of a process) or job (all offline processes of a " +
			"control group).",
		at: func(c *Config) any { return &c.Policy.Gang },
	},
	{
		key: "policy.shadow", live: true,
		doc: "Decide and report, never act: true or false.",
		at:  func(c *Config) any { return &c.Policy.Shadow },
	},
	{
		key: "policy.max_wait", live: true,
		doc: "Longest wait of an announcement without one, 0s to 10s.",
		at:  func(c *Config) any { return &c.Policy.MaxWait },
	},
	{
		key: "policy.default_ttl", live: true,
		doc: "Time to live of a lease without one, 1ms to max_ttl.",
		at:  func(c *Config) any { return &c.Policy.DefaultTTL },
	},
	{
		key: "policy.max_ttl", live: true,
		doc: "Longest time to live of a lease, 1ms to 10m.",
		at:  func(c *Config) any { return &c.Policy.MaxTTL },
	},
	{
		key: "discovery.interval", live: true,
		doc: "Shortest time between two scans of the queues of the host, 10ms to 10s: while queues change, new offline " +
			"work is known after at most this time.",
		at: func(c *Config) any { return &c.Discovery.Interval },
	},
	{
		key: "discovery.idle_interval", live: true,
		doc: "Longest time between two scans, while no queue changes, interval to 1m. The default is 1s, or interval if " +
			"that is longer.",
		at: func(c *Config) any { return &c.Discovery.IdleInterval },
	},
	{
		key: "discovery.mqds_interval", live: true,
		doc: "Time between two reads of the driver's queue dumps in debugfs, which have the priorities and rings of all " +
			"queues: 100ms to 1h, or 0s for never. It grows automatically while nothing changes and if reads are slow.",
		at: func(c *Config) any { return &c.Discovery.MQDsInterval },
	},
	{
		key: "containers.sockets",
		doc: "Sockets of container runtimes, absolute paths; missing ones are ignored. A file whose name begins with docker " +
			"or podman has Docker's API, others the CRI of Kubernetes. With [] no runtime is asked: rules on a " +
			"container's name, image or labels match nothing, and rules on its pod need a kubelet.",
		at: func(c *Config) any { return &c.Containers.Sockets },
	},
	{
		key: "containers.kubelet",
		doc: `Address of the kubelet's API, such as https://127.0.0.1:10250; "" disables it. $(NAME) is the daemon's ` +
			"environment variable NAME, for one file on many nodes. Only the kubelet has priority classes of pods, and " +
			"changed labels.",
		at: func(c *Config) any { return &c.Containers.Kubelet },
	},
	{
		key: "containers.kubelet_token",
		doc: `File with the token for the kubelet, which must grant get on nodes/proxy; "" sends none.`,
		at:  func(c *Config) any { return &c.Containers.KubeletToken },
	},
	{
		key: "containers.kubelet_ca",
		doc: `File with the certificates of the kubelet's authorities; "" uses those of the host.`,
		at:  func(c *Config) any { return &c.Containers.KubeletCA },
	},
	{
		key: "metrics.address",
		doc: "Address to listen on, HOST:PORT, such as 127.0.0.1:9477; \"\" disables it. There is no authentication: the " +
			"metrics name GPUs and mechanisms, but no process, user or command.",
		at: func(c *Config) any { return &c.Metrics.Address },
	},
	{
		key: "log.level", live: true,
		doc: "Least severe level that is logged: debug, info, warn or error.",
		at:  func(c *Config) any { return &c.Log.Level },
	},
}

// keys are all keys in the order of errors: fields, then the two lists.
var keys = func() []string {
	var all []string
	for _, f := range fields {
		all = append(all, f.key)
	}
	return append(all, "rules", "safety.hazards")
}()

// sections describes each group of keys.
var sections = map[string]string{
	"access":     "Rights to call. Root and the user of the daemon have all rights.",
	"tcp":        "Clients on other hosts, identified by certificates. Only the names below have rights.",
	"limits":     "Limits for clients.",
	"policy":     "When offline work is suspended and resumed.",
	"rules":      rulesDoc,
	"safety":     safetyDoc,
	"discovery":  "How the daemon finds queues.",
	"containers": "Sources of the names, images, labels and pods of containers.",
	"metrics":    "Metrics for Prometheus (/metrics, docs/metrics.md), and HTTP probes (/healthz, /readyz).",
	"log":        "The daemon's log.",
}

const rulesDoc = "Which processes are online and which offline; the first rule that matches decides. A process without a " +
	"matching rule is classified by its environment: GPREEMPT_CLASS (a class as below) and GPREEMPT_PRIORITY, which gpctl run " +
	"sets, or AMD_QUEUE_TAG, beginning with ONLINE or OFFLINE, and AMD_QUEUE_PRIORITY. Any other process is unmanaged: " +
	"never suspended.\n" +
	"class is online, offline or unmanaged. priority is 0 to 15, by default 11 for online, 0 for offline, 7 for " +
	"unmanaged; a lease suspends offline processes of lower priority than its own.\n" +
	"Everything under match must hold. Texts are globs for the whole value, best in quotes: * any run, ? any one, [ab] " +
	"one of these. An unknown value matches nothing. gpctl target explain shows the comparison.\n" +
	"- comm, cmdline, exe: command name, command line, path of the program.\n" +
	"- uid, gid: effective ids, numbers.\n" +
	"- cgroup: control group path. unit, slice: systemd's innermost, such as train.service and batch.slice.\n" +
	"- env: {NAME: glob}: variables of the initial environment.\n" +
	"- container: {id, name, image, runtime: globs, labels: {NAME: glob}}; runtime is docker, containerd, cri-o or podman.\n" +
	"- pod: {namespace, name, priority_class: globs, labels: {NAME: glob}}, of Kubernetes; priority_class needs " +
	"containers.kubelet.\n" +
	"- gpu: [gpu_id, node:N, PCI address, renderDN]: one of its queues is on one of these.\n" +
	"- queue_priority: {min, max}: the highest priority of its compute queues, 0 to 15. HIP's low, normal and high " +
	"streams have 0, 7 and 11, and kernels 7.x distinguish only these three. It is known if debugfs is readable and " +
	"mqds_interval is not 0s.\n" +
	"- ring_address: {from, to}: the ring of one of its queues begins there, in virtual memory."

var rulesExample = []string{
	"rules:",
	"  - name: training",
	"    match:",
	`      comm: "python*"`,
	`      cgroup: "/slurm/*"`,
	"    class: offline",
	"    priority: 0",
	"  - name: inference",
	"    match:",
	"      uid: 990",
	"    class: online",
	"  - name: batch-pods",
	"    match:",
	"      pod:",
	`        namespace: "batch-*"`,
	`        labels: {app.kubernetes.io/component: "train*"}`,
	"    class: offline",
	"  - name: low-priority-streams",
	"    match:",
	"      queue_priority: {max: 6}",
	"    class: offline",
}

const safetyDoc = "On which GPUs queues are preempted. A built-in table has combinations of GPU, kernel and firmware that " +
	"hang (docs/hazards.md; gpctl doctor shows its result for this host), and denies RDNA cards and APUs that are not " +
	"known to work. The rows of hazards are checked before it; the first whose conditions all hold decides. id, gfx, " +
	"action (allow, limit to one process on a GPU at a time, deny) and why are required; apu, kernel, driver (in-tree, " +
	"dkms), mes, mes_kiq, mec, sdma (firmware versions), mechanisms (default: dbgtrap and criu), issues and remedy are " +
	"optional."

var safetyExample = []string{
	"safety:",
	"  hazards:",
	"    - id: site-gfx1102",
	"      gfx: [gfx1102]",
	`      kernel: ">=7.1"`,
	`      mes: ">=0x60"`,
	"      action: limit",
	"      why: No failure in a week of suspensions under load.",
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
