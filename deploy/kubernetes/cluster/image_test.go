package cluster

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// image is a container image of one layer: programs, and nothing else.
type image struct {
	name  string
	files map[string]string // by their path in the image, without the first slash
	entry []string
}

// Names of images. None is in a registry.
const (
	pauseImage  = "cluster.local/pause:1"
	workImage   = "cluster.local/work:1"
	daemonImage = "cluster.local/gpreempt:%s"
)

func images() []image {
	all := []image{
		{pauseImage, map[string]string{"node": built("node")}, []string{"/node", "pause"}},
		{workImage, map[string]string{"usr/bin/kfdemu": built("kfdemu"), "usr/bin/node": built("node")}, nil},
	}
	// Like deploy/kubernetes/Dockerfile, in two versions.
	for _, version := range []string{"v1", "v2"} {
		all = append(all, image{fmt.Sprintf(daemonImage, version), map[string]string{
			"usr/bin/gpreemptd": built(version + "/gpreemptd"), "usr/bin/gpctl": built("gpctl"), "usr/bin/gpreempt-csi": built("gpreempt-csi"),
			"usr/bin/gpreempt-node": built("gpreempt-node"),
		}, []string{"/usr/bin/gpreemptd"}})
	}
	return all
}

// load imports the image into containerd.
func (i image) load(ctx context.Context) error {
	archive, err := i.archive()
	if err != nil {
		return fmt.Errorf("image %s: %w", i.name, err)
	}
	cmd := exec.CommandContext(ctx, "ctr", "--namespace", "k8s.io", "images", "import", "-")
	cmd.Stdin = bytes.NewReader(archive)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("import image %s: %w: %s", i.name, err, out)
	}
	return nil
}

// archive returns an archive of the OCI image layout.
func (i image) archive() ([]byte, error) {
	layer := tarball{}
	for at, from := range i.files {
		for dir := filepath.Dir(at); dir != "."; dir = filepath.Dir(dir) {
			layer.dirs = append(layer.dirs, dir)
		}
		text, err := os.ReadFile(from)
		if err != nil {
			return nil, err
		}
		layer.add(at, 0o755, text)
	}
	layer.dirs = append(layer.dirs, "tmp")
	blobs := tarball{}
	content, err := layer.bytes()
	if err != nil {
		return nil, err
	}
	config := map[string]any{
		"architecture": "amd64", "os": "linux",
		"config": map[string]any{"Entrypoint": i.entry, "Env": []string{"PATH=/usr/bin"}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{digest(content)}},
	}
	manifest := map[string]any{
		"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
		"config": blobs.blob("application/vnd.oci.image.config.v1+json", encode(config)),
		"layers": []any{blobs.blob("application/vnd.oci.image.layer.v1.tar", content)},
	}
	entry := blobs.blob("application/vnd.oci.image.manifest.v1+json", encode(manifest))
	entry["annotations"] = map[string]string{"io.containerd.image.name": i.name}
	blobs.add("oci-layout", 0o644, []byte(`{"imageLayoutVersion": "1.0.0"}`))
	blobs.add("index.json", 0o644, encode(map[string]any{"schemaVersion": 2, "manifests": []any{entry}}))
	return blobs.bytes()
}

func encode(v any) []byte {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err) // maps, strings and numbers
	}
	return text
}

func digest(content []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(content)) }

// tarball is the content of an archive.
type tarball struct {
	dirs  []string
	files []tar.Header
	texts [][]byte
}

func (t *tarball) add(name string, mode int64, text []byte) {
	t.files = append(t.files, tar.Header{Name: name, Mode: mode, Size: int64(len(text)), Typeflag: tar.TypeReg})
	t.texts = append(t.texts, text)
}

// blob adds content by its digest, and returns its descriptor.
func (t *tarball) blob(kind string, content []byte) map[string]any {
	sum := digest(content)
	t.add("blobs/sha256/"+sum[len("sha256:"):], 0o644, content)
	return map[string]any{"mediaType": kind, "digest": sum, "size": len(content)}
}

func (t *tarball) bytes() ([]byte, error) {
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	made := map[string]bool{}
	for i := len(t.dirs) - 1; i >= 0; i-- { // the outer first
		if dir := t.dirs[i]; !made[dir] {
			made[dir] = true
			if err := w.WriteHeader(&tar.Header{Name: dir + "/", Mode: 0o755, Typeflag: tar.TypeDir}); err != nil {
				return nil, err
			}
		}
	}
	for i := range t.files {
		if err := w.WriteHeader(&t.files[i]); err != nil {
			return nil, err
		}
		if _, err := w.Write(t.texts[i]); err != nil {
			return nil, err
		}
	}
	return out.Bytes(), w.Close()
}
