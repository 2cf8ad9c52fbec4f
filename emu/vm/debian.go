package main

import "context"

// stewardUnit runs the tests and powers the machine off, whether they pass or not.
const stewardUnit = `[Unit]
Description=Tests
SuccessAction=poweroff-immediate
FailureAction=poweroff-immediate

[Service]
ExecStart=/init ` + StewardArg + `
`

// debianEnv is the environment of the tests. They check GPREEMPT_GUEST because they
// change the machine they run on.
var debianEnv = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "TMPDIR=/tmp", "LC_ALL=C", "SYSTEMD_PAGER=", "GPREEMPT_GUEST=systemd"}

// debian configures guest to boot a Debian image, and returns the files that overlay it.
func (o options) debian(ctx context.Context, kernel Kernel, guest *Guest, m *Manifest, driver []Module) (files, error) {
	image, err := FetchRoot(ctx)
	if err != nil {
		return nil, err
	}
	disk, err := kernel.Modules(ctx, "virtio_pci", "virtio_blk", "crc32c_generic", "ext4")
	if err != nil {
		return nil, err
	}
	guest.Args = append(guest.Args, "-drive", "file="+image+",format=raw,if=virtio,snapshot=on")
	guest.Append += " systemd.wants=gpreempt-vm.service systemd.show_status=0 systemd.mask=serial-getty@ttyS0.service systemd.mask=getty@tty1.service"
	m.Root, m.Need = "/dev/vda", nil
	return func(a *Archive) error {
		if m.Modules, err = addModules(a, "/modules", disk); err != nil {
			return err
		}
		if _, err := addModules(a, Overlay+"/modules", driver); err != nil {
			return err
		}
		if err := a.File(Overlay+"/etc/systemd/system/gpreempt-vm.service", 0o644, []byte(stewardUnit)); err != nil {
			return err
		}
		return add(a, Overlay+"/packages/gpreempt.deb", o.deb)
	}, nil
}
