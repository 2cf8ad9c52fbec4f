package workload

import (
	"bytes"
	"context"
	"debug/elf"
	"embed"
	"encoding/binary"
	"fmt"
	"io"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Code objects that `make kernels` builds from kernels.c, and their sums.
//
//go:embed kernels/*.co
var objects embed.FS

// Compute units run workgroups of this many lanes, and words of a result follow each other.
const (
	lanes    = 256
	values   = 96
	ldsWords = 64
	mfmaRows = 32
	// line is the size of a cache line, in bytes.
	line = 64
)

// Kernels are the names for the command verify, with the stage that runs each, what it keeps its
// values in, and how many rounds should take about a second. Those that need more of a queue than
// packets come Late.
var Kernels = []struct {
	Name, Stage, Storage string
	Rounds               int
	Late                 bool
}{
	{"vgpr", "waves-vgpr", "vector registers", 1 << 20, false},
	{"agpr", "waves-agpr", "accumulation registers", 1 << 20, false},
	{"mfma", "waves-mfma", "sums of matrix instructions", 1 << 22, false},
	{"lds", "waves-lds", "LDS, across barriers", 1 << 16, false},
	{"scratch", "scratch", "scratch memory", 1 << 12, true},
	{"grid", "cooperative", "memory, across barriers of all workgroups, which are resident together,", 1 << 14, true},
}

// HasCode reports whether there is a code object for a gfx_target_version.
func HasCode(gfx uint32) bool {
	_, err := object(gfx)
	return err == nil
}

func object(gfx uint32) ([]byte, error) {
	return objects.ReadFile("kernels/" + gpreempt.GFXName(gfx) + ".co")
}

// code is a code object in memory that the GPU executes.
type code struct {
	memory
	symbols map[string]uint64 // offsets
}

// load puts the segments of the code object into memory of the GPU, once. The object needs no
// relocation.
func (d *device) load() (code, error) {
	if d.code.symbols != nil {
		return d.code, nil
	}
	gfx := uint32(d.node["gfx_target_version"])
	text, err := object(gfx)
	if err != nil {
		return code{}, fmt.Errorf("no code object for %s", gpreempt.GFXName(gfx))
	}
	d.code, err = place(text, d.allocate)
	return d.code, err
}

// place copies the segments of a code object into new memory.
func place(text []byte, allocate func(bytes int) (memory, error)) (code, error) {
	file, err := elf.NewFile(bytes.NewReader(text))
	if err != nil {
		return code{}, err
	}
	end := uint64(0)
	for _, p := range file.Progs {
		if p.Type == elf.PT_LOAD {
			end = max(end, p.Vaddr+p.Memsz)
		}
	}
	m, err := allocate(int(end))
	if err != nil {
		return code{}, err
	}
	for _, p := range file.Progs {
		if p.Type == elf.PT_LOAD {
			if _, err := io.ReadFull(p.Open(), m.mem[p.Vaddr:][:p.Filesz]); err != nil {
				return code{}, err
			}
		}
	}
	symbols, err := file.DynamicSymbols()
	if err != nil {
		return code{}, err
	}
	c := code{m, map[string]uint64{}}
	for _, s := range symbols {
		c.symbols[s.Name] = s.Value
	}
	return c, nil
}

// kernel is what a dispatch needs of a kernel: the address of its descriptor, and what that says
// of the sizes of its LDS and of its scratch, in bytes for a workgroup and for a lane.
type kernel struct {
	descriptor   uint64
	lds, private uint32
}

func (d *device) kernel(name string) (kernel, error) {
	c, err := d.load()
	if err != nil {
		return kernel{}, err
	}
	at, ok := c.symbols[name+".kd"]
	if !ok {
		return kernel{}, fmt.Errorf("the code object has no kernel %s", name)
	}
	descriptor := c.mem[at:]
	return kernel{c.addr(int(at)), binary.LittleEndian.Uint32(descriptor), binary.LittleEndian.Uint32(descriptor[4:])}, nil
}

// dispatch submits a kernel.
func (q *queue) dispatch(k kernel, groups, lanes int, kernarg uint64) {
	le := binary.LittleEndian
	q.submit(packetDispatch|inOrder|1<<16, func(packet []byte) {
		for i := range 3 { // a workgroup and a grid of one dimension
			le.PutUint16(packet[4+2*i:], 1)
			le.PutUint32(packet[12+4*i:], 1)
		}
		le.PutUint16(packet[4:], uint16(lanes))
		le.PutUint32(packet[12:], uint32(groups*lanes))
		le.PutUint32(packet[24:], k.private)
		le.PutUint32(packet[28:], k.lds)
		le.PutUint64(packet[offKernel:], k.descriptor)
		le.PutUint64(packet[offKernarg:], kernarg)
	})
}

// arguments returns the memory with the arguments of a kernel, each of 8 bytes.
func (d *device) arguments(words ...uint64) (memory, error) {
	m, err := d.allocate(pageBytes)
	if err != nil {
		return memory{}, err
	}
	for i, w := range words {
		binary.LittleEndian.PutUint64(m.mem[8*i:], w)
	}
	return m, nil
}

// endless is a queue with a kernel that counts in host memory until it is stopped.
type endless struct {
	*queue
	words, args memory
	groups      int
}

func (d *device) newEndless(groups int) (*endless, error) {
	const lanes = 64 // a workgroup counts in a cache line of its own
	k, err := d.kernel("beat")
	if err != nil {
		return nil, err
	}
	q, err := d.newQueue(0)
	if err != nil {
		return nil, err
	}
	e := &endless{queue: q, groups: groups}
	if e.words, err = d.allocate(groups * line); err != nil {
		return nil, err
	}
	if e.args, err = d.arguments(e.words.base, 0); err != nil {
		return nil, err
	}
	binary.LittleEndian.PutUint64(e.args.mem[8:], e.args.addr(line))
	q.dispatch(k, groups, lanes, e.args.base)
	return e, nil
}

func (e *endless) beats() (sum uint64) {
	for i := range e.groups {
		sum += e.words.u64(line * i).Load()
	}
	return sum
}

func (e *endless) fill() error { return nil }

func (e *endless) stop() { e.args.u32(line).Store(1) }

// verify runs a kernel that keeps values in one kind of storage for a number of rounds, and
// returns the number of lanes with a wrong result. With corrupt it damages one first.
func (d *device) verify(ctx context.Context, name string, rounds uint32, groups int, seed uint64, corrupt bool) (wrong uint64, err error) {
	k, err := d.kernel(name)
	if err != nil {
		return 0, err
	}
	q, err := d.spareQueue(k.private)
	if err != nil {
		return 0, err
	}
	out, err := d.allocate(4 * lanes * groups)
	if err != nil {
		return 0, err
	}
	words, err := d.allocate(line * groups)
	if err != nil {
		return 0, err
	}
	args, err := d.arguments(out.base, seed&0xffffffff|uint64(rounds)<<32, words.base, uint64(groups))
	if err != nil {
		return 0, err
	}
	q.dispatch(k, groups, lanes, args.base)
	if err := q.wait(ctx); err != nil {
		return 0, err
	}
	if corrupt {
		out.u32(0).Add(1)
	}
	for lane := range uint32(lanes * groups) {
		if out.u32(4*int(lane)).Load() != expected(name, uint32(seed), lane, rounds, uint32(groups)) {
			wrong++
		}
	}
	return wrong, nil
}

// expected returns the word that a lane stores: kernels.c without its rounds.
func expected(kernel string, seed, lane, rounds, groups uint32) uint32 {
	a, c := repeated(rounds)
	sum := uint32(0)
	fold := func(v uint32) { sum = (sum ^ v) * 16777619 }
	switch kernel {
	case "vgpr", "agpr", "scratch":
		for i := range uint32(values) {
			fold(first(seed, lane, i)*a + c)
		}
	case "mfma":
		for i := range uint32(mfmaRows) {
			fold(first(seed, lane, i)&0xffff + rounds)
		}
	case "lds": // the value came from another lane of the workgroup
		from := lane - lane%lanes + (lane-rounds)%lanes
		for i := range uint32(ldsWords) {
			fold(first(seed, from, i)*a + c)
		}
	case "grid": // the value came from the same lane of another workgroup
		from := (lane/lanes+groups-rounds%groups)%groups*lanes + lane%lanes
		return first(seed, from, 0)*a + c
	}
	return sum
}

// repeated returns the factor and the summand of n rounds of a value.
func repeated(n uint32) (a, c uint32) {
	a, c = 1, 0
	for stepA, stepC := uint32(1664525), uint32(1013904223); n > 0; n >>= 1 {
		if n&1 == 1 {
			a, c = a*stepA, c*stepA+stepC
		}
		stepA, stepC = stepA*stepA, stepC*stepA+stepC
	}
	return a, c
}

func first(seed, lane, i uint32) uint32 {
	x := seed + lane*0x9e3779b9 + i*0x85ebca6b
	x = (x ^ x>>16) * 0x7feb352d
	x = (x ^ x>>15) * 0x846ca68b
	return x ^ x>>16
}
