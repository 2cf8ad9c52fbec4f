package kfdtest

// Traces reports whether the thread traces pid.
func (t *Thread) Traces(pid int32) bool {
	defer t.p.m.lock()()
	other := t.p.m.threads[pid]
	return other != nil && other.tracedBy() == t
}

// SetPIDInside moves the process to a pid namespace where it has this pid. Other processes
// use the old one.
func (p *Process) SetPIDInside(pid int32) {
	defer p.m.lock()()
	p.inside = pid
}
