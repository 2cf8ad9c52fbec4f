package targets

import (
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/safety"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// What is noted about a GPU is named, and changes nothing.
func TestNotedHazardsAreNamed(t *testing.T) {
	files := fstest.MapFS{"proc/sys/kernel/osrelease": {Data: []byte("7.3.4\n")}}
	gpus := []gpreempt.GPU{{ID: 7, GFX: 90402}}
	h, _ := NewHazards(files, gpus, nil)
	want := Assessment{Evidence: mechanism.Evidence{
		Check: "hazard table", Found: "no known hazard (noted: hws-queue-reset, sdma-queue-reset)", OK: true,
	}}
	if diff := cmp.Diff(want, h.Assess("dbgtrap", discovery.Proc{}, gpus)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// A process has the hazards of its own GPUs only, also on a host with GPUs of two vendors.
func TestHazardsOfNVIDIAsGPUsAreThoseOfNvchannels(t *testing.T) {
	gpus := []gpreempt.GPU{{ID: 7, GFX: 110003}, {ID: 8, Driver: "nvidia", Name: "NVIDIA H200"}, {ID: 9, Driver: "nvidia", Name: "NVIDIA A100"}}
	files := fstest.MapFS{"sys/module/nvidia/version": {Data: []byte("580.159.04\n")}}
	h, _ := NewHazards(files, gpus, nil)
	alone, _ := NewHazards(files, gpus[1:], nil)
	proc := func(driver string, gpus ...gpreempt.GPUID) discovery.Proc {
		var p discovery.Proc
		p.Driver = driver
		for _, id := range gpus {
			p.Queues = append(p.Queues, gpreempt.Queue{GPU: id})
		}
		return p
	}
	got := map[string]bool{
		"AMD by dbgtrap":          h.Assess("dbgtrap", proc("", 7), gpus).Evidence.OK,
		"H200 by nvchannels":      h.Assess("nvchannels", proc("nvidia", 8), gpus).Evidence.OK,
		"A100 by nvchannels":      h.Assess("nvchannels", proc("nvidia", 9), gpus).Evidence.OK,
		"both by nvchannels":      h.Assess("nvchannels", proc("nvidia", 8, 9), gpus).Evidence.OK,
		"no queues by nvchannels": h.Assess("nvchannels", proc("nvidia"), gpus).Evidence.OK,
		"no queues by dbgtrap":    alone.Assess("dbgtrap", proc(""), gpus[1:]).Evidence.OK,
	}
	site, err := safety.Parse("site", []byte("- {id: here, nvidia: \"=580\", model: [A100], action: limit, why: Tested.}\n"))
	if err != nil {
		t.Fatal(err)
	}
	h.SetRows(site)
	allowed := h.Assess("nvchannels", proc("nvidia", 8, 9), gpus)
	got["both, with a row of the site"] = allowed.Evidence.OK
	if diff := cmp.Diff([]gpreempt.GPUID{9}, allowed.Limited); diff != "" {
		t.Errorf("limited GPUs (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[string]bool{
		"AMD by dbgtrap": false, "H200 by nvchannels": true, "A100 by nvchannels": false, "both by nvchannels": false,
		"no queues by nvchannels": false, "no queues by dbgtrap": true, "both, with a row of the site": true,
	}, got); diff != "" {
		t.Errorf("allowed (-want +got):\n%s", diff)
	}
}
