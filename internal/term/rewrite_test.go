package term

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

func TestUnknownFactsAreNull(t *testing.T) {
	const names = `"target_id":"","pid":0,"queue_id":0,"gpu_id":0,"type":"","ring_bytes":"0","class":"CLASS_UNSPECIFIED","priority":0,"state":"TARGET_STATE_UNSPECIFIED","comm":"",`
	for name, test := range map[string]struct {
		message proto.Message
		want    string
	}{
		"no source": {
			&gpreemptv1.Queue{},
			`{` + names + `"source":"","source_note":"","ring_address":null,"aql":null,"kfd_priority_exact":false,"doorbell_offset":null,` +
				`"mqd_address":null,"read_pointer_address":null,"write_pointer_address":null,"backlog_unit":""}`,
		},
		"a snapshot": {
			&gpreemptv1.Queue{Source: "snapshot", RingAddress: 1 << 46, ReadPointerAddress: 255},
			`{` + names + `"source":"snapshot","source_note":"","ring_address":"70368744177664","aql":false,"kfd_priority_exact":false,"doorbell_offset":null,` +
				`"mqd_address":null,"read_pointer_address":"255","write_pointer_address":null,"backlog_unit":""}`,
		},
		"mqds": {
			&gpreemptv1.Queue{Source: "snapshot, mqds", DoorbellOffset: 0, MqdAddress: 1<<64 - 1, Comm: `a "b" <c>`},
			`{"target_id":"","pid":0,"queue_id":0,"gpu_id":0,"type":"","ring_bytes":"0","class":"CLASS_UNSPECIFIED","priority":0,"state":"TARGET_STATE_UNSPECIFIED","comm":"a \"b\" <c>",` +
				`"source":"snapshot, mqds","source_note":"","ring_address":null,"aql":false,"kfd_priority_exact":false,"doorbell_offset":0,` +
				`"mqd_address":"18446744073709551615","read_pointer_address":null,"write_pointer_address":null,"backlog_unit":""}`,
		},
		"lists": {
			&gpreemptv1.ListHqdsResponse{Notes: []string{}, StoppedGpuIds: []uint32{1, 2}, Hqds: []*gpreemptv1.Hqd{{RingAddress: 16}}},
			`{"hqds":[{"gpu_id":0,"node":0,"kind":"","xcc":0,"mec":0,"pipe":0,"slot":0,"state":"HQD_STATE_UNSPECIFIED","vmid":0,"queue_priority":0,` +
				`"pipe_priority":0,"quantum":0,"ring_address":"16","ring_bytes":"0","read_pointer":"0","write_pointer":"0","doorbell_offset":0,"aql":false,` +
				`"mqd_address":null,"target_id":"","queue_id":0,"match":""}],"stopped_gpu_ids":[1,2],"notes":[]}`,
		},
	} {
		raw, err := Marshal(test.message)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(test.want, string(raw)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		back := test.message.ProtoReflect().New().Interface()
		if err := protojson.Unmarshal(raw, back); err != nil || !proto.Equal(back, test.message) {
			t.Errorf("%s: read back as %v, %v", name, back, err)
		}
	}
}
