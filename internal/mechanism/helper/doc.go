// Package helper runs each session of dbgtrap in a process of its own, a helper, which makes
// all calls of the driver and of ptrace for one target.
//
// A call of the driver waits for the lock of its target and cannot be interrupted, not even
// by SIGKILL. A job can hold its own lock for as long as it likes. In the daemon, such a call
// would keep the dead daemon from ending, and so every other target suspended and the next
// daemon from starting. It keeps only its helper.
//
// A helper is another run of the daemon's program. The kernel kills it when the daemon dies,
// by whatever cause (PR_SET_PDEATHSIG), and then undoes what it did. It inherits one
// end of a socket pair and the standard error. A helper that is started ahead waits for the
// next target, and one whose target was released is used again.
package helper
