package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"
)

// fleetHosts is the number of daemons in section o.
const fleetHosts = 50

// fleet is section o: gpctl fleet status of many daemons on this machine, against the slowest gpctl status of one.
func (b *bench) fleet(ctx context.Context) (err error) {
	if err := b.build(ctx, "./cmd/gpctl"); err != nil {
		return err
	}
	var sockets, list []string
	for i := range fleetHosts {
		h, err := b.startHost(ctx, 1, 1, 0)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, h.close()) }()
		sockets, list = append(sockets, h.socket), append(list, fmt.Sprintf("host%d=%s", i, h.socket))
	}
	gpctl := func(args ...string) (time.Duration, error) {
		began := time.Now()
		out, err := exec.CommandContext(ctx, b.program("gpctl"), args...).CombinedOutput()
		if err != nil {
			return 0, fmt.Errorf("gpctl %s: %w\n%s", args[0], err, out)
		}
		return time.Since(began), nil
	}
	all := b.series("o", fmt.Sprintf("Fleet/hosts=%d", fleetHosts))
	var slower []float64
	for range b.repeats {
		var slowest time.Duration
		for i, socket := range sockets {
			took, err := gpctl("status", "--socket", socket)
			if err != nil {
				return err
			}
			slowest = max(slowest, took)
			if i%5 > 0 { // ten of them, among the others
				continue
			}
			if took, err = gpctl("fleet", "status", "--hosts", strings.Join(list, ",")); err != nil {
				return err
			}
			all.add(took)
		}
		all.endRepeat()
		slower = append(slower, p50(all.Repeats[len(all.Repeats)-1])/float64(slowest))
	}
	b.figure("o", fmt.Sprintf("gpctl fleet status of %d hosts, p50 / the slowest gpctl status", fleetHosts), "x", slower).atMost(3)
	return nil
}
