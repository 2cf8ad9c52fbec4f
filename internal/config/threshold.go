package config

import (
	"fmt"
	"slices"
	"strconv"

	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/internal/config/yamlfile"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// ThresholdVariable is the variable of the daemon's environment that classifies by priority.
const ThresholdVariable = "GPREEMPT_PRIORITY_THRESHOLD"

// WithThreshold returns c with two rules at the end: processes whose highest known priority is text, 1 to 15, or
// more are online, and those below it offline. "" adds none.
func (c Config) WithThreshold(text string) (Config, error) {
	if text == "" {
		return c, nil
	}
	n, err := strconv.ParseUint(text, 10, 8)
	if err != nil || n < 1 || n > uint64(gpreempt.MaxPriority) {
		return c, fmt.Errorf("%s in the environment of gpreemptd: %s is not a threshold: write 1 to %d, or remove the variable", ThresholdVariable, yamlfile.Quoted(text), gpreempt.MaxPriority)
	}
	rule := func(name string, class gpreempt.Class, low, high gpreempt.Priority) classify.Rule {
		return classify.Rule{Name: name, Class: class, Match: classify.Match{QueuePriority: &classify.PriorityRange{Min: low, Max: high}}}
	}
	least := gpreempt.Priority(n)
	c.Rules = append(slices.Clip(c.Rules),
		rule(ThresholdVariable+" or more", gpreempt.Online, least, gpreempt.MaxPriority), rule("below "+ThresholdVariable, gpreempt.Offline, 0, least-1))
	return c, nil
}
