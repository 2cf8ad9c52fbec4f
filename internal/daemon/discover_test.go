package daemon

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/config"
)

func TestKubeletAddressNamesVariablesOfTheEnvironment(t *testing.T) {
	environment := map[string]string{"NODE_IP": "10.0.0.5", "EMPTY": "", "TWICE": "$(NODE_IP)"}
	lookup := func(name string) (string, bool) {
		value, ok := environment[name]
		return value, ok
	}
	got := map[string]string{}
	want := map[string]string{
		"https://127.0.0.1:10250":     "https://127.0.0.1:10250",
		"https://$(NODE_IP):10250":    "https://10.0.0.5:10250",
		"https://$(NODE_IP)$(EMPTY):": "https://10.0.0.5:",
		"https://$(TWICE):10250":      "https://$(NODE_IP):10250",
		"https://$(NODE_NAME):10250":  "https://$(NODE_NAME):10250", // not set
		"https://$NODE_IP:10250/$()(": "https://$NODE_IP:10250/$()(",
	}
	for text := range want {
		got[text] = expand(text, lookup)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}

	file := filepath.Join(t.TempDir(), "gpreemptd.yaml")
	if err := os.WriteFile(file, []byte("containers: {kubelet: https://$(NODE_IP):10250}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg, err := config.Load(file)
	if err != nil {
		t.Fatal(err)
	}
	if got := cfg.Containers.Kubelet; got != "https://$(NODE_IP):10250" {
		t.Errorf("the config file gives %q", got)
	}
}
