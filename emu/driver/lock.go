package driver

// lockTarget takes the mutex of the process that a call of another process is about, in
// that function of the driver.
func (d *Driver) lockTarget(c *call, p *process, function string) {
	c.locking = function
	d.lock(c, &p.mutex)
	c.locking = ""
}

// WaitsIn returns the function of the driver in which t waits for the mutex of the process that
// a DBG_TRAP or a CRIU_OP is about, as the kernel shows it (get_wchan); "" for a task that
// waits for anything else.
func (d *Driver) WaitsIn(t Task) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	for c := range d.waiting {
		if c.task == t && c.locking != "" {
			return c.locking
		}
	}
	return ""
}

// HoldMutex takes the mutex of the process with the address space mm until release is
// called, as a call of the process does that has the kernel pin much host memory
// (kfd_ioctl_alloc_memory_of_gpu). It reports whether the process exists.
func (d *Driver) HoldMutex(mm MM) (release func(), ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	p := d.byMM(mm)
	if p == nil {
		return nil, false
	}
	d.lock(&call{d: d}, &p.mutex)
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.unlock(&p.mutex)
	}, true
}
