package scenario

import (
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpreempt/gpreempt/internal/config/yamlfile"
	"github.com/gpreempt/gpreempt/internal/regular"
)

// The columns of a trace. One of the first three is needed.
const (
	columnTimestamp = "timestamp"
	columnMS        = "ms"
	columnAtMS      = "at_ms"
)

var (
	promptColumns = []string{"contexttokens", "prompt"}
	outputColumns = []string{"generatedtokens", "output"}
)

// timestampLayouts are those of the public traces; fractions of a second may follow.
var timestampLayouts = []string{"2006-01-02 15:04:05", "2006-01-02 15:04:05Z07:00", "2006-01-02T15:04:05", time.RFC3339}

// maxTrace bounds a file of requests, in bytes; the public ones have some 100 MB at most.
const maxTrace = 1 << 30

func readTrace(path string) ([]Arrival, error) {
	f, err := regular.Open(path, maxTrace)
	if err != nil {
		return nil, fmt.Errorf("trace: %w: check the path; it is relative to the scenario's file", err)
	}
	defer f.Close()
	points, err := ParseTrace(f)
	if err != nil {
		return nil, fmt.Errorf("trace %s: %w", path, err)
	}
	return points, nil
}

// ParseTrace reads requests from CSV with a header, in the order of their times. Two forms are
// known: TIMESTAMP, ContextTokens and GeneratedTokens, as of the Azure LLM inference traces, where
// the first request arrives at 0; and ms or at_ms, the milliseconds from the beginning, with prompt
// and output for tokens if there are any. Other columns are ignored. The error has the line.
func ParseTrace(r io.Reader) ([]Arrival, error) {
	rows := csv.NewReader(r)
	rows.ReuseRecord = true
	head, err := rows.Read()
	if errors.Is(err, io.EOF) {
		return nil, errors.New("the file is empty: begin with a line that names the columns, such as at_ms")
	}
	if err != nil {
		return nil, fmt.Errorf("not CSV: %w", err)
	}
	c, err := newColumns(head)
	if err != nil {
		return nil, err
	}
	var all []Arrival
	for {
		row, err := rows.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("not CSV: %w", err)
		}
		line, _ := rows.FieldPos(0)
		if len(all) == MaxRequests {
			return nil, fmt.Errorf("line %d: there are more than %d requests: use a part of the file", line, MaxRequests)
		}
		a, err := c.arrival(row)
		if err == nil && len(all) > 0 && a.At < all[len(all)-1].At {
			err = errors.New("it is earlier than the line before: sort the file by time")
		}
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", line, err)
		}
		all = append(all, a)
	}
	if len(all) == 0 {
		return nil, errors.New("the file has no requests: add a line for each")
	}
	return all, nil
}

// columns are the indices of the columns, -1 for those that the file has not.
type columns struct {
	timestamp, ms, prompt, output int
	begin                         time.Time // of the first timestamp
}

func newColumns(head []string) (*columns, error) {
	names := make([]string, len(head))
	for i, name := range head {
		names[i] = strings.ToLower(strings.TrimSpace(strings.TrimPrefix(name, "\ufeff")))
	}
	find := func(wanted ...string) int {
		return slices.IndexFunc(names, func(name string) bool { return slices.Contains(wanted, name) })
	}
	c := &columns{
		timestamp: find(columnTimestamp), ms: find(columnMS, columnAtMS),
		prompt: find(promptColumns...), output: find(outputColumns...),
	}
	if c.timestamp < 0 && c.ms < 0 {
		return nil, fmt.Errorf("line 1: no column says when a request arrives, in %s: name one TIMESTAMP, ms or at_ms", yamlfile.Quoted(strings.Join(head, ",")))
	}
	return c, nil
}

func (c *columns) arrival(row []string) (Arrival, error) {
	var a Arrival
	var err error
	if c.ms >= 0 {
		a.At, err = milliseconds(row[c.ms])
	} else {
		a.At, err = c.since(row[c.timestamp])
	}
	if err != nil {
		return a, err
	}
	if a.Prompt, err = tokens(row, c.prompt); err != nil {
		return a, err
	}
	a.Output, err = tokens(row, c.output)
	return a, err
}

func milliseconds(text string) (time.Duration, error) {
	v, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
	if most := float64(MaxDuration.Milliseconds()); err != nil || !(v >= 0 && v <= most) {
		return 0, fmt.Errorf("%s is not a time: write milliseconds from 0 to %.0f", yamlfile.Quoted(text), most)
	}
	return time.Duration(v * float64(time.Millisecond)), nil
}

// since returns the time from the first timestamp.
func (c *columns) since(text string) (time.Duration, error) {
	for _, layout := range timestampLayouts {
		at, err := time.Parse(layout, strings.TrimSpace(text))
		if err != nil {
			continue
		}
		if c.begin.IsZero() {
			c.begin = at
		}
		if d := at.Sub(c.begin); d <= MaxDuration {
			return d, nil
		}
		return 0, fmt.Errorf("%s is more than %v after the first: use a part of the file", yamlfile.Quoted(text), MaxDuration)
	}
	return 0, fmt.Errorf("%s is not a time: write one such as 2023-11-16 18:15:46.680", yamlfile.Quoted(text))
}

func tokens(row []string, column int) (int, error) {
	if column < 0 {
		return 0, nil
	}
	text := strings.TrimSpace(row[column])
	n, err := strconv.Atoi(text)
	if err != nil || n < 0 || n > maxTokens {
		return 0, fmt.Errorf("%s is not a number of tokens: write 0 to %d", yamlfile.Quoted(text), maxTokens)
	}
	return n, nil
}
