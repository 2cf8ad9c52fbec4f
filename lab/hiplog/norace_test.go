//go:build !race

package hiplog_test

const raceEnabled = false
