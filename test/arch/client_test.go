package arch

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// TestClientLinksGRPCAndNothingElse holds what a program that imports the client downloads: the
// modules of gRPC (docs/adr/0036-one-module-for-the-client-too.md).
func TestClientLinksGRPCAndNothingElse(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "go", "list", "-deps", "-f", "{{with .Module}}{{.Path}}{{end}}", "./pkg/client")
	cmd.Dir = "../.."
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	got := strings.Fields(string(out))
	slices.Sort(got)
	got = slices.Compact(got)
	want := []string{
		"github.com/gpreempt/gpreempt", "golang.org/x/net", "golang.org/x/sys", "golang.org/x/text", "google.golang.org/genproto/googleapis/rpc",
		"google.golang.org/grpc", "google.golang.org/protobuf",
	}
	if !slices.Equal(got, want) {
		t.Errorf("pkg/client links the modules\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}
