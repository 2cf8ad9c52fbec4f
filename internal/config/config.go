// Package config parses and validates the daemon's configuration file.
package config

import (
	"cmp"
	_ "embed"
	"regexp"
	"time"

	"github.com/gpreempt/gpreempt/internal/auth"
	"github.com/gpreempt/gpreempt/internal/classify"
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

// Config is the whole configuration. gpreemptd.yaml has unit and range of each key.
type Config struct {
	// Socket is the absolute path of the unix socket.
	Socket string
	// Mechanisms are the enabled mechanisms, best first. Without any the daemon suspends
	// nothing.
	Mechanisms Mechanisms
	Access     auth.Names
	TCP        TCP
	Limits     Limits
	Policy     scheduler.Policy
	HQDBudget  scheduler.HQDBudget
	// HQDAlarm is the percentage of free slots for compute queues below which a GPU has a
	// warning; 0 for never.
	HQDAlarm   int
	Rules      []classify.Rule
	Jobs       []classify.JobRule
	Safety     Safety
	NVIDIA     NVIDIA
	Discovery  Discovery
	Containers Containers
	Metrics    Metrics
	Log        Log
}

// Mechanisms are distinct names of safety.Mechanisms.
type Mechanisms []string

// Safety restricts preemption.
type Safety struct {
	// Hazards are checked before the built-in table.
	Hazards []safety.Row
}

// NVIDIA configures the mechanism nvchannels.
type NVIDIA struct {
	// CopyEngines disables the channels of copy engines too.
	CopyEngines bool
}

// TCP configures the listener for clients on other hosts, with certificates on both sides.
type TCP struct {
	// Address is "HOST:PORT" to listen on; "" disables TCP.
	Address string
	// Certificate, Key and ClientCA are PEM files: the daemon's certificate and its key,
	// and the authorities of its clients.
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

// Rates returns Clients for a number of processors: a rate that is 0 follows it. All
// announcements of a host pass one lock, so more than eight processors do not serve more.
func (l Limits) Rates(processors int) server.Limits {
	c, n := l.Clients, min(processors, 8)
	c.RequestsPerSecond = cmp.Or(c.RequestsPerSecond, min(500*n, 2000))
	c.Burst = cmp.Or(c.Burst, min(1000*n, 4000))
	c.RequestsPerUser = cmp.Or(c.RequestsPerUser, 1000*n)
	return c
}

// Discovery configures how the daemon scans KFD.
type Discovery struct {
	// Interval and IdleInterval are the shortest and the longest time between two scans.
	Interval, IdleInterval time.Duration
	// MQDsInterval is the time between two reads of the queue dumps in debugfs; 0 for
	// never.
	MQDsInterval time.Duration
}

// Containers configures the sources of container names.
type Containers struct {
	// Sockets are the paths of the runtimes' sockets; if empty, no runtime is asked.
	Sockets []string
	// Kubelet is the address of the kubelet's API, or "". KubeletToken and KubeletCA are
	// files: the token for it, and the certificates of its authorities.
	Kubelet, KubeletToken, KubeletCA string
}

// variable is a reference to an environment variable, in the form of Kubernetes.
var variable = regexp.MustCompile(`\$\([A-Za-z_][A-Za-z0-9_]*\)`)

// KubeletAddress returns Kubelet with the values of environment variables. A variable that
// is not set stays as it is, so that the error that follows has its name.
func (c Containers) KubeletAddress(lookup func(string) (string, bool)) string {
	return variable.ReplaceAllStringFunc(c.Kubelet, func(reference string) string {
		if value, ok := lookup(reference[2 : len(reference)-1]); ok {
			return value
		}
		return reference
	})
}

// Metrics configures the HTTP listener for metrics and probes.
type Metrics struct {
	// Address is "HOST:PORT" to listen on, or "".
	Address string
}

// Log configures the log.
type Log struct {
	// Level is debug, info, warn or error.
	Level string
}

// Default returns the configuration of an empty file: what gpreemptd.yaml says.
func Default() Config {
	c, err := parse("gpreemptd.yaml", defaultYAML, Config{Policy: scheduler.DefaultPolicy()})
	if err != nil {
		panic("config: the default file is invalid: " + err.Error())
	}
	return c
}
