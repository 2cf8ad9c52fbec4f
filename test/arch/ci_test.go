package arch

import (
	"encoding/json"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
)

// TestContainersRunTheChecksWithTheGoOfTheModule holds the devcontainer and the workflow of the
// public forge to .ci/run, which has the checks and what they need, and to the module's Go.
func TestContainersRunTheChecksWithTheGoOfTheModule(t *testing.T) {
	read := func(name string) []byte {
		text, err := os.ReadFile("../../" + name)
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	version := regexp.MustCompile(`(?m)^go (\d+\.\d+)`).FindSubmatch(read("go.mod"))
	if version == nil {
		t.Fatal("go.mod has no go line")
	}
	type container struct {
		Image    string
		Commands []string
	}
	image := "golang:" + string(version[1]) + "-bookworm"

	var dev struct{ Image, OnCreateCommand string }
	if err := json.Unmarshal(read(".devcontainer/devcontainer.json"), &dev); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(container{image, []string{".ci/run build"}}, container{dev.Image, []string{dev.OnCreateCommand}}); diff != "" {
		t.Errorf("devcontainer.json (-want +got):\n%s", diff)
	}

	var workflow struct {
		Jobs map[string]struct {
			Container struct{ Image string }
			Steps     []struct{ Uses, Run string }
		}
	}
	if err := yaml.Unmarshal(read(".github/workflows/ci.yaml"), &workflow); err != nil {
		t.Fatal(err)
	}
	got := container{Image: workflow.Jobs["checks"].Container.Image}
	for _, step := range workflow.Jobs["checks"].Steps {
		if strings.HasPrefix(step.Run, ".ci/") {
			got.Commands = append(got.Commands, step.Run)
		}
	}
	if diff := cmp.Diff(container{image, []string{".ci/run"}}, got); diff != "" || len(workflow.Jobs) != 1 {
		t.Errorf("%d jobs in ci.yaml, want 1 (-want +got):\n%s", len(workflow.Jobs), diff)
	}
}
