package trial

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

// engines are the commands of container engines, in the order in which they are asked.
var engines = []string{"docker", "podman", "nerdctl"}

// engineTime bounds the answer of an engine.
const engineTime = 10 * time.Second

// errNoEngine is returned when this host has none of the engines.
var errNoEngine = errors.New("none of docker, podman and nerdctl is installed here")

// containerID asks the engines of this host for the full ID of a container, which must run. The daemon knows names only where
// it may use the engine's socket; IDs it reads from control groups.
func containerID(ctx context.Context, name string) (string, error) {
	var answers []string
	for _, engine := range engines {
		path, err := exec.LookPath(engine)
		if err != nil {
			continue
		}
		id, err := inspect(ctx, path, name)
		if err == nil {
			return id, nil
		}
		if errors.Is(err, errStopped) {
			return "", err
		}
		answers = append(answers, fmt.Sprintf("%s: %v", engine, err))
	}
	if len(answers) == 0 {
		return "", errNoEngine
	}
	return "", errors.New(strings.Join(answers, "; "))
}

// errStopped is returned for a container that exists and does not run.
var errStopped = errors.New("it does not run, and a trial starts no container")

// inspect runs an engine's command.
func inspect(ctx context.Context, engine, name string) (id string, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, engineTime, fmt.Errorf("no answer within %v", engineTime))
	defer cancel()
	cmd := exec.CommandContext(ctx, engine, "container", "inspect", "--", name) //nolint:gosec // one of the engines, and the name that the user gave
	cmd.WaitDelay = time.Second
	out, err := cmd.Output()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		err = errors.New(firstLine(cmp.Or(strings.TrimSpace(string(exit.Stderr)), exit.Error())))
	}
	if err != nil {
		return "", cmp.Or(context.Cause(ctx), err)
	}
	var found []struct {
		ID    string `json:"Id"`
		State struct{ Running bool }
	}
	switch err := json.Unmarshal(out, &found); {
	case err != nil:
		return "", fmt.Errorf("its answer is not understood: %w", err)
	case len(found) != 1 || found[0].ID == "":
		return "", fmt.Errorf("its answer has %d containers", len(found))
	case !found[0].State.Running:
		return "", errStopped
	}
	return found[0].ID, nil
}

// findContainers finds the IDs of the containers whose names the daemon does not know.
func (d *daemon) findContainers(ctx context.Context, o *Offline) error {
	for _, name := range o.Containers {
		known, err := d.admin.ListTargets(ctx, &gpreemptv1.ListTargetsRequest{Container: name})
		if err != nil {
			return err
		}
		if len(known.GetTargets()) > 0 || strings.Contains(name, "/") { // NAMESPACE/POD, which no engine knows
			continue
		}
		id, err := containerID(ctx, name)
		switch {
		case errors.Is(err, errNoEngine): // its jobs may have no queues yet
		case err != nil:
			return fmt.Errorf("container %s: the daemon sees no process of it with GPU queues, and %w", name, err)
		default:
			d.containers[name] = id
		}
	}
	return nil
}
