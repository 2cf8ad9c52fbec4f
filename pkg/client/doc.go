// Package client hides the conversation an inference server has with gpreemptd:
// say that work is coming, do it, say that it is done.
//
//	c, err := client.Dial("") // the daemon of this host
//	...
//	defer c.Close()
//	err = c.Do(ctx, client.Request{Label: "chat", MaxWait: 20 * time.Millisecond},
//		func(ctx context.Context) error { return model.Run(ctx, batch) })
//
// With Certificate the daemon may be on another host; then the lease covers the GPUs
// the request names, or all of that host.
//
// Do announces the work, waits until the offline work on the GPUs is suspended
// or max_wait has passed, runs the function, and completes the lease whatever
// the function does. Acquire and Lease.Release are its two halves. A Session is
// the same over one stream, for the lowest latency.
//
// # When the daemon is absent
//
// Inference goes on. Unless the client was made with FailClosed, Acquire never
// fails because the daemon is not there, does not answer, or refuses for a
// reason that may pass (overload, shutdown): it returns a lease whose Protected is
// false, at once or when its patience ends, and calls the OnUnprotected hook
// once, and once more when protection is back. The patience is max_wait and a
// tenth of a second for the daemon itself; while the daemon is known to be away
// there is none. A request that is wrong or not permitted is an error in any case.
//
// The client connects when it is first needed and reconnects by itself, at most
// two seconds apart; the same goes for the stream of a Session.
//
// # How long a lease lives
//
// A lease has a time to live, so that a dead client holds up nobody. While a
// Lease is held the client renews it each time half of that has passed; a
// process that forgets to release one keeps it until it exits. Request.NoRenew
// turns renewing off: then the lease is a time slice. Leases also end with the
// connection or the stream they came by; Lease.Lost tells.
//
// Errors of the daemon are *gpreempt.Error values with a reason and a next step.
// All methods may be called from any goroutine.
package client
