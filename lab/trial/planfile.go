package trial

import (
	"embed"
	"fmt"
	"io/fs"
	"math"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/gpreempt/gpreempt/internal/config/yamlfile"
	"github.com/gpreempt/gpreempt/internal/regular"
	"github.com/gpreempt/gpreempt/lab/scenario"
)

//go:embed plans/*.yaml
var planFiles embed.FS

// PlanNames returns the names of the plans that gpreempt brings, sorted.
func PlanNames() []string {
	files, err := fs.Glob(planFiles, "plans/*.yaml")
	if err != nil {
		panic(err) // the pattern is invalid
	}
	for i, file := range files {
		files[i] = strings.TrimSuffix(path.Base(file), ".yaml")
	}
	return files
}

// ReadPlan returns the text of a plan by its name, or of the file at a path: a text with a slash
// or the ending .yaml is a path. file is the name of the file for Parse.
func ReadPlan(nameOrPath string) (file string, text []byte, err error) {
	if strings.Contains(nameOrPath, "/") || strings.HasSuffix(nameOrPath, ".yaml") {
		if text, err = regular.Read(nameOrPath, yamlfile.MaxSize); err != nil {
			return "", nil, fmt.Errorf("cannot read the plan: %w", err)
		}
		return nameOrPath, text, nil
	}
	if text, err = planFiles.ReadFile("plans/" + nameOrPath + ".yaml"); err != nil {
		return "", nil, fmt.Errorf("there is no plan %q: use %s, or the path of a YAML file", nameOrPath, yamlfile.Or(PlanNames()))
	}
	return nameOrPath + ".yaml", text, nil
}

// Parse parses a plan, without checking whether it is complete: see Check. name is the file's
// name in errors. The error is a yamlfile.Errors with every error in the file.
func Parse(name string, data []byte) (Plan, error) {
	d := &decoder{Parser: yamlfile.New(name)}
	root := d.Document(data)
	if root == nil {
		if d.Err() == nil {
			d.Fail(nil, "", "it is empty", "write version, name and the work")
		}
		return Plan{}, d.Err()
	}
	d.plan(yamlfile.Entry{Value: root})
	if !d.Given("version") {
		d.Fail(root, "version", "is missing", fmt.Sprintf("write version: %d", Version))
	}
	if err := d.Err(); err != nil {
		return Plan{}, err
	}
	return d.Plan, nil
}

// Check sets the defaults of a plan and returns its errors, as a yamlfile.Errors.
func (p *Plan) Check() error {
	p.Normalize()
	var errs yamlfile.Errors
	for _, e := range p.problems() {
		errs = append(errs, &yamlfile.Error{Key: e.key, Problem: e.problem, Remedy: e.remedy})
	}
	if errs == nil {
		return nil
	}
	return errs
}

// decoder collects a plan and the errors of its file.
type decoder struct {
	*yamlfile.Parser
	Plan
}

var planKeys = []string{
	"version", "name", "about", "online", "offline", "arrivals", "gaps", "count", "duration", "arms", "repeats", "warm_up", "profile", "gpus", "seed", "kfd_trace", "hip_log",
}

func (d *decoder) plan(root yamlfile.Entry) {
	p := &d.Plan
	for _, e := range d.Mapping(root.Value, "", planKeys) {
		switch e.Name {
		case "version":
			if v, ok := d.Unsigned(e.Value, e.Name, 1<<16); ok && v != Version {
				d.Fail(e.Value, e.Name, fmt.Sprintf("version %d is not known", v), fmt.Sprintf("this gplab reads version %d", Version))
			}
		case "name":
			d.Text(e.Value, e.Name, &p.Name)
		case "about":
			d.Text(e.Value, e.Name, &p.About)
		case "online":
			d.online(e)
		case "offline":
			d.offline(e)
		case "arrivals":
			d.arrivals(e)
		case "gaps":
			if texts := d.texts(e, e.Name, "write two durations, such as [1s, 10s]"); len(texts) == 2 {
				d.parseDuration(e, e.Name, texts[0], &p.Gaps[0])
				d.parseDuration(e, e.Name, texts[1], &p.Gaps[1])
			} else if texts != nil {
				d.Fail(e.Value, e.Name, fmt.Sprintf("has %d items", len(texts)), "write two durations, such as [1s, 10s]")
			}
		case "count":
			d.whole(e, e.Name, scenarioRequests, &p.Count)
		case "duration":
			d.duration(e, e.Name, &p.Duration)
		case "arms":
			for i, text := range d.texts(e, e.Name, "write a list of arms, such as [offline alone, shared, protected]") {
				arm, err := ParseArm(text)
				if err != nil {
					d.Fail(e.Value.Content[i], fmt.Sprintf("arms[%d]", i), yamlfile.Quoted(text)+" is not an arm",
						"use offline alone, online alone, shared or protected[:POLICY[:MECHANISM]]")
				}
				p.Arms = append(p.Arms, arm)
			}
		case "repeats":
			d.whole(e, e.Name, 1000, &p.Repeats)
		case "warm_up":
			d.duration(e, e.Name, &p.WarmUp)
		case "profile":
			d.Text(e.Value, e.Name, &p.Profile)
		case "gpus":
			for _, text := range d.texts(e, e.Name, "write a list of gpu_ids, such as [34535]") {
				id, err := strconv.ParseUint(text, 10, 32)
				if err != nil {
					d.Fail(e.Value, e.Name, yamlfile.Quoted(text)+" is not a gpu_id", "gpctl gpu list shows them")
				}
				p.GPUs = append(p.GPUs, uint32(id))
			}
		case "kfd_trace":
			traced := true
			d.Bool(e.Value, e.Name, &traced)
			p.NoKFDTrace = !traced
		case "hip_log":
			d.whole(e, e.Name, mostHIPLog, &p.HIPLog)
		case "seed":
			if v, ok := d.Unsigned(e.Value, e.Name, math.MaxInt64); ok {
				p.Seed = v
			}
		}
	}
}

func (d *decoder) online(section yamlfile.Entry) {
	o := &d.Online
	for _, e := range d.Mapping(section.Value, section.Name, []string{"command", "request", "ready", "answer", "announce", "hold", "max_wait"}) {
		key := yamlfile.Join(section.Name, e.Name)
		switch e.Name {
		case "command":
			d.Text(e.Value, key, &o.Command)
		case "request":
			d.Text(e.Value, key, &o.Request)
		case "ready":
			d.Text(e.Value, key, &o.Ready)
		case "answer":
			d.Text(e.Value, key, &o.Answer)
		case "announce":
			var by string
			if d.Word(e.Value, key, []string{"trial", "command"}, &by) {
				o.AnnouncedByCommand = by == "command"
			}
		case "hold":
			d.duration(e, key, &o.Hold)
		case "max_wait":
			d.duration(e, key, &o.MaxWait)
		}
	}
}

func (d *decoder) offline(section yamlfile.Entry) {
	o := &d.Offline
	for _, e := range d.Mapping(section.Value, section.Name, []string{"commands", "pids", "containers", "progress", "unit"}) {
		key := yamlfile.Join(section.Name, e.Name)
		switch e.Name {
		case "commands":
			o.Commands = d.texts(e, key, "write a list of command lines")
		case "pids":
			for _, text := range d.texts(e, key, "write a list of pids, such as [4242]") {
				pid, err := strconv.ParseInt(text, 10, 32)
				if err != nil || pid <= 0 {
					d.Fail(e.Value, key, yamlfile.Quoted(text)+" is not a pid", "gpctl target list shows them")
				}
				o.PIDs = append(o.PIDs, int32(pid))
			}
		case "containers":
			o.Containers = d.texts(e, key, "write a list of containers")
		case "progress":
			d.Text(e.Value, key, &o.Progress)
		case "unit":
			d.Text(e.Value, key, &o.Unit)
		}
	}
}

func (d *decoder) arrivals(section yamlfile.Entry) {
	a := &d.Arrivals
	for _, e := range d.Mapping(section.Value, section.Name, []string{"kind", "rate", "cv", "burst", "burst_gap", "trace", "speed"}) {
		key := yamlfile.Join(section.Name, e.Name)
		switch e.Name {
		case "kind":
			var kind string
			kinds := []string{string(scenario.Constant), string(scenario.Poisson), string(scenario.Gamma), string(scenario.Bursts), string(scenario.Trace)}
			if d.Word(e.Value, key, kinds, &kind) {
				a.Kind = scenario.ArrivalKind(kind)
			}
		case "rate":
			d.number(e, key, &a.Rate)
		case "cv":
			d.number(e, key, &a.CV)
		case "burst":
			d.whole(e, key, 10_000, &a.Burst)
		case "burst_gap":
			d.duration(e, key, &a.BurstGap)
		case "trace":
			d.Text(e.Value, key, &a.Trace)
		case "speed":
			d.number(e, key, &a.Speed)
		}
	}
}

// texts returns the texts and numbers of a list.
func (d *decoder) texts(e yamlfile.Entry, key, remedy string) (texts []string) {
	items, _ := d.Items(e.Value, key, remedy, remedy)
	for _, item := range items {
		texts = append(texts, item.Value)
	}
	return texts
}

func (d *decoder) whole(e yamlfile.Entry, key string, most uint64, into *int) {
	if v, ok := d.Unsigned(e.Value, key, most); ok {
		*into = int(v)
	}
}

func (d *decoder) number(e yamlfile.Entry, key string, into *float64) {
	v, err := strconv.ParseFloat(e.Value.Value, 64)
	if !yamlfile.IsScalar(e.Value, "!!int") && !yamlfile.IsScalar(e.Value, "!!float") || err != nil || math.IsNaN(v) || math.IsInf(v, 0) {
		d.Fail(e.Value, key, "is "+yamlfile.Kind(e.Value), "write a number such as 0.5")
		return
	}
	*into = v
}

func (d *decoder) duration(e yamlfile.Entry, key string, into *time.Duration) {
	if !yamlfile.IsScalar(e.Value, "!!str") {
		d.Fail(e.Value, key, "is "+yamlfile.Kind(e.Value), "write a number with its unit, such as 20ms, 1.5s or 5m")
		return
	}
	d.parseDuration(e, key, e.Value.Value, into)
}

func (d *decoder) parseDuration(e yamlfile.Entry, key, text string, into *time.Duration) {
	v, err := time.ParseDuration(text)
	if err != nil || v < 0 {
		d.Fail(e.Value, key, yamlfile.Quoted(text)+" is not a duration", "write a number with its unit, such as 20ms, 1.5s or 5m")
		return
	}
	*into = v
}
