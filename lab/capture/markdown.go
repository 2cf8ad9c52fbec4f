package capture

import (
	"fmt"
	"io"
	"strings"

	"github.com/gpreempt/gpreempt/lab/hiplog"
)

// Report is a capture of one or two cases.
type Report struct {
	Dir     string `json:"dir"`
	Origin  string `json:"origin"`
	Backend string `json:"backend"`
	// Cases are the rest of what is known of each.
	Cases   []Summary `json:"cases"`
	Figures []Figure  `json:"figures"`
	// Missing are the sources without a recording, each with its reason once.
	Missing []string `json:"missing"`
	// Learn says how to learn the figures that are unknown.
	Learn []string `json:"learn"`
	// Comparison is that of the HIP logs of two cases, nil without both.
	Comparison *hiplog.Comparison `json:"comparison"`
}

// Summary is what a case did.
type Summary struct {
	Name    string  `json:"name"`
	Work    string  `json:"work"` // command line, pid or container
	Seconds float64 `json:"seconds"`
	// Steps is the work done, in Unit, 0 if it is not known.
	Steps float64 `json:"steps"`
	Unit  string  `json:"unit,omitempty"`
	PIDs  []int32 `json:"pids"`
	// Device is the line of its output that begins with "device", "" without one.
	Device string `json:"device,omitempty"`
	Seen   *Seen  `json:"seen"`
	// Faults are what went wrong with its run.
	Faults []string `json:"faults,omitempty"`
}

// Rate says how fast a case worked.
func (s *Summary) Rate() string {
	if s.Steps <= 0 || s.Seconds <= 0 {
		return "unknown progress"
	}
	return fmt.Sprintf("%.3g %s/s", s.Steps/s.Seconds, s.Unit)
}

// Headers are those of the table of figures.
func (r *Report) Headers() []string {
	headers := []string{"figure", "target"}
	for i := range r.Cases {
		headers = append(headers, r.Cases[i].Name)
	}
	return append(headers, "result")
}

// Row returns the cells of a figure below Headers.
func (f *Figure) Row() []string {
	result := string(f.Result)
	if len(f.MissedBy) > 0 {
		result += " by " + strings.Join(f.MissedBy, ", ")
	}
	return append(append([]string{f.Name, f.Target}, f.Values...), result)
}

// Markdown writes the report as a page.
func (r *Report) Markdown(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "# Capture on %s: %s\n\n**%s**\n\n", r.Backend, strings.ToUpper(r.Origin), Verdict(r.Figures, r.Cases))
	for i := range r.Cases {
		c := &r.Cases[i]
		fmt.Fprintf(&b, "- **%s**: `%s`, %.0f s, %s\n", c.Name, strings.ReplaceAll(c.Work, "`", "'"), c.Seconds, c.Rate())
		if c.Device != "" {
			fmt.Fprintf(&b, "  - %s\n", c.Device)
		}
		for _, fault := range c.Faults {
			fmt.Fprintf(&b, "  - %s\n", fault)
		}
	}
	b.WriteString("\n")
	line := func(cells []string) {
		fmt.Fprintf(&b, "| %s |\n", strings.Join(cells, " | "))
	}
	line(r.Headers())
	line(strings.Split(strings.Repeat("---,", len(r.Cases)+2)+"---", ","))
	for i := range r.Figures {
		line(r.Figures[i].Row())
	}
	b.WriteString("\n")
	for _, text := range append(append([]string{}, r.Missing...), r.Learn...) {
		fmt.Fprintf(&b, "- %s\n", text)
	}
	if c := r.Comparison; c != nil {
		fmt.Fprintf(&b, "\n## How %s and %s can share a GPU, by their HIP logs\n\n%s\n\n", r.Cases[0].Name, r.Cases[1].Name, c.Advice.Text)
		for _, reason := range c.Advice.Reasons {
			fmt.Fprintf(&b, "- reason: %s\n", reason)
		}
		for _, limit := range c.Advice.Limits {
			fmt.Fprintf(&b, "- limit: %s\n", limit)
		}
		fmt.Fprintf(&b, "\n| | %s | %s |\n|---|---|---|\n", r.Cases[0].Name, r.Cases[1].Name)
		fmt.Fprintf(&b, "| queues | %d | %d |\n| only there | %d | %d |\n", len(c.A.Queues), len(c.B.Queues), c.OnlyA, c.OnlyB)
		fmt.Fprintf(&b, "| dispatches | %d | %d |\n", c.A.Dispatches, c.B.Dispatches)
		fmt.Fprintf(&b, "\nQueues in both: %d. Kernels in both: %d of %d.\n", c.Common, c.CommonKernels, c.DistinctKernels)
	}
	_, err := io.WriteString(w, b.String())
	return err
}
