package classify

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// selector is a name of a GPU.
type selector struct {
	// text is the name in the file.
	text string
	by   selectBy
	// number is the gpu_id, the node or the minor; address is DDDD:BB:DD.F in lower case.
	number  uint64
	address string
}

type selectBy uint8

const (
	byID selectBy = iota
	byNode
	byRenderMinor
	byAddress
)

// parseSelector parses a gpu_id, node:N, renderDN or a PCI address with or without its
// domain.
func parseSelector(text string) (sel selector, ok bool) {
	sel = selector{text: text, by: byID}
	digits := text
	if rest, found := strings.CutPrefix(text, "node:"); found {
		sel.by, digits = byNode, rest
	} else if rest, found := strings.CutPrefix(strings.TrimPrefix(text, "/dev/dri/"), "renderD"); found {
		sel.by, digits = byRenderMinor, rest
	}
	n, err := strconv.ParseUint(digits, 10, 32)
	if err == nil {
		sel.number = n
		return sel, n > 0 || sel.by == byNode
	}
	if sel.by != byID {
		return sel, false
	}
	sel.by = byAddress
	sel.address, ok = address(text)
	return sel, ok
}

// address returns a PCI address in the form of the topology, domain:bus:device.function.
func address(text string) (string, bool) {
	parts := strings.Split(text, ":")
	if len(parts) == 2 {
		parts = append([]string{"0"}, parts...)
	}
	if len(parts) != 3 {
		return "", false
	}
	device, function, _ := strings.Cut(parts[2], ".")
	var numbers [4]uint64
	for n, part := range []struct {
		text  string
		limit uint64
	}{{parts[0], 1<<32 - 1}, {parts[1], 0xff}, {device, 0x1f}, {function, 7}} {
		number, err := strconv.ParseUint(part.text, 16, 32)
		if err != nil || number > part.limit {
			return "", false
		}
		numbers[n] = number
	}
	return fmt.Sprintf("%04x:%02x:%02x.%x", numbers[0], numbers[1], numbers[2], numbers[3]), true
}

// NamesOne reports whether a selector of Match.GPU names one of the GPUs.
func NamesOne(text string, gpus []gpreempt.GPU) bool {
	sel, _ := parseSelector(text)
	return slices.ContainsFunc(gpus, func(g gpreempt.GPU) bool { return sel.selects(&g) })
}

func (sel *selector) selects(g *gpreempt.GPU) bool {
	switch sel.by {
	case byID:
		return sel.number == uint64(g.ID)
	case byNode:
		return g.Node >= 0 && sel.number == uint64(g.Node)
	case byRenderMinor:
		return sel.number == uint64(g.RenderMinor)
	case byAddress:
		return strings.EqualFold(sel.address, g.BDF)
	}
	return false
}
