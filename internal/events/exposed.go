package events

import (
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// exposedHistogram is a snapshot of a histogram of the event log, under the name and the
// labels of a metric. It has classic and native buckets: Prometheus asks for one of them.
type exposedHistogram struct {
	desc   *prometheus.Desc
	counts *dto.Histogram
	labels []*dto.LabelPair
}

// Desc implements prometheus.Metric.
func (h exposedHistogram) Desc() *prometheus.Desc { return h.desc }

// Write implements prometheus.Metric.
func (h exposedHistogram) Write(to *dto.Metric) error {
	to.Histogram, to.Label = h.counts, h.labels
	return nil
}
