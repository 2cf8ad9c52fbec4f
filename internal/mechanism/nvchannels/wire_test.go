package nvchannels

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/nvrm"
)

func TestAPacketArrivesWithItsDescriptor(t *testing.T) {
	daemon, supervisor, err := newPair()
	must(t, err)
	defer daemon.Close()
	defer supervisor.Close()
	sent := message{Kind: kindArm, Number: 7, Target: target, Channels: []nvrm.Channel{{File: 9, Client: 1, Handle: 2, Subdevice: 3, GPU: 4, Compute: true}}}
	must(t, send(int(daemon.Fd()), sent, 0, int(daemon.Fd())))
	got, descriptors, err := receive(int(supervisor.Fd()), make([]byte, maxPacket))
	must(t, err)
	if diff := cmp.Diff(sent, got); diff != "" || len(descriptors) != 1 {
		t.Errorf("%d descriptors; (-sent +got):\n%s", len(descriptors), diff)
	}
	for _, fd := range descriptors {
		must(t, unix.Close(fd))
	}
	if err := send(int(daemon.Fd()), message{Channels: make([]nvrm.Channel, 10_000)}, 0); err == nil {
		t.Error("a packet that is too long was sent")
	}
}

func FuzzReceive(f *testing.F) {
	f.Add([]byte(`{"kind":"arm","number":1,"target":{"PID":1,"Start":2},"channels":[{"File":3}]}`))
	f.Fuzz(func(t *testing.T, packet []byte) {
		if len(packet) == 0 || len(packet) > maxPacket {
			return
		}
		daemon, supervisor, err := newPair()
		must(t, err)
		defer daemon.Close()
		defer supervisor.Close()
		must(t, unix.Send(int(daemon.Fd()), packet, 0))
		if _, descriptors, _ := receive(int(supervisor.Fd()), make([]byte, maxPacket)); len(descriptors) > 0 {
			t.Error("descriptors from nowhere")
		}
	})
}
