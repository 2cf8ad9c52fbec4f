// Package config parses and validates the daemon's configuration file.
package config

import (
	"cmp"
	_ "embed"
	"time"

	"github.com/gpreempt/gpreempt/internal/auth"
	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/internal/config/yamlfile"
	"github.com/gpreempt/gpreempt/internal/safety"
	"github.com/gpreempt/gpreempt/internal/server"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// DefaultPath is the default path of the file.
const DefaultPath = "/etc/gpreempt/gpreemptd.yaml"

//go:embed gpreemptd.yaml
var defaultYAML []byte

// DefaultYAML returns a file with every default, and an explanation of every key.
// Rules and the knobs of the policy are comments, without a space after the #: a knob that
// is set does not follow the preset.
func DefaultYAML() []byte { return defaultYAML }

// Config is the whole configuration. gpreemptd.yaml has unit and range of each key. A key with the
// tag live can be put into force in a running daemon, which a test does for each; others need a
// restart.
type Config struct {
	// Socket is the absolute path of the unix socket.
	Socket string `yaml:"socket"`
	// Mechanisms are the enabled mechanisms, distinct and best first. Without any the daemon suspends
	// nothing.
	Mechanisms []string         `yaml:"mechanisms" write:"write a list such as [dbgtrap, freezer], or [] to suspend nothing"`
	Access     auth.Names       `yaml:"access" live:""`
	TCP        TCP              `yaml:"tcp"`
	Limits     Limits           `yaml:"limits" live:""`
	Policy     scheduler.Policy `yaml:"policy" live:""`
	// HQDBudget is the most that queues of offline processes take of the slots for compute queues
	// of each GPU, in percent; 0 parks nothing.
	HQDBudget int                `yaml:"hqd_budget" range:"0 90" live:""`
	Rules     []classify.Rule    `yaml:"rules" write:"write a list, each item beginning with - name: ..." live:""`
	Jobs      []classify.JobRule `yaml:"jobs" write:"write a list, each item beginning with - name: ..., or [] for no jobs" live:""`
	Safety    Safety             `yaml:"safety"`
	Discovery Discovery          `yaml:"discovery"`
	Metrics   Metrics            `yaml:"metrics"`
	Log       Log                `yaml:"log"`
	// Places are where the keys that the file has are in it.
	Places yamlfile.Places
}

// Safety restricts preemption.
type Safety struct {
	// Hazards are checked before the built-in table.
	Hazards []safety.Row `yaml:"hazards" write:"write a list, each item beginning with - id: ..." live:""`
}

// TCP configures the listener for clients on other hosts, with certificates on both sides.
type TCP struct {
	// Address is "HOST:PORT" to listen on; "" disables TCP.
	Address string `yaml:"address" write:"write HOST:PORT, such as 10.0.0.5:7443 or [::]:7443"`
	// Certificate, Key and ClientCA are PEM files: the daemon's certificate and its key,
	// and the authorities of its clients.
	Certificate string `yaml:"certificate" live:""`
	Key         string `yaml:"key" live:""`
	ClientCA    string `yaml:"client_ca" live:""`
	// Online and Admin are names of certificates with these rights, as auth.Certificate has
	// them.
	Online []string `yaml:"online" write:"write a list such as [dns:web.example]" live:""`
	Admin  []string `yaml:"admin" write:"write a list such as [cn:ops.example]" live:""`
}

// Limits bounds what clients can ask of the daemon. Only LeasesPerUser and RequestsPerUser are keys
// of the file.
type Limits struct {
	Leases          scheduler.Limits `yaml:",inline"`
	Clients         server.Limits    `yaml:",inline"`
	MaxMessageBytes int
}

// limits are those without a key: no site has a reason to have others. They bound what one
// process, or one user, takes from the rest.
func limits() Limits {
	return Limits{
		// All leases together take a few megabytes.
		Leases: scheduler.Limits{LeasesTotal: 4096},
		// A connection needs two file descriptors, and the unit permits more than twice
		// ConnectionsTotal of them.
		Clients: server.Limits{ConnectionsPerUser: 256, ConnectionsTotal: 1024},
		// The largest request, a policy with all its fields, has less than a kilobyte.
		MaxMessageBytes: 64 << 10,
	}
}

// Rates returns Clients for a number of processors: the rates follow it, unless the file has that of
// users, of which a process may have half. All announcements of a host pass one lock, so more than
// eight processors do not serve more.
func (l Limits) Rates(processors int) server.Limits {
	c, n := l.Clients, min(processors, 8)
	each := min(500*n, 2000)
	if c.RequestsPerUser > 0 {
		each = max(1, c.RequestsPerUser/2)
	}
	c.RequestsPerSecond = cmp.Or(c.RequestsPerSecond, each)
	c.Burst = cmp.Or(c.Burst, 2*c.RequestsPerSecond)
	c.RequestsPerUser = cmp.Or(c.RequestsPerUser, 1000*n)
	return c
}

// Discovery configures how the daemon scans KFD. Only Debugfs is a key of the file.
type Discovery struct {
	// Interval and IdleInterval are the shortest and the longest time between two scans. A scan
	// takes about a millisecond: at 50 ms that is 2 % of a processor, and only while queues change.
	Interval, IdleInterval time.Duration
	// Debugfs permits to read the driver's dumps of queues.
	Debugfs bool `yaml:"debugfs" live:""`
}

// Metrics configures the HTTP listener for metrics and probes.
type Metrics struct {
	// Address is "HOST:PORT" to listen on, or "".
	Address string `yaml:"address" write:"write HOST:PORT, such as 127.0.0.1:9477"`
}

// Log configures the log.
type Log struct {
	// Level is debug, info, warn or error.
	Level string `yaml:"level" words:"debug,info,warn,error" live:""`
}

// Default returns the configuration of an empty file: what gpreemptd.yaml says, and the values
// without a key.
func Default() Config {
	c, err := parse("gpreemptd.yaml", defaultYAML, Config{
		Policy: scheduler.DefaultPolicy(), Limits: limits(), Discovery: Discovery{Interval: 50 * time.Millisecond, IdleInterval: time.Second, Debugfs: true},
	})
	if err != nil {
		panic("config: the default file is invalid: " + err.Error())
	}
	c.Places = nil
	return c
}
