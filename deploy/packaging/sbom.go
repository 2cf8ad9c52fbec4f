package main

import (
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// The parts of CycloneDX 1.6 that are used, in the order of its schema;
// https://cyclonedx.org/docs/1.6/json.
type bom struct {
	Format       string       `json:"bomFormat"`
	Spec         string       `json:"specVersion"`
	Version      int          `json:"version"`
	Metadata     metadata     `json:"metadata"`
	Components   []component  `json:"components"`
	Dependencies []dependency `json:"dependencies"`
}

type metadata struct {
	Timestamp string    `json:"timestamp"`
	Component component `json:"component"`
}

type component struct {
	Type    string `json:"type"`
	Ref     string `json:"bom-ref"`
	Name    string `json:"name"`
	Version string `json:"version,omitempty"`
	Hashes  []hash `json:"hashes,omitempty"`
	PURL    string `json:"purl,omitempty"`
}

type hash struct {
	Alg     string `json:"alg"`
	Content string `json:"content"`
}

type dependency struct {
	Ref       string   `json:"ref"`
	DependsOn []string `json:"dependsOn"`
}

// billOfMaterials returns as CycloneDX JSON which modules are linked into binaries, from
// the Go linker's data in them.
func billOfMaterials(version string, date time.Time, binaries []string) ([]byte, error) {
	whole := component{Type: "application", Ref: "gpreempt", Name: "gpreempt", Version: version}
	b := bom{Format: "CycloneDX", Spec: "1.6", Version: 1, Metadata: metadata{date.Format(time.RFC3339), whole}}
	modules := map[string]component{}
	root := dependency{Ref: whole.Ref, DependsOn: []string{}}
	var edges []dependency
	for _, path := range binaries {
		info, err := buildinfo.ReadFile(path)
		if err != nil {
			return nil, err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		sum := sha256.Sum256(text)
		name := filepath.Base(path)
		b.Components = append(b.Components, component{
			Type: "application", Ref: name, Name: name, Version: version, Hashes: []hash{{"SHA-256", hex.EncodeToString(sum[:])}},
		})
		root.DependsOn = append(root.DependsOn, name)
		links := dependency{Ref: name}
		add := func(path, version string) {
			purl := "pkg:golang/" + strings.ToLower(path) + "@" + version
			modules[purl] = component{Type: "library", Ref: purl, Name: path, Version: version, PURL: purl}
			links.DependsOn = append(links.DependsOn, purl)
		}
		add("std", strings.TrimPrefix(info.GoVersion, "go"))
		for _, m := range info.Deps {
			if m.Replace != nil && m.Replace.Version == "" {
				continue // of this repository
			}
			if m.Replace != nil {
				m = m.Replace
			}
			add(m.Path, m.Version)
		}
		edges = append(edges, links)
	}
	for _, purl := range slices.Sorted(maps.Keys(modules)) {
		b.Components = append(b.Components, modules[purl])
	}
	b.Dependencies = append(append(b.Dependencies, root), edges...)
	text, err := json.MarshalIndent(b, "", "  ")
	return append(text, '\n'), err
}
