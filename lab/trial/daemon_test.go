package trial

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

// breakers is a daemon whose GPU has an open breaker for a time.
type breakers struct {
	gpreemptv1.AdminServiceClient
	closes time.Time
}

func (b *breakers) ListGpus(context.Context, *gpreemptv1.ListGpusRequest, ...grpc.CallOption) (*gpreemptv1.ListGpusResponse, error) {
	return &gpreemptv1.ListGpusResponse{Gpus: []*gpreemptv1.Gpu{{}, {BreakerOpen: time.Now().Before(b.closes)}}}, nil
}

// A repeat does not begin while a breaker is open that an earlier one caused, but does in the end.
func TestRepeatWaitsForBreakers(t *testing.T) {
	for open, want := range map[time.Duration]time.Duration{0: 0, 30 * time.Second: 30 * time.Second, time.Hour: breakerTime + pollTime} {
		synctest.Test(t, func(t *testing.T) {
			began := time.Now()
			d := &daemon{admin: &breakers{closes: began.Add(open)}}
			if err := d.awaitBreakers(t.Context()); err != nil {
				t.Fatal(err)
			}
			if got := time.Since(began); got != want {
				t.Errorf("open for %v: it waited for %v, want %v", open, got, want)
			}
		})
	}
}
