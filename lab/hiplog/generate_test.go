package hiplog_test

import (
	"bytes"
	"fmt"
	"io"
)

// generator is a reader of a synthetic log of ROCm 6.2 and newer, generated line by line:
// the lines of one thread for each launch.
type generator struct {
	left    int64 // bytes remaining, which may end within a line
	launch  uint64
	buf     bytes.Buffer
	queues  uint64
	kernels uint64
}

func newGenerator(bytes int64) *generator { return &generator{left: bytes, queues: 4, kernels: 40} }

func (g *generator) Read(p []byte) (int, error) {
	if g.left == 0 {
		return 0, io.EOF
	}
	for int64(g.buf.Len()) < min(int64(len(p)), g.left) {
		g.write()
	}
	p = p[:min(int64(len(p)), g.left)]
	n, err := g.buf.Read(p)
	g.left -= int64(n)
	return n, err
}

// write adds the lines of one launch.
func (g *generator) write() {
	b, i := &g.buf, g.launch
	q, k := i%g.queues, i*7%g.kernels
	us := 20000000000 + 100*i
	prefix := func(level int, source string, line int) {
		fmt.Fprintf(b, ":%d:%-25s:%-4d: %010d us: [pid:459769 tid: 0x7f8edc1c%04x] ", level, source, line, us, q)
		us += 3
	}
	prefix(3, "hip_module.cpp", 812)
	fmt.Fprintf(b, "\x1b[32m hipLaunchKernel ( 0x200d68, {32,1,1}, {32,1,1}, 0x7fffea224e60, 0, stream:0x19520%02x ) \x1b[0m\n", q)
	prefix(4, "command.cpp", 357)
	fmt.Fprintf(b, "Command (KernelExecution) enqueued: 0x2095b30 to queue: 0x19520%02x\n", q)
	prefix(3, "rocvirtual.cpp", 790)
	b.WriteString("Arg0:   = ptr:0x7f8aba600000 obj:[0x7f8aba600000-0x7f8aba601000]\n")
	prefix(3, "rocvirtual.cpp", 3351)
	fmt.Fprintf(b, "ShaderName : void at::native::elementwise_kernel<%d, 4, at::native::add<float>(at::TensorIteratorBase&)>(int)\n", k)
	prefix(3, "rocvirtual.cpp", 3549)
	b.WriteString("KernargSegmentByteSize = 272 KernargSegmentAlignment = 128\n")
	prefix(4, "rocvirtual.cpp", 1083)
	fmt.Fprintf(b, "SWq=0x7f8edc1a8%03x, HWq=0x7f8acd2%05x, id=%d, Dispatch Header = 0xb02 (type=2, barrier=1, acquire=1, release=1), setup=3, "+
		"grid=[1024, 1, 1], workgroup=[32, 1, 1], private_seg_size=0, group_seg_size=0, kernel_obj=0x7f8ed%07x, "+
		"kernarg_address=0x7f8acce00000, completion_signal=0x0, correlation_id=0, rptr=%d, wptr=%d\n",
		q, q<<12, q+1, k<<8, uint32(i/g.queues), uint32(i/g.queues+i%7))
	prefix(3, "hip_module.cpp", 813)
	b.WriteString("hipLaunchKernel: Returned hipSuccess : : duration: 500 us\n")
	g.launch++
}
