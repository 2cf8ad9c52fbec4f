// Package kubernetes tests the chart, the manifests rendered from it, and the examples. It is
// a separate module, so that its dependencies do not affect the shipped binaries.
package kubernetes

import (
	"bytes"
	"flag"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/lint"
	"helm.sh/helm/v3/pkg/lint/support"
)

var update = flag.Bool("update", false, "write chart/files and manifests instead of comparing with them")

// values are those of the user.
type values = map[string]any

// placeholder replaces the image, which is not published.
const placeholder = "example.invalid/gpreempt:unset"

// installs are ways to install the chart, by the name of the manifest; those without a name
// are checked and not written.
var installs = map[string]values{
	"manifests/gpreempt.yaml": {},
	"manifests/gpreempt-device-plugin.yaml": {
		"deviceResources": values{"squat.ai/gpreempt": "1"},
		"csi":             values{"enabled": false}, // its container is privileged
	},
	"every mechanism": {
		"mechanisms":      []any{"dbgtrap", "criu", "freezer"},
		"deviceResources": values{"squat.ai/gpreempt": "1"},
		"runtimeSocket":   "",
	},
	"another rule": {
		"rules": []any{
			values{"name": "batch", "match": values{"pod": values{"namespace": "batch-*"}}, "class": "offline"},
		},
		"imagePullSecrets": []any{values{"name": "registry"}},
	},
	"labels and a resource of the nodes": {
		"node": values{"enabled": true, "offlinePerGPU": 4},
	},
	"another root directory of the kubelet": {
		"csi": values{"kubeletDir": "/var/lib/k0s/kubelet"},
	},
	"metrics": {
		"metrics": values{"enabled": true, "podMonitor": true, "podMonitorLabels": values{"release": "prometheus"}},
	},
	"metrics for one namespace": {
		"metrics": values{
			"enabled": true, "from": []any{values{"namespaceSelector": values{"matchLabels": values{"kubernetes.io/metadata.name": "monitoring"}}}},
		},
	},
	"all that may be empty": {
		"rules": []any{}, "mechanisms": []any{}, "runtimeSocket": "", "networkPolicy": false,
		"affinity": nil, "nodeSelector": nil, "tolerations": []any{},
	},
	"a config file of one's own": {
		"config": "access:\n  online_groups: [\"{{ .Values.socketGroup }}\"]\n  admin_groups: []\n",
	},
}

// render returns the objects of an installation, as of helm template.
func render(t *testing.T, user values) string {
	t.Helper()
	text, err := tryRender(user)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func tryRender(user values) (string, error) {
	chart, err := loader.LoadDir("chart")
	if err != nil {
		return "", err
	}
	release := chartutil.ReleaseOptions{Name: "gpreempt", Namespace: "gpreempt", Revision: 1, IsInstall: true}
	all, err := chartutil.ToRenderValues(chart, user, release, chartutil.DefaultCapabilities)
	if err != nil {
		return "", err
	}
	// Strict mode detects misspelt values, but also reports empty ones.
	emptied := slices.Contains(slices.Collect(maps.Values(user)), nil)
	files, err := engine.Engine{Strict: !emptied}.Render(chart, all)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if text := strings.TrimSpace(files[name]); text != "" && strings.HasSuffix(name, ".yaml") {
			b.WriteString("---\n# Source: " + name + "\n" + text + "\n")
		}
	}
	return b.String(), nil
}

// withImage returns the values with the required image.
func withImage(user values) values {
	user = maps.Clone(user)
	user["image"] = placeholder
	return user
}

func TestManifestsAreThoseOfTheChart(t *testing.T) {
	for name, user := range installs {
		if !strings.HasPrefix(name, "manifests/") {
			continue
		}
		text := "# Generated from chart/ by make kubernetes. Do not edit: change the chart, or use it.\n" + render(t, withImage(user))
		golden(t, name, []byte(text))
	}
}

// golden compares a file with its expected text, or writes it.
func golden(t *testing.T, name string, want []byte) {
	t.Helper()
	if *update {
		if err := os.WriteFile(name, want, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	got, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(want, got) {
		t.Errorf("%s is stale, run make kubernetes (-want +got):\n%s", name, cmp.Diff(string(want), string(got)))
	}
}

func TestMissingImageIsAnError(t *testing.T) {
	_, err := tryRender(values{})
	if err == nil || !strings.Contains(err.Error(), "--set image=REGISTRY/gpreempt:TAG") {
		t.Errorf("got %v", err)
	}
}

func TestHelmLintsTheChart(t *testing.T) {
	for name, user := range installs {
		for _, m := range lint.All("chart", withImage(user), "gpreempt", true).Messages {
			if m.Severity > support.InfoSev { // an icon is for catalogues of charts
				t.Errorf("%s: %v", name, m)
			}
		}
	}
}

// documents splits a file of YAML documents.
func documents(text string) []string {
	var all []string
	for document := range strings.SplitSeq("\n"+text, "\n---") {
		if lines := strings.Split(document, "\n"); slices.ContainsFunc(lines, func(l string) bool {
			return strings.TrimSpace(l) != "" && !strings.HasPrefix(strings.TrimSpace(l), "#")
		}) {
			all = append(all, document)
		}
	}
	return all
}

// everything returns all objects to apply, by their source.
func everything(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	for name, user := range installs {
		all[name] = render(t, withImage(user))
	}
	for _, pattern := range []string{"manifests/namespace.yaml", "examples/*.yaml", "examples/batch/job.yaml"} {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %d files, %v", pattern, len(files), err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			all[file] = string(text)
		}
	}
	return all
}
