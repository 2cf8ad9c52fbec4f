package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"github.com/gpreempt/gpreempt/internal/fleet"
	"github.com/gpreempt/gpreempt/internal/regular"
)

// onManyHosts are the commands that --hosts runs on each host: they ask for one answer, or give one order. Those of gpctl
// fleet use --hosts themselves.
var onManyHosts = []string{
	"gpctl status", "gpctl stats", "gpctl gpu list", "gpctl target list", "gpctl queue list", "gpctl hqd list", "gpctl lease list",
	"gpctl policy get", "gpctl policy set", "gpctl drain on", "gpctl drain off",
}

// mostHosts is how many hosts are asked at once.
const mostHosts = 64

// hostList returns the hosts of --hosts. The file after @, or - for standard input, has a list.
func (a *app) hostList(cmd *cobra.Command) ([]fleet.Host, error) {
	text := a.hosts
	if path, ok := strings.CutPrefix(text, "@"); ok {
		var data []byte
		var err error
		if path == "-" {
			data, err = io.ReadAll(io.LimitReader(a.In, 1<<20))
		} else {
			data, err = regular.Read(path, 1<<20)
		}
		if err != nil {
			return nil, &failure{code: ExitUsage, message: fmt.Sprintf("cannot read --hosts: %v", err), next: cmd.CommandPath() + " --help"}
		}
		text = string(data)
	}
	hosts, err := fleet.ParseHosts(text)
	if err != nil {
		return nil, usage(cmd, "--hosts: %v", err)
	}
	return hosts, nil
}

// checkHosts refuses --hosts where it has no meaning.
func (a *app) checkHosts(cmd *cobra.Command) error {
	given := cmd.Flags().Changed
	inFleet := strings.HasPrefix(cmd.CommandPath(), "gpctl fleet ")
	switch {
	case inFleet && a.hosts == "":
		return usage(cmd, "missing --hosts: the hosts of the fleet, like gpu[01-16] or @FILE")
	case a.hosts == "":
		return nil
	case given("socket") || given("address"):
		return usage(cmd, "--hosts names the daemons: --socket and --address do not apply")
	case given("watch") && !inFleet:
		return usage(cmd, "--watch does not apply to --hosts; gpctl fleet top shows many hosts again and again")
	case !inFleet && !slices.Contains(onManyHosts, cmd.CommandPath()):
		return usage(cmd, "%s does not take --hosts; these do: %s, gpctl fleet", cmd.CommandPath(), strings.Join(onManyHosts, ", "))
	}
	return nil
}

// forHosts makes the commands below cmd that --hosts runs do so.
func (a *app) forHosts(cmd *cobra.Command) {
	for _, c := range cmd.Commands() {
		a.forHosts(c)
	}
	run := cmd.RunE
	if run == nil || !slices.Contains(onManyHosts, cmd.CommandPath()) {
		return
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if a.hosts == "" {
			return run(cmd, args)
		}
		return a.runOnHosts(cmd)
	}
}

// eachHost calls do for all hosts, for mostHosts at a time, and returns when all calls have.
func eachHost(hosts []fleet.Host, do func(i int, h fleet.Host)) {
	var all sync.WaitGroup
	turns := make(chan struct{}, mostHosts)
	for i, h := range hosts {
		turns <- struct{}{}
		all.Go(func() {
			defer func() { <-turns }()
			do(i, h)
		})
	}
	all.Wait()
}

// onHost returns the app for a host.
func (a *app) onHost(h fleet.Host) *app {
	return &app{IO: a.IO, socket: h.Socket, address: h.Address, cert: a.cert, key: a.key, ca: a.ca, output: a.output, timeout: a.timeout}
}

// hostResult is what became of a command on a host.
type hostResult struct {
	Host string `json:"host"`
	// Result is the output for programs, null if it failed.
	Result json.RawMessage `json:"result"`
	// Error is null if it succeeded.
	Error *hostError `json:"error"`

	notes  string
	blocks []block
}

type hostError struct {
	ExitCode int    `json:"exit_code"`
	Message  string `json:"message"`
	Next     string `json:"next"`
}

// runOnHosts runs the command on each host, with the arguments of this run, and shows the results together.
func (a *app) runOnHosts(cmd *cobra.Command) error {
	hosts, err := a.hostList(cmd)
	if err != nil {
		return err
	}
	var input []byte
	if slices.Contains(cmd.Flags().Args(), "-") { // a policy
		if input, err = io.ReadAll(io.LimitReader(a.In, maxPolicy+1)); err != nil {
			return err
		}
	}
	results := make([]hostResult, len(hosts))
	eachHost(hosts, func(i int, h fleet.Host) { results[i] = a.runOnHost(cmd.Context(), h, input) })
	err = a.show(struct {
		Hosts []hostResult `json:"hosts"`
	}{results}, func(p *printer) { printTogether(p, results) })
	return errors.Join(err, a.sumUp(results))
}

func (a *app) runOnHost(ctx context.Context, h fleet.Host, input []byte) (r hostResult) {
	var out, notes bytes.Buffer
	rec := &capture{}
	streams := a.IO
	streams.In, streams.Out, streams.Err, streams.rec = bytes.NewReader(input), &out, &notes, rec
	streams.Terminal, streams.ErrTerminal = false, false
	extra := []string{"--hosts=", "--cert=" + a.cert, "--key=" + a.key, "--ca=" + a.ca, "--socket=" + h.Socket}
	if h.Address != "" {
		extra[4] = "--address=" + h.Address
	} else {
		extra[1], extra[2], extra[3] = "--cert=", "--key=", "--ca="
	}
	if a.forPrograms() {
		extra = append(extra, "--output=json", "--jq=", "--template=")
	}
	err := execute(ctx, append(slices.Clone(a.args), extra...), streams)
	r = hostResult{Host: h.Name, notes: notes.String(), blocks: rec.blocks}
	if err != nil {
		f := asFailure(err)
		r.Error = &hostError{f.code, or(f.message, "the command failed there"), f.next}
	} else if a.forPrograms() {
		r.Result = bytes.TrimSpace(out.Bytes())
	}
	return r
}

// sumUp reports the hosts that failed, and returns the failure of the whole: that of all hosts if it is the same.
func (a *app) sumUp(results []hostResult) error {
	noted := map[string]bool{}
	failed, codes := 0, map[int]bool{}
	for _, r := range results {
		if r.notes != "" && r.Error == nil && !noted[r.notes] && !a.forPrograms() {
			noted[r.notes] = true
			fmt.Fprint(a.Err, r.notes)
		}
		if r.Error != nil {
			failed++
			codes[r.Error.ExitCode] = true
			(&failure{message: "host " + r.Host + ": " + r.Error.Message, next: r.Error.Next}).print(a.Err)
		}
	}
	if failed == 0 {
		return nil
	}
	code := ExitPartial
	if failed == len(results) && len(codes) == 1 {
		code = results[0].Error.ExitCode
	}
	return &failure{code: code, message: fmt.Sprintf("%d of %s failed", failed, count(len(results), "host"))}
}

// capture keeps what a printer would print.
type capture struct{ blocks []block }

// block is a line, or the rows of a table with their header.
type block struct {
	line []cell
	// header is nil for a line.
	header []heading
	rows   [][]cell
}

type heading struct {
	name  string
	right bool
}

// printTogether shows the results of all hosts: tables of the same columns as one, with the name of the host before each
// row; other output once for all hosts with the same.
func printTogether(p *printer, results []hostResult) {
	good := slices.DeleteFunc(slices.Clone(results), func(r hostResult) bool { return r.Error != nil })
	if len(good) == 0 {
		return
	}
	if header := tableOf(good[0].blocks); header != nil && !slices.ContainsFunc(good, func(r hostResult) bool { return !slices.Equal(tableOf(r.blocks), header) }) {
		t := p.table("", append(columns{"HOST"}, namesOf(header)...))
		for _, r := range good {
			for _, row := range r.blocks[0].rows {
				t.row(append([]any{r.Host}, anyOf(row)...)...)
			}
		}
		t.flush()
		return
	}
	var order []string
	same := map[string][]string{}
	blocks := map[string][]block{}
	for _, r := range good {
		key := fmt.Sprint(r.blocks)
		if same[key] == nil {
			order, blocks[key] = append(order, key), r.blocks
		}
		same[key] = append(same[key], r.Host)
	}
	for i, key := range order {
		if i > 0 {
			p.linef("")
		}
		p.line(cell{strings.Join(same[key], ", ") + ":", styleBold})
		for _, b := range blocks[key] {
			if b.header == nil {
				p.line(append([]any{"  "}, anyOf(b.line)...)...)
				continue
			}
			t := p.table("  ", namesOf(b.header))
			for _, row := range b.rows {
				t.row(anyOf(row)...)
			}
			t.flush()
		}
	}
}

// tableOf returns the columns of an output that is one table, else nil.
func tableOf(blocks []block) []heading {
	if len(blocks) != 1 {
		return nil
	}
	return blocks[0].header
}

func namesOf(header []heading) (names columns) {
	for _, c := range header {
		if c.right {
			names = append(names, ">"+c.name)
		} else {
			names = append(names, c.name)
		}
	}
	return names
}

func anyOf(cells []cell) []any {
	all := make([]any, len(cells))
	for i, c := range cells {
		all[i] = c
	}
	return all
}
