package cluster

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// adminConfig is the kubeconfig of the cluster's admin.
const adminConfig = "/run/pki/admin.conf"

// node is the cluster.
type node struct {
	machine *machine
	api     *kubernetes.Clientset
	rest    *rest.Config
	logs    string

	etcd, apiserver, controllers, scheduler, containerd, kubelet *process
}

// started is the cluster of all tests.
var (
	startOnce  sync.Once
	started    *node
	startError error
)

// cluster returns the running cluster; the first test that calls it waits for its start.
func cluster(t *testing.T) *node {
	t.Helper()
	if why := missing(); why != "" {
		t.Skip(why)
	}
	startOnce.Do(func() {
		began := time.Now()
		started, startError = startCluster()
		if startError == nil {
			fmt.Printf("cluster: one node with an EMULATED GPU, ready after %.0f s\n", time.Since(began).Seconds())
		}
	})
	if startError != nil {
		t.Fatal(startError)
	}
	return started
}

// stopCluster ends what is left.
func stopCluster() error {
	if started == nil {
		return nil
	}
	errs := []error{}
	for _, p := range []*process{started.kubelet, started.containerd, started.scheduler, started.controllers, started.apiserver, started.etcd} {
		errs = append(errs, p.kill())
	}
	return errors.Join(append(errs, started.machine.Close())...)
}

// process is a program of the node, which may be killed and started again.
type process struct {
	name  string
	log   string
	start func() (*exec.Cmd, error)
	cmd   *exec.Cmd
	ended chan struct{}
}

func (n *node) program(name string, start func(*exec.Cmd) error, args ...string) *process {
	p := &process{name: name, log: filepath.Join(n.logs, name+".log")}
	p.start = func() (*exec.Cmd, error) {
		log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
		if err != nil {
			return nil, err
		}
		defer log.Close() // the program has it
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Dir, cmd.Stdout, cmd.Stderr = "/run", log, log
		return cmd, start(cmd)
	}
	return p
}

func (p *process) run() error {
	cmd, err := p.start()
	if err != nil {
		return fmt.Errorf("start %s: %w", p.name, err)
	}
	p.cmd, p.ended = cmd, make(chan struct{})
	go func() {
		_ = cmd.Wait() // it is killed
		close(p.ended)
	}()
	return nil
}

// kill ends it by SIGKILL.
func (p *process) kill() error {
	if p == nil || p.cmd == nil {
		return nil
	}
	err := p.cmd.Process.Kill()
	if errors.Is(err, os.ErrProcessDone) {
		err = nil
	}
	<-p.ended
	return err
}

// tail is the end of its log.
func (p *process) tail() string {
	text, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	return string(text[max(0, len(text)-3000):])
}

// startCluster starts everything and waits until the node is ready.
func startCluster() (*node, error) {
	n := &node{logs: filepath.Join(os.Getenv(programsEnv), "logs")}
	if err := errors.Join(os.RemoveAll(n.logs), os.MkdirAll(n.logs, 0o755)); err != nil {
		return nil, err
	}
	ca, err := newAuthority("/run/pki")
	if err != nil {
		return nil, err
	}
	err = errors.Join(
		ca.issue("apiserver", "kube-apiserver", "system:masters", nodeIP, serviceIP, "127.0.0.1", "localhost", "kubernetes.default.svc"),
		ca.issue("admin", "admin", "system:masters"),
		ca.issue("controllers", "system:kube-controller-manager", ""),
		ca.issue("scheduler", "system:kube-scheduler", ""),
		ca.issue("kubelet", "system:node:"+nodeName, "system:nodes", nodeName, nodeIP))
	if err != nil {
		return nil, err
	}
	if n.machine, err = emulate(); err != nil {
		return nil, err
	}
	n.define(ca)
	if n.rest, err = clientcmd.BuildConfigFromFlags("", adminConfig); err != nil {
		return nil, err
	}
	n.rest.QPS, n.rest.Burst = 200, 200
	if n.api, err = kubernetes.NewForConfig(n.rest); err != nil {
		return nil, err
	}
	started = n // so that it is stopped
	return n, n.bringUp()
}

// define defines the programs. The API server is also at the address of its service, so there is
// no kube-proxy.
func (n *node) define(ca *authority) {
	alone := (*exec.Cmd).Start
	kube := func(name string, args ...string) *process {
		return n.program(name, alone, append([]string{built("kube"), name}, args...)...)
	}
	const storage = "http://127.0.0.1:2379"
	n.etcd = n.program("etcd", alone, "etcd", "--data-dir=/run/etcd", "--unsafe-no-fsync", "--listen-client-urls="+storage,
		"--advertise-client-urls="+storage, "--listen-peer-urls=http://127.0.0.1:2380")
	n.apiserver = kube("kube-apiserver", "--etcd-servers="+storage, "--advertise-address="+nodeIP, "--secure-port=443",
		"--service-cluster-ip-range=10.96.0.0/16", "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
		"--allow-privileged", "--kubelet-preferred-address-types=InternalIP", "--client-ca-file="+ca.file("ca.crt"), "--tls-cert-file="+ca.file("apiserver.crt"), "--tls-private-key-file="+ca.file("apiserver.key"),
		"--kubelet-client-certificate="+ca.file("apiserver.crt"), "--kubelet-client-key="+ca.file("apiserver.key"), "--kubelet-certificate-authority="+ca.file("ca.crt"),
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-signing-key-file="+ca.file("ca.key"), "--service-account-key-file="+ca.file("ca.key"))
	users := func(name string) []string {
		file := ca.file(name + ".conf")
		return []string{"--kubeconfig=" + file, "--authentication-kubeconfig=" + file, "--authorization-kubeconfig=" + file, "--leader-elect=false"}
	}
	n.controllers = kube("kube-controller-manager", append(users("controllers"), "--use-service-account-credentials", "--flex-volume-plugin-dir=/run/volumeplugins",
		"--service-account-private-key-file="+ca.file("ca.key"), "--root-ca-file="+ca.file("ca.crt"))...)
	n.scheduler = kube("kube-scheduler", users("scheduler")...)
	n.containerd = n.program("containerd", n.machine.start, "containerd", "--config=/run/containerd.toml")
	n.kubelet = n.program("kubelet", n.machine.start, built("kube"), "kubelet", "--config=/run/kubelet.yaml", "--kubeconfig="+ca.file("kubelet.conf"),
		"--hostname-override="+nodeName, "--node-ip="+nodeIP, "--v=2")
}

func (n *node) bringUp() error {
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	// containerd finds the runtime by its name.
	err := errors.Join(
		serveDNS(),
		os.Mkdir("/run/node-runtime", 0o755), os.Symlink(built("node"), "/run/node-runtime/runc"),
		os.WriteFile("/run/containerd.toml", []byte(containerdConfig), 0o600),
		os.WriteFile("/run/cni/10-pods.conflist", []byte(networkConfig), 0o600),
		os.WriteFile("/run/kubelet.yaml", []byte(kubeletConfig()), 0o600),
		n.etcd.run(), n.containerd.run())
	if err != nil {
		return err
	}
	if err := n.apiserver.run(); err != nil {
		return err
	}
	if err := await(ctx, n.apiserver, "the API server is ready", func() (bool, error) {
		code := 0
		err := n.api.RESTClient().Get().AbsPath("/readyz").Do(ctx).StatusCode(&code).Error()
		return code == http.StatusOK, err
	}); err != nil {
		return err
	}
	if err := errors.Join(n.controllers.run(), n.scheduler.run()); err != nil {
		return err
	}
	for _, i := range images() {
		if err := await(ctx, n.containerd, "containerd has "+i.name, func() (bool, error) { err := i.load(ctx); return err == nil, err }); err != nil {
			return err
		}
	}
	if err := n.kubelet.run(); err != nil {
		return err
	}
	return await(ctx, n.kubelet, "the node is ready", func() (bool, error) { return n.ready(ctx) })
}

// ready reports whether the node is ready, and labels it as Node Feature Discovery does for an AMD GPU.
func (n *node) ready(ctx context.Context) (bool, error) {
	node, err := n.api.CoreV1().Nodes().Get(ctx, nodeName, metav1.GetOptions{})
	if err != nil {
		return false, err
	}
	if node.Labels[gpuLabel] == "" {
		node.Labels[gpuLabel] = "true"
		_, err = n.api.CoreV1().Nodes().Update(ctx, node, metav1.UpdateOptions{})
	}
	return err == nil && slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	}), err
}

const gpuLabel = "feature.node.kubernetes.io/amd-gpu"

// await waits until a condition holds. p is the program that it depends on: its log is in the error.
func await(ctx context.Context, p *process, what string, holds func() (bool, error)) error {
	poll := time.NewTicker(200 * time.Millisecond)
	defer poll.Stop()
	for {
		ok, err := holds()
		if ok {
			return nil
		}
		select {
		case <-p.ended:
			return fmt.Errorf("%s ended; waited until %s: %v\n%s", p.name, what, err, p.tail())
		case <-ctx.Done():
			return fmt.Errorf("%w; waited until %s: %v\n%s wrote at its end:\n%s", ctx.Err(), what, err, p.name, p.tail())
		case <-poll.C:
		}
	}
}

// restart kills a program by SIGKILL and starts it again.
func (n *node) restart(t *testing.T, p *process) {
	t.Helper()
	if err := p.kill(); err != nil && !errors.Is(err, syscall.ESRCH) {
		t.Fatal(err)
	}
	if err := p.run(); err != nil {
		t.Fatal(err)
	}
}
