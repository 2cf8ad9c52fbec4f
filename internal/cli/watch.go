package cli

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/gdamore/tcell/v2"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/gpreempt/gpreempt/internal/term"
)

// reader asks the daemon for what a command shows, and returns the function that prints it for
// people.
type reader func(ctx context.Context, cmd *cobra.Command, admin term.AdminClient) (proto.Message, func(*term.Printer), error)

// defaultWatch is the interval of --watch.
const defaultWatch = 2 * time.Second

// watchable makes cmd show what read returns, once, or with --watch again and again.
func watchable(a *term.App, cmd *cobra.Command, read reader) *cobra.Command {
	var every time.Duration
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if !cmd.Flags().Changed("watch") {
			return a.Call(cmd, func(ctx context.Context, admin term.AdminClient) error {
				data, people, err := read(ctx, cmd, admin)
				if err != nil {
					return err
				}
				return a.Show(data, people)
			})
		}
		if every < leastWatch {
			return term.Usage(cmd, "--watch must be at least %s; write it as --watch=5s", term.Duration(leastWatch))
		}
		return a.Stream(cmd.Context(), func(ctx context.Context, admin term.AdminClient) error {
			return watch(ctx, a, cmd, admin, every, read)
		})
	}
	watchFlag(cmd, &every)
	return cmd
}

// watchFlag adds --watch.
func watchFlag(cmd *cobra.Command, every *time.Duration) {
	cmd.Flags().DurationVarP(every, "watch", "w", defaultWatch, "show it again each `INTERVAL`, such as --watch=5s")
	cmd.Flags().Lookup("watch").NoOptDefVal = defaultWatch.String()
}

// watch shows what read returns until the user ends it: on a terminal in place, otherwise each
// time that it has changed.
func watch(ctx context.Context, a *term.App, cmd *cobra.Command, admin term.AdminClient, every time.Duration, read reader) error {
	bounded := func(ctx context.Context) (proto.Message, func(*term.Printer), error) {
		ctx, cancel := context.WithTimeout(ctx, a.Timeout)
		defer cancel()
		return read(ctx, cmd, admin)
	}
	if a.Terminal && !a.ForPrograms() {
		return watchScreen(ctx, a, cmd.CommandPath(), every, bounded)
	}
	var before proto.Message
	return repeat(ctx, a, every, func() error {
		data, people, err := bounded(ctx)
		if err != nil {
			return err
		}
		first, now := before == nil, timeless(data)
		switch {
		case first:
			a.NoteSimulation()
		case proto.Equal(before, now):
			return nil
		case !a.ForPrograms():
			a.Printer().Linef("--- %s", a.Now().Format(time.TimeOnly))
		}
		before = now
		return a.ShowLine(data, people)
	})
}

// repeat calls read now and then each time that the interval has passed, until ctx ends or read
// fails.
func repeat(ctx context.Context, a *term.App, every time.Duration, read func() error) error {
	for {
		if err := read(); err != nil {
			return err
		}
		if err := a.Sleep(ctx, every); err != nil {
			return err
		}
	}
}

// passing are the fields that change although nothing happens: times and shares of time.
var passing = map[protoreflect.Name]bool{
	"in_state": true, "runs_within": true, "expires_in": true, "breaker_closes_in": true, "clock": true, "read_at": true, "took": true,
	"readings": true, "goroutine_count": true, "suspended_total": true, "measured_over": true, "running_ratio": true,
}

// timeless returns m without its passing fields: two that are equal have no change between them.
func timeless(m proto.Message) proto.Message {
	m = proto.Clone(m)
	removePassing(m.ProtoReflect())
	return m
}

func removePassing(m protoreflect.Message) {
	m.Range(func(field protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case passing[field.Name()]:
			m.Clear(field)
		case field.Message() == nil || field.IsMap():
		case field.IsList():
			for i := range v.List().Len() {
				removePassing(v.List().Get(i).Message())
			}
		default:
			removePassing(v.Message())
		}
		return true
	})
}

// watched is the content of a screen that shows a table again and again.
type watched struct {
	title string
	lines []string
	lost  string // why lines are not newer
	x, y  int    // the first column and line that are visible
}

// shown returns the lines for a screen of this height.
func (w *watched) shown(height int) []string {
	head := []string{w.title}
	if w.lost != "" {
		head = append(head, "\x1b["+string(term.StyleBad)+"m"+term.Printable(w.lost)+"\x1b[0m")
	}
	w.y = max(0, min(w.y, len(w.lines)-(height-len(head))))
	return append(head, w.lines[w.y:]...)
}

// key moves the table, or reports that the user quits.
func (w *watched) key(name string) (quit bool) {
	switch name {
	case "q", "esc", "ctrl-c":
		return true
	case "down":
		w.y++
	case "up":
		w.y--
	case "right":
		w.x += 8
	case "left":
		w.x = max(0, w.x-8)
	}
	return false
}

// watchScreen is watch on the terminal. What was shown last stays there.
func watchScreen(ctx context.Context, a *term.App, command string, every time.Duration, read func(context.Context) (proto.Message, func(*term.Printer), error)) error {
	if _, _, err := read(ctx); err != nil {
		return err
	}
	screen, err := newScreen()
	if err != nil {
		return err
	}
	var last []string
	func() {
		defer screen.Fini()
		last = watchOn(ctx, a, screen, command, every, read)
	}()
	_, err = fmt.Fprintln(a.Out, strings.Join(last, "\n"))
	return err
}

// watchOn is watchScreen on a screen. It returns the last lines.
func watchOn(
	ctx context.Context, a *term.App, screen tcell.Screen, command string, every time.Duration, read func(context.Context) (proto.Message, func(*term.Printer), error),
) []string {
	ctx, cancel := context.WithCancel(ctx)
	var background sync.WaitGroup
	defer background.Wait()
	defer cancel()
	keys, stop := make(chan tcell.Event), make(chan struct{})
	defer close(stop)
	background.Go(func() { screen.ChannelEvents(keys, stop) })
	frames := make(chan watched)
	background.Go(func() {
		// It ends with ctx only: what fails is shown.
		_ = repeat(ctx, a, every, func() error {
			var frame watched
			if _, people, err := read(ctx); err != nil {
				frame.lost = a.FromDaemon(ctx, err).Error()
			} else {
				var out bytes.Buffer
				p := a.Printer()
				p.W = &out
				people(p)
				frame.lines = strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
			}
			frame.title = fmt.Sprintf("%s  %s  every %s; q quits, arrows move", command, a.Now().Format(time.TimeOnly), term.Duration(every))
			if note := a.Simulation(); note != "" {
				frame.title += "  " + note
			}
			select {
			case frames <- frame:
			case <-ctx.Done():
			}
			return ctx.Err()
		})
	})
	var now watched
	for {
		select {
		case <-ctx.Done():
			return now.lines
		case frame := <-frames:
			if now.title, now.lost = frame.title, frame.lost; frame.lost == "" {
				now.lines = frame.lines
			}
		case e := <-keys:
			switch e := e.(type) {
			case nil:
				return now.lines
			case *tcell.EventResize:
				screen.Sync()
			case *tcell.EventKey:
				if now.key(keyName(e)) {
					return now.lines
				}
			}
		}
		_, height := screen.Size()
		paintLines(screen, now.x, now.shown(height))
	}
}
