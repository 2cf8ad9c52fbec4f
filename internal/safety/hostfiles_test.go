package safety

import (
	"bytes"
	"testing"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// FuzzKernelTexts checks that no text makes a parser panic or return an impossible value.
func FuzzKernelTexts(f *testing.F) {
	for _, s := range []string{
		"6.12.107+deb13-amd64",
		"         0          0 4294967295\n", "6.", "[",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if wholeRange(string(b)) && !bytes.Contains(b, []byte("4294967295")) {
			t.Error("the whole range without its size")
		}
		if s := gpreempt.Printable(string(b)); s != gpreempt.Printable(s) {
			t.Errorf("%q is not clean", s)
		}
	})
}
