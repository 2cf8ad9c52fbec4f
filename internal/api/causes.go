package api

import "github.com/gpreempt/gpreempt/pkg/gpreempt"

// causes says what the causes of a target's state mean to people, beside the obstacles of gpreempt.Obstacles.
var causes = map[string]string{
	"breaker-open":       "the breaker of its GPU is open",
	"by-hand":            "an admin's order",
	"class-changed":      "it is not offline",
	"draining":           "the daemon is draining",
	"failed":             "the last attempt failed",
	"hardware-error":     "its GPU reported an error",
	"hold":               "an admin holds it running",
	"hqd-budget":         "it is idle, and its slots are needed",
	"hqd-busy":           "it was parked, and has work",
	"hqd-room":           "it was parked, and there is room",
	"killed":             "it is ended, because it refused suspensions",
	"lapsed":             "it was resumed while the daemon did not answer",
	"lease":              "a lease covers its GPUs",
	"lease-ended":        "the last lease has ended",
	"linger":             "another lease may follow",
	"linger-over":        "no other lease followed",
	"max-suspend":        "its longest suspension is over",
	"new-queue":          "it made a queue while suspended",
	"no-lease":           "no lease covers its GPUs",
	"not-ready":          "no mechanism is attached yet",
	"pin-over":           "an admin's suspension is over",
	"policy":             "the policy has changed",
	"quarantine":         "it failed, and is in quarantine",
	"quarantine-over":    "its quarantine is over",
	"queue-reset":        "the driver reset a queue, perhaps its own",
	"replaced":           "it runs another program",
	"resumed-by-another": "another program resumed it",
	"retry":              "the last attempt is repeated",
	"seen":               "it is new",
	"share-cap":          "the share cap is used up",
	"share-cap-over":     "it has time to run again",
	"share-floor":        "it must run for its share floor",
	"stuck":              "its own call holds its lock in the driver",
}

// Cause returns what a cause of a target's state means, as a clause; the cause itself if that is not known, as
// from a newer daemon.
func Cause(cause string) string {
	if words := gpreempt.Reason(cause).Obstacle(); words != "" {
		return "it " + words
	}
	if words, known := causes[cause]; known {
		return words
	}
	return cause
}
