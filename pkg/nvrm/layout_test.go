package nvrm

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var source = flag.String("nvidia-source", "", "directory of a checkout of NVIDIA/open-gpu-kernel-modules")

// layoutOf describes structures as the probe does: "name size", "name.field offset".
func layoutOf(types map[string]any, fields map[string][]string) string {
	var b strings.Builder
	for _, name := range names {
		t := reflect.TypeOf(types[name])
		fmt.Fprintf(&b, "%s %d\n", name, t.Size())
		n := 0
		for f := range t.Fields() {
			if f.Name == "_" {
				continue
			}
			fmt.Fprintf(&b, "%s.%s %d\n", name, fields[name][n], f.Offset)
			n++
		}
	}
	return b.String()
}

var names = []string{
	"NVOS54_PARAMETERS", "NVOS64_PARAMETERS", "NV0000_CTRL_CLIENT_GET_HANDLE_INFO_PARAMS",
	"NV2080_CTRL_GPU_GET_ID_PARAMS", "NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS",
	"NV_CONF_COMPUTE_CTRL_CMD_SYSTEM_GET_CAPABILITIES_PARAMS",
}

var structures = map[string]any{
	names[0]: nvos54{}, names[1]: nvos64{}, names[2]: HandleInfo{}, names[3]: GPUIDInfo{}, names[4]: DisableList{},
	names[5]: Confidential{},
}

var cFields = map[string][]string{
	names[0]: {"hClient", "hObject", "cmd", "flags", "params", "paramsSize", "status"},
	names[1]: {"hRoot", "hObjectParent", "hObjectNew", "hClass", "pAllocParms", "pRightsRequested", "paramsSize", "flags", "status"},
	names[2]: {"hObject", "index", "data"},
	names[3]: {"gpuId"},
	names[4]: {"bDisable", "numChannels", "bOnlyDisableScheduling", "bRewindGpPut", "pRunlistPreemptEvent", "hClientList", "hChannelList"},
	names[5]: {"cpuCapability", "gpusCapability", "environment", "ccFeature", "devToolsMode", "multiGpuMode"},
}

// constants are checked against the headers, too.
var constants = map[string]uint64{
	"NV0000_CTRL_CMD_CLIENT_GET_HANDLE_INFO": uint64(GetHandleInfo), "NV2080_CTRL_CMD_GPU_GET_ID": uint64(GetGPUID),
	"NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS": uint64(DisableChannels), "NV2080_CTRL_FIFO_DISABLE_CHANNELS_MAX_ENTRIES": MaxChannels,
	"NV0000_CTRL_CMD_CLIENT_GET_HANDLE_INFO_INDEX_PARENT": IndexParent, "NV0000_CTRL_CMD_CLIENT_GET_HANDLE_INFO_INDEX_CLASSID": IndexClass,
	"NV_CONFIDENTIAL_COMPUTE": uint64(ClassConfidential), "NV_CONF_COMPUTE_CTRL_CMD_SYSTEM_GET_CAPABILITIES": uint64(GetConfidential),
	"NV_CONF_COMPUTE_SYSTEM_FEATURE_DISABLED": 0, "NV_CONF_COMPUTE_SYSTEM_DEVTOOLS_MODE_DISABLED": 0, "NV_CONF_COMPUTE_SYSTEM_MULTI_GPU_MODE_NONE": 0,
	"NV_ERR_INVALID_CLASS": uint64(InvalidClass),
	"NV_ESC_RM_CONTROL":    escControl, "NV_ESC_RM_ALLOC": escAlloc, "KEPLER_CHANNEL_GROUP_A": uint64(ClassGroup),
	"NV01_DEVICE_0": uint64(ClassDevice), "NV20_SUBDEVICE_0": uint64(ClassSubdevice), "NV01_ROOT_CLIENT": uint64(ClassRoot),
	"NV_ERR_INSUFFICIENT_PERMISSIONS": uint64(NotPermitted), "NV_ERR_INVALID_CHANNEL": uint64(InvalidChannel), "NV_ERR_INVALID_CLIENT": uint64(InvalidClient),
	"NV_ERR_INVALID_OBJECT_HANDLE": uint64(InvalidObject), "NV_ERR_INVALID_OBJECT_OLD": uint64(InvalidObjectOld), "NV_ERR_NOT_SUPPORTED": uint64(NotSupported),
	"NV_ERR_OBJECT_NOT_FOUND": uint64(ObjectNotFound), "NV_ERR_INVALID_ARGUMENT": uint64(InvalidArgument), "NV_ERR_INVALID_PARAM_STRUCT": uint64(InvalidStruct), "NV_ERR_GPU_IS_LOST": uint64(GPUIsLost),
	"NV_ERR_TIMEOUT": uint64(Timeout), "NV_ERR_RESET_REQUIRED": uint64(ResetRequired), "NV_ERR_GPU_IN_FULLCHIP_RESET": uint64(GPUInReset),
}

// TestStructuresAreThoseOfTheHeaders compiles a C program against the driver's public headers.
func TestStructuresAreThoseOfTheHeaders(t *testing.T) {
	if *source == "" {
		t.Skip("needs -nvidia-source, a checkout of github.com/NVIDIA/open-gpu-kernel-modules")
	}
	var c strings.Builder
	c.WriteString("#include <stdio.h>\n#include <stddef.h>\n")
	for _, h := range []string{"nvtypes.h", "nvos.h", "nvstatus.h", "ctrl/ctrl0000/ctrl0000client.h", "ctrl/ctrl2080/ctrl2080gpu.h", "ctrl/ctrl2080/ctrl2080fifo.h", "ctrl/ctrlcb33.h", "class/clcb33.h", "class/cl0000.h", "class/cl0080.h", "class/cl2080.h", "class/cla06c.h", "nv_escape.h"} {
		fmt.Fprintf(&c, "#if __has_include(\"%s\")\n#include \"%s\"\n#endif\n", h, h)
	}
	c.WriteString("int main(void) {\n")
	for _, name := range names {
		fmt.Fprintf(&c, "printf(\"%s %%zu\\n\", sizeof(%s));\n", name, name)
		for _, f := range cFields[name] {
			fmt.Fprintf(&c, "printf(\"%s.%s %%zu\\n\", offsetof(%s, %s));\n", name, f, name, f)
		}
	}
	for name, value := range constants {
		fmt.Fprintf(&c, "if ((unsigned long long)(%s) != %dULL) printf(\"%s is %%llu\\n\", (unsigned long long)(%s));\n", name, value, name, name)
	}
	c.WriteString("return 0; }\n")
	dir := t.TempDir()
	program := filepath.Join(dir, "layout")
	if err := os.WriteFile(program+".c", []byte(c.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	build := exec.CommandContext(t.Context(), "cc", "-o", program, program+".c",
		"-I", filepath.Join(*source, "src/common/sdk/nvidia/inc"), "-I", filepath.Join(*source, "src/nvidia/arch/nvalloc/unix/include"))
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	out, err := exec.CommandContext(t.Context(), program).Output()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(out), layoutOf(structures, cFields)); diff != "" {
		t.Errorf("-header +ours:\n%s", diff)
	}
	if *update {
		if err := os.WriteFile(filepath.Join("testdata", "layout.txt"), out, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

var update = flag.Bool("update", false, "write testdata")

// TestStructuresAreThoseOfTheGolden compares with what the probe wrote for the headers of 570.211.01,
// 575.64.05, 580.142, 590.48.01 and 595.45.04, which all have the same.
func TestStructuresAreThoseOfTheGolden(t *testing.T) {
	want, err := os.ReadFile(filepath.Join("testdata", "layout.txt"))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), layoutOf(structures, cFields)); diff != "" {
		t.Errorf("-header +ours:\n%s", diff)
	}
}
