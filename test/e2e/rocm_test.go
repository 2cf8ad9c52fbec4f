//go:build rocm

package e2e

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
)

// ROCm's own programs and libraries, as a distribution ships them, run unmodified on the
// emulated machine. Debian's version 5.2.3 supports gfx90a and not gfx942.
const rocmMachine = "mi210"

// needs skips the test unless files are there, each of which comes with a package.
func needs(t *testing.T, packages map[string]string) {
	t.Helper()
	for path, name := range packages {
		if !filepath.IsAbs(path) {
			if _, err := exec.LookPath(path); err == nil {
				continue
			}
		} else if _, err := os.Stat(path); err == nil {
			continue
		}
		t.Skipf("the package %s is missing: there is no %s", name, path)
	}
}

// compile makes a program of a C file of testdata/rocm.
func compile(t *testing.T, name, source string, libraries ...string) string {
	t.Helper()
	needs(t, map[string]string{"cc": "gcc"})
	program := filepath.Join(t.TempDir(), name)
	args := []string{"-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-o", program, filepath.Join("testdata", "rocm", source)}
	if out, err := exec.Command("cc", append(args, libraries...)...).CombinedOutput(); err != nil {
		t.Fatalf("cc: %v\n%s", err, out)
	}
	return program
}

// output runs a program on the machine, requires that it succeeds, and returns its output.
func (m *emulated) output(env []string, program string, args ...string) string {
	m.t.Helper()
	ctx, cancel := context.WithTimeout(m.t.Context(), timeout)
	defer cancel()
	cmd := m.Command(ctx, program, args...)
	var out, errs bytes.Buffer
	cmd.Env, cmd.Stdout, cmd.Stderr = environment(env...), &out, &errs
	if err := cmd.Run(); err != nil {
		m.t.Fatalf("%s: %v; it wrote:\n%s%s", program, err, &out, &errs)
	}
	return out.String()
}

func TestROCmInfoFindsTheEmulatedGPUs(t *testing.T) {
	needs(t, map[string]string{"rocminfo": "rocminfo"})
	m := emulate(t, kfdemu.Config{Machine: rocmMachine, GPUs: 2})
	// It looks for the module with lsmod, which needs /proc/modules.
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "lsmod"), []byte("#!/bin/sh\necho amdgpu 1 0\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	out := m.output([]string{"PATH=" + dir + ":" + os.Getenv("PATH")}, "rocminfo")
	// The host's CPU is described first.
	var got []string
	for _, field := range regexp.MustCompile(`(?m)^  (?:Name|Device Type|Compute Unit): +(.*\S)`).FindAllStringSubmatch(out, -1) {
		got = append(got, field[1])
	}
	gpu := []string{"gfx90a", "GPU", "104"}
	if diff := cmp.Diff(slices.Concat(gpu, gpu), got[min(len(gpu), len(got)):]); diff != "" {
		t.Errorf("the GPUs that rocminfo found (-want +got):\n%s\n%s", diff, out)
	}
	says(t, out, "*** Done ***")
}

func TestROCmSMIListsAProgram(t *testing.T) {
	needs(t, map[string]string{"rocm-smi": "rocm-smi"})
	m := emulate(t, kfdemu.Config{Machine: rocmMachine, GPUs: 2})
	job := m.workOnROCr()
	// It leaves a file in /dev/shm, which after a run that was cut short would stop the
	// next: it gets one of its own.
	out := m.output(nil, "unshare", "--mount", "sh", "-c", `mount -t tmpfs shm /dev/shm && exec "$@"`, "sh", "rocm-smi", "--showid", "--showpids")
	for _, want := range []string{`GPU\[0\]\s*: GPU ID: 0x740f`, `GPU\[1\]\s*: GPU ID: 0x740f`, fmt.Sprintf(`(?m)^%d\s+train-hsa\s+`, job.PID)} {
		if !regexp.MustCompile(want).MatchString(out) {
			t.Errorf("rocm-smi does not say %s:\n%s", want, out)
		}
	}
	job.stop()
}

func TestROCmThunkProgramRunsPackets(t *testing.T) {
	needs(t, map[string]string{"/usr/include/hsakmt.h": "libhsakmt-dev"})
	program := compile(t, "hsakmt", "hsakmt.c", "-lhsakmt")
	for _, machine := range []struct{ name, profile, version, gpu string }{
		{rocmMachine, "6.12", "version 1.17", "gpu gfx90a 416 SIMDs, 5 copy engines"},
		// libhsakmt before ROCm 6 computes a save area for one XCC, and 6.12 refuses it.
		{"mi300x", "6.5", "version 1.13", "gpu gfx942 1216 SIMDs, 16 copy engines"},
	} {
		t.Run(machine.name, func(t *testing.T) {
			m := emulate(t, kfdemu.Config{Machine: machine.name, Profile: machine.profile})
			want := strings.Join([]string{machine.version, machine.gpu, "gpus 1", "events", "queue", "packets 1500", "done", ""}, "\n")
			if diff := cmp.Diff(want, m.output(nil, program)); diff != "" {
				t.Errorf("what the program wrote (-want +got):\n%s", diff)
			}
			m.eventually("the driver releases the program", func() bool { return len(m.Driver().Processes()) == 0 })
		})
	}
}

func TestROCmProgramIsSuspendedAndResumed(t *testing.T) {
	m := emulate(t, kfdemu.Config{Machine: rocmMachine})
	job := m.workOnROCr("--runtime")
	queues := m.queuesOf(job)
	d := m.start(atOnce)
	d.offlineTarget(job, queues)
	for range 3 {
		since := d.revision()
		lease := d.announce(t.Context())
		if !lease.GetQuiesced() || lease.GetSuspendedTargets() != 1 {
			t.Errorf("the announcement was answered %v, want one target suspended", lease)
		}
		m.checkFrozen(job)
		frozen := job.count()
		if now := job.count(); now != frozen {
			t.Errorf("%d kernels ended while the queues are suspended", now-frozen)
		}
		d.complete(lease.GetLeaseId())
		d.awaitTarget(job.PID, since, gpreemptv1.TargetState_TARGET_STATE_RUNNING)
		m.checkRuns(job)
		d.eventually("the program goes on", func() bool { return job.count() > frozen })
	}
	job.stop()
}

// workOnROCr starts the program on ROCm's runtime as an offline job.
func (m *emulated) workOnROCr(args ...string) *worker {
	m.t.Helper()
	needs(m.t, map[string]string{"/usr/include/hsa/hsa.h": "libhsa-runtime-dev"})
	return m.workAs(compile(m.t, "train-hsa", "hsa.c", "-lhsa-runtime64"), args...)
}

// queuesOf counts the queues a worker has by the driver's account.
func (m *emulated) queuesOf(w *worker) int {
	for _, p := range m.Driver().Processes() {
		if p.PID == w.PID {
			return len(p.Queues)
		}
	}
	return 0
}
