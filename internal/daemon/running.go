package daemon

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/internal/dumps"
	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// answerTime bounds the wait for container runtimes, and that for the daemon.
const answerTime = 2 * time.Second

// showRunning writes what the rules of a config make of the processes that run, what the daemon makes of them now,
// and what is not known of them.
func showRunning(ctx context.Context, opts Options, w io.Writer) error {
	cfg, err := opts.load()
	if err != nil {
		return err
	}
	rules, err := classify.New(cfg.Rules, cfg.Jobs)
	if err != nil {
		return err
	}
	subjects, unknown := opts.Host.subjects(ctx, rules.Env(), cfg.Discovery.Debugfs)
	now, err := classes(ctx, cfg.Socket)
	if err != nil {
		unknown = append(unknown, fmt.Sprintf("not known: NOW: the daemon at %s does not answer: %s", cfg.Socket, status.Convert(err).Message()))
	}
	idle, changes := rules.Names()[:len(cfg.Rules)], 0
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprint(table, "PID\tCOMMAND\tNOW\tTHEN\tBY\n") // a writer of text keeps its error for Flush
	for _, s := range subjects {
		d := rules.Decide(s)
		was, then := cmp.Or(now[s.Key.String()], "-"), d.Class.String()
		if was != "-" && was != then {
			then += " (changes)"
			changes++
		}
		for n, matches := range rules.Matching(s, nil) {
			if matches && n < len(idle) {
				idle[n] = ""
			}
		}
		fmt.Fprintf(table, "%d\t%s\t%s\t%s\t%s\n", s.Key.PID, gpreempt.Printable(s.Comm), was, then, d.By)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	lines := []string{fmt.Sprintf("processes with queues: %d, with another class then: %d", len(subjects), changes)}
	if idle = slices.DeleteFunc(idle, func(name string) bool { return name == "" }); len(idle) > 0 {
		lines = append(lines, "rules that match none of them: "+strings.Join(idle, ", "))
	}
	_, err = fmt.Fprintln(w, strings.Join(append(lines, unknown...), "\n"))
	return err
}

// subjects reads the processes that have queues, and says what of them could not be read. It opens no device.
func (h Host) subjects(ctx context.Context, env []string, readDumps bool) (all []*classify.Subject, unknown []string) {
	root, inv := h.files(), inventory.New(1)
	files := discovery.NewFS(root)
	files.SetEnv(env)
	cfg := inventory.Config{
		Root: root, FS: files, Inventory: inv, Now: time.Now, Log: zap.NewNop(),
		Intervals: func() inventory.Intervals {
			return inventory.Intervals{Shortest: time.Second, Longest: time.Second, Debugfs: readDumps}
		},
		Before: func() {}, Scanned: func(inventory.Diff) {}, Described: func(discovery.Proc) {}, Warn: func(string, ...gpreempt.Warning) {},
	}
	if h.Files == nil && h.Dir == "/" {
		cfg.Dump = dumps.New(func(int32) bool { return false }, cfg.Log).Read
	}
	gpus, err := files.GPUs()
	if err != nil {
		unknown = append(unknown, "not known: GPUs: "+err.Error())
	}
	inv.SetGPUs(gpus)
	if err := inventory.NewObserver(cfg).ReadOnce(); err != nil {
		unknown = append(unknown, "not known: priorities and rings of queues: "+err.Error())
	}
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	containers := newContainers(root, func(string) {}, cfg.Log)
	ended := make(chan struct{})
	go func() { containers.Run(ctx); close(ended) }()
	noRuntime, _ := lacks(root)
	var unread, unanswered int
	for _, p := range inv.Processes() {
		if len(p.Queues) == 0 {
			continue
		}
		s := &classify.Subject{Process: p.Process, GPUs: gpus, Queues: inv.QueuesOf(p.Key)}
		for s.Cgroup.ContainerID != "" && !noRuntime && ctx.Err() == nil && !s.ContainerKnown {
			s.SetContainer(containers.Lookup(s.Cgroup))
			if !s.ContainerKnown {
				time.Sleep(10 * time.Millisecond)
			}
		}
		if s.Cgroup.ContainerID != "" && !s.ContainerKnown {
			unanswered++
		}
		if s.Unread {
			unread++
		}
		all = append(all, s)
	}
	cancel()
	<-ended
	if unread > 0 {
		unknown = append(unknown, fmt.Sprintf("not known: command line and environment of processes: %d (run as root)", unread))
	}
	if unanswered > 0 {
		unknown = append(unknown, fmt.Sprintf("not known: names, images, labels and pods of containers: %d processes", unanswered))
	}
	return all, unknown
}

// classes returns the classes that the daemon at a socket has given, by the key of the process.
func classes(ctx context.Context, socket string) (map[string]string, error) {
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	list, err := gpreemptv1.NewAdminServiceClient(conn).ListTargets(ctx, &gpreemptv1.ListTargetsRequest{})
	if err != nil {
		return nil, err
	}
	now := map[string]string{}
	for _, t := range list.GetTargets() {
		now[t.GetTargetId()] = api.EnumName(t.GetClass())
	}
	return now, nil
}
