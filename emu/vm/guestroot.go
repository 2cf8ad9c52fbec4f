package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// handOver mounts a file system as root, copies the overlay, this program and its manifest
// into it, and executes its init. It returns only on failure.
func handOver(device string) error {
	const root = "/root"
	if err := os.MkdirAll(root, 0o755); err != nil { //nolint:gosec // a mount point
		return err
	}
	if err := awaitDevice(device); err != nil {
		return err
	}
	if err := unix.Mount(device, root, "ext4", 0, ""); err != nil {
		return fmt.Errorf("mount %s: %w", device, err)
	}
	if err := os.CopyFS(root, os.DirFS(Overlay)); err != nil {
		return err
	}
	for _, name := range []string{"/init", ManifestPath} {
		if err := copyFile(filepath.Join(root, name), name); err != nil {
			return err
		}
	}
	if err := os.RemoveAll(Overlay); err != nil { // frees memory: it is part of the initramfs
		return err
	}
	// As switch_root(8) does. Mounts made here stay below the new root; systemd makes its own.
	if err := errors.Join(os.Chdir(root), unix.Mount(".", "/", "", unix.MS_MOVE, ""), unix.Chroot("."), os.Chdir("/")); err != nil {
		return fmt.Errorf("change to %s: %w", device, err)
	}
	const first = "/sbin/init"
	return fmt.Errorf("%s of %s: %w", first, device, unix.Exec(first, []string{first}, []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}))
}

// awaitDevice waits for the driver to find a disk.
func awaitDevice(path string) error {
	for range 6000 {
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		time.Sleep(10 * time.Millisecond)
	}
	return fmt.Errorf("no device %s after a minute", path)
}

func copyFile(to, from string) (err error) {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close() // nothing was written
	info, err := in.Stat()
	if err != nil {
		return err
	}
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, info.Mode().Perm())
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}
