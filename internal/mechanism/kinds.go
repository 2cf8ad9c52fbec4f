package mechanism

import "slices"

// The names of the mechanisms.
const (
	DBGTrap    = "dbgtrap"
	CRIU       = "criu"
	Freezer    = "freezer"
	Stop       = "stop"
	NVChannels = "nvchannels"
)

// Kind is what is known of a mechanism without having one.
type Kind struct {
	Name string
	// Driver is the driver whose queues it takes off their GPUs: "kfd", which does not know user queues
	// of DRM, or "nvidia"; "" for one that stops the program. Rows of the hazard table are about those
	// of kfd unless they name others.
	Driver string
	// Debugs: it is a debugger, which never_debug forbids.
	Debugs bool
	// LeavesContexts: the queues of secondary KFD contexts go on running.
	LeavesContexts bool
	// Journal: the kernel does not undo its pauses when the daemon dies.
	Journal bool
	// Configured: the config key mechanisms enables it. Else a rule or an admin does, for single
	// processes.
	Configured bool
}

// Kinds are the mechanisms.
var Kinds = []Kind{
	{Name: DBGTrap, Driver: "kfd", Debugs: true, LeavesContexts: true, Configured: true},
	{Name: CRIU, Driver: "kfd", Debugs: true, Journal: true, Configured: true},
	{Name: Freezer, Journal: true, Configured: true},
	{Name: Stop, Journal: true},
	{Name: NVChannels, Driver: "nvidia", Journal: true, Configured: true},
}

// KindOf returns what is known of a mechanism; false for none with that name.
func KindOf(name string) (Kind, bool) {
	i := slices.IndexFunc(Kinds, func(k Kind) bool { return k.Name == name })
	if i < 0 {
		return Kind{}, false
	}
	return Kinds[i], true
}

// Names returns the names of the mechanisms that are of a kind.
func Names(of func(Kind) bool) (names []string) {
	for _, k := range Kinds {
		if of(k) {
			names = append(names, k.Name)
		}
	}
	return names
}
