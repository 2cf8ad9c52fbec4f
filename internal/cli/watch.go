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

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/term"
)

// reader asks the daemon for what a command shows, and returns the function that prints it for
// people.
type reader func(ctx context.Context, cmd *cobra.Command, admin term.AdminClient) (proto.Message, func(*term.Printer), error)

// source is what makes a table that is watched be read again before its interval has passed.
type source int

const (
	onInterval source = iota // none
	onEvents
	onQueues
)

// defaultWatch is the interval of --watch.
const defaultWatch = 2 * time.Second

// watchable makes cmd show what read returns, once, or with --watch again and again.
func watchable(a *term.App, cmd *cobra.Command, on source, read reader) *cobra.Command {
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
			return watch(ctx, a, cmd, admin, every, on, read)
		})
	}
	cmd.Flags().DurationVarP(&every, "watch", "w", defaultWatch, "show it again when it changes, and each `INTERVAL`, such as --watch=5s")
	cmd.Flags().Lookup("watch").NoOptDefVal = defaultWatch.String()
	return cmd
}

// watch shows what read returns until the user ends it: on a terminal in place, otherwise each
// time that it has changed.
func watch(ctx context.Context, a *term.App, cmd *cobra.Command, admin term.AdminClient, every time.Duration, on source, read reader) error {
	ctx, cancel := context.WithCancel(ctx)
	var background sync.WaitGroup
	defer background.Wait()
	defer cancel()
	wake := make(chan struct{}, 1)
	changed := func() {
		select {
		case wake <- struct{}{}:
		default:
		}
	}
	switch on {
	case onEvents:
		background.Go(func() {
			follow(ctx, a, admin, every, func(reading) { changed() }, func(*gpreemptv1.Event) { changed() }, func(error) { changed() })
		})
	case onQueues:
		background.Go(func() { followQueues(ctx, a, admin, every, changed) })
	case onInterval:
	}
	bounded := func(ctx context.Context) (proto.Message, func(*term.Printer), error) {
		ctx, cancel := context.WithTimeout(ctx, a.Timeout)
		defer cancel()
		return read(ctx, cmd, admin)
	}
	if a.Terminal && !a.ForPrograms() {
		return watchScreen(ctx, a, cmd.CommandPath(), every, wake, bounded)
	}
	var before proto.Message
	return repeat(ctx, a, every, wake, func() error {
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

// followQueues calls changed for each change of queues, until ctx ends.
func followQueues(ctx context.Context, a *term.App, admin term.AdminClient, every time.Duration, changed func()) {
	for {
		list, err := admin.ListQueues(ctx, &gpreemptv1.ListQueuesRequest{})
		if err == nil {
			changes, failed := admin.WatchQueues(ctx, &gpreemptv1.WatchQueuesRequest{AfterRevision: list.GetRevision()})
			if err = failed; err == nil {
				err = term.Each(changes, func(*gpreemptv1.WatchQueuesResponse) error {
					changed()
					return ctx.Err()
				})
			}
		}
		if err != nil {
			changed() // reading fails for the same reason, and reports it
		}
		if a.Sleep(ctx, every) != nil {
			return
		}
	}
}

// leastPause is the minimum time between two readings. Changes that arrive sooner are read together.
const leastPause = 200 * time.Millisecond

// repeat calls read now and then each time that the interval has passed or wake received, until
// ctx ends or read fails.
func repeat(ctx context.Context, a *term.App, every time.Duration, wake <-chan struct{}, read func() error) error {
	for {
		if err := read(); err != nil {
			return err
		}
		rest := every
		if wake != nil {
			if err := a.Sleep(ctx, leastPause); err != nil {
				return err
			}
			rest -= leastPause
		}
		if err := sleepOrWake(ctx, a, rest, wake); err != nil {
			return err
		}
	}
}

// sleepOrWake waits for d or until wake receives. When ctx ends first, it returns the cause.
func sleepOrWake(ctx context.Context, a *term.App, d time.Duration, wake <-chan struct{}) error {
	limited, cancel := context.WithCancel(ctx)
	var waker sync.WaitGroup
	defer waker.Wait()
	defer cancel()
	waker.Go(func() {
		select {
		case <-wake:
			cancel()
		case <-limited.Done():
		}
	})
	err := a.Sleep(limited, d)
	if ctx.Err() == nil {
		return nil
	}
	return err
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
func watchScreen(ctx context.Context, a *term.App, command string, every time.Duration, wake <-chan struct{}, read func(context.Context) (proto.Message, func(*term.Printer), error)) error {
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
		last = watchOn(ctx, a, screen, command, every, wake, read)
	}()
	_, err = fmt.Fprintln(a.Out, strings.Join(last, "\n"))
	return err
}

// watchOn is watchScreen on a screen. It returns the last lines.
func watchOn(
	ctx context.Context, a *term.App, screen tcell.Screen, command string, every time.Duration, wake <-chan struct{}, read func(context.Context) (proto.Message, func(*term.Printer), error),
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
		_ = repeat(ctx, a, every, wake, func() error {
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
