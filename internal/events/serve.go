package events

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/log"
)

// Bounds of the listener.
const (
	connections = 64
	scrapes     = 4
	// headerTime is how long a request may take to arrive, answerTime how long its
	// answer may take to be read, idleTime how long a connection is kept for another.
	headerTime, answerTime, idleTime = 2 * time.Second, 10 * time.Second, 2 * time.Minute
	maxHeaderBytes                   = 8 << 10
)

// MetricsConfig configures MetricsHandler.
type MetricsConfig struct {
	Snapshot func() MetricsSnapshot
	// Alive returns when the scheduler has answered; it blocks while the scheduler hangs.
	Alive func()
	// Ready reports whether the daemon serves: it has started and is not stopping.
	Ready func() bool
}

// MetricsHandler serves /metrics, /healthz and /readyz, and nothing else.
func MetricsHandler(c MetricsConfig) http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(NewCollector(c.Snapshot), collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{MaxRequestsInFlight: scrapes, Timeout: answerTime}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		c.Alive()
		answer(w, true)
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) { answer(w, c.Ready()) })
	return mux
}

// answer answers a probe. It contains nothing about the host.
func answer(w http.ResponseWriter, ok bool) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	if !ok {
		w.WriteHeader(http.StatusServiceUnavailable)
		_, _ = w.Write([]byte("not ready\n"))
		return
	}
	_, _ = w.Write([]byte("ok\n"))
}

// Listen opens address, HOST:PORT, for Serve.
func Listen(ctx context.Context, address string) (net.Listener, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("serve metrics: %w: metrics.address must be a free address of this host", err)
	}
	return &listener{Listener: l}, nil
}

// ServeMetrics serves until ctx ends, then closes all connections without waiting for scrapes.
// Errors are logged: the daemon continues without metrics.
func ServeMetrics(ctx context.Context, l net.Listener, h http.Handler, logger *zap.Logger) {
	errorLog, err := zap.NewStdLogAt(logger, zap.DebugLevel)
	if err != nil {
		logger.Error("the errors of metrics clients are not logged", log.Err(err))
	}
	s := newServer(h)
	s.ErrorLog = errorLog
	stop := context.AfterFunc(ctx, func() { _ = s.Close() })
	defer stop()
	if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		logger.Error("metrics are no longer served", log.Err(err))
	}
}

// newServer returns a server for the listener of Listen.
func newServer(h http.Handler) *http.Server {
	return &http.Server{
		Handler: protectRequests(h), ConnContext: func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connKey{}, c) },
		ReadTimeout: headerTime, WriteTimeout: answerTime, IdleTimeout: idleTime, MaxHeaderBytes: maxHeaderBytes,
	}
}
