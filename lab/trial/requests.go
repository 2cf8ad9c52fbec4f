package trial

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/pkg/client"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// requestTime bounds a request. One that takes longer has failed.
const requestTime = time.Minute

// times returns when the requests of a repeat begin, from the beginning of the window.
func (p *Plan) times(repeat int) []time.Duration {
	seed := p.Seed + uint64(repeat)
	bound := p.Duration
	if bound == 0 {
		bound = 1000 * time.Hour
	}
	var all []time.Duration
	switch {
	case p.Gaps != [2]time.Duration{}:
		random := rand.New(rand.NewPCG(seed, 0)) //nolint:gosec // G404: a plan has the same requests each time
		for at := time.Duration(0); ; {
			at += p.Gaps[0] + time.Duration(random.Int64N(int64(p.Gaps[1]-p.Gaps[0])+1))
			if at >= bound || len(all) == scenarioRequests || p.Count > 0 && len(all) == p.Count {
				break
			}
			all = append(all, at)
		}
	default:
		if p.Count > 0 && p.Arrivals.Rate > 0 {
			// Random arrivals may need more than the mean time for their number.
			bound = min(bound, time.Duration((float64(p.Count)*2+100)/p.Arrivals.Rate*float64(time.Second)))
		}
		for _, a := range p.Arrivals.Times(seed, bound) {
			all = append(all, a.At)
		}
		if p.Count > 0 && len(all) > p.Count {
			all = all[:p.Count]
		}
	}
	return all
}

// server is the online command of a repeat, and what makes its requests.
type server struct {
	plan *Plan
	*process
	ready, answer *regexp.Regexp
	http          *http.Client
	env           []string

	// up is closed when the command is ready, and answers has the lines of its answers.
	up      chan struct{}
	answers chan string
	asking  sync.Mutex // serializes requests by line
	broken  error      // an answer is missing: lines cannot be matched any more; guarded by asking

	mu sync.Mutex // guards all below
	// Requests that the command reports, while the window is open.
	open     bool
	began    time.Time
	reported []evidence.Request
	wrong    error
	more     chan struct{} // has a value after each
	text     string        // its last line
}

// startServer starts the online command, if the plan has one.
func startServer(p *Plan, log string, env []string) (*server, error) {
	s := &server{
		plan: p, env: env, up: make(chan struct{}), answers: make(chan string, 16), more: make(chan struct{}, 1),
		http: &http.Client{Timeout: requestTime},
	}
	var err error
	if s.ready, err = regexp.Compile(p.Online.Ready); err != nil {
		return nil, err
	}
	if s.answer, err = regexp.Compile(p.Online.Answer); err != nil {
		return nil, err
	}
	if p.Online.Ready == "" {
		close(s.up)
	}
	if p.Online.Command == "" {
		return s, nil
	}
	s.process, err = startProcess("the online command", p.Online.Command, log, env, s.line)
	return s, err
}

// line takes a line of the command.
func (s *server) line(at time.Time, line string) {
	s.mu.Lock()
	s.text = line
	s.mu.Unlock()
	select {
	case <-s.up:
	default:
		if s.ready.MatchString(line) {
			close(s.up)
		}
		return
	}
	if s.plan.Online.Request == RequestByLine {
		if s.answer.MatchString(line) {
			select {
			case s.answers <- line:
			default: // nobody asked
			}
		}
		return
	}
	if s.plan.Online.Request != "" {
		return
	}
	q, ok, err := parseRequest(line)
	if !ok && err == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case err != nil:
		s.wrong = err
	case s.open:
		q.At = ms(at.Sub(s.began)) - q.Total
		s.reported = append(s.reported, q)
	}
	select {
	case s.more <- struct{}{}:
	default:
	}
}

// last says what the command wrote last.
func (s *server) last() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.text == "" {
		return "nothing was written"
	}
	const most = 80 // bytes
	return fmt.Sprintf("the last line is %.*q", most, s.text)
}

// await waits until the command is ready, at most so long. It calls slow when that takes a while.
func (s *server) await(ctx context.Context, most time.Duration, slow func()) error {
	timer, late := time.NewTimer(most), time.AfterFunc(slowTime, slow)
	defer timer.Stop()
	defer late.Stop()
	var ended <-chan struct{}
	if s.process != nil {
		ended = s.ended
	}
	select {
	case <-s.up:
		return nil
	case <-ended:
		return fmt.Errorf("the online command ended before it was ready, with %s: its output is in logs/", s.how())
	case <-timer.C:
		return &PreflightError{
			fmt.Sprintf("the online command was not ready within %v, because no line of it matches --ready %q; %s", most, s.plan.Online.Ready, s.last()),
			"give --ready a part of the line by which it is ready, or leave it out if it can be used at once",
		}
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// ask makes one request and waits for its result.
func (s *server) ask(ctx context.Context) (line string, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, requestTime, fmt.Errorf("no answer within %v", requestTime))
	defer cancel()
	switch request := s.plan.Online.Request; {
	case s.plan.Online.Hold > 0:
		return "", sleep(ctx, s.plan.Online.Hold)
	case request == RequestByLine:
		return s.askByLine(ctx)
	case isURL(request):
		return s.get(ctx, request)
	default:
		return s.run(ctx, request)
	}
}

func (s *server) askByLine(ctx context.Context) (string, error) {
	s.asking.Lock()
	defer s.asking.Unlock()
	if s.broken != nil {
		return "", s.broken
	}
	for drained := false; !drained; { // lines that nobody asked for
		select {
		case <-s.answers:
		default:
			drained = true
		}
	}
	if _, err := io.WriteString(s.in, "request\n"); err != nil {
		s.broken = fmt.Errorf("cannot send a request to the online command: %w", err)
		return "", s.broken
	}
	select {
	case line := <-s.answers:
		return line, nil
	case <-s.silent:
		s.broken = errors.New("the online command has ended")
	case <-ctx.Done():
		s.broken = fmt.Errorf("an answer is missing: %w", context.Cause(ctx))
	}
	return "", s.broken
}

func (s *server) get(ctx context.Context, url string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return "", err
	}
	resp, err := s.http.Do(req)
	if err != nil {
		return "", err
	}
	var body bytes.Buffer
	_, err = io.Copy(&body, io.LimitReader(resp.Body, maxLine))
	_, rest := io.Copy(io.Discard, resp.Body)
	if err = errors.Join(err, rest, resp.Body.Close()); err != nil {
		return "", err
	}
	if resp.StatusCode >= http.StatusBadRequest {
		return "", fmt.Errorf("%s answered %s", url, resp.Status)
	}
	return body.String(), nil
}

// run runs the command of a request.
func (s *server) run(ctx context.Context, command string) (string, error) {
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", command) //nolint:gosec // G204: the user's own command line
	cmd.Env = s.env
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		last := strings.TrimSpace(errs.String())
		last = last[strings.LastIndexByte(last, '\n')+1:]
		if last != "" {
			err = fmt.Errorf("%w: %s", err, last)
		}
		return "", err
	}
	return out.String(), nil
}

// request makes a request that arrived at a time: it announces it if announce says so, and releases
// the lease after the result. The user does not wait for the release.
func (s *server) request(ctx context.Context, began, due time.Time, announce func(context.Context) (*client.Lease, error)) (q evidence.Request, lease *client.Lease) {
	q.At = ms(due.Sub(began))
	if announce != nil {
		var err error
		if lease, err = announce(ctx); err != nil {
			q.Failed = "announcement: " + err.Error()
			return q, nil
		}
		q.Announce = ms(time.Since(due))
		defer func() { _ = lease.Release(ctx) }() // it ends with its time to live otherwise
	}
	answer, err := s.ask(ctx)
	q.Total = ms(time.Since(due))
	if err != nil {
		q.Failed = err.Error()
		return q, lease
	}
	for line := range strings.Lines(answer) {
		// The server may know more of its request.
		if own, ok, err := parseRequest(line); ok && err == nil {
			q.Start, q.TTFT, q.TPOT, q.Failed = own.Start, own.TTFT, own.TPOT, own.Failed
		}
	}
	if s.plan.Online.Hold > 0 {
		q.Total = q.Announce // what is measured is the announcement
		return q, lease
	}
	q.Service = max(0, q.Total-q.Announce-q.Start)
	return q, lease
}

// play makes the requests of a repeat at their times, and as long as more says so at the same rate, and
// waits for their results. done is called after each.
func (s *server) play(ctx context.Context, began time.Time, times []time.Duration, announce func(context.Context) (*client.Lease, error), r *evidence.Repeat, done func(), more func(*evidence.Repeat) bool) error {
	var (
		mu sync.Mutex // guards r
		wg sync.WaitGroup
	)
	ask := func(at time.Duration) error {
		due := began.Add(at)
		if err := sleep(ctx, time.Until(due)); err != nil {
			return err
		}
		mu.Lock()
		i := len(r.Requests)
		r.Requests = append(r.Requests, evidence.Request{})
		mu.Unlock()
		wg.Go(func() {
			q, lease := s.request(ctx, began, due, announce)
			mu.Lock()
			defer mu.Unlock()
			r.Requests[i] = q
			if announce != nil && lease != nil {
				switch {
				case lease.Cause() != nil:
					r.Unprotected++
					r.UnprotectedWhy = cmp.Or(r.UnprotectedWhy, lease.Cause().Error())
				case !lease.Quiet():
					r.NotQuiet++
				}
			}
			done()
		})
		return nil
	}
	var stopped error
	for _, at := range times {
		if stopped = ask(at); stopped != nil {
			break
		}
	}
	wg.Wait()
	for n := len(times); stopped == nil && n > 0 && more(r); n++ {
		stopped = ask(times[len(times)-1] * time.Duration(n) / time.Duration(max(1, len(times)-1)))
		wg.Wait()
	}
	return stopped
}

// listen collects the requests that the command makes itself: count of them, or all within d.
func (s *server) listen(ctx context.Context, began time.Time, count int, d time.Duration, r *evidence.Repeat, done func()) error {
	s.mu.Lock()
	s.open, s.began, s.reported = true, began, nil
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.open = false
		r.Requests = s.reported
		if s.wrong != nil {
			r.Requests = append(r.Requests, evidence.Request{At: ms(time.Since(began)), Failed: s.wrong.Error()})
		}
	}()
	var late <-chan time.Time
	if d > 0 {
		timer := time.NewTimer(time.Until(began.Add(d)))
		defer timer.Stop()
		late = timer.C
	}
	for {
		select {
		case <-s.more:
			done()
			s.mu.Lock()
			enough := count > 0 && len(s.reported) >= count || s.wrong != nil
			s.mu.Unlock()
			if enough {
				return nil
			}
		case <-late:
			return nil
		case <-s.silent:
			<-s.ended
			if s.err != nil {
				s.mu.Lock()
				s.reported = append(s.reported, evidence.Request{At: ms(time.Since(began)), Failed: "the online command ended with " + s.how()})
				s.mu.Unlock()
			}
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// announcer returns the announcement of a request for GPUs; without GPUs, for all.
func announcer(c *client.Client, gpus []uint32, maxWait time.Duration) func(context.Context) (*client.Lease, error) {
	req := client.Request{Label: "trial", MaxWait: maxWait}
	for _, id := range gpus {
		req.GPUs = append(req.GPUs, client.GPUByID(gpreempt.GPUID(id)))
	}
	if len(gpus) == 0 {
		req.GPUs = client.AllGPUs()
	}
	return func(ctx context.Context) (*client.Lease, error) { return c.Acquire(ctx, req) }
}

// environment returns the environment of a command: that of the trial, without a class of its
// own, and with what the plan says.
func environment(p *Plan, socket, arm string, repeat int) []string {
	var env []string
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "GPREEMPT_CLASS=") && !strings.HasPrefix(v, "GPREEMPT_PRIORITY=") && !strings.HasPrefix(v, streamPriority) {
			env = append(env, v)
		}
	}
	return append(env, "GPREEMPT_SOCKET="+socket, "GPREEMPT_TRIAL_ARM="+arm, fmt.Sprintf("GPREEMPT_TRIAL_REPEAT=%d", repeat+1),
		fmt.Sprintf("GPREEMPT_TRIAL_COUNT=%d", p.Count), fmt.Sprintf("GPREEMPT_TRIAL_RATE=%g", p.rate()))
}
