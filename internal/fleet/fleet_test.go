package fleet

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestHostsAreExpanded(t *testing.T) {
	got, err := ParseHosts("gpu[01-03,10], rack[1-2]n[8-9]:9000 # a comment\nfar=10.0.0.5:7000\r\n[fd00::1]:7443 fd00::2\nssh=/run/user/gpu7.sock\n#last")
	if err != nil {
		t.Fatal(err)
	}
	want := []Host{
		{Name: "gpu01", Address: "tcp://gpu01:7443"},
		{Name: "gpu02", Address: "tcp://gpu02:7443"},
		{Name: "gpu03", Address: "tcp://gpu03:7443"},
		{Name: "gpu10", Address: "tcp://gpu10:7443"},
		{Name: "rack1n8", Address: "tcp://rack1n8:9000"},
		{Name: "rack1n9", Address: "tcp://rack1n9:9000"},
		{Name: "rack2n8", Address: "tcp://rack2n8:9000"},
		{Name: "rack2n9", Address: "tcp://rack2n9:9000"},
		{Name: "far", Address: "tcp://10.0.0.5:7000"},
		{Name: "fd00::1", Address: "tcp://[fd00::1]:7443"},
		{Name: "fd00::2", Address: "tcp://[fd00::2]:7443"},
		{Name: "ssh", Socket: "/run/user/gpu7.sock"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("hosts (-want +got):\n%s", diff)
	}
}

func TestInvalidHostsAreRefusedWithTheReason(t *testing.T) {
	for text, want := range map[string]string{
		"":                    "no hosts",
		"# none":              "no hosts",
		"a,a":                 "host a is in the list twice",
		"gpu[1-":              "missing ]",
		"gpu[3-1]":            `invalid range "3-1"`,
		"gpu[a]":              `invalid range "a"`,
		"gpu[]":               `invalid range ""`,
		"gpu[0-20000]":        "more than 10000 hosts",
		"a[1-2000]b[1-2000]c": "more than 10000 hosts",
		"/run/x.sock":         "invalid host",
		"=a":                  "invalid host",
		"a:http":              "invalid host",
		"a=":                  "invalid host",
		":7443":               "invalid host",
	} {
		if got, err := ParseHosts(text); err == nil || !strings.Contains(err.Error(), want) || got != nil {
			t.Errorf("%q: %v, error %v, want %s", text, got, err, want)
		}
	}
}

func FuzzParseHosts(f *testing.F) {
	f.Add("gpu[01-03,10], far=10.0.0.5:7000 [::1]:7443 a=/s")
	f.Fuzz(func(t *testing.T, text string) {
		all, err := ParseHosts(text)
		if (err == nil) != (len(all) > 0) || len(all) > maxHosts {
			t.Fatalf("%d hosts, error %v", len(all), err)
		}
		for _, h := range all {
			if h.Name == "" || (h.Address == "") == (h.Socket == "") {
				t.Errorf("host %+v", h)
			}
		}
	})
}
