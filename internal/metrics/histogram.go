package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/gpreempt/gpreempt/internal/events"
)

// histogram is a snapshot of one in both forms, classic and native: which of them a
// scrape gets is what its Prometheus asks for.
type histogram struct {
	classic, native prometheus.Metric
}

// counted is when counting began, which the text format does not tell.
var counted = time.Now()

func newHistogram(desc *prometheus.Desc, h *events.Histogram, labels ...string) prometheus.Metric {
	zero, buckets := h.Fine()
	return histogram{
		classic: prometheus.MustNewConstHistogram(desc, h.Count(), h.Sum(), h.Coarse(), labels...),
		native: prometheus.MustNewConstNativeHistogram(desc, h.Count(), h.Sum(), buckets, nil, zero,
			events.HistogramSchema, events.FineZero, counted, labels...),
	}
}

// Desc implements prometheus.Metric.
func (h histogram) Desc() *prometheus.Desc { return h.classic.Desc() }

// Write implements prometheus.Metric.
func (h histogram) Write(to *dto.Metric) error {
	if err := h.native.Write(to); err != nil {
		return err
	}
	var classic dto.Metric
	if err := h.classic.Write(&classic); err != nil {
		return err
	}
	to.Histogram.Bucket = classic.Histogram.Bucket
	return nil
}
