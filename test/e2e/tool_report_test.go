package e2e

import (
	"bytes"
	"cmp"
	"encoding/base64"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// madeUpRun is a run with made-up figures, which has everything that a report can show.
var madeUpRun = filepath.Join("..", "..", "lab", "report", "testdata", "run")

// writeReport has gplab make a page of a run, and returns its address.
func writeReport(t *testing.T, run string) string {
	t.Helper()
	page := filepath.Join(t.TempDir(), "report.html")
	cmd := exec.Command(gplab, "report", run, "-o", page)
	cmd.Env = environment()
	if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
		t.Fatalf("gplab report: %v: %s", err, out)
	}
	return "file://" + page
}

// print shows a page as on paper.
func (b *browser) print() {
	b.t.Helper()
	b.call("Emulation.setEmulatedMedia", map[string]any{"media": "print", "features": []map[string]any{{"name": "prefers-color-scheme", "value": "dark"}}}, nil)
	b.call("Emulation.setDeviceMetricsOverride", map[string]any{"width": 794, "height": 1123, "deviceScaleFactor": 1, "mobile": false}, nil)
	b.eval(`new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(""))))`)
}

func TestReportInABrowser(t *testing.T) {
	b := startBrowser(t)
	b.resize(1280, 900, false)
	b.call("Page.navigate", map[string]any{"url": writeReport(t, madeUpRun)}, nil)
	b.await(`document.readyState === "complete" && document.querySelectorAll("section").length > 10`)
	const paper, night, day = "rgb(255, 255, 255)", "rgb(18, 21, 27)", "rgb(244, 245, 247)"
	for _, view := range []struct {
		name       string
		show       func()
		width      int
		background string
	}{
		{"a phone", func() { b.resize(360, 800, false) }, 360, day},
		{"a phone, dark", func() { b.resize(360, 800, true) }, 360, night},
		{"a tablet", func() { b.resize(768, 900, false) }, 768, day},
		{"a desktop", func() { b.resize(1280, 900, false) }, 1280, day},
		{"a desktop, dark", func() { b.resize(1280, 900, true) }, 1280, night},
		{"paper", b.print, 794, paper},
	} {
		view.show()
		// Folded, the answer is the first screen. On paper everything is shown.
		b.eval(`document.querySelectorAll("details").forEach((d) => { d.open = false; }); ""`)
		if view.name != "paper" {
			height := map[string]float64{"a phone": 844, "a phone, dark": 844}[view.name]
			if got := b.eval(`document.querySelector("#verdict").getBoundingClientRect().bottom + scrollY`).(float64); got > cmp.Or(height, 800) {
				t.Errorf("on %s the answer ends at %v pixels", view.name, got)
			}
			b.eval(`document.querySelectorAll("details").forEach((d) => { d.open = true; }); ""`)
		}
		if got := b.eval(`document.documentElement.scrollWidth`); got != float64(view.width) {
			t.Errorf("on %s, %d pixels, the page is %v wide", view.name, view.width, got)
		}
		if got := b.eval(`getComputedStyle(document.body).backgroundColor`); got != view.background {
			t.Errorf("on %s the background is %v, want %s", view.name, got, view.background)
		}
		// Each chart is visible, and its text is at least 8 pixels high.
		small := b.eval(`[...document.querySelectorAll("figure")].filter((f) => {
			const chart = f.querySelector("svg").getBoundingClientRect();
			return chart.width * 12.5 / 480 < 8 || chart.height < 60 || [...f.querySelectorAll(":scope > svg text")].some((text) => {
				const r = text.getBoundingClientRect();
				return r.left < chart.left - 1 || r.right > chart.right + 1 || r.top < chart.top - 1 || r.bottom > chart.bottom + 1;
			});
		}).map((f) => f.innerText).join(", ")`)
		if small != "" {
			t.Errorf("on %s these charts are too small or cut: %v", view.name, small)
		}
	}
	if got := b.eval(`[...document.querySelectorAll("figcaption, title, .origin, .everypage")].every((e) => e.textContent.startsWith("EMULATED"))`); got != true {
		t.Error("a part does not say that the figures are emulated")
	}
	if got := b.eval(`getComputedStyle(document.querySelector(".everypage")).position`); got != "fixed" { // on each sheet
		t.Errorf("on paper the origin is %v", got)
	}
	var printed struct{ Data string }
	b.call("Page.printToPDF", map[string]any{}, &printed)
	if pdf, err := base64.StdEncoding.DecodeString(printed.Data); err != nil || !bytes.HasPrefix(pdf, []byte("%PDF")) || bytes.Count(pdf, []byte("/Type /Page\n")) < 3 {
		t.Errorf("a PDF of %d bytes, %v", len(printed.Data), err)
	}

	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.problems) > 0 {
		t.Errorf("the browser reports\n%s", strings.Join(b.problems, "\n"))
	}
	if i := slices.IndexFunc(b.requests, func(url string) bool { return !strings.HasPrefix(url, "file://") && url != "about:blank" }); i >= 0 {
		t.Errorf("a request for %s", b.requests[i])
	}
}

// TestReportPicturesOfTheDocument keeps the first screen of the report of the first example in
// "gplab plan --help".
func TestReportPicturesOfTheDocument(t *testing.T) {
	pictures := []struct {
		name          string
		width, height int
	}{{"report.png", 1280, 800}, {"report-phone.png", 390, 844}}
	if *update {
		run := filepath.Join(t.TempDir(), "run")
		cmd := exec.Command(gplab, "plan", "mi308x-matmul", "--cost", "0.2ms", "--run", run)
		cmd.Env = environment()
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("gplab plan: %v: %s", err, out)
		}
		page := writeReport(t, run)
		b := startBrowser(t)
		for _, p := range pictures {
			b.resize(p.width, p.height, false)
			b.call("Page.navigate", map[string]any{"url": page}, nil)
			b.await(`document.readyState === "complete"`)
			if err := os.WriteFile(filepath.Join(docs, "images", p.name), smaller(t, b.screenshot()), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, p := range pictures {
		info, err := os.Stat(filepath.Join(docs, "images", p.name))
		if err != nil {
			t.Fatal(err)
		}
		if info.Size() > pictureBytes {
			t.Errorf("%s has %d bytes, more than %d", p.name, info.Size(), pictureBytes)
		}
	}
}
