package config

import (
	"flag"
	"strings"
	"testing"

	"github.com/gpreempt/gpreempt/internal/testutil"
)

var update = flag.Bool("update", false, "write the errors to testdata/mistakes.golden")

func TestMistakesAreAnsweredWithTheirRemedy(t *testing.T) {
	testutil.Mistakes(t, "testdata/mistakes.golden", *update, func(t *testing.T, mistake string) string {
		_, err := Parse("gpreemptd.yaml", []byte(strings.ReplaceAll(mistake, `\t`, "\t")+"\n"))
		if err == nil {
			t.Fatal("it is valid")
		}
		return err.Error()
	})
}
