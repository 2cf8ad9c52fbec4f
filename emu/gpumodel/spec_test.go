package gpumodel

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestPresets(t *testing.T) {
	type facts struct {
		GFX              uint32
		XCCs, CUs, Slots int
		MES              bool
		// ContextMiB and SaveArea are the whole context and a queue's save area on
		// one XCC, as the driver sizes them.
		ContextMiB float64
		SaveArea   int
	}
	want := map[string]facts{
		"mi300x":    {90402, 8, 304, 24, false, 176.9, 38*596<<10 + 0x3000},
		"mi308x":    {90402, 4, 80, 24, false, 46.6, 0xba6000},
		"mi250x":    {90010, 1, 110, 24, false, 64.0, 110*596<<10 + 0x9000},
		"mi210":     {90010, 1, 104, 24, false, 60.5, 104*596<<10 + 0x9000},
		"mi100":     {90008, 1, 120, 24, false, 69.8, 120*596<<10 + 0x9000},
		"rx7900xtx": {110000, 1, 96, 8, true, 43.9, 96*468<<10 + 0xa000},
		"mi325x":    {90402, 8, 304, 24, false, 176.9, 38*596<<10 + 0x3000},
		"mi350x":    {90500, 8, 256, 24, false, 173.0, 32*692<<10 + 0x3000},
		"mi355x":    {90500, 8, 256, 24, false, 173.0, 32*692<<10 + 0x3000},
		"gfx1151":   {110501, 1, 40, 8, true, 18.3, 40*468<<10 + 0x4000},
		"gfx1201":   {120001, 1, 64, 8, true, 29.3, 64*468<<10 + 0x7000},
	}
	got := map[string]facts{}
	for _, s := range Presets() {
		size := int(s.saveArea().Bytes)
		mib := math.Round(float64(s.ContextBytes)*10/(1<<20)) / 10
		got[s.Name] = facts{s.GFX, s.XCCs, s.CUs, s.Slots, s.MES, mib, size}
		for _, gpus := range []int{1, 64} {
			if err := s.Validate(gpus); err != nil {
				t.Errorf("%s with %d GPUs: %v", s.Name, gpus, err)
			}
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("presets (-want +got):\n%s", diff)
	}
}

func TestPresetByNameTellsTheNames(t *testing.T) {
	s, err := PresetByName("mi308x")
	if err != nil || s.Name != "mi308x" {
		t.Errorf("PresetByName = %q, %v", s.Name, err)
	}
	_, err = PresetByName("mi9000")
	if err == nil || !strings.Contains(err.Error(), "mi300x, mi308x, mi250x, mi210, mi100, rx7900xtx, mi325x, mi350x, mi355x, gfx1151, gfx1201") {
		t.Errorf("error %v does not name the presets", err)
	}
}

func TestValidateRefusesWhatCannotBeMade(t *testing.T) {
	broken := map[string]func(*Spec){
		"no slots":        func(s *Spec) { s.Slots = 0 },
		"no quantum":      func(s *Spec) { s.Quantum = 0 },
		"too much jitter": func(s *Spec) { s.Costs.Jitter = 1.5 },
		"negative cost":   func(s *Spec) { s.Costs.Map = -time.Second },
		"slow link":       func(s *Spec) { s.LinkRate = s.CopyRate - 1 },
	}
	for name, change := range broken {
		s := hws()
		change(&s)
		if s.Validate(1) == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	for _, gpus := range []int{0, -1, 65} {
		if hws().Validate(gpus) == nil {
			t.Errorf("%d GPUs: accepted", gpus)
		}
	}
}

func TestMI308XIsTheKnownHost(t *testing.T) {
	s, err := PresetByName("mi308x")
	if err != nil {
		t.Fatal(err)
	}
	all := New(s, 8, 1).GPUs()
	want := gpreempt.GPU{
		ID: 0xf7bc, Node: 2, Name: "ip discovery", GFX: 90402, BDF: "0000:0a:00.0", RenderMinor: 128, XCCs: 4, CUs: 80, QueueSlots: 24, DebugFirmware: true,
	}
	if diff := cmp.Diff(want, all[0]); diff != "" {
		t.Errorf("first GPU (-want +got):\n%s", diff)
	}
	var got []string
	for _, g := range all {
		got = append(got, g.ID.String()+" "+g.BDF)
	}
	hosts := []string{
		"63420 0000:0a:00.0", "61531 0000:80:00.0", "60224 0000:a4:00.0", "50797 0000:c8:00.0",
		"61984 0000:0b:00.0", "62919 0000:81:00.0", "61148 0000:a5:00.0", "50161 0000:c9:00.0",
	}
	if diff := cmp.Diff(hosts, got); diff != "" {
		t.Errorf("GPUs (-want +got):\n%s", diff)
	}
}

func TestGPUsHaveDistinctNames(t *testing.T) {
	for _, s := range Presets() {
		ids, bdfs := map[gpreempt.GPUID]bool{0: true}, map[string]bool{}
		for _, g := range New(s, 64, 1).GPUs() {
			if ids[g.ID] || bdfs[g.BDF] || g.ID > 0xffff {
				t.Errorf("%s: GPU %+v", s.Name, g)
			}
			ids[g.ID], bdfs[g.BDF] = true, true
		}
	}
}
