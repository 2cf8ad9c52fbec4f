package safety

import (
	"errors"
	"io/fs"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func file(text string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(text)} }

func TestFactsAreReadFromTheHostsFiles(t *testing.T) {
	const nodes, devices = "sys/class/kfd/kfd/topology/nodes/", "sys/bus/pci/devices/"
	fsys := fstest.MapFS{
		"proc/sys/kernel/osrelease": file("6.8.0-137-generic\n"),
		"sys/module/amdgpu/version": file("6.16.6.30200000\n"),
		// A whole GPU of the MES kind, an MI300X and a partition of another MES GPU.
		nodes + "1/properties":                                 file("cpu_cores_count 0\nfw_version 2520\nsdma_fw_version 24\nunique_id 18446744073709551615\n"),
		devices + "0000:c5:00.0/fw_version/mes_fw_version":     file("0x00000083\n"),
		devices + "0000:c5:00.0/fw_version/mes_kiq_fw_version": file("0x0000006f\n"),
		nodes + "2/properties":                                 file("fw_version 175\nsdma_fw_version 27\n"),
		nodes + "3/properties":                                 file("fw_version 33\nsdma_fw_version 18\n"),
		devices + "0001:0a:00.0/fw_version/mes_fw_version":     file("0x00000055\n"),
		devices + "0001:0a:00.0/fw_version/mes_kiq_fw_version": file("0x00000066\n"),
		devices + "0001:0a:00.3/class":                         file("0x040300\n"), // its audio function
	}
	host, gpus, warnings := Read(fsys, []gpreempt.GPU{
		{ID: 7, Node: 1, GFX: 110501, BDF: "0000:c5:00.0", MES: true},
		{ID: 8, Node: 2, GFX: 90402, BDF: "0000:41:00.0"},
		{ID: 9, Node: 3, GFX: 110000, BDF: "0001:0a:00.3", MES: true},
	})
	if diff := cmp.Diff(Host{Kernel: "6.8.0-137-generic", Driver: "6.16.6.30200000"}, host); diff != "" {
		t.Errorf("host (-want +got):\n%s", diff)
	}
	want := []GPU{
		{ID: 7, GFX: 110501, APU: true, MEC: 2520, SDMA: 24, MES: 0x83, MESKIQ: 0x6f},
		{ID: 8, GFX: 90402, MEC: 175, SDMA: 27},
		{ID: 9, GFX: 110000, MEC: 33, SDMA: 18, MES: 0x55, MESKIQ: 0x66},
	}
	if diff := cmp.Diff(want, gpus); diff != "" {
		t.Errorf("GPUs (-want +got):\n%s", diff)
	}
	if len(warnings) > 0 {
		t.Errorf("warnings: %q", warnings)
	}
}

func TestTheKernelsOwnDriverHasNoVersion(t *testing.T) {
	host, _, warnings := Read(fstest.MapFS{"proc/sys/kernel/osrelease": file("7.2.13-amd64\n")}, nil)
	if diff := cmp.Diff(Host{Kernel: "7.2.13-amd64"}, host); diff != "" || len(warnings) > 0 {
		t.Errorf("host (-want +got):\n%s\nwarnings: %q", diff, warnings)
	}
}

// refusing denies every file.
type refusing struct{}

func (refusing) Open(name string) (fs.File, error) {
	return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrPermission}
}

func TestFactsThatCannotBeReadAreWarningsAndUnknown(t *testing.T) {
	gpu := gpreempt.GPU{ID: 5, Node: 1, GFX: 110501, BDF: "0000:c5:00.0", MES: true}
	host, gpus, warnings := Read(refusing{}, []gpreempt.GPU{gpu})
	if diff := cmp.Diff([]GPU{{ID: 5, GFX: 110501, APU: true}}, gpus); diff != "" || host != (Host{}) {
		t.Errorf("%+v, GPUs (-want +got):\n%s", host, diff)
	}
	all := strings.Join(warnings, "\n")
	for _, what := range []string{
		"the kernel's version", "the version of the amdgpu driver", "the MEC and SDMA firmware of GPU 5", "the MES firmware of GPU 5",
	} {
		if !strings.Contains(all, what+" is unknown: ") {
			t.Errorf("no warning about %s in\n%s", what, all)
		}
	}
	if v := Default().Check(host, gpus[0], "dbgtrap"); v.Action != Deny {
		t.Errorf("%s: %s", v.Action, v.Reason)
	}
}

func TestInvalidFilesAreWarnings(t *testing.T) {
	const properties, mes = "sys/class/kfd/kfd/topology/nodes/1/properties", "sys/bus/pci/devices/0000:c5:00.0/fw_version/mes_fw_version"
	_, gpus, warnings := Read(fstest.MapFS{
		"proc/sys/kernel/osrelease": file("7.2.13-amd64\n"),
		properties:                  file("fw_version x\n"),
		mes:                         file("none\n"),
	}, []gpreempt.GPU{{ID: 5, Node: 1, GFX: 110501, BDF: "0000:c5:00.0", MES: true}})
	want := []string{
		`the MEC and SDMA firmware of GPU 5 is unknown: ` + properties + `: line 1: fw_version is "x", want a decimal number below 2^32: hazards that depend on it are not recognised`,
		`the MES firmware of GPU 5 is unknown: ` + mes + `: "none" is not a firmware version: hazards that depend on it are not recognised`,
	}
	if diff := cmp.Diff(want, warnings); diff != "" {
		t.Errorf("warnings (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]GPU{{ID: 5, GFX: 110501, APU: true}}, gpus); diff != "" {
		t.Errorf("GPUs (-want +got):\n%s", diff)
	}
	if _, err := line(refusing{}, "x"); !errors.Is(err, fs.ErrPermission) {
		t.Error(err)
	}
}
