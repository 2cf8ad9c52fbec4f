package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/client"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// served is what became of the announcements of a server.
type served struct {
	Answered int
	Refused  map[gpreempt.Reason]int
	P50, P99 time.Duration
}

// One user takes all connections and four others all leases that they can get, the former as 14
// users of a namespace; then the four send what they can. Each announcement of another user is
// answered all the time, under the default limits.
func TestOtherUsersAreServedWhileSomeTakeAllTheyCan(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root, to connect as other users")
	}
	const (
		alice, subordinates = 30_010, 14
		abusive, firstUID   = 4, 30_020
		length              = 2 * time.Second
	)
	d := startForStrangers(t)
	took := map[string]served{}
	serve := func(phase string) {
		t.Helper()
		_, out := d.hostile(user(30_011), attack{Serve: true, Length: length})
		var is served
		if err := json.NewDecoder(out).Decode(&is); err != nil {
			t.Fatal(err)
		}
		took[phase] = is
		t.Logf("%s: %d announcements answered, %v refused, p50 %v, p99 %v", phase, is.Answered, is.Refused, is.P50, is.P99)
		if is.Answered == 0 || len(is.Refused) > 0 {
			t.Errorf("%s: %d announcements of another user are answered and %v refused, want all answered", phase, is.Answered, is.Refused)
		}
	}
	serve("alone")

	n := d.held(d.subordinates(user(alice), attack{Processes: subordinates, Hold: 128}))
	serve("connections taken")
	var leaseHolders []*bufio.Reader
	for i := range abusive {
		_, out := d.hostile(user(uint32(firstUID+i)), attack{Processes: 16, Leases: true})
		leaseHolders = append(leaseHolders, out)
	}
	leases := 0
	for _, out := range leaseHolders {
		leases += d.held(out)
	}
	t.Logf("held: %d connections by one user, %d leases by %d", n, leases, abusive)
	if n == 0 || n > 256 {
		t.Errorf("%d users of one have %d connections together, want some and at most the 256 of one user", subordinates, n)
	}
	if most := 4096 - 409; leases < most*9/10 || leases > most {
		t.Errorf("%d leases are held, want most of %d", leases, most)
	}
	serve("connections and leases taken")

	var floods []func() tally
	for i := range abusive {
		floods = append(floods, d.attackAs(user(uint32(firstUID+i)), attack{PerSecond: floodRate / abusive, Length: length, Sessions: 2, Calls: 2}))
	}
	serve("and four users send what they can")
	for _, outcome := range floods {
		if is := outcome(); is.Refused == 0 {
			t.Errorf("nothing of a flood was refused: %+v", is)
		}
	}
	tellFigures(t, "a fifth user while four take all they can, simulated GPUs", racing(), took)
}

// subordinates starts a hostile client whose processes are other users, as with /etc/subuid.
func (d *daemon) subordinates(who *syscall.SysProcAttr, a attack) (out *bufio.Reader) {
	d.t.Helper()
	a.Subordinates = true
	in, out := d.hostile(who, a)
	pid := d.held(out)
	for name, text := range map[string]string{
		"uid_map": fmt.Sprintf("0 100000 %d", a.Processes),
		"gid_map": fmt.Sprintf("0 %d 1", stranger),
	} { // as newuidmap does
		if err := os.WriteFile(fmt.Sprintf("/proc/%d/%s", pid, name), []byte(text), 0); err != nil {
			d.t.Fatal(err)
		}
	}
	if _, err := fmt.Fprintln(in, "mapped"); err != nil {
		d.t.Fatal(err)
	}
	return out
}

// crowdMain starts processes for an attack that is held until standard input ends, and prints the
// sum of what they have got.
func crowdMain(a attack, out io.Writer) int {
	var err error
	switch {
	case a.Subordinates && !a.Members:
		a.Members = true
		err = enterNamespace(a, out)
	case a.Subordinates:
		var mapped string
		if _, err = fmt.Fscanln(os.Stdin, &mapped); err == nil {
			err = crowd(a, out)
		}
	default:
		err = crowd(a, out)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// repeated returns a command that is this program with another attack.
func repeated(a attack) (*exec.Cmd, error) {
	text, err := json.Marshal(a)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env, cmd.Stdin, cmd.Stderr = environment(hostileEnv+"="+string(text)), os.Stdin, os.Stderr
	return cmd, err
}

// enterNamespace starts the process that becomes the users of a new namespace, and prints its pid.
func enterNamespace(a attack, out io.Writer) error {
	member, err := repeated(a)
	if err != nil {
		return err
	}
	member.Stdout = out
	member.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER, AmbientCaps: []uintptr{unix.CAP_SETUID, unix.CAP_SETGID}}
	if err := member.Start(); err != nil {
		return err
	}
	fmt.Fprintln(out, member.Process.Pid)
	return member.Wait()
}

func crowd(a attack, out io.Writer) error {
	one, sum := a, 0
	one.Processes = 0
	var printed []io.Reader
	var all []*exec.Cmd
	for i := range a.Processes {
		cmd, err := repeated(one)
		if err != nil {
			return err
		}
		if a.Subordinates {
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(i), Gid: 0, NoSetGroups: true}}
		}
		stdout, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			return err
		}
		printed, all = append(printed, stdout), append(all, cmd)
	}
	for _, r := range printed {
		var n int
		if _, err := fmt.Fscan(r, &n); err != nil {
			return err
		}
		sum += n
	}
	fmt.Fprintln(out, sum)
	var errs []error
	for _, cmd := range all {
		errs = append(errs, cmd.Wait())
	}
	return errors.Join(errs...)
}

// leasesMain takes leases until one is refused, prints how many it has, and takes what it
// can until in ends.
func leasesMain(a attack, in io.Reader, out io.Writer) int {
	conn, err := connect(a.Socket)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer conn.Close()
	online := gpreemptv1.NewOnlineServiceClient(conn)
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, in)
		cancel()
	}()
	printed := false
	for taken := 0; ; {
		_, err := online.NotifyOnline(ctx, &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(time.Minute), MaxWait: durationpb.New(0)})
		switch {
		case ctx.Err() != nil:
			return 0
		case err == nil:
			taken++
			continue
		case !printed && gpreempt.ReasonOf(client.FromStatus(err)) != gpreempt.ReasonRateLimited:
			fmt.Fprintln(out, taken)
			printed = true
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return 0
		}
	}
}

// serveMain announces and completes some hundred times a second, and prints what became of it.
func serveMain(a attack, out io.Writer) int {
	conn, err := connect(a.Socket)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer conn.Close()
	online := gpreemptv1.NewOnlineServiceClient(conn)
	is := served{Refused: map[gpreempt.Reason]int{}}
	var took []time.Duration
	tick := time.NewTicker(3 * time.Millisecond)
	defer tick.Stop()
	for until := time.Now().Add(a.Length); time.Now().Before(until); <-tick.C {
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		began := time.Now()
		lease, err := online.NotifyOnline(ctx, &gpreemptv1.NotifyOnlineRequest{MaxWait: durationpb.New(time.Second)})
		took = append(took, time.Since(began))
		if err == nil {
			is.Answered++
			_, err = online.Complete(ctx, &gpreemptv1.CompleteRequest{LeaseId: lease.GetLeaseId()})
		}
		cancel()
		if err != nil {
			is.Refused[gpreempt.ReasonOf(client.FromStatus(err))]++
		}
	}
	is.P50, is.P99 = percentile(took, 50), percentile(took, 99)
	if err := json.NewEncoder(out).Encode(is); err != nil {
		return 1
	}
	return 0
}
