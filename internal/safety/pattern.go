package safety

import (
	_ "embed"
	"regexp"

	"go.yaml.in/yaml/v3"
)

// Pattern is a message of the amdgpu driver about a GPU that fails. kernellog.yaml explains
// the fields.
type Pattern struct {
	Name, Text, Source string
	Issue              string // "" for none
	Doubtful           struct {
		Driver KernelRange // "" for none
		Issue  string
	}

	re *regexp.Regexp
}

//go:embed kernellog.yaml
var patternFile []byte

// patterns are those of kernellog.yaml.
var patterns = func() (ps []Pattern) {
	if err := yaml.Unmarshal(patternFile, &ps); err != nil {
		panic("safety: kernellog.yaml is invalid: " + err.Error())
	}
	for i := range ps {
		ps[i].re = regexp.MustCompile("^(?:" + ps[i].Text + ")")
	}
	return ps
}()

// doubt returns the report that a version of the driver prints lines of the pattern about GPUs
// that work; "" for none. The kernel's own driver has no version, "".
func (p *Pattern) doubt(driver string) string {
	if driver == "" || p.Doubtful.Driver == "" || !p.Doubtful.Driver.Contains(driver) {
		return ""
	}
	return p.Doubtful.Issue
}

// prefix precedes the driver's message: dev_err with a GPU or with KFD's own device,
// pr_err, DRM_ERROR, drm_err. Kernels up to 6.12 and some later ones also have "amdgpu: "
// after the device; 7.2 does not. A message about an error of the hardware has the number of
// the event (amdgpu_ras_event_log_print).
var prefix = regexp.MustCompile(`^(?:` +
	`amdgpu ([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]): (?:amdgpu: )?(?:\[drm(?::\w[^\]]*(?: \[amdgpu\])?)?\] )?` +
	`|kfd kfd: (?:amdgpu: )?` +
	`|amdgpu: (?:\[powerplay\] )?` +
	`|\[drm:[^\] ]+ \[amdgpu\]\] ` +
	`)(?:\*ERROR\* )?(?:\{[0-9]+\} ?)?`)

// match returns the pattern that a record of the kernel about amdgpu matches, and the PCI
// address in it; "" if it has none.
func match(r Record) (pattern *Pattern, address string) {
	if r.Facility != 0 {
		return nil, ""
	}
	m := prefix.FindStringSubmatch(r.Text)
	if m == nil {
		return nil, ""
	}
	for i := range patterns {
		if patterns[i].re.MatchString(r.Text[len(m[0]):]) {
			return &patterns[i], m[1]
		}
	}
	return nil, ""
}
