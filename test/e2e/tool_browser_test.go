package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"
)

// browser is a headless Chromium with one page, controlled by the DevTools protocol over a pair of
// pipes: messages of JSON, each ended by a zero byte.
type browser struct {
	t       *testing.T
	to      *os.File
	session string
	ended   chan struct{} // closed when the browser has closed its pipe

	mu       sync.Mutex // guards all below
	calls    int
	answers  map[int]chan devtools
	requests []string // URLs
	problems []string // errors on the console, exceptions and refused loads
}

// devtools is a message of the protocol.
type devtools struct {
	ID      int             `json:"id,omitempty"`
	Session string          `json:"sessionId,omitempty"`
	Method  string          `json:"method,omitempty"`
	Params  any             `json:"params,omitempty"`
	Result  json.RawMessage `json:"result,omitempty"`
	Error   *struct {
		Message string `json:"message"`
	} `json:"error,omitempty"`
}

// startBrowser starts Chromium with an empty page.
func startBrowser(t *testing.T) *browser {
	t.Helper()
	path, err := exec.LookPath("chromium")
	if err != nil {
		t.Skip("needs chromium (apt-get install chromium)")
	}
	// Not t.TempDir: processes of the browser may write after its end, and their files are of no use.
	profile, err := os.MkdirTemp("", "gpreempt-browser-") //nolint:usetesting // see above
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(profile) })
	read, to := pipe(t)
	from, write := pipe(t)
	cmd := exec.Command(path, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
		"--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
		"--remote-debugging-pipe", "--user-data-dir="+profile, "about:blank")
	cmd.ExtraFiles = []*os.File{read, write}
	log := &lines{}
	cmd.Stderr, cmd.WaitDelay = log, time.Minute
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = read.Close()
	_ = write.Close()
	b := &browser{t: t, to: to, ended: make(chan struct{}), answers: map[int]chan devtools{}}
	go b.receive(from)
	t.Cleanup(func() {
		b.call("Browser.close", nil, nil)
		<-b.ended
		if err := cmd.Wait(); err != nil {
			t.Errorf("chromium: %v\n%s", err, log)
		}
		_ = to.Close()
		_ = from.Close()
	})
	var target struct{ TargetID string }
	b.call("Target.createTarget", map[string]any{"url": "about:blank"}, &target)
	var attached struct{ SessionID string }
	b.call("Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": true}, &attached)
	b.session = attached.SessionID
	for _, domain := range []string{"Page", "Runtime", "Log", "Network"} {
		b.call(domain+".enable", nil, nil)
	}
	return b
}

func pipe(t *testing.T) (r, w *os.File) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	return r, w
}

// receive handles the messages of the browser until it ends.
func (b *browser) receive(from *os.File) {
	defer close(b.ended)
	for in := bufio.NewReader(from); ; {
		text, err := in.ReadBytes(0)
		if err != nil {
			return
		}
		var m devtools
		var params json.RawMessage
		m.Params = &params
		if err := json.Unmarshal(bytes.TrimSuffix(text, []byte{0}), &m); err != nil {
			b.problem("message %q: %v", text, err)
			continue
		}
		if m.ID != 0 {
			b.mu.Lock()
			answer := b.answers[m.ID]
			delete(b.answers, m.ID)
			b.mu.Unlock()
			if answer != nil {
				answer <- m
			}
			continue
		}
		b.event(m.Method, params)
	}
}

// event records what a page must not do.
func (b *browser) event(method string, params json.RawMessage) {
	switch method {
	case "Network.requestWillBeSent":
		var p struct{ Request struct{ URL string } }
		if err := json.Unmarshal(params, &p); err != nil {
			b.problem("%s: %v", method, err)
		}
		b.mu.Lock()
		b.requests = append(b.requests, p.Request.URL)
		b.mu.Unlock()
	case "Runtime.exceptionThrown":
		b.problem("%s: %s", method, params)
	case "Runtime.consoleAPICalled", "Log.entryAdded":
		var p struct {
			Type  string
			Entry struct{ Level string }
		}
		if err := json.Unmarshal(params, &p); err != nil || p.Type == "error" || p.Type == "warning" || p.Entry.Level == "error" || p.Entry.Level == "warning" {
			b.problem("%s: %s", method, params)
		}
	}
}

func (b *browser) problem(format string, args ...any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.problems = append(b.problems, fmt.Sprintf(format, args...))
}

// call calls a method and decodes its result, unless that is nil.
func (b *browser) call(method string, params, result any) {
	b.t.Helper()
	b.mu.Lock()
	b.calls++
	m := devtools{ID: b.calls, Session: b.session, Method: method, Params: params}
	if strings.HasPrefix(method, "Target.") || strings.HasPrefix(method, "Browser.") {
		m.Session = ""
	}
	answer := make(chan devtools, 1)
	b.answers[m.ID] = answer
	b.mu.Unlock()
	text, err := json.Marshal(m)
	if err != nil {
		b.t.Fatal(err)
	}
	if _, err := b.to.Write(append(text, 0)); err != nil {
		b.t.Fatalf("%s: %v", method, err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout) // also after the end of the test
	defer cancel()
	select {
	case got := <-answer:
		if got.Error != nil {
			b.t.Fatalf("%s: %s", method, got.Error.Message)
		}
		if result != nil {
			if err := json.Unmarshal(got.Result, result); err != nil {
				b.t.Fatalf("%s: %v", method, err)
			}
		}
	case <-b.ended:
		if method != "Browser.close" {
			b.t.Fatalf("%s: the browser has ended", method)
		}
	case <-ctx.Done():
		b.t.Fatalf("%s: no answer within %v", method, timeout)
	}
}

// eval returns the value of an expression of JavaScript, of a promise what it resolves to.
func (b *browser) eval(expression string) any {
	b.t.Helper()
	var got struct {
		Result           struct{ Value any }
		ExceptionDetails json.RawMessage
	}
	b.call("Runtime.evaluate", map[string]any{"expression": expression, "awaitPromise": true, "returnByValue": true}, &got)
	if got.ExceptionDetails != nil {
		b.t.Fatalf("%s: %s", expression, got.ExceptionDetails)
	}
	return got.Result.Value
}

// await waits until an expression is true in the page.
func (b *browser) await(expression string) {
	b.t.Helper()
	within := timeout / 2
	got := b.eval(fmt.Sprintf(`new Promise((done) => {
		const late = Date.now() + %d;
		const look = () => (%s) ? done("") : Date.now() > late ? done(document.body.innerText) : setTimeout(look, 20);
		look();
	})`, within.Milliseconds(), expression))
	if got != "" {
		b.t.Fatalf("not within %v: %s; the page:\n%v", within, expression, got)
	}
}

// resize sets the size of the window, and whether the reader prefers a dark page.
func (b *browser) resize(width, height int, dark bool) {
	b.t.Helper()
	scheme := "light"
	if dark {
		scheme = "dark"
	}
	b.call("Emulation.setEmulatedMedia", map[string]any{"features": []map[string]any{{"name": "prefers-color-scheme", "value": scheme}}}, nil)
	b.call("Emulation.setDeviceMetricsOverride", map[string]any{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}, nil)
	b.eval(`new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(""))))`) // drawn
}

// screenshot returns the window as PNG.
func (b *browser) screenshot() []byte {
	b.t.Helper()
	var shot struct{ Data string }
	b.call("Page.captureScreenshot", map[string]any{"format": "png"}, &shot)
	png, err := base64.StdEncoding.DecodeString(shot.Data)
	if err != nil {
		b.t.Fatal(err)
	}
	return png
}
