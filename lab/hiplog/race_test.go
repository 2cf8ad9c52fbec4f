//go:build race

package hiplog_test

const raceEnabled = true
