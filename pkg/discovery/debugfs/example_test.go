package debugfs_test

import (
	"fmt"

	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
	"github.com/gpreempt/gpreempt/pkg/discovery/registers"
)

// The registers of a slot, as printed in hqds.
func ExampleParseHQDs() {
	dump, err := debugfs.ParseHQDs([]byte(`Node 2, gpu_id f7bc:
 Inst 0,  CP Pipe 0, Queue 2
    0000c914: 017ba000 00000000 00000001 00000303 40005301 00000001 00000007 00000111
    0000c934: 41b52000 0000007f 00000040 c1576080 00007f61 c1576038 00007f61 60004022
    0000c954: 00000000 14014511 00000000 00000000 00000000 00b00000 00000000 00000000
    0000c974: 00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000
    0000c994: 40004000 00000000 00000100 00000000 00000000 00000000 00000000 00000000
    0000c9b4: 40000000 007f8000 00000000 a4000000 00007f41 00000000 00002000 00002000
    0000c9d4: 00002000 00ba6000 00000000 00000000 00000000 00000001 00000100 00000000
`))
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, slot := range dump.Slots() {
		c := registers.Of(slot.Compute)
		priority, exact := c.Priority(false)
		packets, _ := c.BacklogPackets()
		fmt.Printf("GPU %s XCC %d pipe %d queue %d: %s, VMID %d\n", slot.GPU, slot.XCC, slot.Pipe, slot.Queue, slot.State, c.VMID)
		fmt.Printf("ring %#x of %d bytes, priority %d (exact: %t), quantum %s, %d packets behind\n",
			c.RingBase, c.RingBytes, priority, exact, c.Quantum, packets)
	}
	// Output:
	// GPU 63420 XCC 0 pipe 0 queue 2: live, VMID 3
	// ring 0x7f41b5200000 of 1048576 bytes, priority 7 (exact: true), quantum 1 ms, 12 packets behind
}
