// Package config hides the format of the daemon's one configuration file: its
// keys, their ranges and defaults, and how mistakes in it are told.
package config

import (
	"time"

	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// DefaultPath is where gpreemptd looks for its file.
const DefaultPath = "/etc/gpreempt/gpreemptd.yaml"

// Config is the whole configuration. The comment of each key, with its unit and
// range, is in fields.go: DefaultYAML prints it.
type Config struct {
	// Socket is the absolute path of the unix socket.
	Socket    string
	Access    Access
	Limits    Limits
	Policy    scheduler.Policy
	Rules     []classify.Rule
	Discovery Discovery
	Log       Log
}

// Access says who may call, by group and user: names or decimal ids, not looked
// up yet. A name this host does not know gives nobody a right.
type Access struct {
	OnlineGroups, AdminGroups []string
	OnlineUsers, AdminUsers   []string
}

// Limits bounds what clients can ask of the daemon.
type Limits struct {
	LeasesPerClient  int
	LeasesTotal      int
	StreamsPerClient int
	// RequestsPerSecond and Burst are per client.
	RequestsPerSecond int
	Burst             int
	MaxMessageBytes   int
}

// Discovery says how the daemon watches KFD.
type Discovery struct {
	// Interval is the time between two looks at the queues.
	Interval time.Duration
}

// Log says what the daemon logs.
type Log struct {
	// Level is debug, info, warn or error.
	Level string
}

// Default gives the configuration of an empty file.
func Default() Config {
	return Config{
		Socket: "/run/gpreempt/gpreemptd.sock",
		Access: Access{
			OnlineGroups: []string{"gpreempt"},
			AdminGroups:  []string{"gpreempt-admin"},
		},
		Limits: Limits{
			LeasesPerClient:   64,
			LeasesTotal:       4096,
			StreamsPerClient:  16,
			RequestsPerSecond: 2000,
			Burst:             4000,
			MaxMessageBytes:   64 << 10,
		},
		Policy:    scheduler.DefaultPolicy(),
		Discovery: Discovery{Interval: 250 * time.Millisecond},
		Log:       Log{Level: "info"},
	}
}
