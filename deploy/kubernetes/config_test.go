package kubernetes

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// configHead is the text before the first key of the chart's config file.
const configHead = `# Configuration of gpreemptd in Kubernetes: what gpreemptd config default prints, but for what values of the
# chart say: mechanisms, the group of the socket, rules and metrics. Every other key has its
# default here. Durations have a unit: 20ms, 1.5s, 10m. After a change the pods have to be replaced, which helm upgrade
# does by itself.
`

// configEdits convert the default config file to the template of the chart. Each matches
// once.
var configEdits = []struct{ pattern, template string }{
	{`\A(?:#.*\n)+`, configHead},
	{`(?m)^mechanisms: .*$`, `mechanisms: {{ .Values.mechanisms | toJson }}`},
	{`(?m)^  online_groups: .*$`, `  # The image knows numbers only.
  online_groups: ["{{ .Values.socketGroup | int }}"]`},
	{`(?m)^  admin_groups: .*$`, `  # None: kubectl exec in the pod of the daemon is root, who has every right.
  admin_groups: []`},
	{`(?m)^#rules:\n(?:#.*\n)+`, `${0}rules: {{- if .Values.rules }}{{ .Values.rules | toYaml | nindent 2 }}{{ else }} []{{ end }}
`},
	{`(?m)(^metrics:\n(?:  #.*\n)+  address: )""$`, `${1}{{ if .Values.metrics.enabled }}":{{ .Values.metrics.port }}"{{ else }}""{{ end }}`},
}

// programs builds the product, once, and returns its directory.
var programs = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "gpreempt-kubernetes")
	if err != nil {
		return "", err
	}
	cmd := exec.Command("go", "build", "-o", dir+"/", "./cmd/...")
	cmd.Dir, cmd.Stderr = "../..", os.Stderr
	// Jobs of other users execute its files.
	return dir, errors.Join(os.Chmod(dir, 0o755), cmd.Run())
})

func TestMain(m *testing.M) {
	code := m.Run()
	if dir, _ := programs(); dir != "" {
		_ = os.RemoveAll(dir)
	}
	os.Exit(code)
}

// program returns the path of a program.
func program(t *testing.T, name string) string {
	t.Helper()
	dir, err := programs()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, name)
}

func TestConfigFileOfTheChartIsTheDefaultOne(t *testing.T) {
	text, err := exec.Command(program(t, "gpreemptd"), "config", "default").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, edit := range configEdits {
		pattern := regexp.MustCompile(edit.pattern)
		if n := len(pattern.FindAllIndex(text, -1)); n != 1 {
			t.Fatalf("%s matches %d times in the default config file, want once", edit.pattern, n)
		}
		text = pattern.ReplaceAll(text, []byte(edit.template))
	}
	golden(t, "chart/files/gpreemptd.yaml", text)
}

func TestDaemonAcceptsItsConfigFile(t *testing.T) {
	for name, user := range installs {
		file := filepath.Join(t.TempDir(), "gpreemptd.yaml")
		config := find[*corev1.ConfigMap](t, decode(t, name, render(t, withImage(user)))).Data["gpreemptd.yaml"]
		if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.Command(program(t, "gpreemptd"), "config", "check", file).CombinedOutput(); err != nil {
			t.Errorf("%s: %s", name, strings.TrimSpace(string(out)))
		}
	}
}
