package kfdabi

import (
	"fmt"
	"reflect"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/kfd"
)

func TestLayoutOfKmapStructures(t *testing.T) {
	want := map[string][]string{
		"KmapInfoArgs 32": {
			"ABIMajor 0 4", "ABIMinor 4 4", "MaxTargets 8 4", "MinLeaseMS 12 4", "MaxLeaseMS 16 4", "Lapses 20 4", "Limited 24 4", "Pad 28 4",
		},
		"KmapQueue 16": {"GPUID 0 4", "ID 4 4", "State 8 4", "Pad 12 4"},
		"KmapTargetArgs 32": {
			"PIDFD 0 4", "Limit 4 4", "QueuesPtr 8 8", "NumQueues 16 4", "NumHeld 20 4", "Result 24 4", "Pad 28 4",
		},
		"KmapSetArgs 40": {
			"TargetsPtr 0 8", "NumTargets 8 4", "TargetSize 12 4", "LeaseMS 16 4", "Flags 20 4", "Grace 24 4", "Failed 28 4", "Cycles 32 4", "Lapses 36 4",
		},
		"KmapOccupancyArgs 48": {
			"GPUID 0 4", "Flags 4 4", "CPSlots 8 4", "CPMapped 12 4", "CPHeld 16 4", "SDMASlots 20 4", "SDMAMapped 24 4", "SDMAHeld 28 4",
			"OverSubscribed 32 4", "Limited 36 4", "Pad 40 8",
		},
	}
	got := map[string][]string{}
	for _, s := range []reflect.Type{
		reflect.TypeFor[KmapInfoArgs](), reflect.TypeFor[KmapQueue](), reflect.TypeFor[KmapTargetArgs](),
		reflect.TypeFor[KmapSetArgs](), reflect.TypeFor[KmapOccupancyArgs](),
	} {
		key := fmt.Sprintf("%s %d", s.Name(), s.Size())
		for f := range s.Fields() {
			if f.Name != "_" {
				got[key] = append(got[key], fmt.Sprintf("%s %d %d", f.Name, f.Offset, f.Type.Size()))
			}
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("kfd_kmap.h (-) and this package (+) differ:\n%s", diff)
	}
}

func TestKmapRequestNumbers(t *testing.T) {
	const readWrite, magic = 3 << 30, 0xEB << 8
	got := map[string]kfd.Request{}
	for _, req := range []kfd.Request{ReqKmapInfo, ReqKmapSet, ReqKmapOccupancy} {
		got[KmapName(req)] = req
	}
	want := map[string]kfd.Request{
		"KMAP_INFO": readWrite | 32<<16 | magic, "KMAP_SET": readWrite | 40<<16 | magic | 1, "KMAP_OCCUPANCY": readWrite | 48<<16 | magic | 2,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("kfd_kmap.h (-) and this package (+) differ:\n%s", diff)
	}
}
