package arch

import (
	"os"
	"regexp"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

// The header of the C library has the values of the API: all but that of an unset field.
func TestHeaderOfTheCLibraryHasTheValuesOfTheAPI(t *testing.T) {
	text, err := os.ReadFile("../../bindings/c/gpreempt.h")
	if err != nil {
		t.Fatal(err)
	}
	for prefix, c := range map[string]struct {
		api    string
		values map[string]int32
	}{
		"REASON": {"QUIESCE_REASON_", gpreemptv1.QuiesceReason_value},
		"CLASS":  {"CLASS_", gpreemptv1.Class_value},
		"STATE":  {"TARGET_STATE_", gpreemptv1.TargetState_value},
	} {
		got := map[string]int32{c.api + "UNSPECIFIED": 0}
		for _, m := range regexp.MustCompile(`\tGPREEMPT_`+prefix+`_(\w+) = (\d+)`).FindAllStringSubmatch(string(text), -1) {
			value, err := strconv.ParseInt(m[2], 10, 32)
			if err != nil {
				t.Fatal(err)
			}
			got[c.api+m[1]] = int32(value)
		}
		if diff := cmp.Diff(c.values, got); diff != "" {
			t.Errorf("%s (-API +header):\n%s", prefix, diff)
		}
	}
}
