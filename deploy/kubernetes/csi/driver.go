package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// driverName is the name by which pods refer to the driver.
const driverName = "csi.gpreempt"

// Keys that the kubelet adds to the context of a volume begin with kubeletPrefix
// (podInfoOnMount in the CSIDriver object).
const (
	kubeletPrefix = "csi.storage.k8s.io/"
	ephemeralKey  = kubeletPrefix + "ephemeral"
	namespaceKey  = kubeletPrefix + "pod.namespace"
	podKey        = kubeletPrefix + "pod.name"
)

// driver implements the identity and the node service of CSI 1.x. It stores nothing: what is
// mounted is what the kernel says. Its methods may be called by several goroutines at once.
type driver struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedNodeServer
	cfg config

	mu sync.Mutex // held while mounts are compared and changed
}

// GetPluginInfo returns name and version.
func (d *driver) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: driverName, VendorVersion: Version}, nil
}

// GetPluginCapabilities returns none: there is no controller.
func (d *driver) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (*csi.GetPluginCapabilitiesResponse, error) {
	return &csi.GetPluginCapabilitiesResponse{}, nil
}

// Probe reports whether there is a directory to mount.
func (d *driver) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	info, err := os.Stat(d.cfg.source)
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(err == nil && info.IsDir())}, nil
}

// NodeGetInfo returns the name of the node.
func (d *driver) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: d.cfg.node}, nil
}

// NodeGetCapabilities returns none: volumes are neither staged nor measured.
func (d *driver) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	return &csi.NodeGetCapabilitiesResponse{}, nil
}

// NodePublishVolume mounts the directory at the target path. It is idempotent.
func (d *driver) NodePublishVolume(_ context.Context, req *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	if err := d.check(req.GetVolumeId(), req.GetTargetPath()); err != nil {
		return nil, err
	}
	if err := checkVolume(req); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := publish(d.cfg.source, req.GetTargetPath()); err != nil {
		return nil, status.Errorf(codes.Internal, "mount %s at %s: %v", d.cfg.source, req.GetTargetPath(), err)
	}
	slog.Info("published", "namespace", req.GetVolumeContext()[namespaceKey], "pod", req.GetVolumeContext()[podKey], "target", req.GetTargetPath())
	return &csi.NodePublishVolumeResponse{}, nil
}

// NodeUnpublishVolume unmounts the target path and removes it. It is idempotent.
func (d *driver) NodeUnpublishVolume(_ context.Context, req *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	if err := d.check(req.GetVolumeId(), req.GetTargetPath()); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := unpublish(req.GetTargetPath()); err != nil {
		return nil, status.Errorf(codes.Internal, "unmount %s: %v", req.GetTargetPath(), err)
	}
	slog.Info("unpublished", "target", req.GetTargetPath())
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

// check returns an error if the volume has no name, or if the target is not a path for volumes of
// pods: the driver can mount anywhere on the node.
func (d *driver) check(volume, target string) error {
	pods := filepath.Join(d.cfg.kubelet, "pods") + "/"
	switch {
	case volume == "":
		return status.Error(codes.InvalidArgument, "the volume id is missing")
	case target == "":
		return status.Error(codes.InvalidArgument, "the target path is missing")
	case target != filepath.Clean(target) || !strings.HasPrefix(target, pods):
		return status.Errorf(codes.InvalidArgument, "the target path %q is not below %s", target, pods)
	}
	return nil
}

// checkVolume returns an error for a volume that the driver does not have.
func checkVolume(req *csi.NodePublishVolumeRequest) error {
	c := req.GetVolumeCapability()
	switch {
	case c == nil:
		return status.Error(codes.InvalidArgument, "the volume capability is missing")
	case c.GetMount() == nil:
		return status.Error(codes.InvalidArgument, "the volume is a directory, not a block device: remove volumeMode")
	case c.GetMount().GetFsType() != "" || len(c.GetMount().GetMountFlags()) > 0:
		return status.Error(codes.InvalidArgument, "the volume has no file system of its own: remove fsType and mountOptions")
	case req.GetVolumeContext()[ephemeralKey] != "true":
		return status.Error(codes.InvalidArgument, "there are no persistent volumes: use the driver in the volumes of a pod (csi)")
	case !req.GetReadonly():
		return status.Error(codes.InvalidArgument, "the volume is read only: set readOnly: true in csi")
	}
	for key := range req.GetVolumeContext() {
		if !strings.HasPrefix(key, kubeletPrefix) {
			return status.Error(codes.InvalidArgument, fmt.Sprintf("unknown attribute %q: remove volumeAttributes", key))
		}
	}
	return nil
}
