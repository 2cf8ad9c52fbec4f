package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/gpreempt/gpreempt/emu/kfdemu"
)

const (
	realRuntime = "/usr/sbin/runc"
	// socket is the emulated machine's on the node.
	socket = "/run/kfdemu/kfdemu.sock"
)

// runtime replaces this process by runc with the same arguments. What a container executes is on the
// emulated machine: processes inherit the filter of the runtime that starts them, and the node's /sys
// stands for the kernel's, which a driver would have changed for all containers. The specs of the
// pods are unchanged.
func runtime(args []string) error {
	switch {
	case slices.Contains(args, "create"):
		i := slices.Index(args, "--bundle")
		if i < 0 || i+1 == len(args) {
			return fmt.Errorf("create without --bundle: %q", args)
		}
		if err := showSys(filepath.Join(args[i+1], "config.json")); err != nil {
			return err
		}
		return kfdemu.Exec(socket, realRuntime, args, os.Environ())
	case slices.Contains(args, "exec"):
		return kfdemu.Exec(socket, realRuntime, args, os.Environ())
	}
	return syscall.Exec(realRuntime, args, os.Environ())
}

// showSys binds the node's /sys into the container of this file, instead of a new sysfs.
func showSys(file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var spec map[string]any
	if err := json.Unmarshal(text, &spec); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	mounts, _ := spec["mounts"].([]any)
	for _, m := range mounts {
		m, _ := m.(map[string]any)
		if m["type"] != "sysfs" {
			continue
		}
		options := []any{"rbind", "rprivate"}
		if old, _ := m["options"].([]any); slices.Contains(old, any("ro")) {
			options = append(options, "ro")
		}
		m["type"], m["source"], m["options"] = "bind", "/sys", options
	}
	if text, err = json.Marshal(spec); err != nil {
		return err
	}
	return os.WriteFile(file, text, 0o600)
}
