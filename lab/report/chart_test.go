package report

import (
	"encoding/xml"
	"errors"
	"io"
	"math"
	"math/rand/v2"
	"regexp"
	"strings"
	"testing"
)

var charts = regexp.MustCompile(`(?s)<figure>\n<figcaption>(.*?)</figcaption>\n(<svg.*?</svg>)`)

// readChart checks that a chart is well-formed, and returns its elements by name.
func readChart(t *testing.T, element string) map[string]int {
	t.Helper()
	counts := map[string]int{}
	for d := xml.NewDecoder(strings.NewReader(element)); ; {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return counts
		}
		if err != nil {
			t.Fatalf("a chart is not well-formed: %v\n%s", err, element)
		}
		if start, ok := token.(xml.StartElement); ok {
			counts[start.Name.Local]++
		}
	}
}

func TestChartsHaveOriginTextAndColoursOfThePage(t *testing.T) {
	page, _, _ := reportOf(t, madeUp())
	found := charts.FindAllStringSubmatch(page, -1)
	if len(found) < 15 || len(found) != strings.Count(page, "<figure>") {
		t.Fatalf("%d charts of %d", len(found), strings.Count(page, "<figure>"))
	}
	for _, m := range found {
		title, element := m[1], m[2]
		if !strings.HasPrefix(title, "EMULATED: ") {
			t.Errorf("%s does not say what it was measured on", title)
		}
		if !regexp.MustCompile(`role="img" aria-label="[^"]{20,}"`).MatchString(element) {
			t.Errorf("%s has no text for those who do not see it", title)
		}
		if fixed := regexp.MustCompile(`#[0-9A-Fa-f]{6}`).FindString(element); fixed != "" {
			t.Errorf("%s has the fixed colour %s", title, fixed)
		}
		if counts := readChart(t, element); counts["path"] < 5 || counts["text"] < 4 {
			t.Errorf("%s has %v", title, counts)
		}
	}
	for _, variable := range regexp.MustCompile(`var\((--[a-z0-9]+)\)`).FindAllStringSubmatch(page, -1) {
		if strings.Count(pageStyle, variable[1]+":") != 3 { // light, dark, print
			t.Errorf("%s is not defined for light, dark and print", variable[1])
		}
	}
}

func TestHistogramHasEveryValue(t *testing.T) {
	for _, values := range [][]float64{{5}, {5, 5, 5}, {0, 0, 3}, {1, 2, 3, 4}, {0.01, 1, 1000}, {1e-9, 1e11}} {
		f := histogram("t", "x", values, 0)
		sum := 0.0
		for _, b := range f.boxes {
			sum += b.y1
			if b.x1 <= b.x0 || math.IsNaN(b.x0) {
				t.Errorf("%v: box %+v", values, b)
			}
		}
		if math.Abs(sum-100) > 1e-6 {
			t.Errorf("%v: the bars are %v %%", values, sum)
		}
		f.draw()
	}
}

func TestMarksAreInsideTheAxisAndFew(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		low := math.Pow(10, random.Float64()*12-4)
		high := low * (1 + math.Pow(10, random.Float64()*8-3))
		for _, m := range []marker{{}, {log: true}} {
			marks := m.Ticks(low, high)
			if len(marks) < 2 || len(marks) > 14 {
				t.Errorf("%+v: %d marks from %v to %v: %v", m, len(marks), low, high, marks)
			}
			seen := map[string]bool{}
			for _, tick := range marks {
				if tick.Value < low*0.99 || tick.Value > high*1.01 || tick.Label == "" || seen[tick.Label] {
					t.Errorf("%+v: mark %+v from %v to %v", m, tick, low, high)
				}
				seen[tick.Label] = true
			}
		}
	}
}
