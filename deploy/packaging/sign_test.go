package main

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestSignedChecksumsAreVerified signs with make sign and verifies as docs/install.md says.
func TestSignedChecksumsAreVerified(t *testing.T) {
	for _, program := range []string{"make", "ssh-keygen", "sha256sum"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("no %s", program)
		}
	}
	dir := t.TempDir()
	run := func(stdin, program string, args ...string) (string, error) {
		cmd := exec.CommandContext(t.Context(), program, args...)
		cmd.Dir, cmd.Stdin = dir, strings.NewReader(stdin)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	must := func(out string, err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	write := func(name, text string) {
		t.Helper()
		must("", os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	makefile, err := filepath.Abs("../../Makefile")
	must("", err)
	sign := func(args ...string) (string, error) {
		return run("", "make", append([]string{"--no-print-directory", "-f", makefile, "sign"}, args...)...)
	}
	must("", os.Mkdir(filepath.Join(dir, "dist"), 0o755))
	const release = "content of a release"
	sums := fmt.Sprintf("%x  gpreempt.tar.gz\n", sha256.Sum256([]byte(release)))
	write("dist/gpreempt.tar.gz", release)
	write("dist/SHA256SUMS", sums)
	for _, key := range []string{"release", "other"} {
		must(run("", "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "throw-away", "-f", key))
	}
	public, err := os.ReadFile(filepath.Join(dir, "release.pub"))
	must("", err)
	write("allowed_signers", "gpreempt "+string(public))

	verify := func(sums string) error {
		_, err := run(sums, "ssh-keygen", "-Y", "verify", "-f", "allowed_signers", "-I", "gpreempt", "-n", "gpreempt-release", "-s", "dist/SHA256SUMS.sig")
		return err
	}
	for range 2 { // a signature is replaced
		must(sign("KEY=release"))
		if err := verify(sums); err != nil {
			t.Errorf("the signature is not accepted: %v", err)
		}
	}
	if err := verify(strings.Replace(sums, "gpreempt", "Gpreempt", 1)); err == nil {
		t.Error("other checksums are accepted")
	}
	must(sign("KEY=other"))
	if err := verify(sums); err == nil {
		t.Error("the signature of another key is accepted")
	}
	if out, err := sign(); err == nil || !strings.Contains(out, "make sign KEY=FILE") {
		t.Errorf("without a key: %v, %s", err, out)
	}
	write("dist/gpreempt.tar.gz", release+" that was changed")
	if out, err := sign("KEY=release"); err == nil {
		t.Errorf("checksums of other files are signed: %s", out)
	}
	text, err := os.ReadFile("../../docs/install.md")
	must("", err)
	if want := []byte("ssh-keygen -Y verify -f allowed_signers -I gpreempt -n gpreempt-release -s SHA256SUMS.sig < SHA256SUMS"); !bytes.Contains(text, want) {
		t.Errorf("docs/install.md has no %s", want)
	}
}
