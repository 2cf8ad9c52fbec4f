//go:build hw

package conformance

// realHardware: this build may use the machine's GPUs.
const realHardware = true
