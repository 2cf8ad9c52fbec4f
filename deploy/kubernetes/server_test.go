package kubernetes

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// collections are where objects are created, by kind; %s is the namespace.
var collections = map[string]string{
	"ClusterRole":        "apis/rbac.authorization.k8s.io/v1/clusterroles",
	"ClusterRoleBinding": "apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
	"CSIDriver":          "apis/storage.k8s.io/v1/csidrivers",
	"ConfigMap":          "api/v1/namespaces/%s/configmaps",
	"DaemonSet":          "apis/apps/v1/namespaces/%s/daemonsets",
	"Deployment":         "apis/apps/v1/namespaces/%s/deployments",
	"Job":                "apis/batch/v1/namespaces/%s/jobs",
	"Namespace":          "api/v1/namespaces",
	"NetworkPolicy":      "apis/networking.k8s.io/v1/namespaces/%s/networkpolicies",
	"Node":               "api/v1/nodes",
	"Pod":                "api/v1/namespaces/%s/pods",
	"ResourceClaim":      "apis/resource.k8s.io/v1/namespaces/%s/resourceclaims",
	"ServiceAccount":     "api/v1/namespaces/%s/serviceaccounts",

	"ValidatingAdmissionPolicy":        "apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies",
	"ValidatingAdmissionPolicyBinding": "apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings",
}

// TestAPIServerAcceptsEveryObject creates the objects on a real API server, and each pod that
// a controller would create: with admission, including Pod Security. Without controllers,
// nodes and kubelets, nothing runs.
func TestAPIServerAcceptsEveryObject(t *testing.T) {
	api := startAPI(t)
	namespace, err := os.ReadFile("manifests/namespace.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, object := range []string{
		string(namespace),
		"{apiVersion: v1, kind: ServiceAccount, metadata: {name: gpreempt, namespace: gpreempt}}",
		// Like the controllers.
		"{apiVersion: v1, kind: ServiceAccount, metadata: {name: default, namespace: default}}",
		"{apiVersion: v1, kind: Namespace, metadata: {name: guarded, labels: {pod-security.kubernetes.io/enforce: baseline}}}",
		"{apiVersion: v1, kind: ServiceAccount, metadata: {name: gpreempt, namespace: guarded}}",
		"{apiVersion: v1, kind: Namespace, metadata: {name: restricted, labels: {pod-security.kubernetes.io/enforce: restricted}}}",
		"{apiVersion: v1, kind: ServiceAccount, metadata: {name: default, namespace: restricted}}",
	} {
		if err := api.create(t.Context(), object, ""); err != nil {
			t.Fatal(err)
		}
	}
	for name, text := range everything(t) {
		if name == "manifests/namespace.yaml" {
			continue
		}
		for _, document := range documents(text) {
			if strings.Contains(document, "kind: PodMonitor") {
				continue // without the Prometheus Operator
			}
			// The service account of the chart already exists.
			if err := api.create(t.Context(), document, "dryRun=All"); err != nil && !isConflict(err) {
				t.Errorf("%s: %v", name, err)
			}
		}
		for _, object := range decode(t, name, text) {
			var pod corev1.Pod
			switch o := object.(type) {
			case *appsv1.DaemonSet:
				pod = podOf(o.Namespace, o.Spec.Template)
				guarded := podOf("guarded", o.Spec.Template)
				if err := api.create(t.Context(), encode(t, guarded), "dryRun=All"); err == nil {
					t.Errorf("%s: a namespace that enforces the level baseline takes the daemon's pod", name)
				}
			case *appsv1.Deployment:
				pod = podOf("restricted", o.Spec.Template)
			case *batchv1.Job:
				pod = podOf("restricted", o.Spec.Template)
			default:
				continue
			}
			if err := api.create(t.Context(), encode(t, pod), "dryRun=All"); err != nil {
				t.Errorf("%s: the pod: %v", name, err)
			}
		}
	}
	if err := api.create(t.Context(), "{apiVersion: v1, kind: ConfigMap, metadata: {name: typo}, date: {}}", "dryRun=All"); err == nil {
		t.Error("the server takes a field it does not know: this test proves nothing")
	}
}

func podOf(namespace string, template corev1.PodTemplateSpec) corev1.Pod {
	meta := template.ObjectMeta
	meta.Name, meta.Namespace = "test", namespace
	return corev1.Pod{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}, ObjectMeta: meta, Spec: template.Spec}
}

func encode(t *testing.T, object any) string {
	t.Helper()
	text, err := json.Marshal(object)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// api is a running API server.
type api struct {
	address string
	// certificate is the file of its own, which is self-signed.
	certificate string
	client      http.Client
}

const token = "test"

// create creates an object, or returns the server's refusal.
func (a *api) create(ctx context.Context, document, options string) error {
	var object metav1.PartialObjectMetadata
	if err := yaml.Unmarshal([]byte(document), &object); err != nil {
		return err
	}
	path := collections[object.Kind]
	if strings.Contains(path, "%s") {
		if object.Namespace == "" {
			object.Namespace = "default"
		}
		path = fmt.Sprintf(path, object.Namespace)
	}
	body, err := yaml.YAMLToJSON([]byte(document))
	if err != nil {
		return err
	}
	status, answer, err := a.call(ctx, http.MethodPost, path+"?fieldValidation=Strict&"+options, body)
	if err == nil && status != http.StatusCreated {
		err = &refusal{object.Kind, object.Name, status, answer}
	}
	return err
}

func (a *api) call(ctx context.Context, method, path string, body []byte) (status int, answer string, err error) {
	request, err := http.NewRequestWithContext(ctx, method, "https://"+a.address+"/"+path, bytes.NewReader(body))
	if err != nil {
		return 0, "", err
	}
	request.Header.Set("Authorization", "Bearer "+token)
	request.Header.Set("Content-Type", "application/json")
	response, err := a.client.Do(request)
	if err != nil {
		return 0, "", err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	return response.StatusCode, string(text), err
}

// refusal is the server's answer to an object that it refuses.
type refusal struct {
	kind, name string
	status     int
	answer     string
}

func (r *refusal) Error() string {
	return fmt.Sprintf("%s %s: status %d: %s", r.kind, r.name, r.status, r.answer)
}

func isConflict(err error) bool {
	r, ok := err.(*refusal) //nolint:errorlint // create returns it unwrapped
	return ok && r.status == http.StatusConflict
}

// startAPI runs etcd and kube-apiserver until the test ends. It skips where one is
// missing: make kubernetes-api builds the second.
func startAPI(t *testing.T) *api {
	t.Helper()
	etcd, err := exec.LookPath("etcd")
	if err != nil {
		t.Skip("etcd is not installed: apt-get install etcd-server, or put it into the PATH")
	}
	server, err := exec.LookPath("kube-apiserver")
	if err != nil {
		t.Skip("there is no kube-apiserver in the PATH: make kubernetes-api builds one")
	}
	dir := t.TempDir()
	for name, data := range map[string][]byte{"tokens.csv": []byte(token + `,admin,1,"system:masters"`), "account.key": newKey(t)} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	addresses := freeAddresses(t, 3)
	storage := "http://" + addresses[0]
	run(t, dir, etcd, "--data-dir", "etcd", "--listen-client-urls", storage, "--advertise-client-urls", storage,
		"--listen-peer-urls", "http://"+addresses[1])
	_, port, _ := net.SplitHostPort(addresses[2])
	ended := run(t, dir, server, "--etcd-servers", storage, "--bind-address", "127.0.0.1", "--secure-port", port, "--cert-dir", "certificates",
		"--service-cluster-ip-range", "10.0.0.0/24", "--authorization-mode", "RBAC", "--token-auth-file", "tokens.csv",
		"--service-account-issuer", "https://kubernetes.default.svc", "--service-account-signing-key-file", "account.key",
		"--service-account-key-file", "account.key", "--allow-privileged")
	a := &api{address: addresses[2], certificate: filepath.Join(dir, "certificates", "apiserver.crt"), client: http.Client{Transport: &http.Transport{
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, // its certificate is self-signed
	}}}
	t.Cleanup(a.client.CloseIdleConnections)
	late := time.After(2 * time.Minute)
	for {
		status, answer, err := a.call(t.Context(), http.MethodGet, "readyz", nil)
		if err == nil && status == http.StatusOK {
			return a
		}
		select {
		case <-ended:
			t.Fatal("the API server ended")
		case <-late:
			t.Fatalf("the API server is not ready: %v %s", err, answer)
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// run runs a program until the test ends; its output is shown if the test fails. The channel
// is closed when the program ends.
func run(t *testing.T, dir, program string, args ...string) <-chan struct{} {
	t.Helper()
	var log bytes.Buffer
	cmd := exec.Command(program, args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait() // it is terminated
		close(ended)
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM) // unless it has ended
		select {
		case <-ended:
		case <-time.After(10 * time.Second):
			_ = cmd.Process.Kill()
			<-ended
		}
		if t.Failed() {
			text := log.Bytes()
			t.Logf("%s wrote, at its end:\n%s", program, text[max(0, len(text)-4000):])
		}
	})
	return ended
}

// newKey makes the key for signing tokens of service accounts.
func newKey(t *testing.T) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})
}

// freeAddresses returns addresses without a listener.
func freeAddresses(t *testing.T, n int) (addresses []string) {
	t.Helper()
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close() // once all are chosen, so that they differ
		addresses = append(addresses, l.Addr().String())
	}
	return addresses
}
