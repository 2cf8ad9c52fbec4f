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
	"github.com/gpreempt/gpreempt/internal/term"
)

// onManyHosts are the commands that --hosts runs on each host: they ask for one answer, or give one order. Those of gpctl
// fleet use --hosts themselves.
var onManyHosts = []string{
	"gpctl status", "gpctl stats", "gpctl gpu list", "gpctl target list", "gpctl queue list", "gpctl queue slots", "gpctl lease list",
	"gpctl policy get", "gpctl policy set", "gpctl drain on", "gpctl drain off",
}

// mostHosts is how many hosts are asked at once.
const mostHosts = 64

// hostList returns the hosts of --hosts. The file after @, or - for standard input, has a list.
func hostList(a *term.App, cmd *cobra.Command) ([]fleet.Host, error) {
	text := a.Hosts
	if path, ok := strings.CutPrefix(text, "@"); ok {
		var data []byte
		var err error
		if path == "-" {
			data, err = io.ReadAll(io.LimitReader(a.In, 1<<20))
		} else {
			data, err = regular.Read(path, 1<<20)
		}
		if err != nil {
			return nil, &term.Failure{Code: term.ExitUsage, Message: fmt.Sprintf("cannot read --hosts: %v", err), Next: cmd.CommandPath() + " --help"}
		}
		text = string(data)
	}
	hosts, err := fleet.ParseHosts(text)
	if err != nil {
		return nil, term.Usage(cmd, "--hosts: %v", err)
	}
	return hosts, nil
}

// checkHosts refuses --hosts where it has no meaning.
func checkHosts(a *term.App, cmd *cobra.Command) error {
	given := cmd.Flags().Changed
	inFleet := strings.HasPrefix(cmd.CommandPath(), "gpctl fleet ")
	switch {
	case inFleet && a.Hosts == "":
		return term.Usage(cmd, "missing --hosts: the hosts of the fleet, like gpu[01-16] or @FILE")
	case a.Hosts == "":
		return nil
	case given("socket") || given("address"):
		return term.Usage(cmd, "--hosts names the daemons: --socket and --address do not apply")
	case !inFleet && !slices.Contains(onManyHosts, cmd.CommandPath()):
		return term.Usage(cmd, "%s does not take --hosts; these do: %s, gpctl fleet", cmd.CommandPath(), strings.Join(onManyHosts, ", "))
	}
	return nil
}

// forHosts makes the commands below cmd that --hosts runs do so.
func forHosts(a *term.App, cmd *cobra.Command) {
	for _, c := range cmd.Commands() {
		forHosts(a, c)
	}
	run := cmd.RunE
	if run == nil || !slices.Contains(onManyHosts, cmd.CommandPath()) {
		return
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if a.Hosts == "" {
			return run(cmd, args)
		}
		return runOnHosts(a, cmd)
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
func onHost(a *term.App, h fleet.Host) *term.App {
	return &term.App{IO: a.IO, Program: a.Program, Socket: h.Socket, Address: h.Address, Cert: a.Cert, Key: a.Key, Ca: a.Ca, Output: a.Output, Timeout: a.Timeout}
}

// hostResult is what became of a command on a host.
type hostResult struct {
	Host string `json:"host"`
	// Result is the output for programs, null if it failed.
	Result json.RawMessage `json:"result"`
	// Error is null if it succeeded.
	Error *hostError `json:"error"`

	notes  string
	blocks []term.Block
}

type hostError struct {
	ExitCode int    `json:"exit_code"`
	Message  string `json:"message"`
	Next     string `json:"next"`
}

// runOnHosts runs the command on each host, with the arguments of this run, and shows the results together.
func runOnHosts(a *term.App, cmd *cobra.Command) error {
	hosts, err := hostList(a, cmd)
	if err != nil {
		return err
	}
	results := make([]hostResult, len(hosts))
	eachHost(hosts, func(i int, h fleet.Host) { results[i] = runOnHost(cmd.Context(), a, h) })
	err = a.Show(struct {
		Hosts []hostResult `json:"hosts"`
	}{results}, func(p *term.Printer) { printTogether(p, results) })
	return errors.Join(err, sumUp(a, results))
}

func runOnHost(ctx context.Context, a *term.App, h fleet.Host) (r hostResult) {
	var out, notes bytes.Buffer
	rec := &term.Capture{}
	streams := a.IO
	streams.In, streams.Out, streams.Err, streams.Rec = strings.NewReader(""), &out, &notes, rec
	streams.Terminal, streams.ErrTerminal = false, false
	extra := []string{"--hosts=", "--cert=" + a.Cert, "--key=" + a.Key, "--ca=" + a.Ca, "--socket=" + h.Socket}
	if h.Address != "" {
		extra[4] = "--address=" + h.Address
	} else {
		extra[1], extra[2], extra[3] = "--cert=", "--key=", "--ca="
	}
	if a.ForPrograms() {
		extra = append(extra, "--output=json", "--jq=")
	}
	err := a.Program.Execute(ctx, append(slices.Clone(a.Args), extra...), streams)
	r = hostResult{Host: h.Name, notes: notes.String(), blocks: rec.Blocks}
	if err != nil {
		f := term.AsFailure(err)
		r.Error = &hostError{f.Code, term.Or(f.Message, "the command failed there"), f.Next}
	} else if a.ForPrograms() {
		r.Result = bytes.TrimSpace(out.Bytes())
	}
	return r
}

// sumUp reports the hosts that failed, and returns the failure of the whole: that of all hosts if it is the same.
func sumUp(a *term.App, results []hostResult) error {
	noted := map[string]bool{}
	failed, codes := 0, map[int]bool{}
	for _, r := range results {
		if r.notes != "" && r.Error == nil && !noted[r.notes] && !a.ForPrograms() {
			noted[r.notes] = true
			fmt.Fprint(a.Err, r.notes)
		}
		if r.Error != nil {
			failed++
			codes[r.Error.ExitCode] = true
			(&term.Failure{Message: "host " + r.Host + ": " + r.Error.Message, Next: r.Error.Next}).Print(a.Err, a.Program.Name)
		}
	}
	if failed == 0 {
		return nil
	}
	code := term.ExitPartial
	if failed == len(results) && len(codes) == 1 {
		code = results[0].Error.ExitCode
	}
	return &term.Failure{Code: code, Message: fmt.Sprintf("%d of %s failed", failed, term.Count(len(results), "host"))}
}

// printTogether shows the results of all hosts: tables of the same columns as one, with the name of the host before each
// row; other output once for all hosts with the same.
func printTogether(p *term.Printer, results []hostResult) {
	good := slices.DeleteFunc(slices.Clone(results), func(r hostResult) bool { return r.Error != nil })
	if len(good) == 0 {
		return
	}
	if header := tableOf(good[0].blocks); header != nil && !slices.ContainsFunc(good, func(r hostResult) bool { return !slices.Equal(tableOf(r.blocks), header) }) {
		t := p.Table("", append(term.Columns{"HOST"}, namesOf(header)...))
		for _, r := range good {
			for _, row := range r.blocks[0].Rows {
				t.Row(append([]any{r.Host}, anyOf(row)...)...)
			}
		}
		t.Flush()
		return
	}
	var order []string
	same := map[string][]string{}
	blocks := map[string][]term.Block{}
	for _, r := range good {
		key := fmt.Sprint(r.blocks)
		if same[key] == nil {
			order, blocks[key] = append(order, key), r.blocks
		}
		same[key] = append(same[key], r.Host)
	}
	for i, key := range order {
		if i > 0 {
			p.Linef("")
		}
		p.Line(term.Cell{Text: strings.Join(same[key], ", ") + ":", Style: term.StyleBold})
		for _, b := range blocks[key] {
			if b.Header == nil {
				p.Line(append([]any{"  "}, anyOf(b.Line)...)...)
				continue
			}
			t := p.Table("  ", namesOf(b.Header))
			for _, row := range b.Rows {
				t.Row(anyOf(row)...)
			}
			t.Flush()
		}
	}
}

// tableOf returns the columns of an output that is one table, else nil.
func tableOf(blocks []term.Block) []term.Heading {
	if len(blocks) != 1 {
		return nil
	}
	return blocks[0].Header
}

func namesOf(header []term.Heading) (names term.Columns) {
	for _, c := range header {
		if c.Right {
			names = append(names, ">"+c.Name)
		} else {
			names = append(names, c.Name)
		}
	}
	return names
}

func anyOf(cells []term.Cell) []any {
	all := make([]any, len(cells))
	for i, c := range cells {
		all[i] = c
	}
	return all
}
