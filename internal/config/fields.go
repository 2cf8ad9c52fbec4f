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

// field is one key of the file. The table below is the only list of them: the
// parser, the default file and the comparison of two files all read it.
type field struct {
	// key is "section.name", or "name" at the top.
	key string
	// doc says what the key does; the range of an int is added to it.
	doc string
	// live tells that a running daemon can take a new value.
	live bool
	// min and max bound an int.
	min, max int
	// at returns a pointer to the value: *string, *int, *float64, *bool, *[]string,
	// *Mechanisms, *time.Duration or a pointer to an enum of the scheduler.
	at func(*Config) any
}

const policyPrefix = "policy."

// fields lists every key but those of rules and safety.hazards, in the order of
// the default file.
var fields = []field{
	{
		key: "socket",
		doc: "Unix socket the daemon serves, an absolute path of at most 107 bytes.",
		at:  func(c *Config) any { return &c.Socket },
	},
	{
		key: "mechanisms",
		doc: "Ways to suspend that may be used; the first that works on a process is taken. dbgtrap (the kernel's debug " +
			"interface: stops kernels in the middle; when gpreemptd dies the kernel resumes everything by itself), criu " +
			"(pauses a whole process for a checkpoint that is never made: needs no debug support), freezer (stops the " +
			"program, not its queues: works everywhere, and what is on the GPU runs to its end first). What criu and " +
			"freezer stopped stays so if gpreemptd dies, until it is started again. [] suspends nothing.",
		at: func(c *Config) any { return &c.Mechanisms },
	},
	{
		key: "access.online_groups", live: true,
		doc: "Groups whose members may announce online work. Names or numeric ids, here and below.",
		at:  func(c *Config) any { return &c.Access.OnlineGroups },
	},
	{
		key: "access.admin_groups", live: true,
		doc: "Groups whose members may use gpctl to the full.",
		at:  func(c *Config) any { return &c.Access.AdminGroups },
	},
	{
		key: "access.online_users", live: true,
		doc: "Users who may announce online work, besides those groups.",
		at:  func(c *Config) any { return &c.Access.OnlineUsers },
	},
	{
		key: "access.admin_users", live: true,
		doc: "Users who may use gpctl to the full, besides those groups.",
		at:  func(c *Config) any { return &c.Access.AdminUsers },
	},
	{
		key: "tcp.address",
		doc: `Address to listen on, HOST:PORT, such as 10.0.0.5:7443 or [::]:7443; "" serves the socket alone. Each side ` +
			"shows a certificate, TLS is 1.3, and there is no other way in.",
		at: func(c *Config) any { return &c.TCP.Address },
	},
	{
		key: "tcp.certificate", live: true,
		doc: "File with the daemon's certificate, PEM, followed by those between it and its authority. It is read again at " +
			"each reload, like the next two.",
		at: func(c *Config) any { return &c.TCP.Certificate },
	},
	{
		key: "tcp.key", live: true,
		doc: "File with its private key, PEM.",
		at:  func(c *Config) any { return &c.TCP.Key },
	},
	{
		key: "tcp.client_ca", live: true,
		doc: "File with the certificates of the authorities that vouch for clients, PEM. An authority used for nothing else " +
			"is best.",
		at: func(c *Config) any { return &c.TCP.ClientCA },
	},
	{
		key: "tcp.online", live: true,
		doc: "Names of certificates whose holders may announce online work, and nothing else: uri:URI and dns:NAME for an " +
			"alternative name, cn:NAME for the common name. The whole name counts; there are no wildcards.",
		at: func(c *Config) any { return &c.TCP.Online },
	},
	{
		key: "tcp.admin", live: true,
		doc: "Names of certificates whose holders may use gpctl to the full.",
		at:  func(c *Config) any { return &c.TCP.Admin },
	},
	{
		key: "limits.leases_per_client", live: true, min: 1, max: 100_000,
		doc: "Live leases one process, or the holder of a certificate, may hold.",
		at:  func(c *Config) any { return &c.Limits.Leases.LeasesPerClient },
	},
	{
		key: "limits.leases_per_user", live: true, min: 1, max: 100_000,
		doc: "Live leases all processes of one user may hold together; at least leases_per_client.",
		at:  func(c *Config) any { return &c.Limits.Leases.LeasesPerUser },
	},
	{
		key: "limits.leases_total", live: true, min: 1, max: 100_000,
		doc: "Live leases of all processes together.",
		at:  func(c *Config) any { return &c.Limits.Leases.LeasesTotal },
	},
	{
		key: "limits.streams_per_client", live: true, min: 1, max: 1000,
		doc: "Open streams (sessions, watches) of one process.",
		at:  func(c *Config) any { return &c.Limits.Clients.StreamsPerClient },
	},
	{
		key: "limits.requests_per_second", live: true, min: 1, max: 1_000_000,
		doc: "Calls and session frames per second one process may make in the long run.",
		at:  func(c *Config) any { return &c.Limits.Clients.RequestsPerSecond },
	},
	{
		key: "limits.burst", live: true, min: 1, max: 1_000_000,
		doc: "Calls it may make at once before that rate holds.",
		at:  func(c *Config) any { return &c.Limits.Clients.Burst },
	},
	{
		key: "limits.requests_per_user", live: true, min: 1, max: 1_000_000,
		doc: "Calls and session frames per second all processes of one user may make together in the long run; at " +
			"least requests_per_second. The burst is in proportion.",
		at: func(c *Config) any { return &c.Limits.Clients.RequestsPerUser },
	},
	{
		key: "limits.connections_per_user", live: true, min: 1, max: 100_000,
		doc: "Connections all processes of one user may have open together.",
		at:  func(c *Config) any { return &c.Limits.Clients.ConnectionsPerUser },
	},
	{
		key: "limits.connections_total", live: true, min: 1, max: 100_000,
		doc: "Connections of all users together. Each takes two of the file descriptors the daemon may have.",
		at:  func(c *Config) any { return &c.Limits.Clients.ConnectionsTotal },
	},
	{
		key: "limits.max_message_bytes", min: 4096, max: 16 << 20,
		doc: "Largest request taken, in bytes.",
		at:  func(c *Config) any { return &c.Limits.MaxMessageBytes },
	},
	{
		key: "policy.preset", live: true,
		doc: "Policy to begin from: balanced (waits for the announced eta, lingers when that is cheaper, keeps 10 % " +
			"of the time for offline work), strict (online work first, whatever it costs), slo (suspends only when " +
			"the SLO is at risk), share (half of the time for offline work), shadow (decides and reports, never " +
			"acts). The knobs below come with it; set one to change it.",
		at: func(c *Config) any { return &c.Policy.Preset },
	},
	{
		key: "policy.suspend_when", live: true,
		doc: "When offline work is taken off the GPUs of a new lease: at-once, eta (at the announced eta minus the " +
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
		doc: "Share of the time that offline work runs whatever leases say, 0 to 0.95.",
		at:  func(c *Config) any { return &c.Policy.ShareFloor },
	},
	{
		key: "policy.share_window", live: true,
		doc: "Stretch of time over which the share floor may be borrowed against, 100ms to 10m.",
		at:  func(c *Config) any { return &c.Policy.ShareWindow },
	},
	{
		key: "policy.max_suspend", live: true,
		doc: "Longest time one suspension lasts, 10ms to 10m.",
		at:  func(c *Config) any { return &c.Policy.MaxSuspend },
	},
	{
		key: "policy.min_run", live: true,
		doc: "Shortest time offline work runs once max_suspend or the share floor has resumed it, 1ms to 1m.",
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
		doc: "Longest wait of an announcement that names none, 0s to 10s.",
		at:  func(c *Config) any { return &c.Policy.MaxWait },
	},
	{
		key: "policy.default_ttl", live: true,
		doc: "Time to live of a lease that names none, 1ms to max_ttl.",
		at:  func(c *Config) any { return &c.Policy.DefaultTTL },
	},
	{
		key: "policy.max_ttl", live: true,
		doc: "Longest time to live a client may ask for, 1ms to 10m.",
		at:  func(c *Config) any { return &c.Policy.MaxTTL },
	},
	{
		key: "discovery.interval", live: true,
		doc: "Shortest pause between two looks at the queues of the host, 10ms to 10s: how soon new offline work is " +
			"known, and can be suspended, while others come and go.",
		at: func(c *Config) any { return &c.Discovery.Interval },
	},
	{
		key: "discovery.idle_interval", live: true,
		doc: "Longest pause between them, when nothing has changed for a while, interval to 1m. Without the key it is 1s, " +
			"or interval if that is longer.",
		at: func(c *Config) any { return &c.Discovery.IdleInterval },
	},
	{
		key: "discovery.mqds_interval", live: true,
		doc: "Time between two readings of the driver's dumps of all queues in debugfs, which tell of their priorities and " +
			"rings: 100ms to 1h, or 0s for never. It stretches by itself while nothing changes and where reading is slow.",
		at: func(c *Config) any { return &c.Discovery.MQDsInterval },
	},
	{
		key: "containers.sockets",
		doc: "Sockets of container runtimes, absolute paths; those that do not exist are passed over. If the file's name " +
			"begins with docker or podman it speaks Docker's API, else the CRI of Kubernetes. [] asks no runtime: then " +
			"rules by a container's name, image or labels match nothing, and rules by its pod only with a kubelet.",
		at: func(c *Config) any { return &c.Containers.Sockets },
	},
	{
		key: "containers.kubelet",
		doc: `Address of the kubelet's API, such as https://127.0.0.1:10250; "" does not ask it. $(NAME) is the daemon's ` +
			"environment variable NAME, for one file on many nodes. Only the kubelet tells priority classes of pods, and " +
			"labels that were changed.",
		at: func(c *Config) any { return &c.Containers.Kubelet },
	},
	{
		key: "containers.kubelet_token",
		doc: `File with the token to show the kubelet, which must allow to get nodes/proxy; "" shows none.`,
		at:  func(c *Config) any { return &c.Containers.KubeletToken },
	},
	{
		key: "containers.kubelet_ca",
		doc: `File with the certificates that vouch for the kubelet; "" trusts those of the host.`,
		at:  func(c *Config) any { return &c.Containers.KubeletCA },
	},
	{
		key: "metrics.address",
		doc: "Address to listen on, HOST:PORT, such as 127.0.0.1:9477; \"\" serves none. Whoever reaches it can read: the " +
			"figures name GPUs and mechanisms, and no process, user or command.",
		at: func(c *Config) any { return &c.Metrics.Address },
	},
	{
		key: "tracing.endpoint",
		doc: "Collector that takes OTLP over gRPC: HOST:PORT, such as 127.0.0.1:4317, or unix:PATH, both in clear text, or " +
			"https://HOST:PORT; \"\" sends none. It is told of processes by pid.",
		at: func(c *Config) any { return &c.Tracing.Endpoint },
	},
	{
		key: "log.level", live: true,
		doc: "Least severe message logged: debug, info, warn or error.",
		at:  func(c *Config) any { return &c.Log.Level },
	},
}

// keys are all of the file, in the order errors name them: fields, then the two
// that hold lists.
var keys = func() []string {
	var all []string
	for _, f := range fields {
		all = append(all, f.key)
	}
	return append(all, "rules", "safety.hazards")
}()

// sections says what each group of keys is about.
var sections = map[string]string{
	"access":     "Who may call. The user the daemon runs as, and root, always have every right.",
	"tcp":        "Clients on other hosts, who show a certificate. Nobody has a right there who is not named here.",
	"limits":     "What clients can ask of the daemon.",
	"policy":     "When offline work is suspended and when it runs again.",
	"rules":      rulesDoc,
	"safety":     safetyDoc,
	"discovery":  "How the daemon finds queues.",
	"containers": "Who is asked for the names, images, labels and pods of containers.",
	"metrics":    "What Prometheus scrapes (/metrics, docs/metrics.md), and probes over HTTP (/healthz, /readyz).",
	"tracing":    "Where OpenTelemetry traces of announcements go (docs/tracing.md).",
	"log":        "What the daemon logs.",
}

const rulesDoc = "Which processes are online and which offline; the first rule that matches wins. A process no rule matches " +
	"is what it says itself in its environment: GPREEMPT_CLASS (as a class below) and GPREEMPT_PRIORITY, which gpctl run " +
	"sets, or AMD_QUEUE_TAG, beginning with ONLINE or OFFLINE, and AMD_QUEUE_PRIORITY. Any other process is unmanaged: " +
	"never suspended.\n" +
	"class is online, offline or unmanaged. priority is 0 to 15, by default 11 for online, 0 for offline, 7 for " +
	"unmanaged; a lease suspends offline processes of lower priority than its own.\n" +
	"Everything under match must hold. Texts are globs for the whole of it, best in quotes: * any run, ? any one, [ab] " +
	"one of these. What is not known of a process matches nothing. gpctl target explain shows what was compared.\n" +
	"- comm, cmdline, exe: command name, command line, path of the program.\n" +
	"- uid, gid: effective ids, numbers.\n" +
	"- cgroup: control group path. unit, slice: systemd's innermost, such as train.service and batch.slice.\n" +
	"- env: {NAME: glob}: variables that were set when the program began.\n" +
	"- container: {id, name, image, runtime: globs, labels: {NAME: glob}}; runtime is docker, containerd, cri-o or podman.\n" +
	"- pod: {namespace, name, priority_class: globs, labels: {NAME: glob}}, of Kubernetes; priority_class needs " +
	"containers.kubelet.\n" +
	"- gpu: [gpu_id, node:N, PCI address, renderDN]: one of its queues is on one of these.\n" +
	"- queue_priority: {min, max}: the highest priority of its compute queues, 0 to 15. HIP's low, normal and high " +
	"streams have 0, 7 and 11, and kernels 7.x tell only these three apart. It is known where debugfs is readable and " +
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

const safetyDoc = "On which GPUs queues are preempted. A built-in table knows combinations of GPU, kernel and firmware that " +
	"hang (docs/hazards.md; gpctl doctor shows what it says of this host), and denies RDNA cards and APUs nobody has " +
	"vouched for. The rows of hazards are looked at before it; the first whose conditions all hold decides. id, gfx, " +
	"action (allow, limit to one process on a GPU at a time, deny) and why are needed; apu, kernel, driver (in-tree, " +
	"dkms), mes, mes_kiq, mec, sdma (firmware versions), mechanisms (else dbgtrap and criu), issues and remedy may be " +
	"given."

var safetyExample = []string{
	"safety:",
	"  hazards:",
	"    - id: site-gfx1102",
	"      gfx: [gfx1102]",
	`      kernel: ">=7.1"`,
	`      mes: ">=0x60"`,
	"      action: limit",
	"      why: Withstood a week of suspensions under load in our lab.",
}

// section returns the first part of a dotted key, "" for a key at the top.
func section(key string) string {
	s, _, nested := strings.Cut(key, ".")
	if !nested {
		return ""
	}
	return s
}

// text writes the value at p as the file has it.
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

// durationText writes 1m0s as 1m and 10m0s as 10m.
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
