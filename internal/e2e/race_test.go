//go:build race

package e2e

// raceDetector tells that the binaries are built with the race detector, as the
// test was.
const raceDetector = true
