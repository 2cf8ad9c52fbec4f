package e2e

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

// slurmQOSRules is the config of a site that classifies by QOS.
const slurmQOSRules = `
access: {online_groups: [], admin_groups: []}
policy: {preset: strict, attach_after: 0s}
rules:
  - {name: urgent, match: {slurm: {qos: high}}, class: online}
  - {name: preemptible, match: {slurm: {qos: low}}, class: offline, priority: 3}
  - {name: rest, match: {slurm: {partition: batch}}, class: offline}
`

// accounting is the part of slurm.conf for slurmdbd.
func accounting() string {
	return "AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost=" + net.IP(slurmAddress[:]).String() + "\nAccountingStorageEnforce=associations,qos\n"
}

// startAccounting starts a database and slurmdbd, with the QOS low and high, which root may use.
func (c *cluster) startAccounting() {
	c.t.Helper()
	data := filepath.Join(c.dir, "database")
	c.run("mariadb-install-db", "--no-defaults", "--user=root", "--datadir="+data, "--auth-root-authentication-method=normal", "--skip-test-db")
	// slurmdbd uses the default socket of its library.
	if err := os.MkdirAll("/run/mysqld", 0o755); err != nil {
		c.t.Fatal(err)
	}
	c.daemon(exec.CommandContext(context.Background(), "mariadbd", "--no-defaults", "--user=root", "--datadir="+data, "--socket=/run/mysqld/mysqld.sock",
		"--pid-file="+filepath.Join(c.dir, "mariadbd.pid"), "--skip-networking", "--innodb-buffer-pool-size=32M", "--innodb-flush-log-at-trx-commit=0"))
	c.eventually("the database answers", func() bool { return c.command("mariadb-admin", "--no-defaults", "ping").Run() == nil })
	c.write("slurmdbd.conf", fmt.Sprintf("AuthType=auth/munge\nDbdHost=%[2]s\nDbdAddr=%[3]s\nSlurmUser=root\nPidFile=%[1]s/slurmdbd.pid\n"+
		"StorageType=accounting_storage/mysql\nStorageHost=localhost\nStorageUser=root\nStorageLoc=slurm\n", c.dir, slurmController, net.IP(slurmAddress[:])))
	if err := os.Chmod(filepath.Join(c.dir, "slurmdbd.conf"), 0o600); err != nil {
		c.t.Fatal(err)
	}
	c.daemon(exec.CommandContext(context.Background(), "slurmdbd", "-D"))
	var said []byte
	c.t.Cleanup(func() {
		if c.t.Failed() {
			c.t.Logf("sacctmgr: %s", said)
		}
	})
	c.eventually("slurmdbd answers", func() bool {
		var err error
		said, err = c.command("sacctmgr", "--immediate", "show", "cluster").CombinedOutput()
		return err == nil
	})
	for _, args := range [][]string{
		{"add", "cluster", "gpreempt"},
		{"add", "qos", "low"},
		{"add", "qos", "high"},
		{"modify", "user", "root", "set", "qos=normal,low,high", "defaultqos=normal"},
	} {
		if out, err := c.command("sacctmgr", append([]string{"--immediate"}, args...)...).CombinedOutput(); err != nil {
			c.t.Fatalf("sacctmgr %q: %v\n%s", args, err, out)
		}
	}
}

func TestSlurmJobsAreClassifiedByQOS(t *testing.T) {
	needsSlurm(t, slurmProgram{"slurmdbd", "slurmdbd"}, slurmProgram{"sacctmgr", "slurm-client"}, slurmProgram{"mariadbd", "mariadb-server"})
	c := startSlurm(t, true)
	d := c.m.start(slurmQOSRules)
	check := func(qos string, class gpreemptv1.Class, by string, more ...string) {
		t.Helper()
		j := c.srun(1, append([]string{"--partition=batch", "--qos=" + qos}, more...)...)
		d.eventually("the job is known", func() bool { return d.target(j.tasks[0]) != nil })
		if target := d.target(j.tasks[0]); target.GetClass() != class || target.GetDecidedBy() != by {
			t.Errorf("QOS %s %q: %v by %q, want %v by %q\n%s", qos, more, target.GetClass(), target.GetDecidedBy(), class, by,
				d.ctl("target", "explain", strconv.Itoa(int(j.tasks[0]))).Out)
		}
		j.end()
	}
	check("low", gpreemptv1.Class_CLASS_UNMANAGED, "rule urgent may match")
	proved(t, "where the prolog does not ask for the QOS, no job is offline that a rule by QOS may protect")
	setting := "/etc/default/gpreempt-slurm"
	squeue, err := exec.LookPath("squeue")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(setting, []byte("SQUEUE="+squeue+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.Remove(setting); err != nil {
			t.Error(err)
		}
	})
	check("high", gpreemptv1.Class_CLASS_ONLINE, "rule urgent")
	check("low", gpreemptv1.Class_CLASS_OFFLINE, "rule preemptible")
	check("normal", gpreemptv1.Class_CLASS_OFFLINE, "rule rest")
	// What the owner of a job writes is no QOS, whatever its form.
	const claim = " QOS=high thanks"
	dir := filepath.Join(c.dir, "a"+claim)
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, hostile := range [][]string{
		{"--comment=please" + claim}, {"--comment=a\nQOS=high\nqos=high"}, {"--chdir=" + dir}, {"--job-name=a" + claim},
	} {
		check("low", gpreemptv1.Class_CLASS_OFFLINE, "rule preemptible", hostile...)
	}
	script := filepath.Join(dir, "job"+claim)
	if err := os.WriteFile(script, []byte("#!/bin/sh\nexec \"$@\"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	check("low", gpreemptv1.Class_CLASS_OFFLINE, "rule preemptible", script)
	proved(t, "comment, directory, name and script of a job with text like a QOS do not change its class")
	c.checkNode()
	proved(t, "jobs are online or offline by QOS, with slurmdbd and MariaDB, as slurmctld has it")
}
