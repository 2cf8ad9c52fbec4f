//go:build !race

package e2e

// raceDetector tells that the tests themselves have the race detector.
const raceDetector = false
