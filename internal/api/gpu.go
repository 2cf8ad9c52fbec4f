package api

import (
	"strings"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

// Selects reports whether a selector names the GPU with these names, whose PCI address has
// a domain.
func Selects(sel *gpreemptv1.GpuSelector, id, node, renderMinor uint32, bdf string) bool {
	switch by := sel.GetBy().(type) {
	case *gpreemptv1.GpuSelector_GpuId:
		return by.GpuId != 0 && by.GpuId == id
	case *gpreemptv1.GpuSelector_Node:
		return by.Node == node
	case *gpreemptv1.GpuSelector_RenderMinor:
		return by.RenderMinor != 0 && by.RenderMinor == renderMinor
	case *gpreemptv1.GpuSelector_Bdf:
		address := by.Bdf
		if strings.Count(address, ":") == 1 {
			address = "0000:" + address
		}
		return address != "" && strings.EqualFold(address, bdf)
	case *gpreemptv1.GpuSelector_All:
		return by.All
	default:
		return false
	}
}
