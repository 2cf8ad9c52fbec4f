package main

import (
	"bytes"
	"context"
	"debug/elf"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/testutil"
)

func TestMain(m *testing.M) { os.Exit(testutil.VerifyMain(m)) }

func TestNewestKernelComesFirst(t *testing.T) {
	text := `linux-image-6.12.9+deb12-amd64 - Linux 6.12 for 64-bit PCs (signed)
linux-image-6.12.117+deb12-amd64 - Linux 6.12 for 64-bit PCs (signed)
linux-image-6.1.0-40-amd64 - Linux 6.1 for 64-bit PCs (signed)
linux-headers-6.12.200+deb12-amd64 - Header files
linux-image-6.12.43+deb13-amd64 - Linux 6.12 for 64-bit PCs (signed)
`
	want := []string{"6.12.117+deb12-amd64", "6.12.43+deb13-amd64", "6.12.9+deb12-amd64"}
	if diff := cmp.Diff(want, parseSearch([]byte(text), "6.12")); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func FuzzParseSearch(f *testing.F) {
	f.Add("linux-image-6.12.1+deb12-amd64 - x\nlinux-image-6.12.99999999999999999999 y\n")
	f.Fuzz(func(t *testing.T, text string) {
		for _, release := range parseSearch([]byte(text), "6.12") {
			if !strings.HasPrefix(release, "6.12.") {
				t.Errorf("release %q", release)
			}
		}
	})
}

// module returns an ELF file whose only content is .modinfo.
func module(t *testing.T, info string) []byte {
	t.Helper()
	const names = "\x00.modinfo\x00.shstrtab\x00"
	h := elf.Header64{
		Ident: [elf.EI_NIDENT]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)},
		Type:  uint16(elf.ET_REL), Machine: uint16(elf.EM_X86_64), Version: uint32(elf.EV_CURRENT),
		Ehsize: 64, Shentsize: 64, Shnum: 3, Shstrndx: 2, Shoff: 64,
	}
	at := uint64(64 + 3*64)
	sections := []elf.Section64{
		{},
		{Name: 1, Type: uint32(elf.SHT_PROGBITS), Off: at, Size: uint64(len(info)), Addralign: 1},
		{Name: 10, Type: uint32(elf.SHT_STRTAB), Off: at + uint64(len(info)), Size: uint64(len(names)), Addralign: 1},
	}
	var b bytes.Buffer
	for _, part := range []any{h, sections, []byte(info), []byte(names)} {
		if err := binary.Write(&b, binary.LittleEndian, part); err != nil {
			t.Fatal(err)
		}
	}
	return b.Bytes()
}

func TestModulesComeAfterWhatTheyNeed(t *testing.T) {
	k := Kernel{Release: "6.12.1", dir: t.TempDir()}
	root := filepath.Join(k.dir, "lib", "modules", k.Release)
	for name, text := range map[string][]byte{
		"modules.builtin":              []byte("kernel/lib/crc16.ko\n"),
		"kernel/drivers/gpu/amdgpu.ko": module(t, "license=GPL\x00depends=ttm,gpu-sched,crc16\x00"),
		"kernel/drivers/gpu/ttm.ko":    module(t, "depends=drm\x00"),
		// Files have dashes where modules have underscores.
		"kernel/drivers/gpu/gpu-sched.ko": module(t, "depends=drm\x00"),
		"kernel/drivers/gpu/drm.ko":       module(t, "depends=\x00"),
	} {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	modules, err := k.Modules(t.Context(), "amdgpu", "drm")
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, m := range modules {
		got = append(got, m.Name)
	}
	if diff := cmp.Diff([]string{"drm", "ttm", "gpu_sched", "amdgpu"}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if _, err := k.Modules(t.Context(), "nouveau"); err == nil || !strings.Contains(err.Error(), "no module nouveau") {
		t.Errorf("unknown module: %v", err)
	}
}

// entry is an archive entry as readArchive returns it.
type entry struct {
	Name string
	Mode uint64
	Data string
}

// readArchive reads a newc archive up to its trailer.
func readArchive(t *testing.T, r io.Reader) []entry {
	t.Helper()
	var entries []entry
	at := 0
	take := func(n int) string {
		b := make([]byte, n+(-(at+n)&3))
		if _, err := io.ReadFull(r, b); err != nil {
			t.Fatal(err)
		}
		at += len(b)
		return string(b[:n])
	}
	for {
		// The name follows the header without padding.
		b := make([]byte, 110)
		if _, err := io.ReadFull(r, b); err != nil {
			t.Fatal(err)
		}
		at += len(b)
		field := func(i int) uint64 {
			n, err := strconv.ParseUint(string(b[6+8*i:14+8*i]), 16, 32)
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
		if string(b[:6]) != "070701" {
			t.Fatalf("no entry header at %d: %q", at-110, b)
		}
		e := entry{Name: strings.TrimSuffix(take(int(field(11))), "\x00"), Mode: field(1)}
		e.Data = take(int(field(6)))
		if e.Name == "TRAILER!!!" {
			return entries
		}
		entries = append(entries, e)
	}
}

func TestArchiveHasFilesBelowTheirDirectories(t *testing.T) {
	var b bytes.Buffer
	a := NewArchive(&b)
	tree := fstest.MapFS{"x": {Data: []byte("12345"), Mode: 0o600}, "sub/y": {Data: []byte("1234"), Mode: 0o755}}
	for _, err := range []error{
		a.File("/init", 0o755, []byte("abc")), a.Tree("/test/data", tree), a.Close(),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	want := []entry{
		{"init", 0o100755, "abc"},
		{"test", 0o040755, ""},
		{"test/data", 0o040755, ""},
		{"test/data/sub", 0o040755, ""},
		{"test/data/sub/y", 0o100755, "1234"},
		{"test/data/x", 0o100600, "12345"},
	}
	if diff := cmp.Diff(want, readArchive(t, &b)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestResultsComeFromTheInitOnly(t *testing.T) {
	m := Manifest{Nonce: "N", Programs: make([]Program, 2)}
	var text bytes.Buffer
	fmt.Fprintln(&text, "first")
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	check(m.WriteResult(&text, 0, 0))
	fmt.Fprintln(&text, mark, "M program 1 status 0") // from a program
	check(m.WriteResult(&text, 1, -1))
	check(m.WriteEnd(&text))
	var out bytes.Buffer
	results, ended, err := m.read(&text, &out)
	if err != nil || !ended {
		t.Errorf("ended %v, %v", ended, err)
	}
	if diff := cmp.Diff(Results{0, -1}, results); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got, want := out.String(), "first\n"+mark+" M program 1 status 0\n"; got != want {
		t.Errorf("forwarded %q, want %q", got, want)
	}
}

func TestGuestThatEndsEarlyFails(t *testing.T) {
	m := Manifest{Nonce: "N", Programs: make([]Program, 2)}
	for name, text := range map[string]string{
		"no output":        "",
		"no trailer":       mark + " N program 0 status 0\n" + mark + " N program 1 status 0\n",
		"a result missing": mark + " N program 0 status 0\n" + mark + " N end\n",
		"half a trailer":   mark + " N program 0 status 0\n" + mark + " N program 1 status 0\n" + mark + " N en",
		"out of order":     mark + " N program 1 status 0\n" + mark + " N end\n",
		"a failure":        mark + " N failed: no /dev/kfd\n",
	} {
		t.Run(name, func(t *testing.T) {
			results, ended, err := m.read(strings.NewReader(text), io.Discard)
			if err == nil {
				err = m.whole(results, ended, "console")
			}
			if err == nil {
				t.Errorf("%v counts as a success", results)
			}
		})
	}
}

func TestManifestReachesTheInit(t *testing.T) {
	m := Manifest{
		Nonce: "N", Modules: []Load{{Path: "/modules/a", Params: "x=1"}}, Need: []string{"/dev/kfd"}, Limit: time.Minute,
		Programs: []Program{{Path: "/p", Args: []string{"-v"}, Dir: "/d", Env: []string{"A=b"}}},
	}
	var b bytes.Buffer
	a := NewArchive(&b)
	if err := errors.Join(m.AddTo(a), a.Close()); err != nil {
		t.Fatal(err)
	}
	entries := readArchive(t, &b)
	var got Manifest
	if err := json.Unmarshal([]byte(entries[len(entries)-1].Data), &got); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(m, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestMissingQEMUNamesThePackage(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	err := Guest{Timeout: time.Minute}.Run(context.WithoutCancel(t.Context()), io.Discard)
	if _, ok := errors.AsType[*MissingError](err); !ok {
		t.Fatalf("%v", err)
	}
	if !strings.Contains(err.Error(), "apt-get install qemu-system-x86") && !strings.Contains(err.Error(), "linux/amd64") {
		t.Errorf("%v", err)
	}
}

func TestUnavailableKernelIsAReasonToSkip(t *testing.T) {
	t.Setenv(CacheEnv, t.TempDir())
	t.Setenv("PATH", t.TempDir())
	k, err := FetchKernel(t.Context(), "6.12")
	if _, ok := errors.AsType[*MissingError](err); !ok {
		t.Errorf("%+v, %v", k, err)
	}
}

func TestCachedKernelNeedsNoNetwork(t *testing.T) {
	cache := t.TempDir()
	t.Setenv(CacheEnv, cache)
	t.Setenv("PATH", t.TempDir())
	for _, release := range []string{"6.12.9+deb12-amd64", "6.12.10+deb12-amd64"} {
		if err := os.Mkdir(filepath.Join(cache, release), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	k, err := FetchKernel(t.Context(), "6.12")
	if err != nil || k.Image() != filepath.Join(cache, "6.12.10+deb12-amd64", "boot", "vmlinuz-6.12.10+deb12-amd64") {
		t.Errorf("%q, %v", k.Image(), err)
	}
}

func TestRootImageThatCannotBeBuiltIsAReasonToSkip(t *testing.T) {
	t.Setenv(CacheEnv, t.TempDir())
	t.Setenv("PATH", t.TempDir())
	image, err := FetchRoot(t.Context())
	if _, ok := errors.AsType[*MissingError](err); !ok || !strings.Contains(err.Error(), "apt-get install mmdebstrap") {
		t.Errorf("%q, %v", image, err)
	}
}

// A fake apt that offers a kernel in three packages, as Debian has them since 7.2.
func TestKernelOfANewerDebianComesFromSuitesOfItsOwn(t *testing.T) {
	cache, bin := t.TempDir(), t.TempDir()
	t.Setenv(CacheEnv, cache)
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	const release = "7.3.4+deb13-amd64"
	// The host's apt is called without options and knows nothing.
	write(t, bin, map[string]string{
		"apt-cache": `#!/bin/sh
case "$*" in
*sourcelist=*search*) echo "linux-image-` + release + ` - Linux" ;;
*sourcelist=*show*) printf 'Version: 7.3.4-1\nDepends: kmod, linux-binary-` + release + ` (= 7.3.4-1), linux-modules-` + release + ` (= 7.3.4-1)\n' ;;
esac`,
		"apt-get": `#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
[ "$1" = update ] && exit
[ "$1" = indextargets ] && echo http://debian.example/debian/ && exit
shift
for package; do echo "$package" >"$package.deb"; done`,
		"dpkg": `#!/bin/sh
mkdir -p "$3/usr/lib/modules/` + release + `"
cat "$2" >>"$3/usr/lib/modules/` + release + `/vmlinuz"`,
	})
	for _, name := range []string{"apt-cache", "apt-get", "dpkg"} {
		if err := os.Chmod(filepath.Join(bin, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Stat(keyring); err != nil {
		t.Skip("not a Debian: ", err)
	}
	for range 2 { // the second time, from the cache
		k, err := FetchKernel(t.Context(), "7.3")
		if err != nil {
			t.Fatal(err)
		}
		want := "linux-binary-" + release + "\nlinux-image-" + release + "\nlinux-modules-" + release + "\n"
		if got := read(t, k.Image()); got != want || k.Release != release || k.source.root == "" {
			t.Errorf("%+v: image %q, want %q", k, got, want)
		}
	}
}
