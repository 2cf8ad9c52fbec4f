package testutil

import (
	"os"
	"strconv"
	"testing"
)

// Number returns how often a test repeats something: the number in an environment variable,
// or def where that is empty.
func Number(t testing.TB, variable string, def int) int {
	t.Helper()
	text := os.Getenv(variable)
	if text == "" {
		return def
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("%s is %q, want a number of times", variable, text)
	}
	return n
}
