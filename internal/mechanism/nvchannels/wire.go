package nvchannels

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/nvrm"
)

// Kinds of messages.
const (
	// kindArm, with a pidfd: enable the channels when the daemon ends or is silent. It replaces an
	// earlier one for the process.
	kindArm = "arm"
	// kindDisarm: forget the process.
	kindDisarm = "disarm"
	// kindBeat: the daemon works.
	kindBeat = "beat"
	// kindDone answers each message of the daemon.
	kindDone = "done"
	// kindLapsed, from the supervisor: the daemon was silent, and everything was resumed.
	kindLapsed = "lapsed"
)

// message is one packet.
type message struct {
	Kind     string              `json:"kind"`
	Number   uint64              `json:"number,omitempty"`
	Target   gpreempt.ProcessKey `json:"target"`
	Channels []nvrm.Channel      `json:"channels,omitempty"`
}

const maxPacket = 128 << 10

// newPair returns the two ends of a socket that preserves packet boundaries.
func newPair() (daemon, supervisor *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	return os.NewFile(uintptr(fds[0]), "supervisor"), os.NewFile(uintptr(fds[1]), "daemon"), nil
}

// send sends a packet. It waits for room in the socket unless flags contain MSG_DONTWAIT.
func send(fd int, m message, flags int, descriptors ...int) error {
	text, err := json.Marshal(m)
	if err != nil {
		return err
	}
	if len(text) > maxPacket {
		return fmt.Errorf("process %d has too many channels for the supervisor: %d", m.Target.PID, len(m.Channels))
	}
	var rights []byte
	if len(descriptors) > 0 {
		rights = unix.UnixRights(descriptors...)
	}
	for {
		err := unix.Sendmsg(fd, text, rights, nil, flags|unix.MSG_NOSIGNAL)
		if !errors.Is(err, unix.EINTR) {
			return os.NewSyscallError("sendmsg", err)
		}
	}
}

// receive receives a packet. It returns io.EOF when the other end has closed.
func receive(fd int, buf []byte) (m message, descriptors []int, err error) {
	room := make([]byte, unix.CmsgSpace(4))
	var n, controlled int
	for {
		n, controlled, _, _, err = unix.Recvmsg(fd, buf, room, unix.MSG_CMSG_CLOEXEC)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		return m, nil, os.NewSyscallError("recvmsg", err)
	}
	if n == 0 {
		return m, nil, io.EOF
	}
	messages, err := unix.ParseSocketControlMessage(room[:controlled])
	if err != nil {
		return m, nil, err
	}
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			return m, descriptors, err
		}
		descriptors = append(descriptors, fds...)
	}
	return m, descriptors, json.Unmarshal(buf[:n], &m)
}
