package arch

// rule says what a package may do.
type rule struct {
	// imports are the packages of this module it may import, below the module
	// path. Test files may import more; the generated code under api/gen is not
	// held to the table, but importing it is.
	imports []string
	// stdOnly: no package from outside this module and the standard library.
	stdOnly bool
	// pure: a function of its arguments. No os, no net, no system calls, no
	// reading of the clock, no sleeping, no random numbers.
	pure bool
	// kernel: may import golang.org/x/sys.
	kernel bool
	// unsafe: may import unsafe, in files named *_unsafe.go.
	unsafe bool
	// unsafeTests: its tests may, in files named *_unsafe_test.go.
	unsafeTests bool
}

// The generated packages.
const (
	apiV1 = "api/gen/gpreempt/v1"
)

// table is the import table, lowest layer first: a package may import only what stands
// above it here. Change it on purpose and
// in a commit of its own. An entry may exist before its package does.
var table = []struct {
	pkg string
	rule
}{
	// Words: the domain, the API's codes and names. No I/O.
	{apiV1, rule{}},
	{"internal/stat", rule{stdOnly: true, pure: true}},
	{"internal/stat/histogram", rule{imports: []string{"internal/stat"}, stdOnly: true, pure: true}},
	{"test/arch", rule{stdOnly: true}},
	{"pkg/gpreempt", rule{stdOnly: true}},
	{"internal/api", rule{imports: []string{apiV1, "pkg/gpreempt"}}},

	// Files that somebody names.
	{"internal/regular", rule{stdOnly: true}},

	// Decisions: pure, or with the filesystem as an argument.
	{"pkg/scheduler", rule{imports: []string{"pkg/gpreempt"}, stdOnly: true, pure: true, unsafeTests: true}},
	{"pkg/scheduler/parking", rule{imports: []string{"pkg/gpreempt", "pkg/scheduler"}, stdOnly: true, pure: true}},
	{"internal/log", rule{imports: []string{"pkg/gpreempt", "pkg/scheduler"}}},
	{"internal/classify", rule{imports: []string{"pkg/gpreempt"}, stdOnly: true, pure: true}},
	{"pkg/discovery", rule{imports: []string{"pkg/gpreempt"}, stdOnly: true}},
	{"pkg/discovery/debugfs", rule{imports: []string{"pkg/discovery", "pkg/gpreempt"}, stdOnly: true}},
	{"pkg/discovery/registers", rule{imports: []string{"pkg/discovery", "pkg/discovery/debugfs"}, stdOnly: true}},

	// Kernel: the only packages that make system calls Go has no words for.
	{"internal/hrtimer", rule{kernel: true}},
	{"internal/proc", rule{imports: []string{"pkg/discovery", "pkg/gpreempt"}, kernel: true, unsafe: true}},
	{"internal/auth", rule{imports: []string{apiV1, "internal/proc", "internal/regular", "pkg/discovery", "pkg/gpreempt"}, kernel: true, unsafe: true}},
	{"pkg/kfd", rule{imports: []string{"pkg/gpreempt"}, kernel: true, unsafe: true}},
	// Another vendor's GPUs: what knows them is below the seams of discovery and mechanism.
	{"pkg/nvrm", rule{imports: []string{"internal/proc", "pkg/discovery", "pkg/gpreempt"}, kernel: true, unsafe: true}},
	{"internal/testutil", rule{imports: []string{"pkg/kfd"}, kernel: true}},
	// Mechanisms.
	{"internal/safedir", rule{stdOnly: true}},
	{"internal/child", rule{imports: []string{"internal/log", "internal/proc"}, kernel: true}},
	{"internal/mechanism", rule{imports: []string{"internal/log", "internal/proc", "internal/safedir", "pkg/gpreempt"}}},
	{"internal/spell", rule{stdOnly: true}},
	{"internal/cmdline", rule{imports: []string{"internal/spell"}}},
	{"internal/config/yamlfile", rule{imports: []string{"internal/spell", "pkg/gpreempt"}}},
	{"internal/safety", rule{imports: []string{apiV1, "internal/api", "internal/config/yamlfile", "internal/mechanism", "internal/proc", "pkg/discovery", "pkg/gpreempt"}}},
	{"internal/mechanism/dbgtrap", rule{imports: []string{"internal/log", "internal/mechanism", "internal/proc", "pkg/discovery", "pkg/gpreempt", "pkg/kfd"}, kernel: true}},
	{"internal/mechanism/criu", rule{imports: []string{"internal/mechanism", "internal/log", "internal/proc", "pkg/gpreempt", "pkg/kfd"}, kernel: true}},
	{"internal/mechanism/helper", rule{imports: []string{"internal/child", "internal/log", "internal/mechanism", "internal/mechanism/criu", "internal/mechanism/dbgtrap", "internal/proc", "pkg/gpreempt", "pkg/kfd"}, kernel: true}},
	{"internal/mechanism/freezer", rule{imports: []string{"internal/mechanism", "internal/log", "internal/proc", "pkg/discovery", "pkg/gpreempt"}, kernel: true}},
	{"internal/mechanism/nvchannels", rule{imports: []string{"internal/child", "internal/log", "internal/mechanism", "internal/proc", "pkg/gpreempt", "pkg/nvrm"}, kernel: true}},

	// The daemon.
	{"internal/container", rule{imports: []string{"internal/log", "internal/regular", "pkg/gpreempt"}}},
	{"internal/inventory", rule{imports: []string{"internal/log", "internal/proc", "pkg/discovery", "pkg/discovery/debugfs", "pkg/gpreempt", "pkg/kfd"}, kernel: true}},
	{"internal/dumps", rule{imports: []string{"internal/child", "internal/inventory", "pkg/discovery/debugfs"}}},
	{"internal/events", rule{imports: []string{"internal/auth", "internal/inventory", "internal/log", "pkg/gpreempt", "pkg/scheduler"}}},
	{"internal/targets", rule{imports: []string{"internal/classify", "internal/safety", "internal/inventory", "internal/log", "internal/mechanism", "pkg/discovery", "pkg/gpreempt", "pkg/scheduler"}}},
	{"internal/server", rule{imports: []string{apiV1, "internal/auth", "internal/classify", "internal/api", "internal/events", "internal/inventory", "internal/log", "internal/targets", "pkg/discovery", "pkg/discovery/debugfs", "pkg/gpreempt", "pkg/scheduler"}}},
	{"internal/config", rule{imports: []string{"internal/auth", "internal/classify", "internal/config/yamlfile", "internal/mechanism", "internal/regular", "internal/safety", "internal/server", "internal/spell", "pkg/gpreempt", "pkg/scheduler"}}},
	{"internal/daemon", rule{imports: []string{apiV1, "internal/auth", "internal/classify", "internal/cmdline", "internal/config", "internal/config/yamlfile", "internal/container", "internal/events", "internal/safety", "internal/hrtimer", "internal/dumps", "internal/inventory", "internal/log", "internal/mechanism", "internal/mechanism/criu", "internal/mechanism/dbgtrap", "internal/mechanism/freezer", "internal/mechanism/helper", "internal/mechanism/nvchannels", "internal/targets", "internal/server", "internal/proc", "internal/safedir", "internal/api", "pkg/discovery", "pkg/discovery/debugfs", "pkg/gpreempt", "pkg/kfd", "pkg/nvrm", "pkg/scheduler", "pkg/scheduler/parking"}}},
	{"cmd/gpreemptd", rule{imports: []string{"internal/daemon", "internal/dumps", "internal/mechanism/helper", "internal/mechanism/nvchannels", "internal/api", "pkg/gpreempt"}}},

	// The calls of the driver that gpreempt does not make: GPU programs do, here or emulated.
	{"emu/kfdabi", rule{imports: []string{"pkg/gpreempt", "pkg/kfd"}, stdOnly: true}},

	// Acceptance of a GPU, a program of its own with the daemon's mechanism.
	{"accept/conformance", rule{imports: []string{"emu/kfdabi", "pkg/gpreempt", "pkg/kfd"}, kernel: true, unsafe: true}},
	{"accept/workload", rule{imports: []string{"emu/kfdabi", "pkg/gpreempt", "pkg/kfd"}, kernel: true, unsafe: true}},
	{"accept", rule{imports: []string{"internal/api", "accept/workload", "accept/conformance", "internal/mechanism", "internal/mechanism/dbgtrap", "internal/mechanism/helper", "internal/proc", "internal/safety", "pkg/discovery", "pkg/gpreempt", "pkg/kfd"}, kernel: true}},
	{"accept/cmd/gpaccept", rule{imports: []string{"accept", "accept/conformance", "accept/workload", "internal/mechanism/helper", "pkg/discovery", "pkg/gpreempt"}}},

	// The clients: they reach the daemon over its socket and in no other way.
	{"pkg/client", rule{imports: []string{apiV1, "internal/api", "internal/regular", "pkg/gpreempt"}}},

	// What commands stand on, and gpctl.
	{"internal/term", rule{imports: []string{apiV1, "internal/api", "internal/cmdline", "internal/spell", "pkg/client", "pkg/gpreempt"}}},
	{"internal/testutil/clitest", rule{imports: []string{apiV1, "internal/api", "internal/term", "pkg/gpreempt"}}},
	{"internal/fleet", rule{stdOnly: true}},
	{"internal/cli", rule{imports: []string{apiV1, "internal/api", "internal/cmdline", "internal/fleet", "internal/regular", "internal/spell", "internal/stat", "internal/term", "pkg/client", "pkg/discovery", "pkg/gpreempt"}}},
	{"cmd/gpctl", rule{imports: []string{"internal/cli"}}},

	// The lab, a module of its own: what gpreempt does to given work, simulated, emulated or on
	// hardware, and what drivers and runtimes wrote.
	{"lab/scenario", rule{imports: []string{"internal/config/yamlfile", "internal/regular", "internal/spell", "pkg/gpreempt"}}},
	{"lab/evidence", rule{imports: []string{"internal/config/yamlfile", "internal/regular", "internal/stat"}}},
	{"lab/sim", rule{imports: []string{"internal/stat", "lab/evidence", "lab/scenario", "pkg/gpreempt", "pkg/scheduler", "pkg/scheduler/parking"}, stdOnly: true, pure: true}},
	{"lab/report", rule{imports: []string{"internal/stat", "lab/evidence"}}},
	{"lab/spans", rule{imports: []string{apiV1, "internal/api", "pkg/scheduler"}}},
	{"lab/trial", rule{imports: []string{apiV1, "internal/api", "internal/config/yamlfile", "internal/regular", "internal/stat", "lab/evidence", "lab/scenario", "lab/spans", "pkg/client", "pkg/discovery", "pkg/gpreempt", "pkg/scheduler"}}},
	{"lab/kfdtrace", rule{imports: []string{"internal/stat/histogram", "pkg/discovery", "pkg/gpreempt"}, stdOnly: true}},
	{"lab/hiplog", rule{imports: []string{"internal/stat/histogram"}}},
	{"lab/capture", rule{imports: []string{apiV1, "lab/hiplog", "lab/kfdtrace", "pkg/discovery"}}},
	{"lab/cli", rule{imports: []string{apiV1, "internal/api", "internal/cmdline", "internal/config/yamlfile", "internal/regular", "internal/term", "lab/capture", "lab/evidence", "lab/hiplog", "lab/kfdtrace", "lab/report", "lab/scenario", "lab/sim", "lab/spans", "lab/trial", "pkg/client", "pkg/discovery", "pkg/discovery/debugfs", "pkg/discovery/registers", "pkg/gpreempt", "pkg/scheduler"}}},
	{"lab/cmd/gplab", rule{imports: []string{"lab/cli"}}},

	// The kit: the driver's rules and the model of the GPUs, which the simulated machine has
	// in process and the emulated machine below real programs. The shipped programs link
	// none of it.
	{"emu/driver", rule{imports: []string{"emu/kfdabi", "pkg/gpreempt", "pkg/kfd"}, stdOnly: true}},
	{"emu/kfdtest", rule{imports: []string{"emu/kfdabi", "emu/driver", "internal/proc", "pkg/gpreempt", "pkg/kfd"}, kernel: true}},
	{"emu/nvrmtest", rule{imports: []string{"internal/proc", "pkg/gpreempt", "pkg/nvrm"}, kernel: true}},
	{"emu/gpumodel", rule{imports: []string{"emu/driver", "internal/hrtimer", "pkg/gpreempt", "pkg/kfd"}, stdOnly: true}},
	{"emu/seccomp", rule{kernel: true, unsafe: true}},
	{"emu/engine", rule{imports: []string{"emu/gpumodel", "internal/hrtimer", "pkg/gpreempt"}, stdOnly: true, unsafe: true}},
	{"emu/kfdemu", rule{imports: []string{"emu/driver", "emu/engine", "emu/gpumodel", "emu/kfdabi", "emu/seccomp", "internal/hrtimer", "pkg/gpreempt", "pkg/kfd"}, kernel: true}},
	{"emu/workload", rule{imports: []string{"emu/engine", "emu/kfdabi", "internal/stat/histogram", "pkg/gpreempt", "pkg/kfd"}, kernel: true, unsafe: true}},
	{"emu/cmd/kfdemu", rule{imports: []string{apiV1, "emu/driver", "emu/gpumodel", "emu/kfdemu", "emu/kfdtest", "emu/workload", "internal/api", "internal/cmdline", "internal/config", "internal/daemon", "internal/inventory", "internal/mechanism/dbgtrap", "internal/proc", "internal/stat", "pkg/client", "pkg/discovery", "pkg/gpreempt", "pkg/kfd"}}},

	// Test files only, or what runs them: they run the built binaries and measure.
	{"emu/vm", rule{kernel: true}},
	{"test/e2e", rule{}},
	{"test/bench", rule{imports: []string{apiV1, "emu/gpumodel", "internal/config", "internal/daemon", "internal/hrtimer", "internal/mechanism", "internal/stat", "internal/testutil", "pkg/client", "pkg/discovery", "pkg/gpreempt", "pkg/scheduler"}}},
	{"test/rows", rule{stdOnly: true}},
	{"test/fleetscale", rule{imports: []string{"internal/events", "internal/inventory", "internal/stat", "pkg/gpreempt", "pkg/scheduler"}}},
}
