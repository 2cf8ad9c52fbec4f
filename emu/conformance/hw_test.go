//go:build hw

package conformance

// realHardware: whoever built this wants its GPUs used.
const realHardware = true
