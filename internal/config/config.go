// Package config hides the format of the daemon's one configuration file: its
// keys, their ranges and defaults, and how mistakes in it are told.
package config

import (
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/internal/container"
	"github.com/gpreempt/gpreempt/internal/hazard"
	"github.com/gpreempt/gpreempt/internal/server"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// DefaultPath is where gpreemptd looks for its file.
const DefaultPath = "/etc/gpreempt/gpreemptd.yaml"

// Config is the whole configuration. The comment of each key, with its unit and
// range, is in fields.go: DefaultYAML prints it.
type Config struct {
	// Socket is the absolute path of the unix socket.
	Socket string
	// Mechanisms are the ways to suspend that may be used, best first. None: the
	// daemon watches and suspends nothing.
	Mechanisms Mechanisms
	Access     Access
	TCP        TCP
	Limits     Limits
	Policy     scheduler.Policy
	Rules      []classify.Rule
	Safety     Safety
	Discovery  Discovery
	Containers Containers
	Metrics    Metrics
	Tracing    Tracing
	Log        Log
}

// Mechanisms are names of hazard.Mechanisms, none of them twice.
type Mechanisms []string

// Safety says on which GPUs queues are preempted.
type Safety struct {
	// Hazards are looked at before the built-in table.
	Hazards []hazard.Row
}

// Access says who may call, by group and user: names or decimal ids, not looked
// up yet. A name this host does not know gives nobody a right.
type Access struct {
	OnlineGroups, AdminGroups []string
	OnlineUsers, AdminUsers   []string
}

// TCP says how clients on other hosts reach the daemon: with certificates on both
// sides, or not at all.
type TCP struct {
	// Address is "HOST:PORT" to listen on, or "", and then all else is, too.
	Address string
	// Certificate, Key and ClientCA are PEM files: the daemon's certificate and its
	// key, and the authorities of its clients.
	Certificate, Key, ClientCA string
	// Online and Admin are names of certificates with these rights, as auth.Certificate has
	// them.
	Online, Admin []string
}

// Limits bounds what clients can ask of the daemon.
type Limits struct {
	Leases          scheduler.Limits
	Clients         server.Limits
	MaxMessageBytes int
}

// Discovery says how the daemon watches KFD.
type Discovery struct {
	// Interval and IdleInterval are the shortest and the longest pause between two
	// looks at the queues.
	Interval, IdleInterval time.Duration
	// MQDsInterval is the time between two readings of the dumps of queues in
	// debugfs, 0 for never.
	MQDsInterval time.Duration
}

// Containers says who is asked what containers are called.
type Containers struct {
	// Sockets are the paths of the runtimes' sockets; none: no runtime is asked.
	Sockets []string
	// Kubelet is the address of the kubelet's API, or "". KubeletToken and KubeletCA
	// are files: the token to show it, and the certificates that vouch for it.
	Kubelet, KubeletToken, KubeletCA string
}

// Tracing says where traces of leases go.
type Tracing struct {
	// Endpoint is the collector; "" is none.
	Endpoint string
}

// Metrics says where the daemon is observed over HTTP.
type Metrics struct {
	// Address is "HOST:PORT" to listen on, or "".
	Address string
}

// Log says what the daemon logs.
type Log struct {
	// Level is debug, info, warn or error.
	Level string
}

// Default returns the configuration of an empty file.
func Default() Config {
	return Config{
		Socket:     "/run/gpreempt/gpreemptd.sock",
		Mechanisms: Mechanisms{"dbgtrap"},
		Access: Access{
			OnlineGroups: []string{"gpreempt"},
			AdminGroups:  []string{"gpreempt-admin"},
		},
		Limits: Limits{
			Leases: scheduler.Limits{LeasesPerClient: 64, LeasesPerUser: 1024, LeasesTotal: 4096},
			Clients: server.Limits{
				StreamsPerClient: 16, RequestsPerSecond: 2000, Burst: 4000, RequestsPerUser: 8000,
				ConnectionsPerUser: 256, ConnectionsTotal: 1024,
			},
			MaxMessageBytes: 64 << 10,
		},
		Policy:     scheduler.DefaultPolicy(),
		Discovery:  Discovery{Interval: 50 * time.Millisecond, IdleInterval: time.Second, MQDsInterval: time.Second},
		Containers: Containers{Sockets: slices.Clone(container.DefaultSockets)},
		Log:        Log{Level: "info"},
	}
}
