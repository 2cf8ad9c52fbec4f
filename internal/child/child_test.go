package child

import (
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap/zaptest"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/testutil"
)

func TestMain(m *testing.M) { os.Exit(testutil.VerifyMain(m)) }

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func waitTime() time.Duration { return testutil.WaitTime }

// run serves a daemon, whose requests are answered by do, and returns the daemon's side.
func run(t *testing.T, each func([]int), do func(d *Daemon[int, []int], r Request[int])) *Process[int, []int] {
	t.Helper()
	daemon, socket, err := Pair()
	must(t, err)
	over := make(chan struct{})
	go func() {
		defer close(over)
		defer socket.Close()
		d := Serve[int, []int](socket)
		for r := range d.Requests {
			do(d, r)
		}
		if err := d.Err(); err != nil {
			t.Error(err)
		}
	}()
	p := New[int](daemon, 0, func() { shutdown(socket, unix.SHUT_RDWR) }, func() { <-over }, each, zaptest.NewLogger(t))
	t.Cleanup(func() {
		p.Kill()
		<-p.Ended
	})
	return p
}

func TestRequestsOfAnySizeAreAnsweredAndReportsComeBefore(t *testing.T) {
	var reports []int
	p := run(t, func(m []int) { reports = append(reports, len(m)) }, func(d *Daemon[int, []int], r Request[int]) {
		d.Report([]int{r.Body})
		d.Answer(r, slices.Repeat([]int{r.Body}, r.Body))
	})
	want := []int{}
	for _, n := range []int{0, 1, 100, 50_000, 1} {
		got, err := p.Call(n, waitTime)
		must(t, err)
		if len(got) != n || n > 0 && got[n-1] != n {
			t.Errorf("%d numbers, want %d", len(got), n)
		}
		want = append(want, 1, n)
	}
	if diff := cmp.Diff(want, reports); diff != "" {
		t.Errorf("messages before the last answer (-want +got):\n%s", diff)
	}
}

func TestCallsOfSeveralAtOnceGetTheirOwnAnswers(t *testing.T) {
	var first *Request[int]
	p := run(t, func([]int) {}, func(d *Daemon[int, []int], r Request[int]) {
		if first == nil {
			first = &r
			return
		}
		d.Answer(r, []int{r.Body})
		d.Answer(*first, []int{first.Body})
	})
	results := make(chan bool, 2)
	for n := range 2 {
		go func() {
			got, err := p.Call(n, waitTime)
			results <- err == nil && len(got) == 1 && got[0] == n
		}()
	}
	for range 2 {
		if !testutil.Receive(t, results, "an answer") {
			t.Error("a call has no answer, or that to another one")
		}
	}
}

func TestCallEndsWithTheChildOrItsLimit(t *testing.T) {
	for want, do := range map[error]func(d *Daemon[int, []int]){
		ErrLate:  func(*Daemon[int, []int]) {},
		ErrEnded: func(d *Daemon[int, []int]) { shutdown(d.conn.file, unix.SHUT_RDWR) },
	} {
		asked := 0
		p := run(t, func([]int) {}, func(d *Daemon[int, []int], _ Request[int]) { do(d) })
		_, err := p.Call(1, func() time.Duration {
			switch asked++; {
			case want == ErrEnded: //nolint:errorlint // one of two
				return waitTime()
			case asked < 4:
				return time.Nanosecond
			}
			return 0
		})
		if err != want { //nolint:errorlint // it is not wrapped
			t.Errorf("error %v, want %v", err, want)
		}
		testutil.Receive(t, p.Closed, "the end of the connection")
		if want == ErrLate && asked != 4 { //nolint:errorlint // one of two
			t.Errorf("the limit was asked for %d times", asked)
		}
		if _, err := p.Call(2, waitTime); err != ErrEnded { //nolint:errorlint // it is not wrapped
			t.Errorf("a call after that returns %v", err)
		}
	}
}

func TestChildThatIsNotUnderstoodIsKilled(t *testing.T) {
	daemon, socket, err := Pair()
	must(t, err)
	defer socket.Close()
	killed := make(chan struct{})
	p := New[int](daemon, 0, func() { close(killed) }, func() {}, func([]int) { t.Error("a message") }, zaptest.NewLogger(t))
	if _, err := socket.WriteString(strings.Repeat("not a message of ours", 100)); err != nil {
		t.Fatal(err)
	}
	testutil.Receive(t, killed, "the order to end")
	testutil.Receive(t, p.Ended, "the end")
}

// FuzzServe has the daemon send anything.
func FuzzServe(f *testing.F) {
	f.Add([]byte{3, 4, 0, 2})
	f.Fuzz(func(t *testing.T, packet []byte) {
		if len(packet) == 0 || len(packet) > 32<<10 {
			return
		}
		daemon, socket, err := Pair()
		must(t, err)
		defer socket.Close()
		if _, err := daemon.Write(packet); err != nil {
			t.Fatal(err)
		}
		must(t, daemon.Close())
		for range Serve[map[string][]int, int](socket).Requests {
		}
	})
}
