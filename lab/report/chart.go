package report

import (
	"bytes"
	"fmt"
	"html"
	"html/template"
	"image/color"
	"math"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// The size of a chart. A phone of 360 pixels shows it at seven tenths, with text of 9 pixels.
const (
	chartWidth  = 480
	chartHeight = 270
	laneHeight  = 24
	textSize    = 12.5
	// Browsers have other fonts than gonum measures; this leaves space for wider ones.
	measuredSize = 14
)

// seriesInks is how many series of a chart differ in colour.
const seriesInks = 7

// ink is a colour of the page's style sheet: text, grid, or the series from inkSeries.
type ink uint8

const (
	inkText ink = iota
	inkGrid
	inkSeries
)

// RGBA implements color.Color by a colour that inline finds again.
func (i ink) RGBA() (r, g, b, a uint32) {
	return color.RGBA{R: 0x12, G: 0x34, B: 0x50 + uint8(i), A: 0xff}.RGBA()
}

// hex is how vgsvg writes the colour.
func (i ink) hex() string {
	r, g, b, opaque := i.RGBA()
	scale := 255 / float64(opaque)
	return fmt.Sprintf("#%02X%02X%02X", int(float64(r)*scale), int(float64(g)*scale), int(float64(b)*scale))
}

// variable is the name in the style sheet.
func (i ink) variable() string {
	switch i {
	case inkText:
		return "--dim"
	case inkGrid:
		return "--line"
	default:
		return fmt.Sprintf("--s%d", i-inkSeries)
	}
}

// seriesInk returns the colour of series n.
func seriesInk(n int) ink { return inkSeries + ink(n%seriesInks) }

// dashes distinguish lines without colours, also of more series than there are colours.
var dashes = [][]vg.Length{nil, {6, 3}, {2, 2}, {9, 3, 2, 3}}

// lineStyle returns the style of the line of series n.
func lineStyle(n int) draw.LineStyle {
	return draw.LineStyle{Color: seriesInk(n), Width: 1.8, Dashes: dashes[n%len(dashes)]}
}

// axis is one axis of a chart. Its range is that of the data and of low and high, unless these
// are equal.
type axis struct {
	label     string
	log       bool
	low, high float64
	zero      bool     // begins at 0
	lanes     []string // names of y = 0.5, 1.5, ... from below
}

// series is a line of a chart, or a set of points.
type series struct {
	name   string
	number int // decides the colour and the dashes
	points plotter.XYs
	steps  bool
	marks  bool     // points instead of a line
	labels []string // with marks: texts beside them; without: texts instead of a line
}

// box is a filled rectangle of a chart, in the colour of a series.
type box struct {
	x0, x1, y0, y1 float64
	series         int
}

// figure is a chart before it is drawn.
type figure struct {
	title string
	// alt says in a sentence what the chart shows.
	alt    string
	x, y   axis
	series []series
	boxes  []box
	// legend are the names of the series of boxes.
	legend []string
}

// chart is a drawn figure.
type chart struct {
	Title  string
	Alt    string
	SVG    template.HTML
	Legend []legendEntry
}

// legendEntry names a series of a chart.
type legendEntry struct {
	Name string
	// Dashes is the stroke-dasharray of a line; "fill" marks a box.
	Dashes string
	Style  template.CSS
	ink    ink
}

// boxes is a plotter of rectangles.
type boxes []box

// Plot implements plot.Plotter.
func (bs boxes) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	for _, b := range bs {
		// A short span is visible, too.
		left, right := x(b.x0), max(x(b.x1), x(b.x0)+0.4)
		low, high := y(b.y0), y(b.y1)
		c.FillPolygon(seriesInk(b.series), []vg.Point{{X: left, Y: low}, {X: right, Y: low}, {X: right, Y: high}, {X: left, Y: high}})
	}
}

// DataRange implements plot.DataRanger.
func (bs boxes) DataRange() (xmin, xmax, ymin, ymax float64) {
	xmin, xmax, ymin, ymax = math.Inf(1), math.Inf(-1), math.Inf(1), math.Inf(-1)
	for _, b := range bs {
		xmin, xmax = min(xmin, b.x0), max(xmax, b.x1)
		ymin, ymax = min(ymin, b.y0), max(ymax, b.y1)
	}
	return xmin, xmax, ymin, ymax
}

// draw draws the figure.
func (f *figure) draw() chart {
	p := plot.New()
	p.BackgroundColor = nil
	p.Add(&plotter.Grid{Vertical: gridLine, Horizontal: gridLine})
	if len(f.boxes) > 0 {
		p.Add(boxes(f.boxes))
	}
	c := chart{Title: f.title, Alt: f.alt}
	for i, name := range f.legend {
		c.Legend = append(c.Legend, legendEntry{Name: name, Dashes: "fill", Style: cssColour(i), ink: seriesInk(i)})
	}
	for _, s := range f.series {
		entry := legendEntry{Name: s.name, Dashes: dashArray(s.number), Style: cssColour(s.number), ink: seriesInk(s.number)}
		switch {
		case s.marks:
			entry.Dashes = "fill"
			p.Add(&plotter.Scatter{XYs: s.points, GlyphStyle: draw.GlyphStyle{Color: seriesInk(s.number), Radius: 4, Shape: draw.CircleGlyph{}}})
			if len(s.labels) == len(s.points) {
				p.Add(labels(s.points, s.labels, 3))
			}
		case len(s.labels) > 0:
			p.Add(labels(s.points, s.labels, -4.5))
		default:
			line := &plotter.Line{XYs: s.points, LineStyle: lineStyle(s.number)}
			if s.steps {
				line.StepStyle = plotter.PostStep
			}
			p.Add(line)
		}
		if s.name != "" {
			c.Legend = append(c.Legend, entry)
		}
	}
	f.x.apply(&p.X)
	f.y.apply(&p.Y)
	height := vg.Length(chartHeight)
	if n := len(f.y.lanes); n > 0 {
		height = vg.Length(60 + laneHeight*n)
	}
	canvas := vgsvg.NewWith(vgsvg.UseWH(chartWidth, height))
	p.Draw(draw.New(canvas))
	var out bytes.Buffer
	_, err := canvas.WriteTo(&out)
	if err != nil {
		panic(err) // a buffer accepts everything
	}
	c.SVG = inline(out.String(), f.alt, float64(height))
	return c
}

var gridLine = draw.LineStyle{Color: inkGrid, Width: 0.7}

// labels returns texts to the right of points, so much above them.
func labels(points plotter.XYs, texts []string, above vg.Length) *plotter.Labels {
	style := draw.TextStyle{Color: inkText, Font: plot.DefaultFont, Handler: plot.DefaultTextHandler}
	style.Font.Variant, style.Font.Size = "Sans", measuredSize
	l := &plotter.Labels{XYs: points, Labels: texts, Offset: vg.Point{X: 5, Y: above}}
	for range texts {
		l.TextStyle = append(l.TextStyle, style)
	}
	return l
}

// apply sets range, marks and style of an axis of the plot, whose range is that of the data.
func (a *axis) apply(to *plot.Axis) {
	if a.low != a.high {
		to.Min, to.Max = min(to.Min, a.low), max(to.Max, a.high)
	}
	if math.IsInf(to.Min, 0) || math.IsInf(to.Max, 0) { // no data
		to.Min, to.Max = 0, 1
	}
	if a.zero {
		to.Min, to.Max = min(to.Min, 0), max(to.Max, 0)
		if to.Max == 0 {
			to.Max = 1
		}
	}
	if to.Min == to.Max {
		by := max(math.Abs(to.Min)/10, 1e-3)
		to.Min, to.Max = to.Min-by, to.Max+by
	}
	to.Tick.Marker = marker{}
	if a.log {
		to.Max = max(to.Max, 2*least)
		to.Min = min(max(to.Min, least), to.Max/1.2)
		to.Scale, to.Tick.Marker = plot.LogScale{}, marker{log: true}
	}
	if len(a.lanes) > 0 {
		var named plot.ConstantTicks
		for i, name := range a.lanes {
			named = append(named, plot.Tick{Value: float64(i) + 0.5, Label: cut(name, 22)})
		}
		to.Min, to.Max, to.Tick.Marker, to.Tick.Length = 0, float64(len(a.lanes)), named, 0
	}
	to.Label.Text = a.label
	to.Label.Padding = 3
	to.Padding = 3
	to.LineStyle = draw.LineStyle{Color: inkText, Width: 0.8}
	to.Tick.LineStyle = to.LineStyle
	if to.Tick.Length > 0 {
		to.Tick.Length = 5
	}
	for _, style := range []*draw.TextStyle{&to.Label.TextStyle, &to.Tick.Label} {
		style.Color, style.Font.Variant, style.Font.Size = inkText, "Sans", measuredSize
	}
}

// least is the least value on a logarithmic axis, in ms.
const least = 1e-3

// marker puts marks at 1, 2 or 5 times powers of ten.
type marker struct{ log bool }

// Ticks implements plot.Ticker.
func (m marker) Ticks(low, high float64) []plot.Tick {
	var marks []plot.Tick
	if m.log {
		factors := []float64{1, 2, 5}
		if math.Log10(high/low) > 2.5 {
			factors = factors[:1]
		}
		for e := math.Floor(math.Log10(low)); e <= math.Ceil(math.Log10(high)); e++ {
			for _, factor := range factors {
				if v := factor * math.Pow(10, e); v >= low*0.999 && v <= high*1.001 {
					marks = append(marks, plot.Tick{Value: v, Label: fmt.Sprintf("%.4g", v)})
				}
			}
		}
		if len(marks) > 1 {
			return marks
		}
		marks = nil
	}
	step := math.Pow(10, math.Floor(math.Log10(high-low)))
	for _, divide := range []float64{5, 2, 1} {
		if (high-low)/(step/divide) <= 6 {
			step /= divide
			break
		}
	}
	decimals := max(0, int(-math.Floor(math.Log10(step)+1e-9)))
	first := math.Ceil(low/step - 1e-9)
	for i := range 10 {
		v := (first + float64(i)) * step
		if v > high+step*1e-9 {
			break
		}
		if math.Abs(v) < step/1e6 {
			v = 0 // and not -0
		}
		label := fmt.Sprintf("%.*f", decimals, v)
		if math.Abs(v) >= 1e6 {
			label = fmt.Sprintf("%.8g", v)
		}
		marks = append(marks, plot.Tick{Value: v, Label: label})
	}
	return marks
}

func cssColour(n int) template.CSS {
	return template.CSS("color:var(" + seriesInk(n).variable() + ")") //nolint:gosec // G203: a constant and a number
}

func dashArray(n int) string {
	var parts []string
	for _, d := range dashes[n%len(dashes)] {
		parts = append(parts, fmt.Sprintf("%g", float64(d)))
	}
	return strings.Join(parts, " ")
}

// inline makes of an SVG document an element for the page: it takes the width of its place, its
// colours are variables, its font is that of the page, and it has a text for those who do not
// see it.
func inline(document, alt string, height float64) template.HTML {
	_, body, _ := strings.Cut(document, "<svg")
	_, body, _ = strings.Cut(body, ">")
	replace := []string{"font-family:Liberation Sans;font-variant:normal;font-weight:normal;font-style:normal;", "", "\n\t", " ", fmt.Sprintf("font-size:%dpx", measuredSize), fmt.Sprintf("font-size:%gpx", textSize)}
	for i := range inkSeries + seriesInks {
		replace = append(replace, i.hex(), "var("+i.variable()+")")
	}
	body = strings.NewReplacer(replace...).Replace(body)
	//nolint:gosec // G203: vgsvg escapes the texts of the chart
	return template.HTML(fmt.Sprintf(`<svg viewBox="0 0 %d %g" role="img" aria-label="%s">`, chartWidth, height, html.EscapeString(alt)) + body)
}

// picture makes of a chart an SVG document with its title, its legend and the colours of both
// schemes.
func picture(c *chart) string {
	const top, row, left = 26, 18, 60
	var size struct{ width, height int }
	element := string(c.SVG)
	if _, err := fmt.Sscanf(element, `<svg viewBox="0 0 %d %d"`, &size.width, &size.height); err != nil {
		panic(err) // inline wrote it
	}
	height := top + size.height + row*len(c.Legend) + 8
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" role="img" aria-label="%s">
<style>
%ssvg { background: var(--card); font-family: "Liberation Sans", Arial, Helvetica, sans-serif; }
</style>
<text x="10" y="18" style="font-size:13px;font-weight:bold;fill:var(--text)">%s</text>
`, size.width, height, size.width, height, html.EscapeString(c.Alt), colours(), html.EscapeString(c.Title))
	fmt.Fprintf(&b, `<svg y="%d" width="%d" height="%d"`, top, size.width, size.height)
	b.WriteString(strings.TrimPrefix(element, "<svg"))
	for i, entry := range c.Legend {
		y := top + size.height + row*i + 12
		fmt.Fprintf(&b, `<circle cx="%d" cy="%d" r="5" style="fill:var(%s)"/><text x="%d" y="%d" style="font-size:%gpx;fill:var(--dim)">%s</text>`+"\n",
			left, y-4, entry.ink.variable(), left+12, y, textSize, html.EscapeString(entry.Name))
	}
	b.WriteString("</svg>\n")
	return b.String()
}

// colours returns the variables of the style sheet: everything above its first other rule.
func colours() string {
	variables, _, _ := strings.Cut(pageStyle, "* {")
	return variables
}
