package safety

import (
	"io/fs"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestOnlyMeasuredDriversAndGPUsOfNVIDIAAreAllowed(t *testing.T) {
	const measured, unmeasured = "allow nvidia-measured", "deny nvidia-unmeasured"
	for _, tt := range []struct{ version, gpu, want string }{
		{"580.159.04", "NVIDIA H200", measured},
		{"580.65.06", "NVIDIA H200 NVL", measured},
		{"580.159.04", "NVIDIA H100 PCIe", unmeasured},
		{"580.159.04", "NVIDIA GH200 480GB", unmeasured},
		{"580.159.04", "NVIDIA A100-SXM4-80GB", unmeasured},
		{"580.159.04", "NVIDIA B200", unmeasured},
		{"580.159.04", "NVIDIA", unmeasured},
		{"570.211.01", "NVIDIA H200", unmeasured},
		{"575.64.05", "NVIDIA H200", unmeasured},
		{"590.48.01", "NVIDIA H200", unmeasured},
		{"595.45.04", "NVIDIA H200", unmeasured},
		{"581.1", "NVIDIA H200", unmeasured},
		{"", "NVIDIA H200", unmeasured},
	} {
		r := Default().Check(Host{Kernel: "6.12", NVIDIA: tt.version}, GPU{NVIDIA: tt.gpu}, "nvchannels")
		if got := r.Action.String() + " " + r.Row.ID; got != tt.want {
			t.Errorf("driver %q, %s: %s, want %s", tt.version, tt.gpu, got, tt.want)
		}
	}
}

func TestReasonNamesTheGPUAndTheDriverOfNVIDIA(t *testing.T) {
	r := Default().Check(Host{Kernel: "6.12", NVIDIA: "575.64.05"}, GPU{NVIDIA: "NVIDIA H200"}, "nvchannels")
	want := "NVIDIA H200 with driver 575.64.05, hazard nvidia-unmeasured: " + r.Row.Why
	if diff := cmp.Diff(want, r.Reason); diff != "" {
		t.Errorf("Reason (-want +got):\n%s", diff)
	}
}

func TestRowsOfOneVendorAreNotAboutGPUsOfTheOther(t *testing.T) {
	site, err := Parse("site.yaml", []byte(`
- {id: amd, gfx: ["gfx*"], mechanisms: [dbgtrap, criu, freezer], action: deny, why: W.}
- {id: ours, nvidia: ">=590.48 <591", model: [H200, A100], action: limit, why: W., remedy: R.}
- {id: nvidia, nvidia: ">=0", action: deny, why: W.}
`))
	if err != nil {
		t.Fatal(err)
	}
	want := Row{
		ID: "ours", NVIDIA: ">=590.48 <591", Models: []string{"H200", "A100"},
		Mechanisms: []string{"nvchannels"}, Action: Limit, Why: "W.", Remedy: "R.",
	}
	if diff := cmp.Diff(want, site[1]); diff != "" {
		t.Errorf("row (-want +got):\n%s", diff)
	}
	host := Host{Kernel: "6.12", NVIDIA: "590.48.01"}
	got := map[string]string{}
	for _, mechanism := range append(Mechanisms(), "nvchannels") {
		for _, g := range []GPU{{GFX: 90402}, {NVIDIA: "NVIDIA H200"}} {
			got[mechanism+" "+g.NVIDIA] = Default().With(site).Check(host, g, mechanism).Row.ID
		}
	}
	if diff := cmp.Diff(map[string]string{
		"dbgtrap ": "amd", "criu ": "amd", "freezer ": "amd", "nvchannels ": "",
		"dbgtrap NVIDIA H200": "", "criu NVIDIA H200": "", "freezer NVIDIA H200": "", "nvchannels NVIDIA H200": "ours",
	}, got); diff != "" {
		t.Errorf("rows (-want +got):\n%s", diff)
	}
}

func TestFactsOfNVIDIAsGPUsAreTheVersionAndTheName(t *testing.T) {
	gpus := []gpreempt.GPU{{ID: 1, Driver: "nvidia", Name: "NVIDIA H200", MES: true, BDF: "0000:01:00.0"}, {ID: 2, Driver: "nvidia"}}
	fsys := fstest.MapFS{"proc/sys/kernel/osrelease": file("6.12.0\n"), "sys/module/nvidia/version": file("580.159.04\n")}
	host, facts, warnings := Read(fsys, gpus)
	if diff := cmp.Diff(Host{Kernel: "6.12.0", NVIDIA: "580.159.04"}, host); diff != "" {
		t.Errorf("host (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]GPU{{ID: 1, NVIDIA: "NVIDIA H200"}, {ID: 2, NVIDIA: "NVIDIA"}}, facts); diff != "" || len(warnings) > 0 {
		t.Errorf("GPUs (-want +got):\n%s\nwarnings: %q", diff, warnings)
	}
	delete(fsys, "sys/module/nvidia/version")
	host, _, warnings = Read(fs.FS(fsys), gpus[:1])
	want := []string{"the version of the NVIDIA driver is unknown: open sys/module/nvidia/version: file does not exist: hazards that depend on it are not recognised"}
	if diff := cmp.Diff(want, warnings); diff != "" || host.NVIDIA != "" {
		t.Errorf("version %q, warnings (-want +got):\n%s", host.NVIDIA, diff)
	}
}

func TestDoctorWarnsOfNVIDIAsGPUsThatAreDenied(t *testing.T) {
	type row struct{ Status, Found, Remedy, Verdict string }
	got := map[string]row{}
	for name, say := range map[string]row{
		"all usable":  {Found: "driver 580"},
		"some denied": {Found: "one denied", Remedy: "Test it."},
		"none usable": {Found: "no rights", Remedy: "run as root", Verdict: "unusable"},
	} {
		h := mi300x()
		h.noDriver()
		h.noPCI()
		h.cfg.NVIDIA = func() (string, string, bool) { return say.Found, say.Remedy, say.Verdict == "" }
		report := Examine(t.Context(), h.cfg)
		for _, c := range report.GetChecks() {
			if c.GetId() == "nvidia" {
				got[name] = row{c.GetStatus().String(), c.GetFound(), c.GetRemedy(), report.GetVerdict().String()}
			}
		}
	}
	if diff := cmp.Diff(map[string]row{
		"all usable":  {"CHECK_STATUS_OK", "driver 580", "", "VERDICT_LIMITED"},
		"some denied": {"CHECK_STATUS_WARN", "one denied", "Test it.", "VERDICT_LIMITED"},
		"none usable": {"CHECK_STATUS_WARN", "no rights", "run as root", "VERDICT_NO_GPU"},
	}, got); diff != "" {
		t.Errorf("rows (-want +got):\n%s", diff)
	}
}
