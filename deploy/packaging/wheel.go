package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// python is Debian's, which has the tools that build a wheel.
const python = "/usr/bin/python3"

// wheel builds the Python client for pip below dir, and nothing where the tools are missing.
func (r *release) wheel(ctx context.Context, dir string) error {
	if err := exec.CommandContext(ctx, python, "-c", "import setuptools, wheel, pip").Run(); err != nil {
		fmt.Println("SKIP the wheel: apt-get install python3-pip python3-setuptools python3-wheel")
		return nil
	}
	source, out := filepath.Join(dir, "source"), filepath.Join(dir, "wheel")
	for _, file := range []string{"README.md", "pyproject.toml"} {
		text, err := os.ReadFile(filepath.Join(repository, "bindings/python", file))
		if err != nil {
			return err
		}
		if err := stage(filepath.Join(source, file), text, 0o644); err != nil {
			return err
		}
	}
	if err := r.client(source); err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, python, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-build-isolation", "--no-deps", "--wheel-dir", out, source)
	cmd.Env = append(os.Environ(), fmt.Sprintf("SOURCE_DATE_EPOCH=%d", r.date.Unix()), "PIP_DISABLE_PIP_VERSION_CHECK=1", "PIP_ROOT_USER_ACTION=ignore")
	if text, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("pip wheel: %w\n%s", err, text)
	}
	made, err := filepath.Glob(filepath.Join(out, "*.whl"))
	if err != nil || len(made) != 1 {
		return fmt.Errorf("pip wheel made %q: %w", made, err)
	}
	text, err := os.ReadFile(made[0])
	if err != nil {
		return err
	}
	return r.write(filepath.Base(made[0]), text)
}

var prerelease = regexp.MustCompile(`~(alpha|beta|rc)\.?([0-9]*)`)

// pythonVersion returns the version of the packages in the form of PEP 440.
func pythonVersion(packages string) (string, error) {
	version := prerelease.ReplaceAllStringFunc(packages, func(text string) string {
		m := prerelease.FindStringSubmatch(text)
		return map[string]string{"alpha": "a", "beta": "b", "rc": "rc"}[m[1]] + cmp.Or(m[2], "0")
	})
	if strings.Contains(version, "~") {
		return "", fmt.Errorf("%s is no version for Python: call a prerelease alpha, beta or rc", packages)
	}
	return version, nil
}

// client writes the modules of the Python client below dir, with the version of the release.
func (r *release) client(dir string) error {
	version, err := pythonVersion(r.packages)
	if err != nil {
		return err
	}
	files, err := filepath.Glob(filepath.Join(repository, "bindings/python/gpreempt/*.*"))
	if err != nil {
		return err
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if filepath.Base(file) == "__init__.py" {
			text = regexp.MustCompile(`(?m)^__version__ = ".*"$`).ReplaceAll(text, []byte(`__version__ = "`+version+`"`))
		}
		if err := stage(filepath.Join(dir, "gpreempt", filepath.Base(file)), text, 0o644); err != nil {
			return err
		}
	}
	return nil
}
