package term

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Duration formats d with two or three significant digits: 850µs, 1.2ms, 45.3s, 3m20s,
// 2h05m, 4d3h.
func Duration(d time.Duration) string {
	if d < 0 {
		return "-" + Duration(-d)
	}
	unit := func(u time.Duration, name string) string {
		v := float64(d) / float64(u)
		if v >= 99.95 {
			return fmt.Sprintf("%.0f%s", v, name)
		}
		return strings.TrimSuffix(fmt.Sprintf("%.1f", v), ".0") + name
	}
	whole := func(big, small time.Duration, bigName, smallName string) string {
		b, s := d/big, d%big/small
		if s == 0 {
			return fmt.Sprintf("%d%s", b, bigName)
		}
		return fmt.Sprintf("%d%s%d%s", b, bigName, s, smallName)
	}
	switch {
	case d == 0:
		return "0s"
	case d < time.Microsecond:
		return fmt.Sprintf("%dns", d)
	// What rounds up to the next unit is written in it: 999.7µs is 1ms.
	case d < time.Millisecond-500*time.Nanosecond:
		return unit(time.Microsecond, "µs")
	case d < time.Second-500*time.Microsecond:
		return unit(time.Millisecond, "ms")
	case d < time.Minute-50*time.Millisecond:
		return unit(time.Second, "s")
	case d < time.Hour:
		d = d.Round(time.Second)
		return whole(time.Minute, time.Second, "m", "s")
	case d < 24*time.Hour:
		return whole(time.Hour, time.Minute, "h", "m")
	}
	return whole(24*time.Hour, time.Hour, "d", "h")
}

// Took formats a duration of the API, "-" when it is absent.
func Took(d *durationpb.Duration) string {
	if d == nil {
		return "-"
	}
	return Duration(d.AsDuration())
}

// Age formats the time since at, "-" when it is absent.
func (a *App) Age(at *timestamppb.Timestamp) string {
	if at == nil {
		return "-"
	}
	return Duration(max(0, a.Now().Sub(at.AsTime())))
}

// Size formats a number of bytes in the largest unit that divides it.
func Size(n uint64) string {
	for _, u := range []struct {
		bytes uint64
		name  string
	}{{1 << 30, "GiB"}, {1 << 20, "MiB"}, {1 << 10, "KiB"}} {
		if n >= u.bytes && n%u.bytes == 0 {
			return strconv.FormatUint(n/u.bytes, 10) + u.name
		}
	}
	return strconv.FormatUint(n, 10) + "B"
}

// Count formats a number of things: "1 target", "3 targets".
func Count[N ~int | ~uint32 | ~uint64](n N, thing string) string {
	if n != 1 {
		thing += "s"
	}
	return fmt.Sprintf("%d %s", n, thing)
}

// GPUs formats gpu_ids; for narrow tables only their number when there are many.
func GPUs(ids []uint32, wide bool) string {
	if len(ids) == 0 {
		return "-"
	}
	if len(ids) > 3 && !wide {
		return Count(len(ids), "GPU")
	}
	return Numbers(ids)
}

// Priority formats a priority.
func Priority(p uint32) string {
	return strconv.FormatUint(uint64(p), 10)
}

var stateStyles = map[gpreemptv1.TargetState]Style{
	gpreemptv1.TargetState_TARGET_STATE_SUSPENDED: StyleNote, gpreemptv1.TargetState_TARGET_STATE_SUSPENDING: StyleNote,
	gpreemptv1.TargetState_TARGET_STATE_QUARANTINED: StyleBad,
}

// State formats a target's state and highlights what needs attention.
func State(s gpreemptv1.TargetState) Cell { return Cell{Or(api.EnumName(s), "-"), stateStyles[s]} }

// Or returns s, or instead if s is empty.
func Or(s, instead string) string {
	if s == "" {
		return instead
	}
	return s
}

// Cut shortens s to at most n runes.
func Cut(s string, n int) string {
	if r := []rune(s); len(r) > n {
		return string(r[:n-1]) + "…"
	}
	return s
}

// Printable returns s without characters that a terminal acts on.
func Printable(s string) string { return gpreempt.Printable(s) }

var quiesceTexts = map[gpreemptv1.QuiesceReason]string{
	gpreemptv1.QuiesceReason_QUIESCE_REASON_DONE:           "all targets that may be suspended are suspended",
	gpreemptv1.QuiesceReason_QUIESCE_REASON_NOTHING_TO_DO:  "there was no target to suspend",
	gpreemptv1.QuiesceReason_QUIESCE_REASON_MAX_WAIT:       "max_wait passed; suspending continues",
	gpreemptv1.QuiesceReason_QUIESCE_REASON_DEFERRED:       "the suspension waits for the announced eta",
	gpreemptv1.QuiesceReason_QUIESCE_REASON_NOT_AWAITED:    "the request did not ask to wait",
	gpreemptv1.QuiesceReason_QUIESCE_REASON_SHARE_FLOOR:    "the share floor lets offline work run",
	gpreemptv1.QuiesceReason_QUIESCE_REASON_UNSAFE:         "the breaker of a GPU is open, or a mechanism is not ready",
	gpreemptv1.QuiesceReason_QUIESCE_REASON_SHADOW:         "the policy is a shadow: it decides and does not act",
	gpreemptv1.QuiesceReason_QUIESCE_REASON_DRAINING:       "the daemon is draining",
	gpreemptv1.QuiesceReason_QUIESCE_REASON_ENDED:          "the lease ended meanwhile",
	gpreemptv1.QuiesceReason_QUIESCE_REASON_HOLD:           "an admin holds a target running",
	gpreemptv1.QuiesceReason_QUIESCE_REASON_STUCK:          "a call of a target holds its lock in the driver: it is not suspended",
	gpreemptv1.QuiesceReason_QUIESCE_REASON_CANNOT_SUSPEND: "offline targets cannot be suspended: gpctl target list",
	gpreemptv1.QuiesceReason_QUIESCE_REASON_QUEUE_RESET:    "the driver reset a queue on a GPU meanwhile: gpctl events",
}

// Quiesce describes the reason for the answer to an announcement.
func Quiesce(r gpreemptv1.QuiesceReason) string {
	name := api.EnumName(r)
	if words := gpreempt.Reason(name).Obstacle(); words != "" && quiesceTexts[r] == "" {
		return "a target " + words
	}
	return Or(quiesceTexts[r], Or(name, "the daemon reported no reason"))
}

// Numbers formats numbers, "-" for an empty list.
func Numbers[N ~int | ~int32 | ~uint32](list []N) string {
	var parts []string
	for _, n := range list {
		parts = append(parts, fmt.Sprint(n))
	}
	return Or(Few(parts), "-")
}

// Address formats a virtual address; 0 is unknown.
func Address(at uint64) string {
	if at == 0 {
		return "-"
	}
	return fmt.Sprintf("0x%x", at)
}

// DoorbellAt formats the position of a doorbell in those of the GPU, in bytes. The driver and the
// API count dwords.
func DoorbellAt(dwords uint32) string { return fmt.Sprintf("0x%x", 4*uint64(dwords)) }

// Inexact formats a priority and marks an approximate one.
func Inexact(priority uint32, exact bool) string {
	mark := "~"
	if exact {
		mark = ""
	}
	return strconv.FormatUint(uint64(priority), 10) + mark
}

// Ring formats the address and the size of a ring.
func Ring(at, bytes uint64) string {
	switch {
	case bytes == 0:
		return Address(at)
	case at == 0:
		return Size(bytes)
	}
	return Address(at) + " (" + Size(bytes) + ")"
}

// NumberOf is count for words with an irregular plural.
func NumberOf(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

// PipePriorityName formats the priority of a queue on its pipe.
func PipePriorityName(n uint32) string {
	if names := []string{"low", "medium", "high"}; int(n) < len(names) {
		return names[n]
	}
	return strconv.FormatUint(uint64(n), 10)
}

// InRing returns the positions of a compute queue in dwords from the beginning of its ring, and
// what is written and not read. Of the registers, the read position of some queues wraps at the
// end of the ring, and the write position never does.
func InRing(read, written, ringBytes uint64, aql bool) (r, w uint64, behind string) {
	const dword, packet = 4, 64
	if ring := ringBytes / dword; ring > 0 {
		read, written = read%ring, written%ring
		distance := (written + ring - read) % ring
		if aql {
			return read, written, Count(distance*dword/packet, "packet")
		}
		return read, written, Count(distance, "dword")
	}
	return read, written, "-"
}

// BytesBehind returns what an SDMA queue has written and not read. Its positions never wrap.
func BytesBehind(read, written uint64) string {
	if written < read {
		return "-"
	}
	return Count(written-read, "byte")
}

// Few joins up to 8 words and counts the rest.
func Few(words []string) string {
	if more := len(words) - 8; more > 0 {
		words = append(words[:8:8], fmt.Sprintf("+%d", more))
	}
	return strings.Join(words, ",")
}
