package discovery

import (
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// SlurmRecords has a file for each Slurm job on this host, named after its number. The
// prolog, which is root's, writes it before the first task starts, and the epilog removes
// it (deploy/slurm).
const SlurmRecords = "run/gpreempt/slurm"

// maxSlurmValue bounds a value of a record, in bytes.
const maxSlurmValue = 256

// slurm returns what the prolog recorded of a job, zero for 0. Without a record that can be
// read and is valid, all is unknown, and makes no process offline.
func (f *FS) slurm(job uint32) gpreempt.SlurmJob {
	if job == 0 {
		return gpreempt.SlurmJob{}
	}
	b, err := f.read(SlurmRecords + "/" + strconv.FormatUint(uint64(job), 10))
	if err != nil {
		return gpreempt.SlurmJob{}
	}
	record, _ := ParseSlurmRecord(b)
	return record
}

// ParseSlurmRecord parses the record of a job: lines KEY=VALUE, where KEY is partition,
// account or qos. It reports whether the record is valid and complete: each key at most
// once, values without control characters, the last line with its end. Otherwise it
// returns none of the values, because with accounting off a user chooses some of them.
func ParseSlurmRecord(b []byte) (gpreempt.SlurmJob, bool) {
	var j gpreempt.SlurmJob
	if len(b) == 0 || b[len(b)-1] != '\n' || !utf8.Valid(b) {
		return j, false
	}
	seen := map[string]bool{}
	for line := range strings.SplitSeq(string(b[:len(b)-1]), "\n") {
		key, value, found := strings.Cut(line, "=")
		if !found || seen[key] || len(value) > maxSlurmValue || strings.ContainsFunc(value, unicode.IsControl) {
			return gpreempt.SlurmJob{}, false
		}
		seen[key] = true
		switch key {
		case "partition":
			j.Partition = value
		case "account":
			j.Account = value
		case "qos":
			j.QOS = value
		default:
			return gpreempt.SlurmJob{}, false
		}
	}
	return j, true
}
