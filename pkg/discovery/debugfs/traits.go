package debugfs

import (
	"fmt"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// traits are the properties of a queue that its snapshot, its image and its slot have in common:
// addresses in the owner, and the size of the ring. 0 is unknown.
type traits struct{ ring, read, write, save, ringBytes uint64 }

func traitsOf(q *gpreempt.QueueInfo, ringBytes uint64) traits {
	return traits{q.RingBase, q.ReadPointer, q.WritePointer, q.SaveArea, ringBytes}
}

func traitsOfCompute(c *Compute) traits {
	return traits{c.RingBase, c.ReadPointer, c.WritePointer, c.SaveArea, c.RingBytes}
}

func traitsOfSDMA(s *SDMA) traits {
	return traits{s.RingBase, s.ReadPointer, s.WritePointer, 0, s.RingBytes}
}

// contradiction describes the first property that both know and that differs, or returns "".
func (t traits) contradiction(is traits) string {
	for _, x := range [...]struct {
		name      string
		want, got uint64
	}{
		{"ring", t.ring, is.ring}, {"read pointer", t.read, is.read}, {"write pointer", t.write, is.write}, {"save area", t.save, is.save},
	} {
		if x.want != 0 && x.got != 0 && x.want != x.got {
			return fmt.Sprintf("%s %#x instead of %#x", x.name, x.got, x.want)
		}
	}
	if t.ringBytes != 0 && is.ringBytes != 0 && t.ringBytes != is.ringBytes {
		return fmt.Sprintf("a ring of %d bytes instead of %d", is.ringBytes, t.ringBytes)
	}
	return ""
}
