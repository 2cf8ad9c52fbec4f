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
)

// reader asks the daemon for what a command shows, and returns the function that prints it for
// people.
type reader func(ctx context.Context, cmd *cobra.Command, admin adminClient) (proto.Message, func(*printer), error)

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
func (a *app) watchable(cmd *cobra.Command, on source, read reader) *cobra.Command {
	var every time.Duration
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if !cmd.Flags().Changed("watch") {
			return a.call(cmd, func(ctx context.Context, admin adminClient) error {
				data, people, err := read(ctx, cmd, admin)
				if err != nil {
					return err
				}
				return a.show(data, people)
			})
		}
		if every < leastWatch {
			return usage(cmd, "--watch must be at least %s; write it as --watch=5s", duration(leastWatch))
		}
		return a.stream(cmd.Context(), func(ctx context.Context, admin adminClient) error {
			return a.watch(ctx, cmd, admin, every, on, read)
		})
	}
	cmd.Flags().DurationVarP(&every, "watch", "w", defaultWatch, "show it again when it changes, and each `INTERVAL`, such as --watch=5s")
	cmd.Flags().Lookup("watch").NoOptDefVal = defaultWatch.String()
	return cmd
}

// watch shows what read returns until the user ends it: on a terminal in place, otherwise each
// time that it has changed.
func (a *app) watch(ctx context.Context, cmd *cobra.Command, admin adminClient, every time.Duration, on source, read reader) error {
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
			a.follow(ctx, admin, every, func(reading) { changed() }, func(*gpreemptv1.Event) { changed() }, func(error) { changed() })
		})
	case onQueues:
		background.Go(func() { a.followQueues(ctx, admin, every, changed) })
	case onInterval:
	}
	bounded := func(ctx context.Context) (proto.Message, func(*printer), error) {
		ctx, cancel := context.WithTimeout(ctx, a.timeout)
		defer cancel()
		return read(ctx, cmd, admin)
	}
	if a.Terminal && !a.forPrograms() {
		return a.watchScreen(ctx, cmd.CommandPath(), every, wake, bounded)
	}
	var before proto.Message
	return a.repeat(ctx, every, wake, func() error {
		data, people, err := bounded(ctx)
		if err != nil {
			return err
		}
		first, now := before == nil, timeless(data)
		switch {
		case first:
			a.noteSimulation()
		case proto.Equal(before, now):
			return nil
		case !a.forPrograms():
			a.printer().linef("--- %s", a.Now().Format(time.TimeOnly))
		}
		before = now
		return a.showLine(data, people)
	})
}

// followQueues calls changed for each change of queues, until ctx ends.
func (a *app) followQueues(ctx context.Context, admin adminClient, every time.Duration, changed func()) {
	for {
		list, err := admin.ListQueues(ctx, &gpreemptv1.ListQueuesRequest{})
		if err == nil {
			changes, failed := admin.WatchQueues(ctx, &gpreemptv1.WatchQueuesRequest{AfterRevision: list.GetRevision()})
			if err = failed; err == nil {
				err = each(changes, func(*gpreemptv1.WatchQueuesResponse) error {
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
func (a *app) repeat(ctx context.Context, every time.Duration, wake <-chan struct{}, read func() error) error {
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
		if err := a.sleepOrWake(ctx, rest, wake); err != nil {
			return err
		}
	}
}

// sleepOrWake waits for d or until wake receives. When ctx ends first, it returns the cause.
func (a *app) sleepOrWake(ctx context.Context, d time.Duration, wake <-chan struct{}) error {
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
		head = append(head, "\x1b["+string(styleBad)+"m"+printable(w.lost)+"\x1b[0m")
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
func (a *app) watchScreen(ctx context.Context, command string, every time.Duration, wake <-chan struct{}, read func(context.Context) (proto.Message, func(*printer), error)) error {
	if _, _, err := read(ctx); err != nil {
		return err
	}
	screen, err := a.newScreen()
	if err != nil {
		return err
	}
	var last []string
	func() {
		defer screen.Fini()
		last = a.watchOn(ctx, screen, command, every, wake, read)
	}()
	_, err = fmt.Fprintln(a.Out, strings.Join(last, "\n"))
	return err
}

// watchOn is watchScreen on a screen. It returns the last lines.
func (a *app) watchOn(
	ctx context.Context, screen tcell.Screen, command string, every time.Duration, wake <-chan struct{}, read func(context.Context) (proto.Message, func(*printer), error),
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
		_ = a.repeat(ctx, every, wake, func() error {
			var frame watched
			if _, people, err := read(ctx); err != nil {
				frame.lost = a.fromDaemon(ctx, err).Error()
			} else {
				var out bytes.Buffer
				p := a.printer()
				p.w = &out
				people(p)
				frame.lines = strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
			}
			frame.title = fmt.Sprintf("%s  %s  every %s; q quits, arrows move", command, a.Now().Format(time.TimeOnly), duration(every))
			if note := a.simulation(); note != "" {
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
