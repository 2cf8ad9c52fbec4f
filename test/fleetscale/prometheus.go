package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// Names below the directory of a run.
const (
	targetsFile = "targets.json"
	dataDir     = "data"
)

// upTime is how long all hosts may take to be scraped after they became known, in addition
// to four intervals.
const upTime = 3 * time.Minute

// longestScrape is a timeout: hosts that are slower count as failed.
const longestScrape = 30 * time.Second

// config is that of Prometheus, given the interval, the targets and the files of rules.
const config = `global: {scrape_interval: %[1]s, scrape_timeout: %[2]s, evaluation_interval: %[1]s}
scrape_configs: [{job_name: gpreempt, file_sd_configs: [{files: [%[3]q]}]}]
rule_files: [%[4]q, %[5]q]
`

// prometheus is a running Prometheus.
type prometheus struct {
	cmd    *exec.Cmd
	base   string // URL
	dir    string
	log    bytes.Buffer
	client *http.Client
}

// usage is what Prometheus has used until a time.
type usage struct {
	at       time.Time
	cpu      time.Duration
	resident int64 // memory in bytes, now
	series   float64
	added    float64 // samples
}

// startPrometheus starts one in dir, where the file of targets is.
func startPrometheus(ctx context.Context, o options, dir string) (*prometheus, error) {
	address, err := freeAddress(ctx)
	if err != nil {
		return nil, err
	}
	rules, err := filepath.Abs(o.grafana)
	if err != nil {
		return nil, err
	}
	text := fmt.Sprintf(config, model.Duration(o.interval), model.Duration(min(o.interval, longestScrape)), filepath.Join(dir, targetsFile),
		filepath.Join(rules, "alerts.yaml"), filepath.Join(rules, "fleet_rules.yaml"))
	file := filepath.Join(dir, "prometheus.yml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		return nil, err
	}
	p := &prometheus{base: "http://" + address, dir: dir, client: &http.Client{Timeout: 3 * time.Minute}}
	args := []string{
		"--config.file=" + file, "--storage.tsdb.path=" + filepath.Join(dir, dataDir), "--web.listen-address=" + address,
		"--web.enable-admin-api", "--log.level=warn",
	}
	if o.native {
		args = append(args, "--enable-feature=native-histograms")
	}
	p.cmd = exec.CommandContext(ctx, o.prometheus, args...)
	p.cmd.Cancel = func() error { return p.cmd.Process.Signal(os.Interrupt) }
	p.cmd.Stderr = &p.log
	return p, p.cmd.Start()
}

func (p *prometheus) stop() error {
	_ = p.cmd.Process.Signal(os.Interrupt) // it may have ended
	if err := p.cmd.Wait(); err != nil {
		return fmt.Errorf("prometheus: %w; it wrote:\n%s", err, &p.log)
	}
	return nil
}

// freeAddress returns an address of the loopback that was free.
func freeAddress(ctx context.Context) (string, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}

// get returns the body of an answer with status 200.
func get(ctx context.Context, client *http.Client, where string) ([]byte, error) {
	return fetch(ctx, client, http.MethodGet, where)
}

func fetch(ctx context.Context, client *http.Client, method, where string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, where, http.NoBody)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %.200s", where, resp.Status, body)
	}
	return body, err
}

// api calls the API and decodes the data of its answer.
func (p *prometheus) api(ctx context.Context, method, call string, values url.Values, data any) error {
	body, err := fetch(ctx, p.client, method, p.base+"/api/v1/"+call+"?"+values.Encode())
	if err != nil {
		return err
	}
	if err := json.Unmarshal(body, &struct{ Data any }{data}); err != nil {
		return fmt.Errorf("the answer of Prometheus to %s: %w", call, err)
	}
	return nil
}

// value returns the value of an expression that has one.
func (p *prometheus) value(ctx context.Context, expression string) (float64, error) {
	var data struct{ Result []struct{ Value [2]any } }
	if err := p.api(ctx, http.MethodGet, "query", url.Values{"query": {expression}}, &data); err != nil {
		return 0, err
	}
	if len(data.Result) != 1 {
		return 0, fmt.Errorf("%d values for %s", len(data.Result), expression)
	}
	return strconv.ParseFloat(fmt.Sprint(data.Result[0].Value[1]), 64)
}

// awaitUp waits until every host has been scraped with the given label.
func (p *prometheus) awaitUp(ctx context.Context, o options, rollout string) error {
	limit := upTime + 4*o.interval
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("not all of %d hosts were scraped in %v: fewer hosts, or a longer interval", o.hosts, limit))
	defer cancel()
	expression := fmt.Sprintf(`count(max_over_time(up{rollout=%q}[%s]) == 1) or vector(0)`, rollout, model.Duration(limit))
	for {
		n, err := p.value(ctx, expression) // fails until it serves
		if err == nil && n == float64(o.hosts) {
			return nil
		}
		if slept := sleep(ctx, time.Second); slept != nil {
			return errors.Join(slept, fmt.Errorf("%.0f were", n), errors.New(p.log.String()))
		}
	}
}

// usage reads what it has used.
func (p *prometheus) usage(ctx context.Context) (u usage, err error) {
	text, err := get(ctx, p.client, p.base+"/metrics")
	if err != nil {
		return u, err
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(text))
	if err != nil {
		return u, fmt.Errorf("the metrics of Prometheus: %w", err)
	}
	sum := func(name string) (all float64) {
		for _, m := range families[name].GetMetric() {
			all += m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
		return all
	}
	u = usage{
		at: time.Now(), cpu: time.Duration(sum("process_cpu_seconds_total") * float64(time.Second)), resident: int64(sum("process_resident_memory_bytes")),
		series: sum("prometheus_tsdb_head_series"), added: sum("prometheus_tsdb_head_samples_appended_total"),
	}
	return u, nil
}

// disk is the size of a block with all samples, in bytes, and its number of samples.
type disk struct {
	chunks, index int64
	samples       float64
}

// snapshot has Prometheus write all it has as blocks, and returns their size.
func (p *prometheus) snapshot(ctx context.Context) (d disk, err error) {
	var data struct{ Name string }
	if err := p.api(ctx, http.MethodPost, "admin/tsdb/snapshot", nil, &data); err != nil {
		return d, err
	}
	root := filepath.Join(p.dir, dataDir, "snapshots", data.Name)
	err = filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		info, err := e.Info()
		switch {
		case err != nil:
			return err
		case filepath.Base(filepath.Dir(path)) == "chunks":
			d.chunks += info.Size()
		case e.Name() == "index":
			d.index += info.Size()
		case e.Name() == "meta.json":
			var meta struct{ Stats struct{ NumSamples float64 } }
			text, err := os.ReadFile(path) //nolint:gosec // G122: nobody else writes below this directory, which this program made
			if err == nil {
				err = json.Unmarshal(text, &meta)
			}
			d.samples += meta.Stats.NumSamples
			return err
		}
		return nil
	})
	return d, err
}

// scrapes returns how many hosts were not scraped at least once during the window, and the
// 99th percentile and the greatest time of a scrape in it, in seconds.
func (p *prometheus) scrapes(ctx context.Context, o options) (down float64, slowest [2]float64, err error) {
	window := model.Duration(o.window)
	for _, v := range []struct {
		to         *float64
		expression string
	}{
		{&down, fmt.Sprintf(`count(min_over_time(up[%s]) == 0) or vector(0)`, window)},
		{&slowest[0], fmt.Sprintf(`quantile(0.99, max_over_time(scrape_duration_seconds[%s]))`, window)},
		{&slowest[1], fmt.Sprintf(`max(max_over_time(scrape_duration_seconds[%s]))`, window)},
	} {
		if *v.to, err = p.value(ctx, v.expression); err != nil {
			return down, slowest, err
		}
	}
	return down, slowest, nil
}
