package cli

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/gdamore/tcell/v2"
	"github.com/spf13/cobra"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/term"
)

func topCommand(a *term.App) *cobra.Command {
	var (
		every time.Duration
		once  string
	)
	cmd := &cobra.Command{
		Use:         "top",
		Annotations: map[string]string{term.NoData: term.NoData},
		Short:       "Watch GPUs, targets, leases and preemptions",
		Args:        term.Operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if every < 100*time.Millisecond {
				return term.Usage(cmd, "invalid --every %v; use at least 100ms", every)
			}
			if once != "" {
				var width, height int
				if n, err := fmt.Sscanf(once, "%dx%d", &width, &height); n != 2 || err != nil || width < 20 || height < 10 || width > 1000 || height > 1000 {
					return term.Usage(cmd, "invalid --once %q; use COLUMNSxLINES, such as 80x24", once)
				}
				return a.Stream(cmd.Context(), func(ctx context.Context, admin term.AdminClient) error {
					return topOnce(ctx, a, admin, every, width, height)
				})
			}
			if !a.Terminal {
				return &term.Failure{Code: term.ExitUsage, Message: "gpctl top needs a terminal", Next: "gpctl top --once 120x40, or gpctl target list"}
			}
			return a.Stream(cmd.Context(), func(ctx context.Context, admin term.AdminClient) error { return topLive(ctx, a, admin, every) })
		},
	}
	cmd.Flags().DurationVar(&every, "every", 500*time.Millisecond, "time between readings")
	cmd.Flags().StringVar(&once, "once", "", "print one screen of COLUMNSxLINES after two readings, and exit")
	return cmd
}

// topOnce prints one screen, with the shares between two readings and the events that the daemon has kept.
func topOnce(ctx context.Context, a *term.App, admin term.AdminClient, every time.Duration, width, height int) error {
	s := newTopScreen(a)
	first, err := readAll(ctx, admin)
	if err != nil {
		return err
	}
	s.read(first)
	if err := a.Sleep(ctx, every); err != nil {
		return err
	}
	second, err := readAll(ctx, admin)
	if err != nil {
		return err
	}
	s.read(second)
	kept := watchAfter(0, true)
	kept.NoFollow = true
	stream, err := admin.WatchEvents(ctx, kept)
	if err != nil {
		return err
	}
	if err := term.Each(stream, func(m *gpreemptv1.WatchEventsResponse) error {
		s.event(m.GetEvent())
		return nil
	}); err != nil {
		return err
	}
	for _, line := range s.lines(width, height) {
		if _, err := fmt.Fprintln(a.Out, strings.TrimRight(line, " ")); err != nil {
			return err
		}
	}
	return nil
}

// topLive shows the screen in the terminal until the user quits or ctx ends.
func topLive(ctx context.Context, a *term.App, admin term.AdminClient, every time.Duration) error {
	screen, err := tcell.NewScreen()
	if err == nil {
		err = screen.Init()
	}
	if err != nil {
		return &term.Failure{Code: term.ExitFailure, Message: fmt.Sprintf("cannot use this terminal: %v", err), Next: "set TERM, or redirect the output"}
	}
	defer screen.Fini() // a terminal that stays raw is of no use
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	topOn(ctx, a, admin, screen, every)
	return nil
}

// topOn is topLive on a screen. Readings and events come from goroutines of their own, so that a
// slow daemon delays no key.
func topOn(ctx context.Context, a *term.App, admin term.AdminClient, screen tcell.Screen, every time.Duration) {
	ctx, cancel := context.WithCancel(ctx)
	var background sync.WaitGroup
	defer background.Wait()
	defer cancel()
	changes := make(chan func(*topScreen))
	change := func(how func(*topScreen)) {
		select {
		case changes <- how:
		case <-ctx.Done():
		}
	}
	keys := make(chan tcell.Event)
	stop := make(chan struct{})
	defer close(stop)
	background.Go(func() { screen.ChannelEvents(keys, stop) })
	background.Go(func() { readEvery(ctx, a, admin, every, change) })
	background.Go(func() { followEvents(ctx, a, admin, every, change) })

	s := newTopScreen(a)
	paint(screen, s)
	for {
		select {
		case <-ctx.Done():
			return
		case how := <-changes:
			how(s)
			if s.stale {
				s.stale = false
				paint(screen, s)
			}
		case e := <-keys:
			switch e := e.(type) {
			case nil:
				return
			case *tcell.EventResize:
				screen.Sync()
			case *tcell.EventKey:
				explain, quit := s.key(keyName(e))
				if quit {
					return
				}
				if explain != "" {
					background.Go(func() { explainOn(ctx, a, admin, explain, change) })
				}
			}
			paint(screen, s)
		}
	}
}

// readEvery reads the daemon, until ctx ends.
func readEvery(ctx context.Context, a *term.App, admin term.AdminClient, every time.Duration, change func(func(*topScreen))) {
	for {
		limited, cancel := context.WithTimeout(ctx, a.Timeout)
		r, err := readAll(limited, admin)
		cancel()
		change(func(s *topScreen) {
			switch {
			case err != nil:
				s.lose(a.FromDaemon(ctx, err))
			case !s.paused:
				s.read(r)
			}
			s.stale = true
		})
		if a.Sleep(ctx, every) != nil {
			return
		}
	}
}

// followEvents follows the events from now on, until ctx ends. The screen is painted with the next
// reading: a burst of events costs nothing more.
func followEvents(ctx context.Context, a *term.App, admin term.AdminClient, every time.Duration, change func(func(*topScreen))) {
	follow(ctx, a, admin, true, every, func(r reading) {
		change(func(s *topScreen) {
			if !s.paused {
				s.read(r)
			}
		})
	}, func(e *gpreemptv1.Event) {
		change(func(s *topScreen) {
			if !s.paused {
				s.event(e)
			}
		})
	}, func(err error) {
		change(func(s *topScreen) { s.lose(err) })
	})
}

// explainOn shows the explanation of a target, unless the user has left it.
func explainOn(ctx context.Context, a *term.App, admin term.AdminClient, target string, change func(func(*topScreen))) {
	limited, cancel := context.WithTimeout(ctx, a.Timeout)
	defer cancel()
	e, err := admin.ExplainTarget(limited, &gpreemptv1.ExplainTargetRequest{TargetId: target})
	change(func(s *topScreen) {
		if s.view == viewExplain && s.explained == target {
			s.explanation, s.failed, s.stale = e, a.FromDaemon(ctx, err), true
		}
	})
}

// keyName returns the name of a key as topScreen.key has it, "" for others.
func keyName(e *tcell.EventKey) string {
	if e.Key() == tcell.KeyRune {
		return string(e.Rune())
	}
	return keyNames[e.Key()]
}

var keyNames = map[tcell.Key]string{
	tcell.KeyUp: "up", tcell.KeyDown: "down", tcell.KeyEnter: "enter", tcell.KeyEscape: "esc", tcell.KeyBackspace: "backspace",
	tcell.KeyBackspace2: "backspace", tcell.KeyCtrlC: "ctrl-c", tcell.KeyPgUp: "page up", tcell.KeyPgDn: "page down",
}

// paint draws the screen. tcell sends the cells whose content changes, and a cell that is cleared
// first changes twice; so the rest of the screen is filled with spaces instead.
func paint(screen tcell.Screen, s *topScreen) {
	width, height := screen.Size()
	lines := s.lines(width, height)
	for y := range height {
		line := ""
		if y < len(lines) {
			line = lines[y]
		}
		x, look := 0, tcell.StyleDefault
		for line != "" {
			if rest, ok := strings.CutPrefix(line, "\x1b["); ok {
				code, after, _ := strings.Cut(rest, "m")
				look, line = looks[term.Style(code)], after
				continue
			}
			r, n := utf8.DecodeRuneInString(line)
			screen.SetContent(x, y, r, nil, look)
			x, line = x+1, line[n:]
		}
		for ; x < width; x++ {
			screen.SetContent(x, y, ' ', nil, tcell.StyleDefault)
		}
	}
	screen.Show()
}

// looks has the style of each sequence of printer; "0" is the default.
var looks = map[term.Style]tcell.Style{
	term.StyleBold:  tcell.StyleDefault.Bold(true),
	term.StyleGood:  tcell.StyleDefault.Foreground(tcell.ColorGreen),
	term.StyleNote:  tcell.StyleDefault.Foreground(tcell.ColorOlive),
	term.StyleBad:   tcell.StyleDefault.Foreground(tcell.ColorMaroon),
	term.StyleState: tcell.StyleDefault.Reverse(true),
}
