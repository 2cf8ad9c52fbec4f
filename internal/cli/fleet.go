package cli

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/fleet"
	"github.com/gpreempt/gpreempt/internal/term"
)

func fleetCommand(a *term.App) *cobra.Command {
	status := &cobra.Command{
		Use:   "status",
		Short: "Show the hosts of --hosts, and their sums",
		Args:  term.Operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			hosts, err := hostList(a, cmd)
			if err != nil {
				return err
			}
			f := readFleet(cmd.Context(), a, hosts)
			if err := a.Show(f, func(p *term.Printer) { printFleet(p, f) }); err != nil {
				return err
			}
			return fleetFailure(a, f)
		},
	}
	return term.Noun("fleet", "Many hosts together", status)
}

// fleetView is what gpctl fleet status shows.
type fleetView struct {
	Summary fleetSummary `json:"summary"`
	Hosts   []fleetHost  `json:"hosts"`
}

type fleetSummary struct {
	Hosts     int `json:"host_count"`
	Answering int `json:"answering_count"`
	GPUs      int `json:"gpu_count"`
	Offline   int `json:"offline_count"`
	Suspended int `json:"suspended_count"`
	Leases    int `json:"lease_count"`
	// By how many hosts have what, by name; the mechanism is "none" where nothing can be suspended.
	Mechanisms map[string]int `json:"mechanisms"`
	Policies   map[string]int `json:"policies"`
	Versions   map[string]int `json:"versions"`
	Alarms     map[string]int `json:"alarms"`
}

type fleetHost struct {
	Host string `json:"host"`
	// Error is why it does not answer, "" if it does. Then all else is zero.
	Error     string   `json:"error"`
	Backend   string   `json:"backend"`
	Version   string   `json:"version"`
	Mechanism string   `json:"mechanism"`
	Policy    string   `json:"policy"`
	Draining  bool     `json:"draining"`
	GPUs      int      `json:"gpu_count"`
	Offline   int      `json:"offline_count"`
	Suspended int      `json:"suspended_count"`
	Leases    int      `json:"lease_count"`
	Failures  uint64   `json:"failures"`
	QuietP99  string   `json:"quiet_p99"`
	Alarms    []string `json:"alarms"`

	code int
}

// alarmCodes are the warnings, besides all errors, that concern a fleet: those of jobs that suffer.
var alarmCodes = []string{"JOB_SLOW", "STUCK", "ORPHANED_PAUSE"}

func alarmsOf(st *gpreemptv1.GetStatusResponse) []string {
	codes := []string{}
	for _, w := range st.GetWarnings() {
		if w.GetSeverity() == "error" || slices.Contains(alarmCodes, w.GetCode()) {
			codes = append(codes, w.GetCode())
		}
	}
	slices.Sort(codes)
	return slices.Compact(codes)
}

// readFleet reads all hosts at once, each within --timeout.
func readFleet(ctx context.Context, a *term.App, hosts []fleet.Host) *fleetView {
	f := &fleetView{
		Hosts: make([]fleetHost, len(hosts)),
		Summary: fleetSummary{
			Hosts: len(hosts), Mechanisms: map[string]int{}, Policies: map[string]int{}, Versions: map[string]int{}, Alarms: map[string]int{},
		},
	}
	eachHost(hosts, func(i int, h fleet.Host) { f.Hosts[i] = readHost(ctx, onHost(a, h), h.Name) })
	s := &f.Summary
	for _, h := range f.Hosts {
		if h.Error != "" {
			continue
		}
		s.Answering++
		s.GPUs, s.Offline, s.Suspended, s.Leases = s.GPUs+h.GPUs, s.Offline+h.Offline, s.Suspended+h.Suspended, s.Leases+h.Leases
		s.Mechanisms[h.Mechanism]++
		s.Policies[h.Policy]++
		s.Versions[h.Version]++
		for _, code := range h.Alarms {
			s.Alarms[code]++
		}
	}
	return f
}

func readHost(ctx context.Context, a *term.App, name string) fleetHost {
	var st *gpreemptv1.GetStatusResponse
	var statistics *gpreemptv1.Statistics
	ctx, cancel := context.WithTimeout(ctx, a.Timeout)
	defer cancel()
	err := a.Stream(ctx, func(ctx context.Context, admin term.AdminClient) (err error) {
		if st, err = admin.GetStatus(ctx, &gpreemptv1.GetStatusRequest{}); err != nil {
			return err
		}
		resp, err := admin.GetStatistics(ctx, &gpreemptv1.GetStatisticsRequest{})
		statistics = resp.GetStatistics()
		return err
	})
	if err != nil {
		f := term.AsFailure(err)
		return fleetHost{Host: name, Error: f.Message, Alarms: []string{}, code: f.Code}
	}
	quiet := statistics.GetQuiesceLatency()
	h := fleetHost{
		Host: name, Backend: st.GetBackend(), Version: st.GetVersion(), Policy: st.GetPolicy(), Draining: st.GetDraining(), Mechanism: "none",
		GPUs: int(st.GetGpuCount()), Offline: int(st.GetOfflineCount()), Suspended: int(st.GetSuspendedCount()), Leases: int(st.GetLeaseCount()),
		Failures: statistics.GetFailures(), QuietP99: "-", Alarms: alarmsOf(st),
	}
	if m := st.GetMechanisms(); len(m) > 0 {
		h.Mechanism = m[0]
	}
	if quiet.GetCount() > 0 {
		h.QuietP99 = term.Took(quiet.GetP99())
	}
	return h
}

// printFleet shows the sums, and a row for each host: first those that do not answer, then those with alarms.
func printFleet(p *term.Printer, f *fleetView) {
	s := f.Summary
	state := term.Cell{Text: fmt.Sprintf("%d answer", s.Answering), Style: term.StyleGood}
	if s.Answering < s.Hosts {
		state = term.Cell{Text: fmt.Sprintf("%d of them answer", s.Answering), Style: term.StyleBad}
	}
	p.Line(term.Count(s.Hosts, "host")+", ", state, fmt.Sprintf("; %s, %d of %s suspended, %s", term.Count(s.GPUs, "GPU"), s.Suspended,
		term.Count(s.Offline, "offline target"), term.Count(s.Leases, "lease")))
	for _, by := range []struct {
		name string
		n    map[string]int
	}{{"mechanisms", s.Mechanisms}, {"policies", s.Policies}, {"versions", s.Versions}, {"alarms", s.Alarms}} {
		if len(by.n) > 0 {
			p.Linef("  %-10s  %s", by.name, countsOf(by.n))
		}
	}
	p.Linef("")
	rows := slices.Clone(f.Hosts)
	trouble := func(h fleetHost) int {
		switch {
		case h.Error != "":
			return 0
		case len(h.Alarms) > 0:
			return 1
		}
		return 2
	}
	slices.SortStableFunc(rows, func(a, b fleetHost) int { return cmp.Compare(trouble(a), trouble(b)) })
	t := p.Table("", term.Columns{"HOST", "VERSION", "MECHANISM", "POLICY", ">GPUS", ">OFFLINE", ">SUSPENDED", ">LEASES", ">FAILURES", ">QUIET P99", "ALARMS", "+BACKEND"})
	for _, h := range rows {
		if h.Error != "" {
			t.Row(term.Cell{Text: h.Host, Style: term.StyleBad}, "-", "-", "-", "-", "-", "-", "-", "-", "-", term.Cell{Text: "does not answer", Style: term.StyleBad}, "-")
			continue
		}
		policy := h.Policy
		if h.Draining {
			policy += ", draining"
		}
		t.Row(h.Host, h.Version, h.Mechanism, policy, h.GPUs, h.Offline, h.Suspended, h.Leases, h.Failures, h.QuietP99,
			term.Cell{Text: term.Or(strings.Join(h.Alarms, ","), "-"), Style: term.StyleNote}, h.Backend)
	}
	t.Flush()
}

// countsOf lists names with how many hosts have them, most first.
func countsOf(by map[string]int) string {
	names := slices.SortedFunc(maps.Keys(by), func(a, b string) int { return cmp.Or(cmp.Compare(by[b], by[a]), cmp.Compare(a, b)) })
	for i, name := range names {
		names[i] = fmt.Sprintf("%s %d", name, by[name])
	}
	return strings.Join(names, ", ")
}

// fleetFailure reports the hosts that do not answer.
func fleetFailure(a *term.App, f *fleetView) error {
	results := make([]hostResult, len(f.Hosts))
	for i, h := range f.Hosts {
		results[i].Host = h.Host
		if h.Error != "" {
			results[i].Error = &hostError{ExitCode: h.code, Message: h.Error}
		}
	}
	return sumUp(a, results)
}
