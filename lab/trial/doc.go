// Package trial runs a user's own work with and without gpreempt and measures it: offline jobs
// alone, online requests alone, both together, and both with offline jobs that the daemon
// suspends. It starts and ends the processes, makes or counts the requests, reads what the daemon
// and /proc say, and keeps everything in the folder of a run (internal/evidence).
//
// It changes the daemon for the time of an arm only: classes of the offline processes, and the
// policy. Both are undone when the arm ends, for any reason.
package trial
