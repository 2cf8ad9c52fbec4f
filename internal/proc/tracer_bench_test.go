package proc

import (
	"testing"

	"golang.org/x/sys/unix"
)

func BenchmarkDo(b *testing.B) {
	x := startTarget(b)
	thread := x.attach()
	defer detach(b, thread)
	nothing := func() error { return nil }
	for b.Loop() {
		if err := thread.Do(b.Context(), nothing); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkSignal is a signal to a program that answers over a pipe: the difference
// between the two is what the trace costs.
func BenchmarkSignal(b *testing.B) {
	for _, mode := range []string{"alone", "traced"} {
		b.Run(mode, func(b *testing.B) {
			x := startTarget(b)
			x.ask("catch %d", unix.SIGUSR1)
			if mode == "traced" {
				defer detach(b, x.attach())
			}
			for b.Loop() {
				x.signal(unix.SIGUSR1)
				x.out.next(b)
			}
		})
	}
}

func BenchmarkAttachAndDetach(b *testing.B) {
	x := startTarget(b)
	for b.Loop() {
		detach(b, x.attach())
	}
}
