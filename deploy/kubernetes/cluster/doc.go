// Package cluster runs a Kubernetes cluster of one node on this host, in namespaces of its own, and
// tests the chart on it: etcd, the control plane and the kubelet of Kubernetes 1.36, and containerd and
// runc of Debian. The GPU is EMULATED: every container of the node is on a machine of kfdemu.
//
// It needs root and the programs that make cluster builds. It changes nothing on the host: files are in
// memory, and its control groups are removed when it ends.
package cluster
