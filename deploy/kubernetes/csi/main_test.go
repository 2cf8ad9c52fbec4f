package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
	"github.com/onsi/ginkgo/v2"
	"github.com/onsi/gomega"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// ownMounts is set in a process with a mount namespace of its own.
const ownMounts = "GPREEMPT_CSI_TEST_MOUNTS"

// TestMain runs the tests in a mount namespace of their own.
func TestMain(m *testing.M) {
	if os.Geteuid() != 0 {
		fmt.Println("SKIP: mounts need root")
		return
	}
	if os.Getenv(ownMounts) != "" {
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			panic(err)
		}
		os.Exit(m.Run())
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = append(os.Environ(), ownMounts+"=1"), os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
	err := cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		os.Exit(exit.ExitCode())
	}
	if err != nil {
		panic(err)
	}
}

// node is a node with a running driver and, in place of the kubelet, the test.
type node struct {
	t   *testing.T
	cfg config
	// ended has the result of run.
	ended chan error
	stop  context.CancelFunc
}

func startNode(t *testing.T) *node {
	t.Helper()
	dir, err := os.MkdirTemp("", "csi") // t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	n := &node{t: t, cfg: config{node: "worker-7", kubelet: filepath.Join(dir, "kubelet"), source: filepath.Join(dir, "run")}}
	for _, d := range []string{n.cfg.source, filepath.Join(n.cfg.kubelet, "pods/7/volumes/kubernetes.io~csi/gpreempt"), filepath.Dir(n.cfg.registrationSocket())} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	n.start()
	return n
}

func (n *node) start() {
	n.t.Helper()
	ctx, stop := context.WithCancel(n.t.Context())
	n.ended, n.stop = make(chan error, 1), stop
	ended := n.ended
	go func() { ended <- run(ctx, n.cfg) }()
	n.t.Cleanup(stop)
}

// target is where the kubelet has the driver mount the volume of a pod.
func (n *node) target() string {
	return filepath.Join(n.cfg.kubelet, "pods/7/volumes/kubernetes.io~csi/gpreempt/mount")
}

// dial connects to one of the driver's sockets, which may not exist yet.
func (n *node) dial(path string) *grpc.ClientConn {
	n.t.Helper()
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { conn.Close() })
	return conn
}

func (n *node) client() csi.NodeClient { return csi.NewNodeClient(n.dial(n.cfg.socket())) }

// request is that of a kubelet for a pod as in examples/online.yaml.
func (n *node) request() *csi.NodePublishVolumeRequest {
	return &csi.NodePublishVolumeRequest{
		VolumeId: "csi-1", TargetPath: n.target(), Readonly: true,
		VolumeCapability: &csi.VolumeCapability{
			AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		},
		VolumeContext: map[string]string{ephemeralKey: "true", namespaceKey: "default", podKey: "chat", kubeletPrefix + "serviceAccount.name": "default"},
	}
}

func (n *node) publish(req *csi.NodePublishVolumeRequest) error {
	_, err := n.client().NodePublishVolume(n.t.Context(), req)
	return err
}

func (n *node) unpublish() error {
	_, err := n.client().NodeUnpublishVolume(n.t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: "csi-1", TargetPath: n.target()})
	return err
}

// mounts returns the options of the mounts at a path.
func mounts(t *testing.T, path string) (options []string) {
	t.Helper()
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if fields := strings.Fields(line); fields[4] == path {
			options = append(options, fields[5])
		}
	}
	return options
}

func (n *node) must(err error) {
	n.t.Helper()
	if err != nil {
		n.t.Fatal(err)
	}
}

// daemon listens like a daemon, for one connection.
func (n *node) daemon() (accepted chan error) {
	n.t.Helper()
	path := filepath.Join(n.cfg.source, "gpreemptd.sock")
	_ = os.Remove(path) // of the daemon before
	l, err := net.Listen("unix", path)
	n.must(err)
	n.t.Cleanup(func() { l.Close() })
	accepted = make(chan error, 1)
	go func() {
		c, err := l.Accept()
		if err == nil {
			err = c.Close()
		}
		accepted <- err
	}()
	return accepted
}

func (n *node) connect() error {
	c, err := net.Dial("unix", filepath.Join(n.target(), "gpreemptd.sock"))
	if err != nil {
		return err
	}
	return c.Close()
}

func TestPodReachesEachDaemonOfItsNodeAndCannotWrite(t *testing.T) {
	n := startNode(t)
	n.must(n.publish(n.request())) // before there is a daemon
	for range 2 {                  // and after it was replaced
		accepted := n.daemon()
		n.must(n.connect())
		n.must(<-accepted)
	}
	if err := os.WriteFile(filepath.Join(n.target(), "file"), nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("a pod can write: %v", err)
	}
	if err := os.Remove(filepath.Join(n.target(), "gpreemptd.sock")); !errors.Is(err, unix.EROFS) {
		t.Errorf("a pod can remove the socket: %v", err)
	}
	options := strings.Split(strings.Join(mounts(t, n.target()), " "), ",")
	for _, want := range []string{"ro", "nosuid", "nodev", "noexec"} {
		if !slices.Contains(options, want) {
			t.Errorf("mounted with %q, without %s", options, want)
		}
	}
}

func TestPublishAndUnpublishAreIdempotent(t *testing.T) {
	n := startNode(t)
	n.must(os.WriteFile(filepath.Join(n.cfg.source, "file"), []byte("kept"), 0o600))
	n.must(n.unpublish()) // of a volume that was never there
	for range 3 {
		n.must(n.publish(n.request()))
		if got := mounts(t, n.target()); len(got) != 1 {
			t.Fatalf("%d mounts, want 1", len(got))
		}
	}
	n.must(syscall.Mount(n.cfg.source, n.target(), "", unix.MS_BIND, "")) // a second one on top
	for range 3 {
		n.must(n.unpublish())
		if got := mounts(t, n.target()); len(got) != 0 {
			t.Fatalf("%d mounts, want none", len(got))
		}
		if _, err := os.Lstat(n.target()); !errors.Is(err, os.ErrNotExist) {
			t.Fatalf("the target remains: %v", err)
		}
	}
	if text, err := os.ReadFile(filepath.Join(n.cfg.source, "file")); string(text) != "kept" {
		t.Errorf("the daemon's directory has lost its file: %v", err)
	}
	n.must(n.publish(n.request()))
	n.must(n.unpublish())
}

func TestMountsOutliveTheDriver(t *testing.T) {
	n := startNode(t)
	n.must(n.publish(n.request()))
	n.stop()
	n.must(<-n.ended)
	for _, path := range []string{n.cfg.socket(), n.cfg.registrationSocket()} {
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s remains after an orderly end: %v", path, err)
		}
	}
	accepted := n.daemon()
	n.must(n.connect())
	n.must(<-accepted)
	// A driver that is killed leaves its sockets.
	for _, path := range []string{n.cfg.socket(), n.cfg.registrationSocket()} {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		n.must(err)
		l.SetUnlinkOnClose(false)
		n.must(l.Close())
	}
	n.start()
	n.must(n.publish(n.request()))
	n.must(n.unpublish())
}

func TestInvalidVolumesAreRefusedWithTheRemedy(t *testing.T) {
	n := startNode(t)
	for want, change := range map[string]func(*csi.NodePublishVolumeRequest){
		"the volume id is missing":                          func(r *csi.NodePublishVolumeRequest) { r.VolumeId = "" },
		"the target path is missing":                        func(r *csi.NodePublishVolumeRequest) { r.TargetPath = "" },
		`the target path "/etc" is not below`:               func(r *csi.NodePublishVolumeRequest) { r.TargetPath = "/etc" },
		`/pods/../plugins" is not below`:                    func(r *csi.NodePublishVolumeRequest) { r.TargetPath = n.cfg.kubelet + "/pods/../plugins" },
		`pods" is not below`:                                func(r *csi.NodePublishVolumeRequest) { r.TargetPath = n.cfg.kubelet + "/pods" },
		"the volume capability is missing":                  func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability = nil },
		"remove volumeMode":                                 func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability.AccessType = &csi.VolumeCapability_Block{} },
		"remove fsType and mountOptions":                    func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability.GetMount().FsType = "ext4" },
		"there are no persistent volumes":                   func(r *csi.NodePublishVolumeRequest) { delete(r.VolumeContext, ephemeralKey) },
		"set readOnly: true":                                func(r *csi.NodePublishVolumeRequest) { r.Readonly = false },
		`unknown attribute "path": remove volumeAttributes`: func(r *csi.NodePublishVolumeRequest) { r.VolumeContext["path"] = "/etc" },
	} {
		req := n.request()
		change(req)
		err := n.publish(req)
		if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want INVALID_ARGUMENT with %q", err, want)
		}
	}
	if _, err := os.Lstat(n.target()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a refused volume has a target: %v", err)
	}
	_, err := n.client().NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: "csi-1", TargetPath: "/"})
	if status.Code(err) != codes.InvalidArgument {
		t.Errorf("unpublish of /: %v", err)
	}
}

func TestWhatIsAtTheTargetIsNotReplaced(t *testing.T) {
	for name, occupy := range map[string]func(n *node) error{
		"a file": func(n *node) error { return os.WriteFile(n.target(), nil, 0o600) },
		"a link": func(n *node) error { return os.Symlink("/etc", n.target()) },
		"another mount": func(n *node) error {
			return errors.Join(os.Mkdir(n.target(), 0o755), unix.Mount("none", n.target(), "tmpfs", 0, "size=4k"))
		},
		"a writable mount": func(n *node) error {
			return errors.Join(os.Mkdir(n.target(), 0o755), unix.Mount(n.cfg.source, n.target(), "", unix.MS_BIND, ""))
		},
		"no parent for it":  func(n *node) error { return os.Remove(filepath.Dir(n.target())) },
		"no daemon's place": func(n *node) error { return os.Remove(n.cfg.source) },
	} {
		t.Run(name, func(t *testing.T) {
			n := startNode(t)
			n.must(occupy(n))
			before := mounts(t, n.target())
			if err := n.publish(n.request()); status.Code(err) != codes.Internal {
				t.Errorf("%v, want INTERNAL", err)
			}
			if diff := cmp.Diff(before, mounts(t, n.target())); diff != "" {
				t.Errorf("mounts (-before +after):\n%s", diff)
			}
			_ = unix.Unmount(n.target(), 0)
		})
	}
}

func TestKubeletFindsTheDriver(t *testing.T) {
	n := startNode(t)
	r := registration.NewRegistrationClient(n.dial(n.cfg.registrationSocket()))
	got, err := r.GetInfo(t.Context(), &registration.InfoRequest{})
	n.must(err)
	want := &registration.PluginInfo{Type: "CSIPlugin", Name: "csi.gpreempt", Endpoint: n.cfg.socket(), SupportedVersions: []string{"1.0.0"}}
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	info, err := n.client().NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
	if err != nil || info.GetNodeId() != "worker-7" {
		t.Errorf("node %v, %v", info, err)
	}
	_, err = r.NotifyRegistrationStatus(t.Context(), &registration.RegistrationStatus{PluginRegistered: true})
	n.must(err)
	for _, path := range []string{n.cfg.socket(), n.cfg.registrationSocket()} {
		if info, err := os.Stat(path); err != nil || info.Mode() != os.ModeSocket|0o600 {
			t.Errorf("%s: %v, %v", path, info.Mode(), err)
		}
	}
	_, err = r.NotifyRegistrationStatus(t.Context(), &registration.RegistrationStatus{Error: "another driver has the name"})
	n.must(err)
	if err := <-n.ended; err == nil || err.Error() != "the kubelet refuses the driver: another driver has the name" {
		t.Errorf("the driver ended with %v", err)
	}
}

func TestNodeIsRequired(t *testing.T) {
	if err := run(t.Context(), config{}); err == nil || !strings.Contains(err.Error(), "-node is missing") {
		t.Errorf("%v", err)
	}
}

func TestCSISanity(t *testing.T) {
	n := startNode(t)
	n.must(n.publish(n.request())) // the driver serves
	cfg := sanity.NewTestConfig()
	cfg.Address = "unix:" + n.cfg.socket()
	cfg.TargetPath = filepath.Join(n.cfg.kubelet, "pods", "sanity")
	cfg.StagingPath = filepath.Join(n.cfg.kubelet, "staging")
	c := sanity.GinkgoTest(&cfg)
	gomega.RegisterFailHandler(ginkgo.Fail)
	suite, reporter := ginkgo.GinkgoConfiguration()
	// There is no controller; "should remove target path" creates its volume with one.
	suite.SkipStrings = []string{"Controller", "should remove target path"}
	reporter.Succinct, reporter.NoColor = true, true
	ginkgo.RunSpecs(t, "CSI", suite, reporter)
	c.Finalize()
	n.must(n.unpublish())
}
