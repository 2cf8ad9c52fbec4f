package container

import (
	"maps"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

const (
	// maxText bounds a name, an image or the value of a label, in bytes: Kubernetes
	// allows 253, 63 and less; Docker allows anything.
	maxText = 512
	// maxLabels is how many labels are kept of a container, and of a pod.
	maxLabels = 64
)

// clean bounds the names of a container and makes them fit to be sent on.
func clean(c gpreempt.Container) gpreempt.Container {
	for _, s := range []*string{&c.Name, &c.Image, &c.Namespace, &c.Pod} {
		*s = cut(*s, maxText)
	}
	return c
}

// cleanLabels returns the labels without some, bounded and fit to be sent on. Of too
// many the first by name are kept.
func cleanLabels(labels map[string]string, without ...string) map[string]string {
	names := slices.DeleteFunc(slices.Sorted(maps.Keys(labels)), func(name string) bool { return slices.Contains(without, name) })
	if len(names) == 0 {
		return nil
	}
	cleaned := make(map[string]string, min(len(names), maxLabels))
	for _, name := range names[:min(len(names), maxLabels)] {
		cleaned[cut(name, maxText)] = cut(labels[name], maxText)
	}
	return cleaned
}

// cut returns the first n bytes of a text at most, in whole characters. What is not
// UTF-8 becomes U+FFFD.
func cut(s string, n int) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) > n {
		for !utf8.RuneStart(s[n]) {
			n--
		}
		s = s[:n]
	}
	// What was cut off, and the rest of the answer, is not to be kept in memory.
	return strings.Clone(s)
}
