// Package otlp hides how leases become OpenTelemetry traces and get to a collector.
//
// Spans are made afterwards, of the records in the event log, which is the queue too:
// nothing waits for a collector, and one that is slow or gone costs spans. Of an
// announcement only its caller's trace context is kept when it comes.
package otlp

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/metadata"

	"github.com/gpreempt/gpreempt/internal/events"
	"github.com/gpreempt/gpreempt/internal/spans"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

const (
	// gatherTime is how long spans wait for others to go out with them.
	gatherTime = 200 * time.Millisecond
	// batchSpans is how many spans are in one message at most.
	batchSpans = 512
	// exportTime is how long a collector may take for them, with retries.
	exportTime = 10 * time.Second
	// lastExportTime is how long it may take at the end of the daemon.
	lastExportTime = 2 * time.Second
	// leasesKept bounds the leases whose traces are known: of older ones, spans are lost.
	leasesKept = 16384
	// maxParent and maxState bound what is kept of a caller's headers; the standard
	// asks for 55 and 512 bytes.
	maxParent, maxState = 64, 512
)

// EventLog is what is needed of *events.Log.
type EventLog interface {
	Read(after uint64, dst []events.Entry) ([]events.Entry, error)
	Wait(ctx context.Context, after uint64) error
}

// Config is what an Exporter needs. Every field must be set.
type Config struct {
	// Endpoint is the collector: HOST:PORT or unix:PATH in clear text, or
	// https://HOST:PORT.
	Endpoint string
	Events   EventLog
	// Now is the scheduler's clock.
	Now func() scheduler.Time
	// LeaseID returns the API's name of a lease.
	LeaseID func(scheduler.LeaseID) string
	// Version is the daemon's, and Backend what stands for the hardware.
	Version, Backend string
	// Lost is told each time spans are lost, and nil once they arrive again.
	Lost func(error)
}

// Exporter sends the traces of leases. Announced may be called by any number of
// goroutines, Run by one and once.
type Exporter struct {
	cfg      Config
	exporter *otlptrace.Exporter
	provider *sdktrace.TracerProvider
	tracer   trace.Tracer

	mu    sync.Mutex // guards inbox and full
	inbox []announced
	full  uint64 // announcements that found the inbox full

	// Of Run alone.
	builder spans.Builder
	ended   []spans.Span
	early   []spans.Span // of leases that are not known yet
	leases  map[scheduler.LeaseID]*leaseTrace
	order   []scheduler.LeaseID // a ring of leasesKept, at next
	next    int
	batch   []sdktrace.ReadOnlySpan
	lost    uint64
	failing bool
}

// announced is an announcement as it came.
type announced struct {
	lease            scheduler.LeaseID
	parent, state    string
	arrived, decided scheduler.Time
}

// leaseTrace is the part of a trace that is a lease.
type leaseTrace struct {
	announce trace.Span
	ctx      context.Context //nolint:containedctx // what spans are begun in
	zero     time.Time       // the wall clock at 0 of the scheduler's
}

// New returns an exporter that is yet to run. It connects to nobody.
func New(ctx context.Context, cfg Config) (*Exporter, error) {
	exporter, err := otlptracegrpc.New(ctx, append(endpoint(cfg.Endpoint), otlptracegrpc.WithTimeout(exportTime),
		otlptracegrpc.WithRetry(otlptracegrpc.RetryConfig{
			Enabled: true, InitialInterval: 500 * time.Millisecond, MaxInterval: 2 * time.Second, MaxElapsedTime: exportTime,
		}))...)
	if err != nil {
		return nil, fmt.Errorf("export traces to %s: %w", cfg.Endpoint, err)
	}
	about, err := resource.New(ctx, resource.WithHost(), resource.WithTelemetrySDK(), resource.WithAttributes(
		attribute.String("service.name", "gpreemptd"), attribute.String("service.version", cfg.Version), attribute.String("gpreempt.backend", cfg.Backend),
	), resource.WithFromEnv())
	if about == nil { // an error may be of a part of it
		return nil, fmt.Errorf("export traces to %s: %w", cfg.Endpoint, errors.Join(err, exporter.Shutdown(ctx)))
	}
	e := &Exporter{cfg: cfg, exporter: exporter, leases: map[scheduler.LeaseID]*leaseTrace{}, order: make([]scheduler.LeaseID, leasesKept)}
	// Sampled is what the caller samples, and all else, unless OTEL_TRACES_SAMPLER says otherwise.
	e.provider = sdktrace.NewTracerProvider(sdktrace.WithResource(about), sdktrace.WithSpanProcessor((*collect)(e)))
	e.tracer = e.provider.Tracer("github.com/gpreempt/gpreempt", trace.WithInstrumentationVersion(cfg.Version))
	return e, nil
}

func endpoint(where string) []otlptracegrpc.Option {
	if strings.HasPrefix(where, "https://") {
		return []otlptracegrpc.Option{otlptracegrpc.WithEndpointURL(where)}
	}
	return []otlptracegrpc.Option{otlptracegrpc.WithEndpoint(where), otlptracegrpc.WithInsecure()}
}

// Announced takes note of an announcement whose call has ctx. It waits for nobody.
func (e *Exporter) Announced(ctx context.Context, lease scheduler.LeaseID, arrived, decided scheduler.Time) {
	a := announced{lease: lease, arrived: arrived, decided: decided}
	if v := metadata.ValueFromIncomingContext(ctx, "traceparent"); len(v) > 0 && len(v[0]) <= maxParent {
		a.parent = v[0]
		if v := metadata.ValueFromIncomingContext(ctx, "tracestate"); len(v) > 0 && len(v[0]) <= maxState {
			a.state = v[0]
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.inbox) >= leasesKept {
		e.full++
		return
	}
	e.inbox = append(e.inbox, a)
}

// Run exports until ctx ends, and what there is by then. It takes a few seconds for that
// at most.
func (e *Exporter) Run(ctx context.Context) {
	var after uint64
	for ctx.Err() == nil {
		if len(e.early) == 0 {
			_ = e.cfg.Events.Wait(ctx, after) // an error is the end of ctx
		}
		gather := time.NewTimer(gatherTime)
		select {
		case <-gather.C:
		case <-ctx.Done():
		}
		gather.Stop()
		after = e.take(ctx, after)
		e.export(ctx)
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastExportTime)
	defer cancel()
	e.take(last, after)
	e.export(last)
	// Nothing is left in either, and no error to tell anybody.
	_ = e.provider.Shutdown(last)
	_ = e.exporter.Shutdown(last)
}

// take makes spans of all that is in the event log after a revision, and returns the last.
func (e *Exporter) take(ctx context.Context, after uint64) uint64 {
	var entries []events.Entry
	for {
		var err error
		if entries, err = e.cfg.Events.Read(after, entries[:0]); err != nil {
			// Overwritten before it was read: what is open can no longer be told.
			e.builder, after = spans.Builder{}, 0
			e.lose(1, fmt.Errorf("changes came faster than traces could be sent: %w", err))
			continue
		}
		if len(entries) == 0 {
			break
		}
		for _, entry := range entries {
			if entry.Admin == "" {
				e.ended = e.builder.Add(entry.Record, e.ended)
			}
			after = entry.Revision
		}
		if len(e.ended) >= batchSpans {
			e.finish(ctx)
		}
	}
	e.finish(ctx)
	return after
}

// finish turns what ended into spans of the SDK.
func (e *Exporter) finish(ctx context.Context) {
	e.mu.Lock()
	inbox, full := e.inbox, e.full
	e.inbox, e.full = nil, 0
	e.mu.Unlock()
	if full > 0 {
		e.lose(full, fmt.Errorf("%d announcements came faster than traces could be sent", full))
	}
	zero := time.Now().Add(-e.cfg.Now())
	for _, a := range inbox {
		e.begin(a, zero)
	}
	unknown := 0
	for _, s := range e.early {
		if !e.add(s) {
			unknown++ // it was announced long ago, or vanished at once
		}
	}
	if unknown > 0 {
		e.lose(uint64(unknown), fmt.Errorf("%d spans are of leases that are no longer known", unknown))
	}
	e.early = e.early[:0]
	for _, s := range e.ended {
		if !e.add(s) {
			e.early = append(e.early, s)
		}
	}
	e.ended = e.ended[:0]
	if len(e.batch) >= batchSpans {
		e.export(ctx)
	}
}

// begin begins the trace of a lease, or its part of the caller's.
func (e *Exporter) begin(a announced, zero time.Time) {
	if e.leases[a.lease] != nil {
		return // asked twice, with one request id
	}
	parent := propagation.TraceContext{}.Extract(context.Background(), //nolint:forbidigo // the context of spans, which nobody waits for
		propagation.MapCarrier{"traceparent": a.parent, "tracestate": a.state})
	t := &leaseTrace{zero: zero}
	t.ctx, t.announce = e.tracer.Start(parent, //nolint:spancheck // it ends with the answer, in add
		spans.Announce.String(), trace.WithSpanKind(trace.SpanKindServer), trace.WithTimestamp(zero.Add(a.arrived)), trace.WithAttributes(attribute.String("gpreempt.lease", e.cfg.LeaseID(a.lease))))
	_, decide := e.tracer.Start(t.ctx, "decide", trace.WithTimestamp(zero.Add(a.arrived)))
	decide.End(trace.WithTimestamp(zero.Add(a.decided)))
	delete(e.leases, e.order[e.next])
	e.leases[a.lease], e.order[e.next] = t, a.lease
	e.next = (e.next + 1) % len(e.order)
}

// add makes a span of a lease one of its trace, and reports whether the lease is known.
func (e *Exporter) add(s spans.Span) bool {
	switch s.Kind {
	case spans.Announce, spans.Quiescing, spans.Online, spans.Suspending, spans.Resuming:
	default:
		return true
	}
	if s.Lease == 0 {
		return true // by no announcement
	}
	t := e.leases[s.Lease]
	if t == nil {
		return false
	}
	end := trace.WithTimestamp(t.zero.Add(s.End))
	if s.Kind == spans.Announce {
		t.announce.SetAttributes(attribute.String("gpreempt.answer", s.Ended))
		if s.Ended == string(scheduler.CauseQuiet) || s.Ended == string(scheduler.CauseCoalesced) {
			t.announce.AddEvent("quiesced", trace.WithTimestamp(t.zero.Add(s.End)))
		}
		t.announce.End(end)
		return true
	}
	about := []attribute.KeyValue{attribute.String("gpreempt.cause", s.Cause), attribute.String("gpreempt.ended", s.Ended)}
	if !s.Target.IsZero() {
		about = append(about, attribute.String("gpreempt.target", s.Target.String()), attribute.Float64("gpreempt.mechanism_seconds", s.Took.Seconds()))
	}
	_, span := e.tracer.Start(t.ctx, s.Kind.String(), trace.WithTimestamp(t.zero.Add(s.Begin)), trace.WithAttributes(about...))
	if s.Ended == string(scheduler.CauseFailed) || s.Ended == string(scheduler.CauseHardware) {
		span.SetStatus(codes.Error, s.Ended)
	}
	span.End(end)
	return true
}

// export sends what has been gathered. What cannot be sent is lost, but at the end of ctx.
func (e *Exporter) export(ctx context.Context) {
	for len(e.batch) > 0 {
		n := min(len(e.batch), batchSpans)
		err := e.exporter.ExportSpans(ctx, e.batch[:n])
		if err != nil && ctx.Err() != nil {
			return // Run tries once more
		}
		e.batch = e.batch[n:]
		if err != nil {
			e.lose(uint64(n), err)
		} else if e.failing {
			e.failing = false
			e.cfg.Lost(nil)
		}
	}
	e.batch = nil
}

func (e *Exporter) lose(n uint64, err error) {
	e.lost, e.failing = e.lost+n, true
	e.cfg.Lost(fmt.Errorf("%d lost since the start: %w", e.lost, err))
}

// collect is the processor of an Exporter's spans: it gathers them. Only Run makes any.
type collect Exporter

// OnStart does nothing.
func (*collect) OnStart(context.Context, sdktrace.ReadWriteSpan) {}

// OnEnd gathers a span.
func (c *collect) OnEnd(s sdktrace.ReadOnlySpan) { c.batch = append(c.batch, s) }

// Shutdown does nothing: Run sends what is left.
func (*collect) Shutdown(context.Context) error { return nil }

// ForceFlush does nothing.
func (*collect) ForceFlush(context.Context) error { return nil }
