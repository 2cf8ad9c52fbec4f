package e2e

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestGuestClientsWaitWhileTheDaemonStartsAgain(t *testing.T) {
	inGuest(t)
	startWorker(t)
	restarted := make(chan struct{})
	go func() {
		defer close(restarted)
		for range 3 {
			_, _ = command(t, "systemctl", "restart", service) // the state is checked below
		}
	}()
	calls := 0
	for {
		answers(t) // fails the test if it gets none
		calls++
		select {
		case <-restarted:
			if got := property(t, "ActiveState"); got != "active" {
				t.Errorf("it is %s", got)
			}
			t.Logf("%d calls during 3 restarts, each answered", calls)
			return
		default:
		}
	}
}

// watchPauses starts to measure for how long this process does not run, as in a pause of the host.
// stop ends that and returns the sum.
func watchPauses() (stop func() time.Duration) {
	const most = 100 * time.Millisecond
	end, stood := make(chan struct{}), make(chan time.Duration)
	go func() {
		tick, all := time.NewTicker(most/10), time.Duration(0)
		defer tick.Stop()
		for last := time.Now(); ; {
			select {
			case <-tick.C:
			case <-end:
				stood <- all
				return
			}
			now := time.Now()
			if gap := now.Sub(last); gap > most {
				all += gap
			}
			last = now
		}
	}()
	return func() time.Duration { close(end); return <-stood }
}

// hit does something bad to the daemon while the worker is frozen. It returns the times
// until the worker ran, without pauses of the host, and until one who calls from then on, tries times, was answered.
func hit(t *testing.T, signal syscall.Signal, tries int) (ran, answered time.Duration) {
	t.Helper()
	restarts, before := number(t, "NRestarts"), number(t, "MainPID")
	c, _ := suspend(t)
	began := time.Now()
	if err := syscall.Kill(before, signal); err != nil {
		t.Fatal(err)
	}
	call := make(chan time.Duration)
	go func() {
		defer close(call)
		for range tries {
			if status, _ := command(t, "gpctl", "--socket", path, "--timeout", guestCall, "status"); status == 0 {
				call <- time.Since(began)
				return
			}
		}
	}()
	stood := watchPauses()
	ran = mustRun(t, began)
	ran -= stood()
	answered, ok := <-call
	if !ok {
		t.Errorf("a call made while the daemon was down was not answered\n%s", lastWords(t))
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	eventually(t, "the next daemon", nowAndThen, func() bool { return property(t, "ActiveState") == "active" })
	if got := number(t, "NRestarts"); got != restarts+1 || number(t, "MainPID") == before {
		t.Errorf("restarts: %d, want %d\n%s", got, restarts+1, lastWords(t))
	}
	eventually(t, "nobody is suspended", nowAndThen, func() bool { return strings.Contains(property(t, "StatusText"), "suspended targets 0") })
	mustRun(t, began)
	mustLeaveNothing(t)
	return ran, answered
}

// busyness describes how long it takes to start a service that does nothing. An emulated CPU
// of a host that has other work, too, is a slow one.
func busyness(t *testing.T) time.Duration {
	t.Helper()
	began := time.Now()
	must(t, "systemd-run", "--quiet", "--wait", "gpreemptd", "version")
	return time.Since(began)
}

// recovery checks a failure: beyond the watchdog's time the worker may stay suspended for
// 1 s, or, as the host may have been busy meanwhile, for eight times what it takes to
// start a service before it or after it.
func recovery(t *testing.T, what string, watchdog time.Duration, signal syscall.Signal, tries int) {
	t.Helper()
	before := busyness(t)
	ran, answered := hit(t, signal, tries)
	starting := max(before, busyness(t))
	if most := watchdog + max(time.Second, 8*starting); ran > most {
		t.Errorf("suspended for %v after %s, want at most %v", ran, what, most)
	}
	t.Logf("%s: the worker ran again after %.2f s, a call was answered after %.2f s; a service that does nothing takes %.2f s here",
		what, ran.Seconds(), answered.Seconds(), starting.Seconds())
}

func TestGuestDaemonThatHangsIsKilledAndNothingStaysSuspended(t *testing.T) {
	inGuest(t)
	watchdog, err := time.ParseDuration(property(t, "WatchdogUSec"))
	if err != nil {
		t.Fatal(err)
	}
	// A call that the daemon accepts as it is woken to die ends with it.
	recovery(t, fmt.Sprintf("SIGSTOP with WatchdogSec=%v", watchdog), watchdog, syscall.SIGSTOP, 2)
}

func TestGuestDaemonThatIsKilledIsReplacedAndNothingStaysSuspended(t *testing.T) {
	inGuest(t)
	recovery(t, "SIGKILL", 0, syscall.SIGKILL, 1)
}

func TestGuestReloadTakesOverAGoodFileAndNamesABadOne(t *testing.T) {
	inGuest(t)
	pid := property(t, "MainPID")
	file := "/etc/gpreempt/gpreemptd.yaml"
	write(t, file, guestConfig+"log: {level: debug}\n")
	must(t, "systemctl", "reload", service)
	eventually(t, "the change is in the journal", nowAndThen, func() bool { return len(entries(t, "GPREEMPT_KEY=log.level", "GPREEMPT_TO=debug")) == 1 })
	write(t, file, guestConfig+"log: {level: loud}\n")
	must(t, "systemctl", "reload", service)
	eventually(t, "the status names the mistake", nowAndThen, func() bool { return strings.Contains(property(t, "StatusText"), "was not applied") })
	write(t, file, guestConfig+"log: {level: debug}\n")
	must(t, "systemctl", "reload", service)
	eventually(t, "the status is well again", nowAndThen, func() bool { return !strings.Contains(property(t, "StatusText"), "was not applied") })
	if got := property(t, "MainPID"); got != pid || property(t, "ActiveState") != "active" {
		t.Errorf("process %s is now %s, %s", pid, got, property(t, "ActiveState"))
	}
}

func TestGuestStopLetsEverythingRunAndLeavesNothing(t *testing.T) {
	inGuest(t)
	c, lease := suspend(t)
	began := time.Now()
	must(t, "systemctl", "stop", socket, service)
	stopped := time.Since(began)
	mustRun(t, began)
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	mustLeaveNothing(t)
	if out := must(t, "gpreemptd", "--cleanup"); out != "nothing was left paused\n" {
		t.Errorf("gpreemptd --cleanup: %s", out)
	}
	if got := property(t, "ActiveState") + " " + property(t, "Result"); got != "inactive success" {
		t.Errorf("it is %s\n%s", got, lastWords(t))
	}
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the socket: %v", err)
	}
	if status, out := command(t, "gpctl", "--socket", path, "--timeout", "5s", "status"); status == 0 {
		t.Errorf("somebody answers: %s", out)
	}
	if got := entries(t, "MESSAGE=stopped, nothing is suspended"); len(got) == 0 {
		t.Errorf("the journal does not say that nothing is suspended\n%s", lastWords(t))
	}
	// Routine work is logged at debug, which the reload has set.
	if got := entries(t, "PRIORITY=7", "GPREEMPT_LEASE="+lease.ID()); len(got) == 0 {
		t.Errorf("the journal cannot be filtered by lease\n%s", lastWords(t))
	}
	t.Logf("stopped after %.2f s", stopped.Seconds())
}

func TestGuestFirstCallStartsTheDaemon(t *testing.T) {
	inGuest(t)
	must(t, "systemctl", "start", socket)
	if got := property(t, "ActiveState"); got != "inactive" {
		t.Fatalf("it is %s before anybody calls", got)
	}
	began := time.Now()
	answers(t)
	t.Logf("socket activation: answered after %.2f s", time.Since(began).Seconds())
	if got := property(t, "ActiveState"); got != "active" {
		t.Errorf("it is %s", got)
	}
}
