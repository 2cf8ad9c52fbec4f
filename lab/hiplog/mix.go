package hiplog

import (
	"cmp"
	"hash/fnv"
	"maps"
	"slices"
	"strconv"
	"strings"
)

const (
	// maxNames bounds the kernels that are counted separately in a log, maxKernels those of
	// one queue or process.
	maxNames   = 4096
	maxKernels = 1024
	// maxName bounds the length of a name: names of templates can fill HIP's 4096 bytes.
	maxName = 1024
	// maxTop bounds Mix.Top.
	maxTop = 50
)

// Mix counts kernels.
type Mix struct {
	// Total counts all, Others those of kernels that are not counted separately: beyond
	// 1024 of a queue or a process, or 4096 of the log.
	Total  uint64 `json:"total"`
	Others uint64 `json:"others"`
	// Distinct is the number of kernels that are counted separately.
	Distinct int `json:"distinct"`
	// Top are the 50 most frequent, most frequent first.
	Top []KernelCount `json:"top"`

	counts map[string]uint64
}

// KernelCount is how often a kernel occurred.
type KernelCount struct {
	// Name is the demangled name, or "kernel_obj=0x…" for a kernel without a name in the
	// log. Beyond 1024 bytes it is replaced by a checksum of the rest.
	Name  string `json:"name"`
	Count uint64 `json:"count"`
}

// nameID represents a name; noName represents those beyond the bound too.
type nameID uint32

const noName nameID = 0

// names assigns a number to each name. The zero value is ready.
type names struct {
	ids  map[string]nameID
	list []string
}

func (n *names) id(name []byte) nameID {
	if len(name) > maxName {
		sum := fnv.New64a()
		sum.Write(name[maxName:])
		name = strconv.AppendUint(append(slices.Clone(name[:maxName]), "…"...), sum.Sum64(), 16)
	}
	if id, known := n.ids[string(name)]; known {
		return id
	}
	if n.ids == nil {
		n.ids = map[string]nameID{}
		n.list = []string{""}
	}
	if len(n.list) > maxNames {
		return noName
	}
	s := string(name)
	id := nameID(len(n.list))
	n.ids[s] = id
	n.list = append(n.list, s)
	return id
}

// tally counts kernels. The zero value is ready.
type tally struct {
	counts map[nameID]uint64
	total  uint64
}

func (t *tally) add(id nameID) {
	t.total++
	if t.counts == nil {
		t.counts = map[nameID]uint64{}
	}
	if _, known := t.counts[id]; !known && len(t.counts) >= maxKernels {
		id = noName
	}
	t.counts[id]++
}

func (t *tally) mix(n *names) Mix {
	m := Mix{Total: t.total, Top: []KernelCount{}, counts: map[string]uint64{}}
	for id, count := range t.counts {
		if id == noName {
			m.Others += count
			continue
		}
		m.counts[strings.ToValidUTF8(n.list[id], "\uFFFD")] += count
	}
	m.Distinct = len(m.counts)
	for _, name := range slices.Collect(maps.Keys(m.counts)) {
		m.Top = append(m.Top, KernelCount{Name: name, Count: m.counts[name]})
	}
	slices.SortFunc(m.Top, func(a, b KernelCount) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.Name, b.Name))
	})
	m.Top = m.Top[:min(len(m.Top), maxTop)]
	return m
}
