package main

import (
	"fmt"
	"html"
	"math"
	"strings"
)

// chart is one figure of all arms.
type chart struct {
	title string
	bars  []bar
}

// bar is a figure of an arm: its value in the chart's unit, and the text beside it.
type bar struct {
	arm   Arm
	value float64
	text  string
}

// charts returns what the demo is about: what inference sees, and what training keeps.
func (r *Result) charts() []chart {
	latency := chart{title: "p99 latency of inference (shorter is better)"}
	work := chart{title: "work of the training job, as a share of training alone (longer is better)"}
	for _, a := range r.Arms {
		latency.bars = append(latency.bars, bar{a.Arm, a.Online.P99, fmt.Sprintf("%.1f ms", a.Online.P99)})
		b := bar{a.Arm, a.OfflineShare, fmt.Sprintf("%.0f %%", 100*a.OfflineShare)}
		if a.Arm == OnlineAlone {
			b = bar{a.Arm, 0, "no training"}
		}
		work.bars = append(work.bars, b)
	}
	return []chart{latency, work}
}

// longest returns the greatest value of a chart, and 1 if no value is positive.
func (c chart) longest() float64 {
	longest := 0.0
	for _, b := range c.bars {
		longest = max(longest, b.value)
	}
	if longest <= 0 {
		return 1
	}
	return longest
}

// barCells is the length of the longest bar in a terminal.
const barCells = 36

// bars returns the charts for a terminal.
func (r *Result) bars() string {
	var b strings.Builder
	for _, c := range r.charts() {
		fmt.Fprintf(&b, "%s: %s\n", strings.ToUpper(r.kind()), c.title)
		for _, bar := range c.bars {
			line := cells(bar.value / c.longest() * barCells)
			fmt.Fprintf(&b, "%23s  %s%s\n", bar.arm, line, bar.text)
		}
		b.WriteByte('\n')
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// cells returns a bar of a length in cells, to an eighth, and the space after it.
func cells(length float64) string {
	eighths := int(math.Round(length * 8))
	bar := strings.Repeat("█", eighths/8)
	if rest := eighths % 8; rest > 0 {
		bar += string([]rune("▏▎▍▌▋▊▉")[rest-1])
	}
	if bar != "" {
		bar += " "
	}
	return bar
}

// pictureStyle has colours for a light and for a dark page, and its own background.
const pictureStyle = `<style>
.back{fill:#ffffff}.text{fill:#1f2328}.note{fill:#59636e}.alone{fill:#818b98}.without{fill:#cf222e}.with{fill:#0969da}
@media (prefers-color-scheme:dark){.back{fill:#0d1117}.text{fill:#f0f6fc}.note{fill:#9198a1}.alone{fill:#656c76}.without{fill:#f85149}.with{fill:#4493f8}}
</style>
`

// looks has the style of each arm.
var looks = map[Arm]string{OnlineAlone: "alone", Shared: "without", Protected: "with"}

// svg returns the charts as a picture.
func (r *Result) svg() string {
	const (
		width, left, longest = 720, 190, 420
		row                  = 28
	)
	var b strings.Builder
	y := 0
	text := func(class string, x, size int, anchor, words string) {
		fmt.Fprintf(&b, `<text class="%s" x="%d" y="%d" font-size="%d" text-anchor="%s">%s</text>`+"\n", class, x, y, size, anchor, html.EscapeString(words))
	}
	title := fmt.Sprintf("%s %s: inference beside training, without and with gpreempt", strings.ToUpper(r.kind()), r.Machine)
	y += 32
	text("text", 16, 17, "start", title)
	y += 22
	text("note", 16, 13, "start", fmt.Sprintf("%.0f requests/s of %.1f ms, and a training job that keeps the GPU busy. No figure was measured on a real GPU.", r.RequestsPerSecond, r.RequestMS))
	for _, c := range r.charts() {
		y += 36
		text("text", 16, 14, "start", c.title)
		y += 8
		for _, bar := range c.bars {
			length := int(math.Round(bar.value / c.longest() * longest))
			fmt.Fprintf(&b, `<rect class="%s" x="%d" y="%d" width="%d" height="18" rx="2"/>`+"\n", looks[bar.arm], left, y+5, length)
			y += 19
			text("text", left-10, 13, "end", string(bar.arm))
			text("text", left+length+8, 13, "start", bar.text)
			y += row - 19
		}
	}
	return fmt.Sprintf(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" role="img" font-family="system-ui,-apple-system,'Segoe UI',sans-serif">
<title>%s</title>
%s<rect class="back" width="100%%" height="100%%"/>
%s</svg>
`, width, y+16, html.EscapeString(title), pictureStyle, b.String())
}
