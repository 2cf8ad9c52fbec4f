package breaker

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Record is one record of /dev/kmsg.
type Record struct {
	// Facility is 0 for what the kernel wrote; the kernel gives what programs write
	// to /dev/kmsg another one, whatever they ask for (devkmsg_write).
	Facility uint32
	// Seq counts records since boot.
	Seq uint64
	// Time is the kernel's clock, since boot.
	Time time.Duration
	Text string
	// Device is what the kernel says the record is about: "+pci:0000:03:00.0" for a
	// PCI device; "" when it says nothing.
	Device string
}

// ParseRecord reads what one read of /dev/kmsg gives, in the form of
// info_print_ext_header and msg_print_ext_body (printk.c):
//
//	PRIORITY,SEQUENCE,MICROSECONDS,FLAGS[,MORE];TEXT\n[ KEY=VALUE\n]...
//
// Bytes that cannot be printed, and backslashes, come as \xNN.
func ParseRecord(b []byte) (Record, error) {
	head, body, ok := strings.Cut(string(b), ";")
	fields := strings.Split(head, ",")
	if !ok || len(fields) < 4 {
		return Record{}, fmt.Errorf("no header of a kernel log record: %q", shorten(string(b)))
	}
	priority, err1 := strconv.ParseUint(fields[0], 10, 32)
	seq, err2 := strconv.ParseUint(fields[1], 10, 64)
	usec, err3 := strconv.ParseInt(fields[2], 10, 64)
	if err := errors.Join(err1, err2, err3); err != nil || usec < 0 || usec > int64(1<<63-1)/int64(time.Microsecond) {
		return Record{}, fmt.Errorf("a wrong header of a kernel log record: %q", shorten(head))
	}
	text, dictionary, _ := strings.Cut(body, "\n")
	r := Record{
		Facility: uint32(priority >> 3), // the lower three bits are the level
		Seq:      seq,
		Time:     time.Duration(usec) * time.Microsecond,
		Text:     unescape(text),
	}
	for line := range strings.SplitSeq(dictionary, "\n") {
		if device, ok := strings.CutPrefix(line, " DEVICE="); ok {
			r.Device = unescape(device)
		}
	}
	return r, nil
}

// unescape undoes msg_add_ext_text. What is no escape stays as it is.
func unescape(s string) string {
	if !strings.Contains(s, `\x`) {
		return s
	}
	var b strings.Builder
	for {
		before, after, found := strings.Cut(s, `\x`)
		b.WriteString(before)
		if !found {
			return b.String()
		}
		if len(after) >= 2 {
			if c, err := strconv.ParseUint(after[:2], 16, 8); err == nil {
				b.WriteByte(byte(c))
				s = after[2:]
				continue
			}
		}
		b.WriteString(`\x`)
		s = after
	}
}

// shorten keeps what a device said short in an error.
func shorten(s string) string {
	const most = 80
	if len(s) > most {
		return s[:most] + "..."
	}
	return s
}
