package e2e

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
)

// The variables that make this binary another program than the tests; hostileEnv is one, too.
const (
	clientEnv   = "GPREEMPT_E2E_CLIENT"   // a client of the socket that it names
	heirEnv     = "GPREEMPT_E2E_HEIR"     // the heir of a client's connection
	meterEnv    = "GPREEMPT_E2E_METER"    // what measures an emulated machine: see meterMain
	debuggerEnv = "GPREEMPT_E2E_DEBUGGER" // a debugger that is not ours
	tracerEnv   = "GPREEMPT_E2E_TRACER"   // the tracer of a process, whose id it is
	roleEnv     = "GPREEMPT_ROLE"         // a process in a guest, by its name in guestRoles
)

// roles are those programs, which get the variable's value and return their exit status.
var roles = []struct {
	env  string
	main func(value string) int
}{
	{clientEnv, func(socket string) int { return clientMain(socket, os.Stdin, os.Stdout) }},
	{heirEnv, func(string) int { return heirMain(os.Stdout) }},
	{meterEnv, func(measurement string) int { return meterMain(measurement, os.Stdout) }},
	{debuggerEnv, func(string) int { return debuggerMain(os.Stdin, os.Stdout) }},
	{tracerEnv, func(pid string) int {
		n, err := strconv.Atoi(pid)
		if err == nil {
			err = tracerMain(n)
		}
		fmt.Println(err)
		return 1
	}},
	{hostileEnv, func(attack string) int { return hostileMain(attack, os.Stdout) }},
	{roleEnv, func(name string) int { return guestRoles[name](os.Args[1:]) }},
}

var guestRoles = map[string]func(args []string) int{
	"worker":    func([]string) int { return work() },
	"job":       func([]string) int { return job() },
	"holder":    func(args []string) int { return holderMain(args, os.Stdin, os.Stdout) },
	"sandboxed": sandboxed,
}

// TestMain runs the tests where they are, or is one of the processes that they start.
func TestMain(m *testing.M) {
	for _, r := range roles {
		if value := os.Getenv(r.env); value != "" {
			os.Exit(r.main(value))
		}
	}
	if code, ran := slurmMain(m); ran {
		os.Exit(code)
	}
	switch os.Getenv(guestEnv) {
	case "systemd":
		os.Exit(m.Run())
	case softGPUGuest:
		os.Exit(softGPUMain(m))
	}
	os.Exit(testMain(m))
}

// environment returns the test's environment without variables that affect the programs
// under test; the race detector must not delay the end of a process.
func environment(more ...string) []string {
	env := make([]string, 0, len(os.Environ()))
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, "GPREEMPT_") && !strings.HasPrefix(kv, "NOTIFY_SOCKET=") {
			env = append(env, kv)
		}
	}
	return append(append(env, "GORACE=atexit_sleep_ms=0", "NO_COLOR=1"), more...)
}
