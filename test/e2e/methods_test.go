package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
	"time"
)

// hostileMethodsEnv sets the duration of each abuse of each method, and has the times of other
// clients judged, which requires a machine on which nothing else runs.
const hostileMethodsEnv = "GPREEMPT_HOSTILE"

// hostileOnlyEnv selects the rows whose "TRANSPORT/ABUSE/METHOD" contains it.
const hostileOnlyEnv = "GPREEMPT_HOSTILE_ONLY"

// The judgement of times.
const (
	// slices is into how many parts each abuse is divided, with as many without it between.
	hostileSlices = 4
	// mostSlower bounds the p99 of the worst other client, as a multiple of its p99 in the
	// slices without the abuse.
	mostSlower = 3
	// hostileAttempts is how often a time is measured before it is a miss. Only times are
	// measured again: an answer that is missing once is a miss.
	hostileAttempts = 3
	hostileTable    = "../../build/hostile.json"
)

// cell is a row of the table.
type cell struct {
	Method    string `json:"method"`
	Transport string `json:"transport"`
	Abuse     string `json:"abuse"`
	// Requests were sent in abuse, and Ended connections refused or closed.
	Requests uint64 `json:"requests"`
	Ended    uint64 `json:"connections_ended"`
	// Memory is the most resident memory of the daemon, in KiB.
	Memory int `json:"max_rss_kib"`
	// Processors is the processor time of the daemon during the abuse, as a multiple of that time.
	Processors float64 `json:"processors"`
	// Announcements and Answers of admins meanwhile.
	Announcements int `json:"announcements"`
	Answers       int `json:"admin_answers"`
	// Without and With are the p99 of the worst other client, and Slower their ratio; 0 when
	// times are not judged.
	Without  float64 `json:"p99_without_us,omitempty"`
	With     float64 `json:"p99_with_us,omitempty"`
	Slower   float64 `json:"slower,omitempty"`
	Worst    string  `json:"worst_client,omitempty"`
	Attempts int     `json:"attempts"`
	// Misses are the invariants that do not hold.
	Misses []string `json:"misses,omitempty"`
}

// TestHostileClientsOfEveryMethod abuses every method that is served, over each transport
// and in every way of methodAbuses. Other clients and admins are served meanwhile, and the
// daemon stays below the limit of the unit. GPREEMPT_HOSTILE has it judge how much slower others
// are served.
func TestHostileClientsOfEveryMethod(t *testing.T) {
	length, judged := 60*time.Millisecond, false
	if text := os.Getenv(hostileMethodsEnv); text != "" {
		var err error
		if length, err = time.ParseDuration(text); err != nil {
			t.Fatal(err)
		}
		judged = true
	}
	s := newArena(t, judged)
	var all []cell
	for _, transport := range s.transports {
		for _, a := range methodAbuses {
			for _, m := range s.methods(transport) {
				if !strings.Contains(transport+"/"+a.name+"/"+short(m.Method), os.Getenv(hostileOnlyEnv)) {
					continue
				}
				c := s.judge(transport, a, m, length, judged)
				all = append(all, c)
				for _, miss := range c.Misses {
					t.Errorf("%s, %s, %s: %s", c.Method, c.Transport, c.Abuse, miss)
				}
				if judged {
					writeCells(t, all)
				}
			}
		}
	}
	s.eventually("the hostile connections leave no descriptor", func() bool { return s.fds() <= s.quietFDs })
	t.Log(tableOf(all, s.limit, judged))
}

// slice has the honest clients work for a while, and returns their times by transport.
func (s *arena) slice(length time.Duration, also func()) map[string]played {
	s.t.Helper()
	for transport, p := range s.honest {
		if o, known := s.orders[transport]; known {
			p.begin(o)
		}
	}
	if also != nil {
		also()
	}
	<-time.After(length)
	all := map[string]played{}
	for transport, p := range s.honest {
		all[transport] = p.end()
	}
	return all
}

// judge measures a cell, and repeats it when only the times miss.
func (s *arena) judge(transport string, a methodAbuse, o order, length time.Duration, judged bool) (c cell) {
	s.t.Helper()
	for attempt := 1; ; attempt++ {
		c = s.measure(transport, a, o, length, judged)
		c.Attempts = attempt
		if !judged || c.Slower <= mostSlower {
			return c
		}
		if len(c.Misses) > 0 || attempt == hostileAttempts {
			c.Misses = append(c.Misses, fmt.Sprintf("p99 of the client over %s is %.0f us, %.1f times that without the abuse, want at most %d times, in %d attempts",
				c.Worst, c.With, c.Slower, mostSlower, attempt))
			return c
		}
	}
}

func (s *arena) measure(transport string, a methodAbuse, o order, length time.Duration, judged bool) cell {
	s.t.Helper()
	c := cell{Method: short(o.Method), Transport: transport, Abuse: a.name}
	miss := func(format string, args ...any) { c.Misses = append(c.Misses, fmt.Sprintf(format, args...)) }
	// The kernel forgets the maximum of VmHWM.
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", s.process.Process.Pid), []byte("5"), 0o200); err != nil {
		s.t.Fatal(err)
	}
	rounds := 1
	if judged {
		rounds = hostileSlices
	}
	with, without := map[string][]time.Duration{}, map[string][]time.Duration{}
	add := func(to map[string][]time.Duration, from map[string]played) {
		for transport, is := range from {
			to[transport] = append(to[transport], is.Took...)
			if is.Failure != "" {
				miss("the honest client over %s got: %s", transport, is.Failure)
			}
		}
	}
	var used int // in ticks of 10 ms
	var elapsed time.Duration
	for range rounds {
		part := length / time.Duration(rounds)
		if judged {
			add(without, s.slice(part, nil))
		}
		all, orders := s.cast(transport, a, o)
		before, began := s.cpu(), time.Now()
		for i, p := range all {
			p.begin(orders[i])
		}
		add(with, s.slice(part, func() {
			for _, ask := range s.admins {
				if err := ask(); err != nil {
					miss("an admin got: %v", err)
				}
				c.Answers++
			}
		}))
		used, elapsed = used+s.cpu()-before, elapsed+time.Since(began)
		for _, p := range all {
			is := p.end()
			c.Requests += is.Sent
			c.Ended += is.Ended
			if is.Failure != "" {
				s.t.Fatalf("the hostile client: %s", is.Failure)
			}
		}
	}
	c.Processors = float64(used) / 100 / elapsed.Seconds()
	if c.Memory = s.kib("VmHWM"); c.Memory > s.limit {
		miss("the daemon has %d KiB, want at most %d", c.Memory, s.limit)
	}
	for transport, took := range with {
		c.Announcements += len(took)
		if judged {
			if after, before := percentile(took, 99), percentile(without[transport], 99); c.Slower < float64(after)/float64(before) {
				c.Worst, c.Slower = transport, float64(after)/float64(before)
				c.With, c.Without = float64(after.Nanoseconds())/1e3, float64(before.Nanoseconds())/1e3
			}
		}
	}
	return c
}

func writeCells(t *testing.T, all []cell) {
	t.Helper()
	text, err := json.MarshalIndent(all, "", "  ")
	if err == nil {
		err = os.MkdirAll(filepath.Dir(hostileTable), 0o755)
	}
	if err == nil {
		err = os.WriteFile(hostileTable, append(text, '\n'), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// tableOf returns the table for people: each method with its worst figures over all abuses, then
// each abuse over all methods.
func tableOf(all []cell, limit int, judged bool) string {
	var b bytes.Buffer
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintf(&b, "\nhostile clients of every method; the daemon may have %d MiB; announcements, admin calls and requests are counted during the abuse", limit>>10)
	if judged {
		fmt.Fprintf(&b, "; slower: p99 of the worst honest client as a multiple of its p99 without the abuse, at most %d; a cell that is slower is measured up to %d times", mostSlower, hostileAttempts)
	}
	fmt.Fprintln(&b)
	rows := func(title string, key func(cell) string) {
		fmt.Fprintf(w, "%s\ttransport\trequests\tended\tmax CPUs\tmax MiB\tannouncements\tadmin\tmissed\tslower\tby\trepeated\n", title)
		var keys []string
		of := map[string][]cell{}
		for _, c := range all {
			k := key(c) + "\t" + c.Transport
			if !slices.Contains(keys, k) {
				keys = append(keys, k)
			}
			of[k] = append(of[k], c)
		}
		for _, k := range keys {
			var sum cell
			repeated, missed := 0, 0
			for _, c := range of[k] {
				sum.Requests, sum.Ended = sum.Requests+c.Requests, sum.Ended+c.Ended
				sum.Announcements, sum.Answers = sum.Announcements+c.Announcements, sum.Answers+c.Answers
				sum.Memory, sum.Processors = max(sum.Memory, c.Memory), max(sum.Processors, c.Processors)
				if c.Slower > sum.Slower {
					sum.Slower, sum.Worst = c.Slower, c.Abuse
					if title == "abuse" {
						sum.Worst = c.Method
					}
				}
				repeated += c.Attempts - 1
				missed += len(c.Misses)
			}
			times := "not judged"
			if judged {
				times = fmt.Sprintf("%.2f\t%s\t%d", sum.Slower, sum.Worst, repeated)
			}
			fmt.Fprintf(w, "%s\t%d\t%d\t%.2f\t%d\t%d\t%d\t%d\t%s\n", k, sum.Requests, sum.Ended, sum.Processors, sum.Memory>>10, sum.Announcements, sum.Answers, missed, times)
		}
		w.Flush()
		fmt.Fprintln(&b)
	}
	rows("method", func(c cell) string { return c.Method })
	rows("abuse", func(c cell) string { return c.Abuse })
	return b.String()
}
