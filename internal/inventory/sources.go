package inventory

import "time"

// Names of the sources.
const (
	events = "events"
	sysfs  = "sysfs"
	smi    = "smi"
	mqds   = "mqds"
	hqds   = "hqds"
)

// Source is the state of one source.
type Source struct {
	Name      string
	Available bool
	// Every is the present interval of readings; 0 for a source that is read on demand or
	// reports events.
	Every time.Duration
	// Took is how long the last reading took, ReadAt when it ended, Readings the number
	// of readings, and Spent how long they took together.
	Took     time.Duration
	Spent    time.Duration
	ReadAt   time.Time
	Readings uint64
	// Note is for the operator: why the source is not available, for example.
	Note string
}

// order lists the sources by cost, the cheapest first.
var order = []string{events, sysfs, smi, mqds, hqds}

// Sources returns the state of the sources, the cheapest first.
func (o *Observer) Sources() []Source {
	o.mu.Lock()
	defer o.mu.Unlock()
	all := make([]Source, 0, len(order))
	for _, name := range order {
		all = append(all, *o.sources[name])
	}
	return all
}

// update changes the state of a source.
func (o *Observer) update(name string, change func(*Source)) {
	o.mu.Lock()
	defer o.mu.Unlock()
	change(o.sources[name])
}

// noteReading records a reading that began at a time.
func (o *Observer) noteReading(name string, began time.Time, every time.Duration, err error) {
	now := o.cfg.Now()
	o.update(name, func(s *Source) {
		s.Available, s.Every, s.Took, s.ReadAt = err == nil, every, now.Sub(began), now
		s.Spent += s.Took
		s.Readings++
		s.Note = ""
		if err != nil {
			s.Note = err.Error()
		}
	})
}
