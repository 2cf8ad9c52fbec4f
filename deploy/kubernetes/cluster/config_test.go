package cluster

import "os"

const containerdConfig = `
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
# opt makes a directory in /opt of the host.
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs", "io.containerd.tracing.processor.v1.otlp"]
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "` + pauseImage + `"
  disable_apparmor = true
  # The host may not permit lower ones (CAP_SYS_RESOURCE).
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "/run/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        # It runs runc, with the container on the emulated machine.
        BinaryName = "/run/node-runtime/runc"
`

const networkConfig = `{"cniVersion": "0.4.0", "name": "pods", "plugins": [
  {"type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true,
   "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.244.0.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
`

func kubeletConfig() string {
	return `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
cgroupDriver: cgroupfs
cgroupRoot: /` + os.Getenv(groupEnv) + `
failCgroupV1: false
failSwapOn: false
authentication:
  anonymous: {enabled: false}
  webhook: {enabled: true}
  x509: {clientCAFile: /run/pki/ca.crt}
authorization: {mode: Webhook}
tlsCertFile: /run/pki/kubelet.crt
tlsPrivateKeyFile: /run/pki/kubelet.key
volumePluginDir: /var/lib/kubelet/volumeplugins
resolvConf: ""
clusterDNS: [` + nodeIP + `]
clusterDomain: cluster.local
# The host's disk is not the node's.
evictionHard: {memory.available: 1Mi, nodefs.available: 0%, nodefs.inodesFree: 0%, imagefs.available: 0%, imagefs.inodesFree: 0%}
imageGCHighThresholdPercent: 100
enforceNodeAllocatable: []
# More often than by default: the tests wait for it.
nodeStatusUpdateFrequency: 2s
syncFrequency: 10s
`
}
