package cli

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/net/netutil"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/term"
)

// Bounds of the page's server.
const (
	webConnections = 64
	webReadTime    = 5 * time.Second // for a request to arrive, and for its answer to be read
	webIdleTime    = 30 * time.Second
	webHeaderBytes = 8 << 10
	webTargetBytes = 64 // of a target_id
)

// webFiles are the page: no file of it is made by a program or comes from another host.
//
//go:embed web
var webFiles embed.FS

func webCommand(a *term.App) *cobra.Command {
	var (
		listen string
		every  time.Duration
	)
	cmd := &cobra.Command{
		Use:   "web",
		Short: "Serve a page with GPUs, targets, leases and preemptions on loopback",
		Args:  term.Operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if every < 100*time.Millisecond {
				return term.Usage(cmd, "invalid --every %v; use at least 100ms", every)
			}
			address, err := netip.ParseAddrPort(listen)
			if err != nil || !address.Addr().IsLoopback() {
				return term.Usage(cmd, "invalid --listen %q; use a loopback address with a port, such as 127.0.0.1:9478", listen)
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
			defer stop()
			return a.Stream(ctx, func(ctx context.Context, admin term.AdminClient) error {
				return serveWeb(ctx, a, admin, address, every)
			})
		},
	}
	cmd.Flags().StringVar(&listen, "listen", "127.0.0.1:0", "loopback address and port; port 0 selects a free one")
	cmd.Flags().DurationVar(&every, "every", 500*time.Millisecond, "time between readings while a page is open")
	return cmd
}

// serveWeb serves the page until ctx ends. A daemon that cannot be read at the start is a failure:
// later the page shows it.
func serveWeb(ctx context.Context, a *term.App, admin term.AdminClient, address netip.AddrPort, every time.Duration) error {
	model := newWebModel(a, admin, every)
	limited, cancel := context.WithTimeout(ctx, a.Timeout)
	_, err := admin.GetStatus(limited, &gpreemptv1.GetStatusRequest{})
	cancel()
	if err != nil {
		return err
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", address.String())
	if err != nil {
		return &term.Failure{Code: term.ExitFailure, Message: fmt.Sprintf("cannot listen on %s: %v", address, err), Next: "gpctl web --listen 127.0.0.1:0"}
	}
	token := rand.Text()
	server := &http.Server{
		Handler: webHandler(model, token), ReadTimeout: webReadTime, WriteTimeout: 2*webReadTime + a.Timeout, IdleTimeout: webIdleTime,
		MaxHeaderBytes: webHeaderBytes,
	}
	followed := make(chan struct{})
	ctx, cancel = context.WithCancel(ctx)
	go func() {
		defer close(followed)
		model.follow(ctx)
	}()
	defer func() { <-followed }()
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stop()
	if _, err := fmt.Fprintf(a.Out, "http://%s/%s/\n", l.Addr(), token); err != nil {
		return errors.Join(err, l.Close())
	}
	fmt.Fprintln(a.Err, "The address is a password for this page. Ctrl-C ends it.")
	if err := server.Serve(netutil.LimitListener(l, webConnections)); !errors.Is(err, http.ErrServerClosed) {
		return &term.Failure{Code: term.ExitFailure, Message: fmt.Sprintf("the page is no longer served: %v", err), Next: "gpctl web"}
	}
	return nil
}

// webHandler serves the page below /token/.
func webHandler(model *webModel, token string) http.Handler {
	files, err := fs.Sub(webFiles, "web")
	if err != nil {
		panic(err) // the directory is not embedded: an error in this package
	}
	pages := http.FileServerFS(files)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for _, header := range webHeaders {
			w.Header().Set(header[0], header[1])
		}
		given, path, ok := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
		switch {
		case !loopbackHost(r.Host):
			// Another name for this address may be that of another site (DNS rebinding).
			http.Error(w, "open the address that gpctl web printed", http.StatusForbidden)
		case r.Method != http.MethodGet:
			w.Header().Set("Allow", http.MethodGet)
			http.Error(w, "the page is read-only", http.StatusMethodNotAllowed)
		case !ok || subtle.ConstantTimeCompare([]byte(given), []byte(token)) != 1:
			http.Error(w, "open the address that gpctl web printed", http.StatusNotFound)
		case path == "data":
			serveWebData(w, r, model)
		case path == "" || path == "page.js" || path == "page.css" || path == "icon.svg":
			http.StripPrefix("/"+given, pages).ServeHTTP(w, r)
		default:
			http.NotFound(w, r)
		}
	})
}

// webHeaders are those of every answer. The page loads nothing from elsewhere, cannot be framed,
// and no other site reads it; the token is in its address, which no request passes on.
var webHeaders = [][2]string{
	{"Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"},
	{"Cache-Control", "no-store"},
	{"Cross-Origin-Opener-Policy", "same-origin"},
	{"Cross-Origin-Resource-Policy", "same-origin"},
	{"Referrer-Policy", "no-referrer"},
	{"X-Content-Type-Options", "nosniff"},
}

// loopbackHost reports whether a Host header names this host by an address of loopback. The port
// may be another one: that of a forwarded connection.
func loopbackHost(header string) bool {
	host := header
	if name, _, err := net.SplitHostPort(header); err == nil {
		host = name
	}
	address, err := netip.ParseAddr(strings.Trim(host, "[]"))
	return host == "localhost" || err == nil && address.IsLoopback()
}

func serveWebData(w http.ResponseWriter, r *http.Request, model *webModel) {
	query := r.URL.Query()
	after := int64(-1)
	if text := query.Get("after"); text != "" {
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			http.Error(w, "after is a column of the timeline", http.StatusBadRequest)
			return
		}
		after = n
	}
	target := query.Get("target")
	if len(target) > webTargetBytes {
		http.Error(w, "target is a target_id", http.StatusBadRequest)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), model.a.Timeout)
	defer cancel()
	d, err := model.data(ctx, after, target)
	if err != nil {
		http.Error(w, "the daemon has not answered", http.StatusGatewayTimeout)
		return
	}
	body, err := term.Marshal(d)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(body) //nolint:gosec // not markup, by its type; the page shows values as text
}
