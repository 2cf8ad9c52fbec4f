package main

import (
	"strings"
	"testing"
)

func TestTracingTakesTheCapabilityAndNoYamaThatForbidsIt(t *testing.T) {
	status := func(mask string) string {
		return "Name:\tkfdemu\nCapPrm:\t0000000000000000\nCapEff:\t" + mask + "\nCapBnd:\t0000000000000000\n"
	}
	for _, test := range []struct{ name, status, scope, want string }{
		{name: "root", status: status("000001ffffffffff")},
		{name: "the one capability", status: status("0000000000080000"), scope: "2"},
		{name: "no capability", status: status("0000000000000000"), want: "no CAP_SYS_PTRACE"},
		{name: "others", status: status("000001fffff7ffff"), scope: "0", want: "no CAP_SYS_PTRACE"},
		{name: "Yama forbids all", status: status("000001ffffffffff"), scope: "3", want: "ptrace_scope is 3"},
		{name: "another kernel's text", status: "Name:\tkfdemu\n", want: "CapEff"},
	} {
		err := mayTrace(test.status, test.scope)
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %q in it", test.name, err, test.want)
		}
	}
}
