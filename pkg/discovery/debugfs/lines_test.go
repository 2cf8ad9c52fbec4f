package debugfs_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
)

func TestCarriageReturnsAreIgnored(t *testing.T) {
	var b text
	b.linef("Process 7 PASID 7:")
	want, err := debugfs.ParseMQDs([]byte(b.String()))
	if err != nil {
		t.Fatal(err)
	}
	got, err := debugfs.ParseMQDs([]byte(strings.ReplaceAll(b.String(), "\n", "\r\n")))
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("error %v (-want +got):\n%s", err, diff)
	}
}
