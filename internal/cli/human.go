package cli

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

// duration formats d with two or three significant digits: 850µs, 1.2ms, 45.3s, 3m20s,
// 2h05m, 4d3h.
func duration(d time.Duration) string {
	if d < 0 {
		return "-" + duration(-d)
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

// took formats a duration of the API, "-" when it is absent.
func took(d *durationpb.Duration) string {
	if d == nil {
		return "-"
	}
	return duration(d.AsDuration())
}

// age formats the time since at, "-" when it is absent.
func (a *app) age(at *timestamppb.Timestamp) string {
	if at == nil {
		return "-"
	}
	return duration(max(0, a.Now().Sub(at.AsTime())))
}

// size formats a number of bytes in the largest unit that divides it.
func size(n uint64) string {
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

// count formats a number of things: "1 target", "3 targets".
func count[N ~int | ~uint32 | ~uint64](n N, thing string) string {
	if n != 1 {
		thing += "s"
	}
	return fmt.Sprintf("%d %s", n, thing)
}

// gpus formats gpu_ids; for narrow tables only their number when there are many.
func gpus(ids []uint32, wide bool) string {
	if len(ids) == 0 {
		return "-"
	}
	if len(ids) > 3 && !wide {
		return count(len(ids), "GPU")
	}
	return numbers(ids)
}

// priority formats a priority; that of an admin's own lease has a name.
func priority(p uint32) string {
	if p == uint32(gpreempt.PriorityAdmin) {
		return "admin"
	}
	return strconv.FormatUint(uint64(p), 10)
}

var stateStyles = map[gpreemptv1.TargetState]style{
	gpreemptv1.TargetState_TARGET_STATE_SUSPENDED: styleNote, gpreemptv1.TargetState_TARGET_STATE_SUSPENDING: styleNote,
	gpreemptv1.TargetState_TARGET_STATE_QUARANTINED: styleBad,
}

// state formats a target's state and highlights what needs attention.
func state(s gpreemptv1.TargetState) cell { return cell{or(api.EnumName(s), "-"), stateStyles[s]} }

func or(s, instead string) string {
	if s == "" {
		return instead
	}
	return s
}

// cut shortens s to at most n runes.
func cut(s string, n int) string {
	if r := []rune(s); len(r) > n {
		return string(r[:n-1]) + "…"
	}
	return s
}

func printable(s string) string { return gpreempt.Printable(s) }

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
	gpreemptv1.QuiesceReason_QUIESCE_REASON_DRM_QUEUES:     "a target has user queues of DRM, which no enabled mechanism can suspend",
	gpreemptv1.QuiesceReason_QUIESCE_REASON_CANNOT_SUSPEND: "offline targets cannot be suspended: gpctl target list",
	gpreemptv1.QuiesceReason_QUIESCE_REASON_QUEUE_RESET:    "the driver reset a queue on a GPU meanwhile: gpctl events",
}

// quiesce describes the reason for the answer to an announcement.
func quiesce(r gpreemptv1.QuiesceReason) string {
	return or(quiesceTexts[r], or(api.EnumName(r), "the daemon reported no reason"))
}
