package auth

import (
	"os"
	"testing"

	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// TestReadingsThatHangAreBounded takes the place of readings that never end.
func TestReadingsThatHangAreBounded(t *testing.T) {
	handle, err := proc.Open("/", gpreempt.ProcessKey{PID: int32(os.Getpid())})
	if err != nil {
		t.Fatal(err)
	}
	handle.Close()
	p := Process{PID: handle.Key().PID, Start: handle.Key().Start}
	for range cap(factReadings) {
		factReadings <- struct{}{}
	}
	facts, known := p.Facts(nil)
	for range cap(factReadings) {
		<-factReadings
	}
	if known || facts.Comm != "" {
		t.Errorf("facts at the limit of concurrent reads: %+v, %v", facts, known)
	}
	p.Start++
	if facts, known := p.Facts(nil); known {
		t.Errorf("another process with the pid has %+v", facts)
	}
}
