// Command packaging makes what is released, in dist: for each architecture a tar.gz, debs,
// rpms and the list of what is linked (SBOM), a wheel of the Python client, and the checksums of all.
//
//	go run . -version "$(git describe --tags --always --dirty)" [-commits N] [-date UNIXTIME] [-arch amd64,arm64] [-out ../../dist]
//
// It runs in its own directory. The same commit and the same Go produce the same bytes.
package main

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/goreleaser/nfpm/v2"
	_ "github.com/goreleaser/nfpm/v2/deb"
	_ "github.com/goreleaser/nfpm/v2/rpm"

	"github.com/gpreempt/gpreempt/internal/config"
)

// repository is the root of the tree, relative to this directory.
const repository = "../.."

// programs are in the tar.gz.
var programs = []string{"gpreemptd", "gpctl", "gplab", "gpaccept", "kfdemu"}

// units are the files for systemd and udev.
var units = []string{
	"70-gpreempt.rules", "gpreempt-trace-export.service", "gpreempt.sysusers.conf", "gpreempt.tmpfiles.conf",
	"gpreemptd.default", "gpreemptd.service", "gpreemptd.socket",
}

// maintainer is the one in the packages: a placeholder until there is an address.
const maintainer = "The gpreempt authors <maintainers@gpreempt.invalid>"

// packages are the files for nfpm, and what each is made for.
var packages = []struct {
	config  string
	formats []string
}{
	{"gpreempt.yaml", []string{"deb", "rpm"}},
	{"kfdemu.yaml", []string{"deb", "rpm"}},
	{libraryConfig, []string{"deb", "rpm"}},
	{"python3-gpreempt.yaml", []string{"deb", "rpm"}},
}

const libraryConfig = "libgpreempt.yaml"

type release struct {
	version  string // of the binaries
	packages string // the version of the packages
	date     time.Time
	out      string
	made     []string // names of files in out
}

func main() {
	var (
		r       release
		commits = flag.Int("commits", 0, "number of commits up to this one, for a version without a tag")
		seconds = flag.Int64("date", 0, "time of every file, in seconds since 1970")
		archs   = flag.String("arch", "amd64,arm64", "architectures, as GOARCH")
	)
	flag.StringVar(&r.version, "version", "", "version, from git describe")
	flag.StringVar(&r.out, "out", filepath.Join(repository, "dist"), "directory to write to")
	flag.Parse()
	r.date = time.Unix(*seconds, 0).UTC()
	if err := r.make(context.Background(), *commits, strings.Split(*archs, ",")); err != nil {
		fmt.Fprintln(os.Stderr, "packaging:", err)
		os.Exit(1)
	}
}

func (r *release) make(ctx context.Context, commits int, archs []string) (err error) {
	if r.packages, err = packageVersion(r.version, commits); err != nil {
		return err
	}
	if err := os.MkdirAll(r.out, 0o755); err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "gpreempt-packaging-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	for _, arch := range archs {
		if err := r.build(ctx, filepath.Join(dir, arch), arch); err != nil {
			return fmt.Errorf("%s: %w", arch, err)
		}
	}
	if err := r.wheel(ctx, filepath.Join(dir, "python")); err != nil {
		return err
	}
	var sums bytes.Buffer
	for _, name := range r.made {
		text, err := os.ReadFile(filepath.Join(r.out, name))
		if err != nil {
			return err
		}
		fmt.Fprintf(&sums, "%x  %s\n", sha256.Sum256(text), name)
	}
	fmt.Print(sums.String())
	return os.WriteFile(filepath.Join(r.out, "SHA256SUMS"), sums.Bytes(), 0o644)
}

// build makes everything for one architecture, from files it stages in dir.
func (r *release) build(ctx context.Context, dir, arch string) error {
	name := fmt.Sprintf("gpreempt-%s-linux-%s", r.version, arch)
	bin := filepath.Join(dir, name)
	if err := os.MkdirAll(bin, 0o755); err != nil {
		return err
	}
	for module, packages := range map[string][]string{".": {"./cmd/...", "./accept/cmd/gpaccept", "./emu/cmd/kfdemu"}, "lab": {"./cmd/..."}} {
		args := []string{"build", "-trimpath", "-buildvcs=false", "-o", bin + "/", "-ldflags=-s -w -X github.com/gpreempt/gpreempt/internal/api.Version=" + r.version}
		cmd := exec.CommandContext(ctx, "go", append(args, packages...)...)
		cmd.Dir = filepath.Join(repository, module)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch)
		cmd.Stderr = os.Stderr
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("go build in %s: %w", module, err)
		}
	}
	var binaries []string
	for _, program := range programs {
		binaries = append(binaries, filepath.Join(bin, program))
	}
	sbom, err := billOfMaterials(r.version, r.date, binaries)
	if err != nil {
		return err
	}
	if err := r.write(name+".cdx.json", sbom); err != nil {
		return err
	}
	if err := r.stage(dir); err != nil {
		return err
	}
	if err := r.archive(dir, name); err != nil {
		return err
	}
	glibc, err := library(ctx, dir, arch)
	if err != nil {
		return err
	}
	if err := dated(dir, r.date); err != nil {
		return err
	}
	for _, p := range packages {
		if p.config == libraryConfig && glibc == "" {
			continue
		}
		for _, format := range p.formats {
			if err := r.pack(p.config, format, staged{dir, bin, arch, glibc}); err != nil {
				return fmt.Errorf("%s, %s: %w", p.config, format, err)
			}
		}
	}
	return nil
}

// stage writes the generated files of a package.
func (r *release) stage(dir string) error {
	if err := stage(filepath.Join(dir, "gpreemptd.yaml"), config.DefaultYAML(), 0o644); err != nil {
		return err
	}
	if err := writeManual(dir, r.packages, r.date); err != nil {
		return err
	}
	if err := writeCompletions(dir); err != nil {
		return err
	}
	if err := writeDocuments(filepath.Join(dir, "doc")); err != nil {
		return err
	}
	if err := r.client(filepath.Join(dir, "python")); err != nil {
		return err
	}
	for _, unit := range units {
		text, err := os.ReadFile(filepath.Join(repository, "deploy/systemd", unit))
		if err != nil {
			return err
		}
		if err := stage(filepath.Join(dir, "systemd", unit), text, 0o644); err != nil {
			return err
		}
	}
	// In Debian's form, for its tools; the changes are in CHANGELOG.md.
	entry := fmt.Sprintf("gpreempt (%s) unstable; urgency=medium\n\n  * See CHANGELOG.md.\n\n -- %s  %s\n",
		r.packages, maintainer, r.date.Format(time.RFC1123Z))
	return stage(filepath.Join(dir, "changelog.gz"), packed([]byte(entry)), 0o644)
}

// stage writes a file with exactly that mode, and the directories above it.
func stage(name string, text []byte, mode fs.FileMode) error {
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(name, text, mode); err != nil {
		return err
	}
	return os.Chmod(name, mode)
}

// dated sets one time for everything below dir, and the modes of installed directories and
// programs, independent of the umask.
func dated(dir string, date time.Time) error {
	return filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if err := os.Chmod(name, 0o755); err != nil {
				return err
			}
		}
		return os.Chtimes(name, date, date)
	})
}

func (r *release) write(name string, text []byte) error {
	r.made = append(r.made, name)
	return stage(filepath.Join(r.out, name), text, 0o644)
}

// archived are the staged files and folders in the tar.gz, with the programs and the license.
var archived = []string{"completions", "doc", "gpreemptd.yaml", "man", "systemd"}

// archive writes the tar.gz, with the sums of its files.
func (r *release) archive(dir, name string) error {
	var content, sums bytes.Buffer
	t := tar.NewWriter(&content)
	add := func(file string, mode int64, text []byte) error {
		header := tar.Header{Name: name + "/" + file, Mode: mode, Size: int64(len(text)), ModTime: r.date, Format: tar.FormatGNU, Typeflag: tar.TypeReg}
		fmt.Fprintf(&sums, "%x  %s\n", sha256.Sum256(text), file)
		if err := t.WriteHeader(&header); err != nil {
			return err
		}
		_, err := t.Write(text)
		return err
	}
	license, err := os.ReadFile(filepath.Join(repository, "LICENSE"))
	if err != nil {
		return err
	}
	if err := add("LICENSE", 0o644, license); err != nil {
		return err
	}
	for _, program := range programs {
		text, err := os.ReadFile(filepath.Join(dir, name, program))
		if err != nil {
			return err
		}
		if err := add(program, 0o755, text); err != nil {
			return err
		}
	}
	for _, each := range archived {
		err := filepath.WalkDir(filepath.Join(dir, each), func(file string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			text, err := os.ReadFile(file)
			if err != nil {
				return err
			}
			relative, err := filepath.Rel(dir, file)
			if err != nil {
				return err
			}
			return add(filepath.ToSlash(relative), 0o644, text)
		})
		if err != nil {
			return err
		}
	}
	if err := add("SHA256SUMS", 0o644, bytes.Clone(sums.Bytes())); err != nil {
		return err
	}
	if err := t.Close(); err != nil {
		return err
	}
	return r.write(name+".tar.gz", packed(content.Bytes()))
}

// staged is what packages are made of: generated files, binaries, and the glibc of the library.
type staged struct{ dir, bin, arch, glibc string }

// pack makes a package from a config for nfpm.
func (r *release) pack(config, format string, s staged) error {
	variables := map[string]string{
		"MAINTAINER": maintainer, "STAGE": s.dir, "BIN": s.bin, "VERSION": r.packages, "ARCH": s.arch,
		"LIB": filepath.Join(s.dir, "lib", format), "GLIBC": s.glibc,
	}
	c, err := nfpm.ParseFileWithEnvMapping(config, func(name string) string { return variables[name] })
	if err != nil {
		return err
	}
	info, err := c.Get(format)
	if err != nil {
		return err
	}
	packager, err := nfpm.Get(format)
	if err != nil {
		return err
	}
	info.MTime = r.date
	info = nfpm.WithDefaults(info)
	if err := nfpm.Validate(info); err != nil {
		return err
	}
	info.Target = packager.ConventionalFileName(info)
	if slices.Contains(r.made, info.Target) {
		return nil // it is the same for all architectures
	}
	var b bytes.Buffer
	if err := packager.Package(info, &b); err != nil {
		return err
	}
	return r.write(info.Target, b.Bytes())
}
