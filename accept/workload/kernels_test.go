package workload

import (
	"bytes"
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// rounds does what kernels.c does, round by round, for the lanes of two workgroups.
func rounds(kernel string, seed, n uint32) []uint32 {
	next := func(v uint32) uint32 { return v*1664525 + 1013904223 }
	count := map[string]int{"vgpr": values, "agpr": values, "mfma": mfmaRows, "lds": ldsWords, "scratch": values, "grid": 1}[kernel]
	words := make([][]uint32, 2*lanes)
	for lane := range words {
		for i := range count {
			v := first(seed, uint32(lane), uint32(i))
			if kernel == "mfma" {
				v &= 0xffff
			}
			words[lane] = append(words[lane], v)
		}
	}
	for range n {
		moved := make([][]uint32, len(words))
		for lane, ws := range words {
			to := lane
			switch kernel {
			case "grid":
				to = (lane + lanes) % len(words)
			case "lds":
				to = lane - lane%lanes + (lane+1)%lanes
			}
			for _, v := range ws {
				if kernel == "mfma" {
					moved[to] = append(moved[to], v+1)
				} else {
					moved[to] = append(moved[to], next(v))
				}
			}
		}
		words = moved
	}
	sums := make([]uint32, len(words))
	for lane, ws := range words {
		for _, v := range ws {
			if kernel == "grid" {
				sums[lane] = v
				break
			}
			sums[lane] = (sums[lane] ^ v) * 16777619
		}
	}
	return sums
}

func TestExpectedWordsAreThoseOfTheRounds(t *testing.T) {
	for _, k := range Kernels {
		for _, n := range []uint32{0, 1, 2, 255, 300} {
			const seed = 0xdeadbeef
			var got []uint32
			for lane := range uint32(2 * lanes) {
				got = append(got, expected(k.Name, seed, lane, n, 2))
			}
			if diff := cmp.Diff(rounds(k.Name, seed, n), got); diff != "" {
				t.Errorf("%s, %d rounds (-want +got):\n%s", k.Name, n, diff)
			}
		}
	}
}

// gpus are the GPUs with a code object.
var gpus = map[string]uint32{"gfx90a": 90010, "gfx942": 90402, "gfx950": 90500}

func TestEveryCodeObjectHasEveryKernelAndNeedsNoRelocation(t *testing.T) {
	for name, gfx := range gpus {
		text, err := object(gfx)
		if err != nil {
			t.Fatal(err)
		}
		file, err := elf.NewFile(bytes.NewReader(text))
		if err != nil {
			t.Fatal(err)
		}
		d := &device{}
		if d.code, err = place(text, func(n int) (memory, error) { return memory{mem: make([]byte, n)}, nil }); err != nil {
			t.Fatal(err)
		}
		got := map[string]kernel{}
		for symbol := range d.code.symbols {
			if kernelName, ok := strings.CutSuffix(symbol, ".kd"); ok {
				k, err := d.kernel(kernelName)
				if err != nil {
					t.Fatal(err)
				}
				k.descriptor = 0
				got[kernelName] = k
			}
		}
		want := map[string]kernel{
			"beat": {}, "vgpr": {}, "agpr": {}, "mfma": {}, "grid": {}, "touch": {}, "debugtrap": {}, "lds": {lds: 4 * ldsWords * lanes},
			"scratch": {private: 4 * (values + 1)}, // one is the compiler's
		}
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(kernel{})); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		if at := d.code.symbols["trapped"]; at == 0 || at%256 != 0 {
			t.Errorf("%s has its trap handler at %#x", name, at)
		}
		for _, s := range file.Sections {
			if s.Type == elf.SHT_RELA || s.Type == elf.SHT_REL { //nolint:misspell // RELA is a type of section
				t.Errorf("%s has relocations in %s", name, s.Name)
			}
		}
	}
	if HasCode(110000) {
		t.Error("there is a code object for gfx1100")
	}
}

func TestCodeObjectsAreThoseOfTheSource(t *testing.T) {
	const clang = "/usr/lib/llvm-22/bin/clang"
	if _, err := os.Stat(clang); err != nil {
		t.Skip("no LLVM 22: apt-get install -y --no-install-recommends clang-22 lld-22")
	}
	out := t.TempDir()
	if text, err := exec.Command("make", "-C", "../..", "--no-print-directory", "kernels", "KERNELS="+out).CombinedOutput(); err != nil {
		t.Fatalf("make kernels: %v\n%s", err, text)
	}
	for name := range gpus {
		built, err := os.ReadFile(filepath.Join(out, name+".co"))
		if err != nil {
			t.Fatal(err)
		}
		committed, err := object(gpus[name])
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(built, committed) {
			t.Errorf("%s.co is not what kernels.c compiles to: run make kernels", name)
		}
	}
}
