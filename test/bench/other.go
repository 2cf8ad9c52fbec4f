package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/gpreempt/gpreempt/internal/stat"
)

// checkout is a tree whose sections are measured by its own bench, so by its own programs, config
// and client.
type checkout struct{ dir, bench string }

// compare measures sections of this tree and of the one at other, pairs times each. The two take
// turns, section by section, and change the order. It prints new / old of each figure.
func compare(ctx context.Context, out io.Writer, other, only string, pairs int) (err error) {
	b := &bench{}
	if b.dir, err = os.MkdirTemp("", "gp-bench-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(b.dir)) }()
	trees := []checkout{{".", filepath.Join(b.dir, "new")}, {other, filepath.Join(b.dir, "old")}}
	for _, t := range trees {
		cmd := exec.CommandContext(ctx, "go", "build", "-buildvcs=false", "-o", t.bench, "./test/bench")
		cmd.Dir = t.dir
		if said, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("build %s/test/bench: %w\n%s", t.dir, err, said)
		}
	}
	both := map[string][2][]float64{}
	for n := range pairs {
		for _, letter := range onceEach(only) {
			for k := range trees {
				side := (n + k) % 2
				fmt.Fprintf(os.Stderr, "pair %d of %d, section %s, %s\n", n+1, pairs, letter, [...]string{"new", "old"}[side])
				figures, err := trees[side].measure(ctx, letter, filepath.Join(b.dir, "out"))
				if err != nil {
					return err
				}
				for name, v := range figures {
					sides := both[name]
					sides[side] = append(sides[side], v)
					both[name] = sides
				}
			}
		}
	}
	return writePairs(out, both, pairs)
}

// onceEach returns one letter for each measurement that only names: some have several sections.
func onceEach(only string) (letters []string) {
	for _, s := range sections {
		if i := strings.IndexAny(only, s.letters); i >= 0 {
			letters = append(letters, only[i:i+1])
		}
	}
	return letters
}

// measure returns the median of each figure of a section, by section and name.
func (c checkout) measure(ctx context.Context, section, out string) (map[string]float64, error) {
	cmd := exec.CommandContext(ctx, c.bench, "-only", section, "-o", out)
	cmd.Dir = c.dir
	if said, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%v in %s: %w\n%s", cmd.Args, c.dir, err, said)
	}
	text, err := os.ReadFile(filepath.Join(out, "bench.txt"))
	if err != nil {
		return nil, err
	}
	figures := map[string]float64{}
	for name, units := range parseBenchmarks(string(text)) {
		figure, is := strings.CutPrefix(name, "Figure/section=")
		for unit, values := range units {
			if is {
				figures[strings.ReplaceAll(strings.Replace(figure, "/", " ", 1), "_", " ")+", "+unit] = stat.Median(values)
			}
		}
	}
	return figures, nil
}

// writePairs writes a table of Markdown: the medians of the sides, and of new / old in each pair.
func writePairs(out io.Writer, both map[string][2][]float64, pairs int) error {
	rows := [][]string{{"figure", "old", "new", "new / old", "pairs"}}
	for _, name := range slices.Sorted(maps.Keys(both)) {
		side := both[name]
		if len(side[0]) != pairs || len(side[1]) != pairs {
			rows = append(rows, []string{name, "", "", "measured by one side only", ""})
			continue
		}
		var all []float64
		for i := range pairs {
			all = append(all, side[0][i]/side[1][i])
		}
		rows = append(rows, []string{
			name, number(stat.Median(side[1])), number(stat.Median(side[0])), number(stat.Median(all)), number(slices.Min(all)) + ".." + number(slices.Max(all)),
		})
	}
	return writeRows(out, rows)
}
