package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"
)

// fleet serves the metrics of simulated hosts, each below a path of its own.
type fleet struct {
	hosts    []*host
	address  string
	server   *http.Server
	served   chan error
	requests atomic.Int64
	bytes    atomic.Int64
}

// traffic is what was served.
type traffic struct{ requests, bytes int64 }

func (t traffic) since(earlier traffic) traffic {
	return traffic{t.requests - earlier.requests, t.bytes - earlier.bytes}
}

func name(n int) string { return fmt.Sprintf("gpu-%04d", n+1) }

// startFleet serves hosts on the loopback until close.
func startFleet(ctx context.Context, hosts, gpus int) (*fleet, error) {
	f := &fleet{served: make(chan error, 1)}
	began := time.Now()
	mux := http.NewServeMux()
	for n := range hosts {
		h, err := newHost(n, gpus, func() time.Duration { return time.Since(began) })
		if err != nil {
			return nil, err
		}
		f.hosts = append(f.hosts, h)
		prefix := "/" + name(n)
		mux.Handle(prefix+"/metrics", http.StripPrefix(prefix, f.count(h.handler)))
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	f.address = l.Addr().String()
	f.server = &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	go func() { f.served <- f.server.Serve(l) }() // ends by close
	return f, nil
}

func (f *fleet) close() error {
	err := f.server.Close()
	if served := <-f.served; !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(err, served)
	}
	return err
}

func (f *fleet) sent() traffic { return traffic{f.requests.Load(), f.bytes.Load()} }

// scrape returns the metrics of a host as text, not compressed.
func (f *fleet) scrape(ctx context.Context, n int) (string, error) {
	client := &http.Client{Transport: &http.Transport{DisableCompression: true, DisableKeepAlives: true}}
	text, err := get(ctx, client, "http://"+f.address+"/"+name(n)+"/metrics")
	return string(text), err
}

// counted counts the bytes of a body, compressed or not, as they are sent.
type counted struct {
	http.ResponseWriter
	bytes *atomic.Int64
}

func (c counted) Write(p []byte) (int, error) {
	n, err := c.ResponseWriter.Write(p)
	c.bytes.Add(int64(n))
	return n, err
}

func (f *fleet) count(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.requests.Add(1)
		h.ServeHTTP(counted{w, &f.bytes}, r)
	})
}

// writeTargets replaces the file of targets for Prometheus. rollout is a label of each.
func (f *fleet) writeTargets(path, rollout string) error {
	type group struct {
		Targets []string          `json:"targets"`
		Labels  map[string]string `json:"labels"`
	}
	groups := make([]group, len(f.hosts))
	for n := range f.hosts {
		groups[n] = group{[]string{f.address}, map[string]string{
			"__metrics_path__": "/" + name(n) + "/metrics", "instance": name(n), "rollout": rollout,
		}}
	}
	text, err := json.Marshal(groups)
	if err != nil {
		return err
	}
	// Prometheus must not read a part of it.
	whole := filepath.Join(filepath.Dir(path), "new")
	return errors.Join(os.WriteFile(whole, text, 0o600), os.Rename(whole, path))
}

// kind is a part of a host's series.
type kind struct {
	name   string
	series int
}

// kinds counts the series of a scrape by what they are, in a fixed order.
func kinds(scrape string) []kind {
	all := []kind{{name: "buckets of histograms"}, {name: "one for each GPU"}, {name: "one for each warning code"}, {name: "other of gpreempt"}, {name: "Go runtime and process"}}
	for line := range strings.Lines(scrape) {
		switch {
		case strings.HasPrefix(line, "#"):
		case !strings.HasPrefix(line, "gpreempt_"):
			all[4].series++
		case strings.Contains(line, "_bucket{"):
			all[0].series++
		case strings.Contains(line, `gpu="`):
			all[1].series++
		case strings.HasPrefix(line, "gpreempt_warnings{"):
			all[2].series++
		default:
			all[3].series++
		}
	}
	return all
}
