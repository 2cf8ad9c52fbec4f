package container

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// dockerTalk queries over Docker's API, which Podman has too: GET /containers/ID/json,
// "Inspect a container". A path without a version means the newest version of the peer;
// all versions have the fields that are read here.
func dockerTalk(ctx context.Context, conn net.Conn, id string) (reported, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://localhost/containers/"+url.PathEscape(id)+"/json", nil)
	if err != nil {
		return reported{}, err
	}
	request.Close = true
	if err := request.Write(conn); err != nil {
		return reported{}, err
	}
	stream := &io.LimitedReader{R: conn, N: maxHeader + maxAnswer}
	response, err := http.ReadResponse(bufio.NewReader(stream), request)
	if err != nil {
		if stream.N <= 0 {
			return reported{}, tooLarge()
		}
		return reported{}, err
	}
	defer response.Body.Close()
	switch response.StatusCode {
	case http.StatusOK:
	case http.StatusNotFound:
		return reported{}, errUnknown
	default:
		return reported{}, &answerError{"HTTP status " + response.Status}
	}
	body, err := io.ReadAll(response.Body)
	if stream.N <= 0 {
		return reported{}, tooLarge()
	}
	if err != nil {
		return reported{}, err
	}
	return parseInspect(body, id)
}

func tooLarge() error {
	return &answerError{fmt.Sprintf("the answer is larger than %d KiB", maxAnswer>>10)}
}

// parseInspect parses the answer of Docker's API.
func parseInspect(body []byte, id string) (reported, error) {
	var inspect struct {
		ID     string `json:"Id"`
		Name   string
		Image  string
		State  struct{ Pid *int32 }
		Config struct {
			Image  string
			Labels map[string]string
		}
	}
	if err := json.NewDecoder(bytes.NewReader(body)).Decode(&inspect); err != nil {
		return reported{}, &answerError{"the answer is not that of Docker's API: " + cut(err.Error(), maxText)}
	}
	if inspect.ID != id {
		return reported{}, errUnknown // Docker accepts names instead of ids
	}
	labels := inspect.Config.Labels
	pid := int32(unsaid)
	if inspect.State.Pid != nil {
		pid = *inspect.State.Pid
	}
	return reported{pid: pid, pod: labels[labelPodUID], container: clean(gpreempt.Container{
		// For the kubelet's containers the name combines the names of all parts.
		Name:      cmp.Or(labels[labelContainer], strings.TrimPrefix(inspect.Name, "/")),
		Image:     cmp.Or(inspect.Config.Image, inspect.Image),
		Labels:    cleanLabels(labels),
		Namespace: labels[labelPodNamespace], Pod: labels[labelPod],
	})}, nil
}
