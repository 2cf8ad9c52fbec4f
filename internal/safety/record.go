package safety

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Record is one record of /dev/kmsg.
type Record struct {
	// Facility is 0 for records of the kernel. Records that programs write to /dev/kmsg
	// have another one, even if they ask for 0 (devkmsg_write).
	Facility uint32
	// Seq counts records since boot.
	Seq uint64
	// Time is the kernel's clock, since boot.
	Time time.Duration
	Text string
	// Device is the device that the kernel attached to the record: "+pci:0000:03:00.0"
	// for a PCI device; "" for none.
	Device string
}

// ParseRecord parses the result of one read of /dev/kmsg, in the form of
// info_print_ext_header and msg_print_ext_body (printk.c):
//
//	PRIORITY,SEQUENCE,MICROSECONDS,FLAGS[,MORE];TEXT\n[ KEY=VALUE\n]...
//
// Unprintable bytes and backslashes are escaped as \xNN.
func ParseRecord(b []byte) (Record, error) {
	head, body, ok := strings.Cut(string(b), ";")
	fields := strings.Split(head, ",")
	if !ok || len(fields) < 4 {
		return Record{}, fmt.Errorf("no header of a kernel log record: %.80q", string(b))
	}
	priority, err1 := strconv.ParseUint(fields[0], 10, 32)
	seq, err2 := strconv.ParseUint(fields[1], 10, 64)
	usec, err3 := strconv.ParseInt(fields[2], 10, 64)
	if err := errors.Join(err1, err2, err3); err != nil || usec < 0 || usec > int64(1<<63-1)/int64(time.Microsecond) {
		return Record{}, fmt.Errorf("invalid header of a kernel log record: %.80q", head)
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

// unescape reverses msg_add_ext_text. Text that is not an escape does not change.
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
