package server

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// boundary is a scheduler that checks that requests of the server concern this host and
// are within the ranges.
type boundary struct {
	Scheduler
	t *testing.T
}

func (b *boundary) process(what string, key gpreempt.ProcessKey) {
	if key != offline && key != other && !key.IsZero() {
		b.t.Errorf("%s of process %v, which has no queues", what, key)
	}
}

func (b *boundary) Announce(req scheduler.LeaseRequested, reply scheduler.Reply) (scheduler.LeaseID, time.Duration, error) {
	id, ttl, err := b.Scheduler.Announce(req, reply)
	if err != nil {
		return id, ttl, err
	}
	for _, gpu := range req.GPUs {
		if gpu != gpuA && gpu != gpuB {
			b.t.Errorf("a lease on the unknown GPU %d", gpu)
		}
	}
	for _, r := range []struct {
		name      string
		got, most time.Duration
	}{
		{"ttl", ttl, 10 * time.Minute},
		{"max_wait", max(req.MaxWait, 0), 10 * time.Second}, // below 0: that of the policy
		{"eta", req.ETA, time.Minute},
	} {
		if r.got < 0 || r.got > r.most {
			b.t.Errorf("a lease with %s %v", r.name, r.got)
		}
	}
	if req.Priority > gpreempt.MaxPriority || len(req.RequestID) > 64 {
		b.t.Errorf("a lease with priority %d and a request ID of %d bytes", req.Priority, len(req.RequestID))
	}
	return id, ttl, nil
}

func (b *boundary) Post(ev scheduler.Event) {
	switch ev := ev.(type) {
	case scheduler.Pin:
		b.process("a pin", ev.Target)
		if most := map[scheduler.Cause]time.Duration{scheduler.CauseHold: maxHold, scheduler.CauseByHand: 10 * time.Minute}[ev.Cause]; ev.For < 0 || ev.For > most {
			b.t.Errorf("a pin, %v, of %v", ev.Cause, ev.For)
		}
	case scheduler.PolicyChanged:
		if err := ev.Policy.Validate(); err != nil {
			b.t.Errorf("a policy in force: %v", err)
		}
	}
	b.Scheduler.Post(ev)
}

// hostile returns invalid and unusual values of a field.
func hostile(f protoreflect.FieldDescriptor) []protoreflect.Value {
	var values []protoreflect.Value
	add := func(vs ...any) {
		for _, v := range vs {
			values = append(values, protoreflect.ValueOf(v))
		}
	}
	switch f.Kind() {
	case protoreflect.StringKind:
		add("", "1", "0", "-1", "4294967297", "4000001@", "4000001@12", "4000001@-11", "+4000001", " 4000001", "0x3d0901", "18446744073709551616@1",
			"../../proc/1/mem", "/proc/self/root/etc/shadow", "/dev/kfd", "a\x00b", "a\nb\x1b[2J", "%s%n%d", "*", strings.Repeat("*a", 1000), strings.Repeat("9", 40_000),
			"000000000000feed-", "000000000000feed-0", "000000000000feed-18446744073709551616", "0000:0a:00.0/../x", "${IFS}", "'; drop")
	case protoreflect.Int32Kind:
		add(int32(-1), int32(0), int32(1), int32(math.MinInt32), int32(math.MaxInt32))
	case protoreflect.Uint32Kind:
		add(uint32(0), uint32(1), uint32(16), uint32(256+3), uint32(math.MaxUint32))
	case protoreflect.Uint64Kind:
		add(uint64(1), uint64(math.MaxUint64))
	case protoreflect.DoubleKind:
		add(math.NaN(), math.Inf(1), math.Inf(-1), -1.0, 1e308, 0.96)
	case protoreflect.BoolKind:
		add(true)
	case protoreflect.EnumKind:
		add(protoreflect.EnumNumber(-1), protoreflect.EnumNumber(256+1), protoreflect.EnumNumber(math.MaxInt32), protoreflect.EnumNumber(1))
	case protoreflect.MessageKind:
		if f.Message().FullName() != "google.protobuf.Duration" {
			return nil // each handles its fields
		}
		for _, d := range []*durationpb.Duration{
			{},
			{Seconds: math.MaxInt64},
			{Seconds: math.MinInt64},
			{Seconds: -1},
			{Nanos: -1},
			{Nanos: math.MaxInt32},
			{Seconds: 1, Nanos: -1},
			{Seconds: 1 << 40},
			{Seconds: 315_576_000_000},
			{Nanos: 1},
		} {
			add(d.ProtoReflect())
		}
	default:
		panic("no hostile values of kind " + f.Kind().String())
	}
	return values
}

// each calls try with copies of base in which one field, also of a nested message, has a
// hostile value or is a list of many.
func each(base proto.Message, try func(what string, m proto.Message)) {
	var walk func(what string, at func(proto.Message) protoreflect.Message, d protoreflect.MessageDescriptor)
	walk = func(what string, at func(proto.Message) protoreflect.Message, d protoreflect.MessageDescriptor) {
		for i := range d.Fields().Len() {
			f := d.Fields().Get(i)
			name := what + "." + string(f.Name())
			for _, v := range hostile(f) {
				for _, n := range []int{1, 300} {
					m := proto.Clone(base)
					switch to := at(m); {
					case f.IsList():
						for range n {
							to.Mutable(f).List().Append(v)
						}
					case n == 1:
						to.Set(f, v)
					default:
						continue
					}
					try(fmt.Sprintf("%s = %.40q (%d times)", name, fmt.Sprint(v.Interface()), n), m)
				}
			}
			if f.Kind() != protoreflect.MessageKind || f.Message().FullName() == "google.protobuf.Duration" {
				continue
			}
			walk(name, func(m proto.Message) protoreflect.Message {
				if f.IsList() {
					return at(m).Mutable(f).List().AppendMutable().Message()
				}
				return at(m).Mutable(f).Message()
			}, f.Message())
		}
	}
	walk(string(base.ProtoReflect().Descriptor().Name()), func(m proto.Message) protoreflect.Message { return m.ProtoReflect() }, base.ProtoReflect().Descriptor())
}

// TestEveryFieldOfARequestIsChecked sends hostile values of every field of every
// request, in an empty and in a valid request.
func TestEveryFieldOfARequestIsChecked(t *testing.T) {
	b := &boundary{t: t}
	h := startHost(t, func(c *Config, l *scheduler.Limits) {
		c.Scheduler, c.Observer = b, &readings{hqds: &inventory.HQDs{}}
		l.LeasesPerClient = 4096
		c.Backlogs = func(_ context.Context, key gpreempt.ProcessKey, queues []gpreempt.QueueEntry) []inventory.Backlog {
			b.process("the memory", key)
			return make([]inventory.Backlog, len(queues))
		}
	})
	b.Scheduler = h.runner
	conn := h.dial(t)
	valid := map[string]proto.Message{
		"NotifyOnline":   minute(gpuA),
		"CreateLease":    &gpreemptv1.CreateLeaseRequest{Announce: minute(gpuA)},
		"SuspendTarget":  &gpreemptv1.SuspendTargetRequest{TargetId: offline.String(), Ttl: durationpb.New(time.Millisecond)},
		"ResumeTarget":   &gpreemptv1.ResumeTargetRequest{TargetId: offline.String()},
		"ClassifyTarget": &gpreemptv1.ClassifyTargetRequest{TargetId: offline.String(), Class: gpreemptv1.Class_CLASS_OFFLINE},
		"ListQueues":     &gpreemptv1.ListQueuesRequest{TargetId: offline.String(), Backlog: true},
		"ListHqds":       &gpreemptv1.ListHqdsRequest{TargetId: offline.String()},
		"ExplainTarget":  &gpreemptv1.ExplainTargetRequest{TargetId: offline.String()},
		"SetPolicy":      &gpreemptv1.SetPolicyRequest{Preset: "strict"},
		"SetDrain":       &gpreemptv1.SetDrainRequest{},
	}
	tried := 0
	for _, service := range []protoreflect.FullName{"gpreempt.v1.OnlineService", "gpreempt.v1.AdminService"} {
		d, err := protoregistry.GlobalFiles.FindDescriptorByName(service)
		if err != nil {
			t.Fatal(err)
		}
		methods := d.(protoreflect.ServiceDescriptor).Methods()
		for i := range methods.Len() {
			method := methods.Get(i)
			if method.IsStreamingServer() { // their requests have numbers, or the same messages
				continue
			}
			kind, err := protoregistry.GlobalTypes.FindMessageByName(method.Input().FullName())
			if err != nil {
				t.Fatal(err)
			}
			answer, err := protoregistry.GlobalTypes.FindMessageByName(method.Output().FullName())
			if err != nil {
				t.Fatal(err)
			}
			bases := []proto.Message{kind.New().Interface()}
			if m := valid[string(method.Name())]; m != nil {
				bases = append(bases, m)
			}
			for _, base := range bases {
				each(base, func(what string, m proto.Message) {
					tried++
					if invalidText(m) {
						return // it cannot be marshaled
					}
					if req, ok := m.(*gpreemptv1.NotifyOnlineRequest); ok && req.GetMaxWait() == nil {
						req.MaxWait = durationpb.New(0)
					}
					reply := answer.New().Interface()
					err := conn.Invoke(t.Context(), fmt.Sprintf("/%s/%s", service, method.Name()), m, reply)
					if slices.Contains([]codes.Code{codes.Internal, codes.Unknown, codes.Unavailable, codes.DeadlineExceeded}, status.Code(err)) {
						t.Errorf("%s: %v", what, err)
					}
					if err != nil && reason(err) == "" {
						t.Errorf("%s: an error without a reason: %v", what, err)
					}
					if req, ok := m.(*gpreemptv1.NotifyOnlineRequest); ok && err == nil && len(req.GetLabel()) > 128 {
						t.Errorf("%s: accepted", what)
					}
				})
			}
		}
	}
	if tried < 1000 {
		t.Errorf("%d requests tried: the walk finds too few", tried)
	}
	t.Logf("%d requests", tried)
	if len(h.directory.unknown) > 0 {
		t.Errorf("processes without queues were classified: %v", h.directory.unknown)
	}
}

// invalidText reports whether a message has text that is not UTF-8, which protobuf does
// not marshal.
func invalidText(m proto.Message) bool {
	_, err := proto.Marshal(m)
	return err != nil
}
