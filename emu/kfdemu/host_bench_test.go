package kfdemu

import (
	"testing"

	"golang.org/x/sys/unix"
)

// The calls that the driver makes with its lock held, about an idle process.
func BenchmarkTask(b *testing.B) {
	h, _ := newHost(b)
	c := startProgram(b, nil)
	tracer := startProgram(b, nil)
	tracer.ok(0, "seize %d", c.pid)
	at := c.numbers(0, "map %d hello", unix.PROT_READ|unix.PROT_WRITE)[0]
	fds := c.numbers(0, "pipe %d", unix.O_NONBLOCK)
	task := taskOf(b, h, c.pid)
	space := task.Space()
	buf := make([]byte, 64)
	f := task.File(uint32(fds[1]))
	defer f.Put()
	run := func(name string, call func()) {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				call()
			}
		})
	}
	run("Task", func() { taskOf(b, h, c.pid) })
	run("BeginEnd", func() { task.Begin(nil, nil, nil, nil); task.End() })
	run("Leader", func() { task.Leader() })
	run("MM", func() { task.MM() })
	run("Tracer", func() { task.Tracer() })
	run("Find", func() { task.Find(c.pid) })
	run("PIDInside", func() { task.PIDInside() })
	run("Capable", func() { task.Capable(0) })
	run("Comm", func() { task.Comm() })
	run("MemoryRead64", func() { task.Memory(at).Read(buf) })
	run("MemoryWrite64", func() { task.Memory(at).Write(buf) })
	run("SpaceReadAt64", func() { _ = space.ReadAt(buf, at) })
	run("SpaceWriteAt64", func() { _ = space.WriteAt(buf, at) })
	run("SpaceAlive", func() { space.Alive() })
	run("File", func() { task.File(uint32(fds[1])).Put() })
	run("WriteDot", func() { f.WriteDot(task) }) // the pipe is soon full, and dots are lost
	run("FileIDAt", func() { _, _ = FileIDAt(c.pid, fds[1]) })
	run("NewTask", func() {
		fresh, err := h.newTask(c.pid)
		if err != nil {
			b.Fatal(err)
		}
		fresh.close()
	})
}

// The cost of Sweep when no address space has ended.
func BenchmarkSweep(b *testing.B) {
	h, _ := newHost(b)
	const processes = 16
	for range processes {
		taskOf(b, h, startProgram(b, nil).pid).Space()
	}
	for b.Loop() {
		if ended := h.Sweep(); len(ended) > 0 {
			b.Fatal(ended)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/processes, "ns/process")
}
