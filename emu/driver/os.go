package driver

// Capability is a capability of capabilities(7), by its number.
type Capability int

// The capabilities that the driver and ptrace check.
const (
	CapSysPtrace         Capability = 19
	CapSysAdmin          Capability = 21
	CapCheckpointRestore Capability = 40
)

// MM identifies an address space: values are compared with ==, nil means none. The
// threads of a process share it, exec replaces it.
type MM any

// Task is a thread of the operating system: task_struct. Values are compared with ==: two
// are equal if, and only if, they are the same thread.
//
// The driver calls the methods with its lock held: they must not wait and must not call
// the driver.
type Task interface {
	// TID returns the thread's id in the host's pid namespace.
	TID() int32
	// Leader returns the main thread of the task's process (group_leader).
	Leader() Task
	// MM returns the address space (get_task_mm), nil when the task is a zombie.
	MM() MM
	// Tracer returns the thread that traces this one (ptrace_parent), nil for none.
	Tracer() Task
	// Interrupted reports whether a signal is pending (signal_pending). A fatal signal
	// stays pending.
	Interrupted() bool
	// Capable reports whether the task has a capability in the initial namespace.
	Capable(Capability) bool
	// PIDInside returns the id of the task's process in its innermost pid namespace
	// (task_tgid_nr_ns).
	PIDInside() int32
	// Comm returns the name of the task.
	Comm() string
	// Find returns the task with the id pid in this task's pid namespace (find_get_pid,
	// get_pid_task), nil for none. Zombies are found.
	Find(pid int32) Task
	// Pidfd returns the main thread of the process that a descriptor is a pidfd of, nil for a
	// process that was reaped. ok is false for any other descriptor (pidfd_get_pid).
	Pidfd(fd int32) (leader Task, ok bool)
	// File returns the open file of a descriptor with a reference (fget), nil if the
	// descriptor is not open.
	File(fd uint32) EventFile
	// Install opens a descriptor for a new event stream in the task's process
	// (anon_inode_getfd) and returns it, or a negative errno.
	Install(*SMIStream) int
}

// EventFile is the file that a debugger passed to ENABLE.
type EventFile interface {
	// WriteDot writes one '.' on behalf of by, which is nil for a kernel worker. It never
	// waits: it reports whether the file is a full pipe in blocking mode, and then calls
	// Driver.Wake when there may be room. As in the driver, other errors are ignored, but
	// by gets a SIGPIPE for a pipe without a reader (pipe_write).
	WriteDot(by Task) (full bool)
	// Put releases the file (fput). It is called without the driver's lock.
	Put()
}

// Memory is memory of the calling process.
type Memory interface {
	// Read fills p from the memory (copy_from_user). It returns false for EFAULT.
	Read(p []byte) bool
	// Write copies p to the memory (copy_to_user). It returns false for EFAULT.
	Write(p []byte) bool
	// At returns the memory off bytes further on.
	At(off int) Memory
	// Pointer returns the memory that the 64-bit address stored off bytes further on
	// points to, nil for NULL.
	Pointer(off int) Memory
}
