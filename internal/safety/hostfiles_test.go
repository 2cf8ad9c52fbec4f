package safety

import (
	"bytes"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestOnlyTheHolderOfALockHoldsIt(t *testing.T) {
	const locks = "1: POSIX  ADVISORY  WRITE 7 00:19:1 0 EOF\n2: FLOCK  ADVISORY  WRITE 8 00:19:1 0 EOF\n" +
		"2: -> FLOCK  ADVISORY  WRITE 9 00:19:1 0 EOF\n3: FLOCK  ADVISORY  READ 10 fd:01:11 0 EOF\nnonsense\n"
	var got []int32
	for pid := range int32(12) {
		if holdsFlock([]byte(locks), 1, pid) {
			got = append(got, pid)
		}
	}
	if diff := cmp.Diff([]int32{8}, got); diff != "" {
		t.Errorf("holders of inode 1 (-want +got):\n%s", diff)
	}
}

// FuzzKernelTexts checks that no text makes a parser panic or return an impossible value.
func FuzzKernelTexts(f *testing.F) {
	for _, s := range []string{
		"6.12.107+deb13-amd64", "3: FLOCK  ADVISORY  WRITE 4242 00:19:1337 0 EOF\n",
		"         0          0 4294967295\n", "6.", "[", "1: FLOCK a b 1 :",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if holdsFlock(b, 1, 4242) && !bytes.Contains(b, []byte("FLOCK")) {
			t.Error("a holder without a lock")
		}
		if wholeRange(string(b)) && !bytes.Contains(b, []byte("4294967295")) {
			t.Error("the whole range without its size")
		}
		if s := gpreempt.Printable(string(b)); s != gpreempt.Printable(s) {
			t.Errorf("%q is not clean", s)
		}
	})
}
