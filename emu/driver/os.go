package driver

// Capability is a capability of capabilities(7), by its number.
type Capability int

// The capabilities the driver and ptrace ask for.
const (
	CapSysPtrace         Capability = 19
	CapSysAdmin          Capability = 21
	CapCheckpointRestore Capability = 40
)

// MM is the identity of an address space: values are compared with ==, nil means
// none. The threads of a process share it, exec replaces it.
type MM any

// Task is a thread as the operating system knows it: task_struct. Values are
// compared with ==, so there is one for each thread, and never one for two.
//
// The driver calls the methods with its lock held: they must not wait and must
// not call the driver.
type Task interface {
	// TID is the thread's id in the host's pid namespace.
	TID() int32
	// Leader is the main thread of the task's process (group_leader).
	Leader() Task
	// MM is the address space (get_task_mm), nil when the task is a zombie.
	MM() MM
	// Tracer is the thread that traces this one (ptrace_parent), nil if none does.
	Tracer() Task
	// Interrupted reports whether a signal is pending (signal_pending); a fatal one
	// counts, and stays.
	Interrupted() bool
	// Capable reports whether the task has a capability in the initial namespace.
	Capable(Capability) bool
	// PIDInside is the id of the task's process in the innermost pid namespace it
	// is in (task_tgid_nr_ns).
	PIDInside() int32
	// Comm is the name of the task.
	Comm() string
	// Find returns the task that the number pid means to this one (find_get_pid,
	// get_pid_task), nil if there is none. Zombies are found.
	Find(pid int32) Task
	// File takes hold of an open file by its descriptor (fget), nil if it is not
	// open.
	File(fd uint32) EventFile
	// Install returns the task's process a descriptor for a new event stream
	// (anon_inode_getfd), or a negative errno.
	Install(*SMIStream) int
}

// EventFile is the file a debugger handed to ENABLE.
type EventFile interface {
	// WriteDot writes one '.' in the name of by, which is nil for a worker of the
	// kernel's, and tells instead of waiting when it has to wait: the file is a pipe
	// in blocking mode and full. The implementation calls Driver.Wake when there may
	// be room. What else goes wrong is nobody's concern, as in the driver; but a pipe
	// without a reader gives by a SIGPIPE (pipe_write).
	WriteDot(by Task) (full bool)
	// Put releases the file (fput). It is called without the driver's lock.
	Put()
}

// Memory is memory of the calling process.
type Memory interface {
	// Read fills p from the memory (copy_from_user). False is EFAULT.
	Read(p []byte) bool
	// Write copies p to the memory (copy_to_user). False is EFAULT.
	Write(p []byte) bool
	// At is the memory off bytes further on.
	At(off int) Memory
	// Pointer is the memory that the 64-bit address stored off bytes further on
	// points to, nil for NULL.
	Pointer(off int) Memory
}
