package classify

import (
	"fmt"
	"strings"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// tag is a pair of variables by which a process declares its own class.
type tag struct {
	// class and priority are their names.
	class, priority string
	// read returns the class; want describes other values.
	read func(string) (gpreempt.Class, bool)
	want string
}

// tags are in the order of precedence: the first with a valid class counts. `gpctl run`
// sets GPREEMPT_CLASS. AMD_QUEUE_TAG and AMD_QUEUE_PRIORITY are our convention too;
// nothing in ROCm reads them.
var tags = [...]tag{
	{"GPREEMPT_CLASS", "GPREEMPT_PRIORITY", readClass, "is not online, offline or unmanaged"},
	{"AMD_QUEUE_TAG", "AMD_QUEUE_PRIORITY", readQueueTag, "begins with neither ONLINE nor OFFLINE"},
}

func readClass(s string) (gpreempt.Class, bool) {
	for _, c := range [...]gpreempt.Class{gpreempt.Unmanaged, gpreempt.Online, gpreempt.Offline} {
		if strings.EqualFold(s, c.String()) {
			return c, true
		}
	}
	return gpreempt.Unmanaged, false
}

func readQueueTag(s string) (gpreempt.Class, bool) {
	begins := func(with string) bool { return len(s) >= len(with) && strings.EqualFold(s[:len(with)], with) }
	switch {
	case begins("ONLINE"):
		return gpreempt.Online, true
	case begins("OFFLINE"):
		return gpreempt.Offline, true
	}
	return gpreempt.Unmanaged, false
}

// readPriority parses 0 to 15 in decimal digits. Unlike strconv it does not allocate.
func readPriority(s string) (gpreempt.Priority, bool) {
	if len(s) == 0 || len(s) > 2 {
		return 0, false
	}
	n := gpreempt.Priority(0)
	for i := range len(s) {
		if s[i] < '0' || s[i] > '9' {
			return 0, false
		}
		n = 10*n + gpreempt.Priority(s[i]-'0')
	}
	return n, n <= gpreempt.MaxPriority
}

// tagOf returns the tag that counts, and its decision.
func tagOf(env map[string]string) (t *tag, d Decision, found bool) {
	if len(env) == 0 {
		return nil, Decision{}, false
	}
	for n := range tags {
		text, set := env[tags[n].class]
		if !set {
			continue
		}
		class, ok := tags[n].read(text)
		if !ok {
			continue
		}
		d = Decision{Class: class, Priority: DefaultPriority(class), By: ByTag}
		if p, ok := readPriority(env[tags[n].priority]); ok {
			d.Priority = p
		}
		return &tags[n], d, true
	}
	return nil, Decision{}, false
}

// tagDetail describes the variables, and why others do not count.
func tagDetail(env map[string]string) string {
	counts, _, _ := tagOf(env)
	var parts []string
	say := func(format string, args ...any) { parts = append(parts, fmt.Sprintf(format, args...)) }
	for n := range tags {
		t := &tags[n]
		class, set := env[t.class]
		priority, prioritySet := env[t.priority]
		_, priorityOK := readPriority(priority)
		switch {
		case t == counts:
			say("%s is %s", t.class, quoted(class))
		case set:
			say("%s %s %s and does not count", t.class, quoted(class), t.want)
		case prioritySet:
			say("%s has no effect without %s", t.priority, t.class)
		}
		switch {
		case prioritySet && !priorityOK:
			say("%s %s is not 0 to %d and does not count", t.priority, quoted(priority), gpreempt.MaxPriority)
		case prioritySet && t == counts:
			say("%s is %s", t.priority, priority)
		}
		if t == counts {
			break // later tags do not count
		}
	}
	if counts == nil && len(parts) == 0 {
		return fmt.Sprintf("neither %s nor %s is set", tags[0].class, tags[1].class)
	}
	return strings.Join(parts, "; ")
}
