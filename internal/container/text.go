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
	// allows at most 253; Docker has no limit.
	maxText = 512
	// maxLabels is how many labels of a container, and of a pod, are kept.
	maxLabels = 64
)

// clean bounds the names of a container and makes them valid UTF-8.
func clean(c gpreempt.Container) gpreempt.Container {
	for _, s := range []*string{&c.Name, &c.Image, &c.Namespace, &c.Pod} {
		*s = cut(*s, maxText)
	}
	return c
}

// cleanLabels returns the labels without some, bounded and as valid UTF-8. Of too many it
// keeps the first by name.
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

// cut returns at most the first n bytes of a text, in whole characters. Invalid UTF-8
// becomes U+FFFD.
func cut(s string, n int) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) > n {
		for !utf8.RuneStart(s[n]) {
			n--
		}
		s = s[:n]
	}
	// The clone does not keep the whole answer in memory.
	return strings.Clone(s)
}
