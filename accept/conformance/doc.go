// Package conformance compares drivers with one table of expectations. Its tests compare
// the fake of kfdtest, in each of its versions and machines, the emulator of kfdemu, and the
// driver of the running kernel; Play compares the driver of a host with GPUs.
//
// # The table
//
// The directory table has the expectations, each a few lines of text:
//
//	expect enable-needs-ptrace
//	when process-rule !gpu
//	D open
//	T open
//	D pipe ev
//	D enable T fd=ev -> EPERM
//	D seize T
//	D enable T fd=ev -> 0 state=0 rinfo_size=16
//
// "when" names conditions of the host, "!" a condition that must not hold; on other hosts
// the expectation is skipped. Every other line is an actor, a verb, its arguments, and the
// answer: a returned value or the name of an errno, then the results. Answers may differ:
// "-> thread-rule: EPERM | 0 num=0" is the first alternative whose condition holds;
// conditions joined by a comma must all hold. A line without an answer must succeed. A
// result that the answer does not name is not compared.
//
// Actors are processes, created when they are first named; T is the main thread of process
// T and T.1, T.2 are others. "start VERB" does not wait for the answer, "blocked" waits
// until the call sleeps in the driver, "stuck" until it waits there for the lock of a
// process, "await" until it returns. The other verbs are in the
// files verbs*.go and, those about processes, in play.go; attach and runtime
// are abbreviations of several (names.go). Masks are numbers or names joined by "+",
// such as runtime+new; a process's name is replaced by its pid, g0 and g1 by those of GPUs.
//
// GPUs are actors too: "g0 cycles" compares the runlist cycles since the last such line.
// "T queue 0" looks at a queue, and "T evict", "T raise" and "g0 hang" are what the memory
// manager and the hardware do; "T hold" has a process hold its own lock until "T release".
// This needs a host that shows and does them: a fake, the
// emulator, or the driver with nodes of emu/softgpu. CREATE_QUEUE gets memory as a ROCm
// program has it (memory.go).
package conformance
