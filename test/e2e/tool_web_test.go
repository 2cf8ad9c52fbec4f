package e2e

import (
	"bufio"
	"bytes"
	"context"
	"flag"
	"fmt"
	"image/png"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/internal/testutil/clitest"
)

// update has the tests named PicturesOfTheDocuments and PictureOfTheDocument make the pictures of docs/operate.md, which
// takes a minute, and of docs/trial.md:
//
//	go test ./test/e2e -run OfTheDocument -update
var update = flag.Bool("update", false, "make the pictures of the documents, and record version 1")

// startWeb runs gpctl web and returns the address of its page.
func (d *daemon) startWeb() (cmd *exec.Cmd, address string) {
	d.t.Helper()
	cmd = exec.Command(gpctl, "--socket", d.socket, "web")
	out, err := cmd.StdoutPipe()
	if err != nil {
		d.t.Fatal(err)
	}
	said := &lines{}
	cmd.Env, cmd.Stderr = environment(), said
	if err := cmd.Start(); err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(func() {
		_ = cmd.Process.Signal(os.Interrupt) // it may have ended
		_ = cmd.Wait()
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		d.t.Fatalf("gpctl web: %v: %s", err, said)
	}
	return cmd, strings.TrimSpace(line)
}

func TestWebEndsWithASignal(t *testing.T) {
	d := start(t, atOnce)
	for _, signal := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP} {
		cmd, address := d.startWeb()
		if !strings.HasPrefix(address, "http://127.0.0.1:") || !strings.HasSuffix(address, "/") {
			t.Errorf("the address is %q", address)
		}
		if err := cmd.Process.Signal(signal); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Errorf("after %v: %v", signal, err)
		}
	}
	if r := d.ctl("web", "--listen", "0.0.0.0:0"); r.Code != 2 {
		t.Errorf("on all addresses: %+v", r)
	}
}

// row is an expression for the text of the row of a table whose first cells have a text.
func row(table, text string) string {
	return fmt.Sprintf(`([...document.querySelectorAll("#%s tbody tr")].map((r) => r.innerText).find((s) => s.includes(%q)) || "")`, table, text)
}

func shows(table, row1, text string) string {
	return row(table, row1) + fmt.Sprintf(".includes(%q)", text)
}

// painted is an expression for the number of canvases of the timeline on which anything is drawn.
const painted = `[...document.querySelectorAll("#timeline canvas")].filter((c) =>
	c.width > 0 && c.getContext("2d").getImageData(0, 0, c.width, c.height).data.some((v) => v > 0)).length`

func TestWebPageInABrowser(t *testing.T) {
	b := startBrowser(t)
	dir := testutil.TempSocketDir(t)
	d := startIn(t, dir, atOnce)
	pid := fmt.Sprint(d.startOffline())
	_, address := d.startWeb()
	b.resize(1280, 900, false)
	b.call("Page.navigate", map[string]any{"url": address}, nil)
	b.await(`document.querySelector("#link-text")?.textContent === "live"`)
	b.await(`document.querySelector("#model").textContent === "SIMULATED: no hardware is involved"`)
	b.await(`document.querySelector("#timeline").innerText.includes("#0 gfx942")`)
	b.await(shows("targets", pid, "running") + " && " + shows("targets", pid, "Running: no lease covers its GPUs (no-lease)."))

	// A lease appears, and its targets are suspended; it ends, and they run.
	work := announcement()
	work.Label = "chat<b>"
	lease, err := d.online.NotifyOnline(t.Context(), work)
	if err != nil {
		t.Fatal(err)
	}
	b.await(shows("leases", lease.GetLeaseId(), "chat<b>") + " && " + shows("leases", lease.GetLeaseId(), "held"))
	b.await(shows("targets", pid, "suspended") + " && " + shows("targets", pid, "Suspended: a lease covers its GPUs (lease)."))
	b.await(shows("preemptions", pid, lease.GetLeaseId()))
	b.await(painted + " === 2") // the GPU's and the target's
	b.await(`document.querySelector("#quiet dd").textContent !== "-"`)
	b.eval(`document.querySelector("#targets button.open").click()`)
	b.await(`(document.querySelector(".detail")?.innerText || "").includes("highest lease priority")`)
	b.await(`document.querySelector(".detail").innerText.includes("process      ` + pid + `")`)
	d.complete(lease.GetLeaseId())
	b.await(`document.querySelector("#leases").innerText.includes("No live leases.")`)
	b.await(shows("targets", pid, "running"))

	// No layout is wider than the window; the colours are those that the reader prefers.
	for _, width := range []int{360, 768, 880, 1280} {
		b.resize(width, 800, width == 360)
		if got := b.eval(`document.documentElement.scrollWidth`); got != float64(width) {
			t.Errorf("in a window of %d pixels the page is %v wide", width, got)
		}
	}

	// The daemon stops, and another one starts.
	d.stop()
	b.await(`!document.querySelector("#lost").hidden && document.querySelector("#lost").textContent.includes("cannot reach the daemon")`)
	b.await(`document.querySelector("#link-text").textContent === "not connected"`)
	next := startIn(t, dir, atOnce)
	again := fmt.Sprint(next.startOffline())
	b.await(`document.querySelector("#link-text").textContent === "live" && document.querySelector("#lost").hidden`)
	b.await(shows("targets", again, "running"))
	b.await(painted + " >= 2") // the time without the daemon

	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.problems) > 0 {
		t.Errorf("the browser reports\n%s", strings.Join(b.problems, "\n"))
	}
	root, _, _ := strings.Cut(strings.TrimPrefix(address, "http://"), "/")
	if len(b.requests) < 4 {
		t.Errorf("%d requests", len(b.requests))
	}
	if i := slices.IndexFunc(b.requests, func(url string) bool { return !strings.HasPrefix(url, "http://"+root+"/") }); i >= 0 {
		t.Errorf("a request for %s", b.requests[i])
	}
}

// webText is the text of the page, with what the layout cuts and with the state that is not seen without scrolling.
const webText = `(() => {
	const shown = (e) => e.checkVisibility() && e.getClientRects().length > 0;
	const all = [...document.querySelectorAll("h1, h2, p, li, dt, dd, th, td, .model, .link, button")].filter((e) => shown(e) && !e.querySelector("p, li, dt, dd, td, button"));
	const texts = (list) => list.map((e) => e.innerText.replace(/\s+/g, " ").trim() + "\n").filter((s) => s !== "\n").join("");
	const cut = all.filter((e) => e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflowX !== "visible");
	const late = all.filter((e) => e.matches(".banner, .model, .link, .figure") && e.getBoundingClientRect().bottom > innerHeight);
	return texts(all) + "-- cut --\n" + texts(cut) + "-- state below the fold --\n" + texts(late);
})()`

// passingText matches what depends on when the page is read.
var passingText = regexp.MustCompile(`\b\d+d\d*h?\b|\b\d\d:\d\d:\d\d\.\d{3}\b`)

// calmMachine is a daemon without events.
type calmMachine struct{ *clitest.Machine }

func (calmMachine) WatchEvents(_ *gpreemptv1.WatchEventsRequest, out grpc.ServerStreamingServer[gpreemptv1.WatchEventsResponse]) error {
	<-out.Context().Done()
	return out.Context().Err()
}

// The page of a daemon with two warnings, as a person with a laptop and one with a phone sees it.
func TestWebScreens(t *testing.T) {
	b := startBrowser(t)
	d := &daemon{t: t, socket: filepath.Join(testutil.TempSocketDir(t), "gpreemptd.sock")}
	clitest.Serve(t, d.socket, calmMachine{clitest.NewMachine()})
	_, address := d.startWeb()
	b.call("Page.navigate", map[string]any{"url": address}, nil)
	b.await(`document.querySelector("#link-text")?.textContent === "live"`)
	b.await(`document.querySelectorAll("#leases tbody tr[data-key]").length > 0`)
	for _, size := range []struct {
		width, height int
		explained     bool
	}{{1280, 800, false}, {390, 844, false}, {1280, 800, true}, {390, 844, true}} {
		name := fmt.Sprintf("web-%dx%d", size.width, size.height)
		if size.explained {
			name += "-explained-draining"
			d.check(0, "draining", "drain", "on")
			b.await(`document.querySelector("#warnings").innerText.includes("DRAINING")`)
			b.await(`(document.querySelector(".detail") || document.querySelector("#targets button.open").click(), !!document.querySelector(".detail table, .detail pre"))`)
		}
		b.resize(size.width, size.height, false)
		if folder := os.Getenv("GPREEMPT_PICTURES"); folder != "" {
			if err := os.WriteFile(filepath.Join(folder, name+".png"), b.screenshot(), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		got := passingText.ReplaceAllString(b.eval(webText).(string), "TIME")
		path := filepath.Join("testdata", name+".golden")
		if *update {
			if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), got); diff != "" {
			t.Errorf("%s (-want +got; -update writes it):\n%s", path, diff)
		}
	}
}

// pictures are those of docs/operate.md.
var pictures = []struct {
	name          string
	width, height int
	dark          bool
}{
	{"web-desktop.png", 1240, 886, false},
	{"web-phone.png", 390, 844, true},
}

const pictureBytes = 150_000

func TestWebPicturesOfTheDocuments(t *testing.T) {
	folder := filepath.Join(docs, "images")
	if *update {
		makePictures(t, folder)
	}
	for _, p := range pictures {
		info, err := os.Stat(filepath.Join(folder, p.name))
		if err != nil {
			t.Error(err)
		} else if info.Size() > pictureBytes {
			t.Errorf("%s has %d bytes, more than %d", p.name, info.Size(), pictureBytes)
		}
	}
}

// makePictures shows a minute of two inference servers and three jobs on two simulated GPUs.
func makePictures(t *testing.T, folder string) {
	b := startBrowser(t)
	config := strings.Replace(strings.Replace(atOnce, "preset: strict\n  linger: 0s\n  attach_after: 0s", "preset: balanced", 1), "class: offline",
		"class: offline\n  - name: inference\n    match:\n      comm: \"vllm*\"\n    class: online\n    priority: 10", 1)
	d := start(t, config, "--gpus", "2", "--job", "train-bert:10:25ms", "--job", "train-llama:8:25ms:2", "--job", "vllm:2:1ms:2", "--job", "indexer:1:5ms")
	d.eventually("the jobs can be suspended", func() bool { return d.status().GetOfflineCount() == 2 })
	gpus, err := d.admin.ListGpus(t.Context(), &gpreemptv1.ListGpusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	_, address := d.startWeb()
	b.resize(pictures[0].width, pictures[0].height, false)
	b.call("Page.navigate", map[string]any{"url": address}, nil)

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan struct{})
	// Requests of two servers begin and end at random; the one for the second GPU has more.
	go func() {
		defer close(ended)
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		random := rand.New(rand.NewPCG(1, 2))
		var live []string
		for {
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
			for i, label := range []string{"chat", "embeddings"} {
				if random.IntN(90/(i+1)) > 0 {
					continue
				}
				lease, err := d.online.NotifyOnline(ctx, &gpreemptv1.NotifyOnlineRequest{
					Gpus:  []*gpreemptv1.GpuSelector{{By: &gpreemptv1.GpuSelector_GpuId{GpuId: gpus.GetGpus()[i].GetGpuId()}}},
					Label: label, Ttl: durationpb.New(5 * time.Second), MaxWait: durationpb.New(100 * time.Millisecond),
				})
				if err == nil {
					live = append(live, lease.GetLeaseId())
				}
			}
			live = slices.DeleteFunc(live, func(id string) bool {
				if random.IntN(14) > 0 {
					return false
				}
				_, err := d.online.Complete(ctx, &gpreemptv1.CompleteRequest{LeaseId: id})
				return err == nil
			})
		}
	}()
	defer func() { <-ended }()
	defer cancel()
	b.await(`document.querySelector("#link-text")?.textContent === "live"`)
	b.await(`newest > 300`)
	b.await(`newest > 610 && document.querySelectorAll("#leases tbody tr[data-key]").length > 0`)
	for _, p := range pictures {
		b.resize(p.width, p.height, p.dark)
		b.await(`document.querySelectorAll("#leases tbody tr[data-key]").length > 0`)
		if err := os.WriteFile(filepath.Join(folder, p.name), smaller(t, b.screenshot()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// smaller compresses a PNG better, without a change of its pixels.
func smaller(t *testing.T, data []byte) []byte {
	t.Helper()
	picture, err := png.Decode(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := (&png.Encoder{CompressionLevel: png.BestCompression}).Encode(&out, picture); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}
