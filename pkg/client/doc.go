// Package client implements the client of gpreemptd for inference servers: announce
// work, run it, and report its end.
//
//	c, err := client.Dial("") // the daemon of this host
//	...
//	defer c.Close()
//	err = c.Do(ctx, client.Request{GPUs: client.OwnGPUs(), Label: "chat", MaxWait: 20 * time.Millisecond},
//		func(ctx context.Context) error { return model.Run(ctx, batch) })
//
// Do announces the work, waits until the offline work on the GPUs is suspended
// or max_wait has passed, runs the function, and completes the lease in every case.
// Acquire and Lease.Release are its two halves. All announcements of a Client are frames
// of one stream, which cost less than calls. Work that overlaps shares one lease if its
// announcements are equal, so that any number of requests may be in flight.
//
// # Without a daemon
//
// Inference continues without a daemon. Unless the client has the option FailClosed,
// Acquire does not fail when the daemon is absent, does not answer, or refuses. It returns
// a lease whose Protected is false, and calls the OnUnprotected hook once, and once more when
// protection is back. It waits for max_wait and a tenth of a second; while the daemon is known
// to be unavailable, it does not wait.
//
// The client connects when a call first needs it, and reconnects automatically, with
// pauses of at most two seconds.
//
// # The time to live of a lease
//
// A lease has a time to live, so that the lease of a dead client ends. The client renews
// a Lease whenever half of that time has passed; a process that does not release a lease
// keeps it until it exits. With Request.NoRenew the lease is not renewed: it is a time
// slice. A lease also ends with the stream; see Lease.Lost.
//
// Errors of the daemon are *gpreempt.Error values with a reason and a next step.
// All methods may be called from any goroutine.
package client
