package cli

import (
	"testing"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

func TestWithoutOfflineWorkAdviceIsToClassifyWhatIsNotOnline(t *testing.T) {
	online, unmanaged := gpreemptv1.Class_CLASS_ONLINE.String(), gpreemptv1.Class_CLASS_UNMANAGED.String()
	v := &advice{Processes: []advised{{PID: 5001, Class: online}, {PID: 4242, Class: unmanaged}}}
	if got, want := v.suspend().Command, "gpctl target classify 4242 offline"; got != want {
		t.Errorf("command %q, want %q", got, want)
	}
}
