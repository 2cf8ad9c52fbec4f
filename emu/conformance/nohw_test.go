//go:build !hw

package conformance

const realHardware = false
