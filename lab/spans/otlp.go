package spans

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	grpccodes "google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

const (
	// gatherTime is how long spans wait for others to be sent with them.
	gatherTime = 200 * time.Millisecond
	// batchSpans is the most spans in one message.
	batchSpans = 512
	// exportTime is how long a collector may take for one message, retries included.
	exportTime = 10 * time.Second
	// lastExportTime is the same for what remains when Run ends.
	lastExportTime = 2 * time.Second
	// reconnectTime is the pause before the next attempt to follow the daemon.
	reconnectTime = time.Second
	// leasesKept bounds the leases whose trace is known: the spans of older ones are lost.
	leasesKept = 16384
)

// ExporterConfig is what an Exporter needs. Every field must be set.
type ExporterConfig struct {
	// Endpoint is the collector: HOST:PORT, http://HOST:PORT or unix:PATH in clear text,
	// or https://HOST:PORT.
	Endpoint string
	Daemon   gpreemptv1.AdminServiceClient
	// Warn is called with an error when spans are lost or the daemon is not reachable,
	// and with nil when a message arrives again. It must not block.
	Warn func(error)
}

// Exporter follows the events of a daemon and exports its leases as OpenTelemetry traces.
// It is used by one goroutine.
//
// The daemon's event log is the queue: while a collector is slow, the exporter reads no
// events. When the daemon has overwritten events that were not read yet, their spans are
// lost; the daemon waits for nothing.
type Exporter struct {
	cfg      ExporterConfig
	exporter *otlptrace.Exporter

	// Of the daemon that is followed; a daemon that restarts has new ones.
	started  time.Time
	after    uint64 // the last revision that was read
	provider *sdktrace.TracerProvider
	tracer   trace.Tracer
	builder  Builder
	leases   map[string]*leaseTrace
	order    [leasesKept]string // a ring, at next
	next     int

	ended   []Span
	batch   []sdktrace.ReadOnlySpan
	lost    uint64
	warning bool
}

// leaseTrace is the span that the spans of a lease are below.
type leaseTrace struct {
	ctx      context.Context //nolint:containedctx // a span's place in its trace
	announce trace.Span
	zero     time.Time // of the daemon's clock
}

// NewExporter returns an exporter. It connects to nothing yet.
func NewExporter(ctx context.Context, cfg ExporterConfig) (*Exporter, error) {
	options, err := endpoint(cfg.Endpoint)
	if err != nil {
		return nil, err
	}
	exporter, err := otlptracegrpc.New(ctx, append(options, otlptracegrpc.WithTimeout(exportTime),
		otlptracegrpc.WithRetry(otlptracegrpc.RetryConfig{
			Enabled: true, InitialInterval: 500 * time.Millisecond, MaxInterval: 2 * time.Second, MaxElapsedTime: exportTime,
		}))...)
	if err != nil {
		return nil, fmt.Errorf("export traces to %s: %w", cfg.Endpoint, err)
	}
	return &Exporter{cfg: cfg, exporter: exporter}, nil
}

func endpoint(where string) ([]otlptracegrpc.Option, error) {
	address := where
	if u, err := url.Parse(where); err == nil && (u.Scheme == "http" || u.Scheme == "https") {
		address = u.Host
	}
	_, port, err := net.SplitHostPort(address)
	path, unix := strings.CutPrefix(where, "unix:")
	switch {
	case unix && path != "":
		return []otlptracegrpc.Option{otlptracegrpc.WithEndpoint(where), otlptracegrpc.WithInsecure()}, nil
	case err != nil || port == "":
		return nil, fmt.Errorf("invalid collector %q: use HOST:PORT, such as 127.0.0.1:4317, unix:PATH or https://HOST:PORT", where)
	case strings.HasPrefix(where, "https://"):
		return []otlptracegrpc.Option{otlptracegrpc.WithEndpointURL(where)}, nil
	default:
		return []otlptracegrpc.Option{otlptracegrpc.WithEndpoint(address), otlptracegrpc.WithInsecure()}, nil
	}
}

// Remembered exports what the daemon remembers.
func (e *Exporter) Remembered(ctx context.Context) error {
	defer e.close(ctx)
	return e.read(ctx, false)
}

// Follow exports what happens from now on, until ctx ends. It reconnects to a daemon that
// restarts. It returns an error when the daemon refuses, and nil at the end of ctx.
func (e *Exporter) Follow(ctx context.Context) error {
	defer e.close(ctx)
	for {
		err := e.read(ctx, true)
		switch status.Code(err) {
		case grpccodes.PermissionDenied, grpccodes.Unauthenticated, grpccodes.Unimplemented, grpccodes.InvalidArgument:
			return err
		case grpccodes.OutOfRange: // REVISION_COMPACTED
			e.builder, e.after = Builder{}, 0
			e.lose(1, fmt.Errorf("there were more changes than could be sent as traces: %w", err))
			continue
		default:
		}
		if ctx.Err() != nil {
			return nil
		}
		e.warn(err)
		pause := time.NewTimer(reconnectTime)
		select {
		case <-pause.C:
		case <-ctx.Done():
		}
		pause.Stop()
	}
}

// read exports the events of one stream, until the stream ends.
func (e *Exporter) read(ctx context.Context, follow bool) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	st, err := e.cfg.Daemon.GetStatus(ctx, &gpreemptv1.GetStatusRequest{})
	if err != nil {
		return err
	}
	if err := e.meet(ctx, st, follow); err != nil {
		return err
	}
	stream, err := e.cfg.Daemon.WatchEvents(ctx, &gpreemptv1.WatchEventsRequest{AfterRevision: e.after, FromStart: true, NoFollow: !follow})
	if err != nil {
		return err
	}
	received := make(chan *gpreemptv1.Event, batchSpans)
	ended := make(chan error, 1)
	go func() {
		defer close(received)
		for {
			resp, err := stream.Recv()
			if err != nil {
				ended <- err
				return
			}
			select {
			case received <- resp.GetEvent():
			case <-ctx.Done():
				ended <- ctx.Err()
				return
			}
		}
	}()
	var gather <-chan time.Time
	for {
		select {
		case event, more := <-received:
			if !more {
				e.export(ctx)
				return eof(<-ended)
			}
			e.event(event)
			if len(e.batch) >= batchSpans {
				e.export(ctx)
			}
			if len(e.batch) > 0 && gather == nil {
				gather = time.After(gatherTime)
			}
		case <-gather:
			gather = nil
			e.export(ctx)
		}
	}
}

func eof(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// meet prepares for a daemon. After a restart its leases and revisions are others.
func (e *Exporter) meet(ctx context.Context, st *gpreemptv1.GetStatusResponse, follow bool) error {
	started := st.GetStartedAt().AsTime()
	if started.Equal(e.started) {
		return nil
	}
	about, err := resource.New(ctx, resource.WithHost(), resource.WithTelemetrySDK(), resource.WithAttributes(
		attribute.String("service.name", "gpreemptd"), attribute.String("service.version", st.GetVersion()), attribute.String("gpreempt.backend", st.GetBackend()),
	), resource.WithFromEnv())
	if about == nil { // an error may concern a part of it only
		return fmt.Errorf("export traces to %s: %w", e.cfg.Endpoint, err)
	}
	if e.after = 0; follow && e.started.IsZero() {
		e.after = st.GetEventRevision()
	}
	e.started, e.builder, e.leases = started, Builder{}, map[string]*leaseTrace{}
	// Sampled is what the client samples, and what has no client's context, unless
	// OTEL_TRACES_SAMPLER says otherwise.
	e.provider = sdktrace.NewTracerProvider(sdktrace.WithResource(about), sdktrace.WithSpanProcessor((*collect)(e)))
	e.tracer = e.provider.Tracer("github.com/gpreempt/gpreempt", trace.WithInstrumentationVersion(st.GetVersion()))
	return nil
}

// event makes spans of what ended with an event.
func (e *Exporter) event(ev *gpreemptv1.Event) {
	e.after = ev.GetRevision()
	if ev.GetKind() == gpreemptv1.EventKind_EVENT_KIND_LEASE && ev.GetFromLease() == leaseNone {
		e.begin(ev)
	}
	e.ended = e.builder.Add(ev, e.ended[:0])
	for _, s := range e.ended {
		e.add(s)
	}
}

// begin begins the trace of a new lease, or its part of the client's trace.
func (e *Exporter) begin(ev *gpreemptv1.Event) {
	parent := propagation.TraceContext{}.Extract(context.Background(), //nolint:forbidigo // the context of spans, which nobody waits for
		propagation.MapCarrier{"traceparent": ev.GetTrace().GetTraceparent(), "tracestate": ev.GetTrace().GetTracestate()})
	admitted := ev.GetClock().AsDuration()
	t := &leaseTrace{zero: ev.GetAt().AsTime().Add(-admitted)}
	arrived, decided := trace.WithTimestamp(t.zero.Add(admitted-ev.GetTook().AsDuration())), trace.WithTimestamp(t.zero.Add(admitted))
	t.ctx, t.announce = e.tracer.Start(parent, //nolint:spancheck // it ends with the answer, in add
		Announce.String(), trace.WithSpanKind(trace.SpanKindServer), arrived, trace.WithAttributes(attribute.String("gpreempt.lease", ev.GetLeaseId())))
	_, decide := e.tracer.Start(t.ctx, "decide", arrived)
	decide.End(decided)
	delete(e.leases, e.order[e.next])
	e.leases[ev.GetLeaseId()], e.order[e.next] = t, ev.GetLeaseId()
	e.next = (e.next + 1) % len(e.order)
}

// add makes a span of a lease part of its trace. The span of a lease whose announcement
// was not read, or is one of the oldest, is left out.
func (e *Exporter) add(s Span) {
	switch s.Kind {
	case Announce, Quiescing, Online, Suspending, Resuming:
	default:
		return
	}
	t := e.leases[s.Lease]
	if t == nil {
		return
	}
	end := trace.WithTimestamp(t.zero.Add(s.End))
	if s.Kind == Announce {
		t.announce.SetAttributes(attribute.String("gpreempt.answer", s.Ended))
		if s.Ended == string(scheduler.CauseQuiet) || s.Ended == string(scheduler.CauseCoalesced) {
			t.announce.AddEvent("quiesced", trace.WithTimestamp(t.zero.Add(s.End)))
		}
		t.announce.End(end)
		return
	}
	about := []attribute.KeyValue{attribute.String("gpreempt.cause", s.Cause), attribute.String("gpreempt.ended", s.Ended)}
	if s.Target != "" {
		about = append(about, attribute.String("gpreempt.target", s.Target), attribute.Float64("gpreempt.mechanism_seconds", s.Took.Seconds()))
	}
	_, span := e.tracer.Start(t.ctx, s.Kind.String(), trace.WithTimestamp(t.zero.Add(s.Begin)), trace.WithAttributes(about...))
	if ended := scheduler.Cause(s.Ended); ended == scheduler.CauseFailed || ended == scheduler.CauseHardware || ended.Obstacle() != "" {
		span.SetStatus(codes.Error, s.Ended)
	}
	span.End(end)
}

// export sends the batch. A message that cannot be sent is lost, except when ctx ended.
func (e *Exporter) export(ctx context.Context) {
	for len(e.batch) > 0 {
		n := min(len(e.batch), batchSpans)
		err := e.exporter.ExportSpans(ctx, e.batch[:n])
		if err != nil && ctx.Err() != nil {
			return // close tries once more
		}
		e.batch = e.batch[n:]
		if err != nil {
			e.lose(n, err)
		} else if e.warning {
			e.warning = false
			e.cfg.Warn(nil)
		}
	}
	e.batch = nil
}

// close sends what remains and ends the connection to the collector.
func (e *Exporter) close(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastExportTime)
	defer cancel()
	e.export(ctx)
	e.lost += uint64(len(e.batch))
	_ = e.exporter.Shutdown(ctx) // nothing is left in it
}

func (e *Exporter) lose(n int, err error) {
	e.lost += uint64(n)
	e.warn(fmt.Errorf("%d spans lost: %w", e.lost, err))
}

// warn reports the first of a row of problems.
func (e *Exporter) warn(err error) {
	if !e.warning && err != nil {
		e.warning = true
		e.cfg.Warn(err)
	}
}

// Lost returns how many spans, or runs of overwritten events, did not reach the collector.
func (e *Exporter) Lost() uint64 { return e.lost }

// collect is the processor of an Exporter's spans: it gathers them.
type collect Exporter

// OnStart does nothing.
func (*collect) OnStart(context.Context, sdktrace.ReadWriteSpan) {}

// OnEnd gathers a span.
func (c *collect) OnEnd(s sdktrace.ReadOnlySpan) { c.batch = append(c.batch, s) }

// Shutdown does nothing: close sends what is left.
func (*collect) Shutdown(context.Context) error { return nil }

// ForceFlush does nothing.
func (*collect) ForceFlush(context.Context) error { return nil }
