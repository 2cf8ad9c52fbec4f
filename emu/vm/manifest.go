package main

import (
	"encoding/json"
	"fmt"
	"io"
	"time"
)

// ManifestPath is where the guest's init finds its Manifest.
const ManifestPath = "/manifest.json"

// Overlay is the directory of an initramfs whose files are copied over a distribution's
// root, see Manifest.Root.
const Overlay = "/overlay"

// StewardArg starts this program as the steward of a guest: a child of the first
// process that runs the programs.
const StewardArg = "steward"

// Manifest is what the init of a guest does: it loads modules, then runs programs,
// one after the other, and powers off. With a Root it hands the machine over to the
// first process of a distribution, which starts the steward as a service.
type Manifest struct {
	// Nonce marks the init's own lines in the output.
	Nonce string
	// Modules are the kernel modules, in the order of loading.
	Modules []Load
	// Root is the block device of an ext4 file system that becomes the root; "" to stay
	// in the initramfs.
	Root string
	// Need are paths that must exist once the modules are in.
	Need []string
	// Programs run one after the other, also after a failure.
	Programs []Program
	// Limit is the time after which the init powers off.
	Limit time.Duration
}

// Load is a kernel module in a file of the guest, and its parameters.
type Load struct {
	Path, Params string
}

// Program is one to run in the guest.
type Program struct {
	Path string
	Args []string
	Dir  string
	Env  []string
}

// WriteResult reports the exit status of a program to the host, -1 if a signal ended
// it. It is called by the init.
func (m Manifest) WriteResult(w io.Writer, program, status int) error {
	return m.write(w, "program", program, "status", status)
}

// WriteEnd reports to the host that all programs have run.
func (m Manifest) WriteEnd(w io.Writer) error { return m.write(w, "end") }

// WriteFailure reports to the host that the init failed.
func (m Manifest) WriteFailure(w io.Writer, err error) error {
	return m.write(w, "failed:", err)
}

// AddTo adds the manifest to an archive.
func (m Manifest) AddTo(a *Archive) error {
	text, err := json.Marshal(m)
	if err != nil {
		return err
	}
	return a.File(ManifestPath, 0o644, text)
}

func (m Manifest) write(w io.Writer, words ...any) error {
	_, err := fmt.Fprintln(w, append([]any{mark, m.Nonce}, words...)...)
	return err
}
