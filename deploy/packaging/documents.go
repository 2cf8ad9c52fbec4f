package main

import (
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
)

// documents are the files and folders of the repository that are installed as documentation,
// and where below its folder.
var documents = map[string]string{
	"README.md": "README.md", "docs": ".", "CHANGELOG.md": "CHANGELOG.md", "bindings/python/README.md": "python.md",
	"api/proto": "proto", "deploy/grafana": "grafana", "examples": "examples",
}

// link matches a Markdown link to a file, or an image.
var link = regexp.MustCompile(`!?\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)`)

// installed returns where a path of the repository is installed, if it is.
func installed(name string) (where string, ok bool) {
	for from, to := range documents {
		if name == from || strings.HasPrefix(name, from+"/") {
			where = path.Join(to, strings.TrimPrefix(name, from))
			_, err := os.Stat(filepath.Join(repository, filepath.FromSlash(name)))
			return where, err == nil && !raw(name)
		}
	}
	return "", false
}

// raw reports whether a file is one of the samples behind the figures of a document.
func raw(name string) bool {
	return strings.HasPrefix(name, "docs/") && path.Ext(name) == ".json"
}

// writeDocuments writes the documentation into dir.
func writeDocuments(dir string) error {
	for from := range documents {
		root := filepath.Join(repository, filepath.FromSlash(from))
		err := filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			if d.IsDir() && (strings.HasPrefix(d.Name(), ".") || d.Name() == "__pycache__") {
				return filepath.SkipDir
			}
			relative, err := filepath.Rel(repository, file)
			if err != nil {
				return err
			}
			name := filepath.ToSlash(relative)
			to, ok := installed(name)
			if !ok || !d.Type().IsRegular() {
				return nil
			}
			text, err := os.ReadFile(file)
			if err != nil {
				return err
			}
			if path.Ext(name) == ".md" {
				text = []byte(relink(string(text), name))
			}
			return stage(filepath.Join(dir, filepath.FromSlash(to)), text, 0o644)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// relink returns a document with the links to what is installed, and only their text where
// the target is not.
func relink(text, name string) string {
	at, _ := installed(name)
	return link.ReplaceAllStringFunc(text, func(whole string) string {
		m := link.FindStringSubmatchIndex(whole)
		label, target := whole[m[2]:m[3]], whole[m[4]:m[5]]
		file, fragment, _ := strings.Cut(target, "#")
		if file == "" || strings.Contains(target, ":") {
			return whole
		}
		to, ok := installed(path.Join(path.Dir(name), file))
		if !ok {
			return label
		}
		relative, err := filepath.Rel(path.Dir(at), to)
		if err != nil {
			return label
		}
		if fragment != "" {
			relative += "#" + fragment
		}
		return whole[:m[4]] + filepath.ToSlash(relative) + whole[m[5]:]
	})
}
