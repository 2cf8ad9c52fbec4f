// gpreempt-csi is a CSI driver with one kind of volume: the directory of the daemon's socket on
// the node, read only, for the lifetime of a pod. A pod that mounts it needs no hostPath, which
// Pod Security forbids to all but privileged pods.
//
// It registers itself with the kubelet, so it needs no other program beside it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"sync"
	"syscall"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// Version is set at build time.
var Version = "unknown"

func main() {
	var cfg config
	flag.StringVar(&cfg.node, "node", "", "name of the node (required)")
	flag.StringVar(&cfg.kubelet, "kubelet", "/var/lib/kubelet", "root directory of the kubelet, at the same path here as on the node")
	flag.StringVar(&cfg.source, "source", "/run/gpreempt", "directory that is mounted into pods")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := run(ctx, cfg)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "gpreempt-csi:", err)
		os.Exit(1)
	}
}

// config is where the driver runs. The directories are absolute paths.
type config struct{ node, kubelet, source string }

// socket is where the kubelet calls the driver.
func (c config) socket() string { return filepath.Join(c.kubelet, "plugins", driverName, "csi.sock") }

// registrationSocket is where the kubelet finds the driver: it watches that directory.
func (c config) registrationSocket() string {
	return filepath.Join(c.kubelet, "plugins_registry", driverName+"-reg.sock")
}

// run serves until ctx ends, or until the kubelet refuses the driver.
func run(ctx context.Context, cfg config) error {
	if cfg.node == "" {
		return errors.New("-node is missing: set it to the name of the node")
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	d := &driver{cfg: cfg}
	r := &registrar{cfg: cfg, refused: func(why string) {
		cancel(fmt.Errorf("the kubelet refuses the driver: %s", why))
	}}
	// The kubelet calls the driver as soon as it finds the registration.
	var servers []*grpc.Server
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, s := range []struct {
		path     string
		register func(*grpc.Server)
	}{
		{cfg.socket(), func(g *grpc.Server) { csi.RegisterIdentityServer(g, d); csi.RegisterNodeServer(g, d) }},
		{cfg.registrationSocket(), func(g *grpc.Server) { registration.RegisterRegistrationServer(g, r) }},
	} {
		l, err := listen(s.path)
		if err != nil {
			cancel(err)
			break
		}
		g := grpc.NewServer()
		s.register(g)
		servers = append(servers, g)
		wg.Go(func() {
			if err := g.Serve(l); err != nil {
				cancel(err)
			}
		})
	}
	if ctx.Err() == nil {
		slog.Info("serving", "driver", driverName, "version", Version, "node", cfg.node, "socket", cfg.socket(), "source", cfg.source)
	}
	<-ctx.Done()
	for i := range servers { // first the registration, by which the kubelet stops calling
		servers[len(servers)-1-i].GracefulStop() // removes the socket
	}
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// listen listens on a socket for root only. It replaces that of a driver that was killed.
func listen(path string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		return nil, err
	}
	if info, err := os.Lstat(path); err == nil && info.Mode().Type() == fs.ModeSocket {
		if err := os.Remove(path); err != nil {
			return nil, err
		}
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	return l, os.Chmod(path, 0o600)
}

// registrar answers the kubelet's questions about the driver.
type registrar struct {
	registration.UnimplementedRegistrationServer
	cfg     config
	refused func(why string)
}

// GetInfo returns where the driver is.
func (r *registrar) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{
		Type: registration.CSIPlugin, Name: driverName, Endpoint: r.cfg.socket(), SupportedVersions: []string{"1.0.0"},
	}, nil
}

// NotifyRegistrationStatus ends the driver if the kubelet refuses it: its container is then
// restarted, which shows.
func (r *registrar) NotifyRegistrationStatus(_ context.Context, s *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	if s.GetPluginRegistered() {
		slog.Info("registered with the kubelet")
	} else {
		r.refused(s.GetError())
	}
	return &registration.RegistrationStatusResponse{}, nil
}
