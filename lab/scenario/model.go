package scenario

import (
	"math"
	"slices"
	"time"
)

// models are profiles of one request of batch 1 on an AMD MI50, kernel by kernel, from the
// repository of REEF (SJTU-IPADS/reef at 58dabe0, resource/*/profile.json): kernels, their mean,
// p50, p90 and longest duration when measured one by one, and the latency of the model, which is
// mostly less than their sum because launches overlap. The profiles are quantised to 2 to 4 µs. The
// files of "vgg" have kernels that VGG has not; the name is nominal.
var models = map[string]Work{
	"resnet152-mi50": profile(207, 76.6, 36, 204, 240, 13233),
	"densenet-mi50":  profile(207, 29.6, 20, 40, 660, 3743),
	"vgg-mi50":       profile(71, 74.6, 40, 204, 252, 4824),
	"inception-mi50": profile(146, 65.0, 48, 144, 464, 8273),
	"bert-mi50":      profile(205, 36.4, 20, 80, 84, 5426),
	"resnet-mi50":    profile(330, 77.6, 40, 104, 500, 10958),
	"resnet18-mi50":  profile(57, 46.3, 20, 72, 500, 2189),
	"mobilenet-mi50": profile(31, 40.6, 24, 80, 128, 1188),
	"alexnet-mi50":   profile(13, 672, 168, 2196, 3884, 8851),
}

// profile returns a work from durations in µs.
func profile(kernels int, mean, p50, p90, most, total float64) Work {
	us := func(v float64) time.Duration { return time.Duration(math.Round(v * float64(time.Microsecond))) }
	return Work{Kernels: kernels, Mean: us(mean), P50: us(p50), P90: us(p90), Max: us(most), Total: us(total)}
}

// Models returns the names that Work.Model accepts, sorted.
func Models() []string {
	var names []string
	for name := range models {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// fill sets what the work does not say, from its model and from the defaults.
func (w *Work) fill() {
	if m, ok := models[w.Model]; ok {
		if w.Total == 0 && w.Mean == 0 {
			w.Total = m.Total
			if w.Kernels > 0 {
				w.Total = m.Total * time.Duration(w.Kernels) / time.Duration(m.Kernels)
			}
		}
		if w.Kernels == 0 {
			w.Kernels = m.Kernels
		}
		if w.Mean == 0 && w.P50 == 0 && w.P90 == 0 && w.Max == 0 {
			w.Mean, w.P50, w.P90, w.Max = m.Mean, m.P50, m.P90, m.Max
		}
	}
	if *w == (Work{}) {
		return
	}
	if w.Kernels == 0 {
		w.Kernels = 1
	}
	if w.Occupancy == 0 {
		w.Occupancy = 1
	}
	if w.Mean == 0 {
		w.Mean = w.Total / time.Duration(w.Kernels)
	}
}
