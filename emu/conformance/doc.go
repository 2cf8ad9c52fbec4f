// Package conformance hides how one table of expectations about the driver is put
// to whatever claims to be it: the fake of kfdtest, in each of its versions and
// machines, the emulator of kfdemu, and the driver of the running kernel. It has no
// code but tests.
//
// # The table
//
// testdata holds the expectations, each a few lines of text:
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
// "when" names what must hold of the host, "!" what must not; elsewhere the
// expectation is not asked. Every other line is an actor, a verb, what it needs, and
// the answer: a value returned or the name of an errno, then what was handed back.
// Answers may differ: "-> thread-rule: EPERM | 0 num=0" is the first of its
// alternatives whose condition holds, those joined by a comma together. A line
// without an answer must succeed. A word in the answer that is not there is not
// compared.
//
// Actors are processes, made when they are first named; T is the main thread of
// process T and T.1, T.2 are others. "start VERB" does not wait for the answer,
// "blocked" waits until the call sleeps in the driver, "await" until it returns. The
// other verbs are in the files verbs_*_test.go and, those about processes, in
// play_test.go; attach and runtime stand for several (names_test.go). Masks are
// numbers or names joined by "+", such as runtime+new; a process's name stands for
// its pid, g0 and g1 for GPUs.
package conformance
