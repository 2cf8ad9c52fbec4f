package e2e

import (
	"encoding/json"
	"strings"
	"testing"
)

// fleetOf starts daemons with TCP and the same authority, and returns them with the flags by which gpctl reaches
// all of them.
func fleetOf(t *testing.T, names ...string) (daemons []*daemon, flags []string) {
	t.Helper()
	var first *tcp
	var hosts []string
	for _, name := range names {
		w := overTCP(t)
		if first == nil {
			first = w
		}
		w.install(first.ca)
		daemons = append(daemons, start(t, w.config))
		hosts = append(hosts, name+"="+w.address)
	}
	cert, key := first.ca.Issue(opsHolder)
	return daemons, []string{"--hosts", strings.Join(hosts, ","), "--cert", cert, "--key", key, "--ca", first.ca.File}
}

func TestFleetIsShownTogetherAndItsAbsentHostsAreNamed(t *testing.T) {
	t.Parallel()
	daemons, flags := fleetOf(t, "gpu1", "gpu2", "gpu3")
	daemons[1].startOffline()
	daemons[1].eventually("the job is known", func() bool {
		r := (&tcp{t: t}).gpctl(nil, append(flags, "target", "list")...)
		return r.Code == 0 && strings.Contains(r.Out, "gpu2")
	})
	daemons[2].kill()
	r := (&tcp{t: t}).gpctl(nil, append(flags, "fleet", "status", "-o", "json")...)
	var view struct {
		Summary struct {
			Hosts     int `json:"host_count"`
			Answering int `json:"answering_count"`
			Offline   int `json:"offline_count"`
		} `json:"summary"`
	}
	if err := json.Unmarshal([]byte(r.Out), &view); err != nil {
		t.Fatalf("%v in %+v", err, r)
	}
	if s := view.Summary; s.Hosts != 3 || s.Answering != 2 || s.Offline != 1 || r.Code != 10 || !strings.Contains(r.Err, "host gpu3: ") {
		t.Errorf("summary %+v, exit code %d, errors %s", s, r.Code, r.Err)
	}
}
