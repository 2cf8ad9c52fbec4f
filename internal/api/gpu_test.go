package api_test

import (
	"testing"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
)

func TestSelectorsByAddressNeedNoDomainZero(t *testing.T) {
	for _, c := range []struct {
		selector, address string
		want              bool
	}{
		{"0000:0a:00.0", "0000:0a:00.0", true},
		{"0A:1f.7", "0000:0a:1f.7", true},
		{"10000:E1:00.0", "10000:e1:00.0", true},
		{"0a:00.0", "0001:0a:00.0", false},
		{"0a", "0a", true},
		{"", "", false},
	} {
		sel := &gpreemptv1.GpuSelector{By: &gpreemptv1.GpuSelector_Bdf{Bdf: c.selector}}
		if got := api.Selects(sel, 1, 1, 128, c.address); got != c.want {
			t.Errorf("%q selects %q: %t", c.selector, c.address, got)
		}
	}
	for _, zero := range []*gpreemptv1.GpuSelector{
		nil, {}, {By: &gpreemptv1.GpuSelector_GpuId{}}, {By: &gpreemptv1.GpuSelector_RenderMinor{}},
	} {
		if api.Selects(zero, 0, 0, 0, "") {
			t.Errorf("%v selects a GPU without names", zero)
		}
	}
}
