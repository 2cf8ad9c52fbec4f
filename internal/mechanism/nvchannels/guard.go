package nvchannels

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/child"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/nvrm"
)

// order is a message to a supervisor. Without a target it is a beat: the daemon works.
type order struct {
	// Channels of Target are to be enabled when the daemon ends or is silent, in place of an earlier
	// list; without any, the process is forgotten.
	Target   gpreempt.ProcessKey
	Channels []nvrm.Channel
}

// answer is that of a supervisor to each order.
type answer struct {
	// Lapsed: the daemon was silent before, and everything was resumed.
	Lapsed bool
	// Err is why the order was not carried out, "" if it was.
	Err string
}

const (
	// answerTime is how long the supervisor may take to answer. It makes no call of the driver
	// meanwhile, unless the daemon was silent.
	answerTime = 2 * time.Second
	// maxChannels is the most channels of a process that the supervisor takes.
	maxChannels = 4096
)

// guard is the daemon's side of a supervisor.
type guard struct {
	*child.Process[order, answer]
	// lapses counts how often the supervisor has resumed everything because the daemon was silent.
	lapses atomic.Int64
	// heard is the time of the supervisor's last answer, in nanoseconds since begin.
	begin time.Time
	heard atomic.Int64
	// beating: a beat is being sent.
	beating atomic.Bool
}

// start starts this program as a supervisor, in a process group of its own: a terminal kills the
// daemon's group.
func start() (*os.File, *exec.Cmd, error) {
	return child.Start(Argument, &unix.SysProcAttr{Setpgid: true})
}

// newGuard returns the daemon's side of a supervisor. lapsed is called after each lapse was counted.
func newGuard(daemon *os.File, cmd *exec.Cmd, lapsed func(), log *zap.Logger) *guard {
	g := &guard{begin: time.Now()}
	g.Process = child.Started[order](daemon, cmd, func(a answer) {
		if a.Lapsed {
			g.lapses.Add(1)
			lapsed()
		}
		g.heard.Store(int64(time.Since(g.begin)))
	}, log)
	return g
}

// ask sends an order and waits for the answer. A supervisor that does not answer is ended, because it
// would not resume anything; the next action starts another one.
func (g *guard) ask(o order) error {
	const parts = 4 // a pause of both programs takes one, however long it is
	n := 0
	a, err := g.Call(o, func() time.Duration {
		if n++; n > parts {
			return 0
		}
		return answerTime / parts
	})
	switch {
	case err != nil:
		g.Shutdown(unix.SHUT_RDWR)
		<-g.Closed
	case a.Err != "":
		err = errors.New(a.Err)
	default:
		return nil
	}
	return fmt.Errorf("call the supervisor: %w", err)
}

// beat shows that the daemon works. It blocks while the supervisor does not read.
func (g *guard) beat() {
	if g.beating.Swap(true) {
		return
	}
	if g.Tell(order{}) != nil {
		g.Shutdown(unix.SHUT_RDWR) // see ask
	}
	g.beating.Store(false)
}

// arm sends the supervisor the list of channels of a process to enable; of none for a process that it
// is to forget.
func (g *guard) arm(target gpreempt.ProcessKey, channels []nvrm.Channel) error {
	if len(channels) > maxChannels {
		return fmt.Errorf("process %d has too many channels for the supervisor: %d", target.PID, len(channels))
	}
	return g.ask(order{target, channels})
}

// fresh reports whether the supervisor has answered so recently that it cannot have resumed anything
// since.
func (g *guard) fresh() bool { return time.Since(g.begin)-time.Duration(g.heard.Load()) < Silence/2 }

// close makes the supervisor resume everything and end, and waits a second for that.
func (g *guard) close() {
	g.Shutdown(unix.SHUT_WR)
	select {
	case <-g.Closed:
	case <-time.After(time.Second):
		g.Shutdown(unix.SHUT_RD)
		<-g.Closed
	}
}
