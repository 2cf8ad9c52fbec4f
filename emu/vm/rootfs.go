package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// The content of a guest with systemd: Debian's minimal installation and these packages.
const (
	rootSuite    = "bookworm"
	rootPackages = "systemd-sysv,udev,dbus,kmod,procps"
	rootMiB      = 640
)

// FetchRoot returns the path of an ext4 image of a Debian with systemd. It is built once,
// as root, and cached; boot it with snapshot=on. If the host lacks a tool, the error is a
// *MissingError.
func FetchRoot(ctx context.Context) (string, error) {
	cache, err := cacheDir()
	if err != nil {
		return "", err
	}
	what := fnv.New32a()
	fmt.Fprint(what, rootSuite, rootPackages, rootMiB)
	image := filepath.Join(cache, fmt.Sprintf("root-%s-%08x.ext4", rootSuite, what.Sum32()))
	if _, err := os.Stat(image); !errors.Is(err, fs.ErrNotExist) {
		return image, err
	}
	if _, err := exec.LookPath("mke2fs"); err != nil {
		return "", &MissingError{What: "no mke2fs", Remedy: "apt-get install mmdebstrap e2fsprogs"}
	}
	if os.Geteuid() != 0 {
		return "", &MissingError{What: "no image of a Debian with systemd in " + cache, Remedy: "run it once as root to build one"}
	}
	tmp, err := os.MkdirTemp(cache, "root-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(tmp)
	tree, made := filepath.Join(tmp, "tree"), filepath.Join(tmp, "image")
	if err := install(ctx, rootSuite, rootPackages, tree); err != nil {
		return "", err
	}
	disk := exec.CommandContext(ctx, "mke2fs", "-q", "-t", "ext4", "-d", tree, made, fmt.Sprintf("%dM", rootMiB)) //nolint:gosec // paths of the cache
	if text, err := disk.CombinedOutput(); err != nil {
		return "", fmt.Errorf("mke2fs: %w: %s", err, bytes.TrimSpace(text))
	}
	return image, os.Rename(made, image)
}

// install makes a minimal Debian with packages in a new folder, as root.
func install(ctx context.Context, suite, packages, tree string) error {
	debian := exec.CommandContext(ctx, "mmdebstrap", "--quiet", "--variant=minbase", "--include="+packages, //nolint:gosec // constants
		"--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-exclude=/usr/share/man/*", "--dpkgopt=path-exclude=/usr/share/locale/*",
		suite, tree)
	text, err := debian.CombinedOutput()
	switch {
	case errors.Is(err, exec.ErrNotFound):
		return &MissingError{What: "no mmdebstrap", Remedy: "apt-get install mmdebstrap"}
	case err != nil:
		return &MissingError{
			What:   fmt.Sprintf("mmdebstrap could not install Debian %s (%v: %s)", suite, err, lastLine(text)),
			Remedy: "check the network",
		}
	}
	return nil
}

func lastLine(text []byte) string {
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return lines[len(lines)-1]
}
