package discovery

import "time"

// SetPatience has every Scan wait that long for what it reads of the memory of
// processes, and no longer.
func (f *FS) SetPatience(d time.Duration) { f.memory.patience, f.memory.longestWait = d, d }

// ParseDirents is what reads the directories of a Host.
var ParseDirents = parseDirents
