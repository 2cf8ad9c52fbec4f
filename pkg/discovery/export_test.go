package discovery

import "time"

// SetAnswerWait sets how long every Scan waits for the memory of processes.
func (f *FS) SetAnswerWait(d time.Duration) { f.memory.answerWait, f.memory.longestWait = d, d }

// ParseDirents parses the directories of a Host.
var ParseDirents = parseDirents
