package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
)

// What is published. A pod selects nodes by the labels, and requests the resource.
const (
	labelMechanism  = "gpreempt/mechanism"
	labelPolicy     = "gpreempt/policy"
	labelFreeShare  = "gpreempt/free-share"
	resourceOffline = "gpreempt/offline"
)

// apiServer is the API server of the cluster, for one node.
type apiServer struct{ url, dir, node string }

// publish sends two patches, of labels and of resources. A null removes a key: a resource of 0 instead
// would have a restarted kubelet refuse the pods that run there already.
func (a apiServer) publish(ctx context.Context, f facts) error {
	type object = map[string]any
	optional := func(value string) any {
		if value == "" {
			return nil
		}
		return value
	}
	amount := ""
	if f.Offline > 0 {
		amount = strconv.Itoa(f.Offline)
	}
	resources := object{resourceOffline: optional(amount)}
	return errors.Join(
		a.patch(ctx, "", object{"metadata": object{"labels": object{
			labelMechanism: optional(f.Mechanism), labelPolicy: optional(f.Policy), labelFreeShare: optional(f.FreeShare),
		}}}),
		// The kubelet copies the capacity too, but seconds to minutes later.
		a.patch(ctx, "/status", object{"status": object{"capacity": resources, "allocatable": resources}}))
}

// patch applies a JSON merge patch (RFC 7396) to the node. The credentials are read each time: the
// kubelet replaces them.
func (a apiServer) patch(ctx context.Context, part string, change any) error {
	token, err := os.ReadFile(filepath.Join(a.dir, "token"))
	if err != nil {
		return err
	}
	ca, err := os.ReadFile(filepath.Join(a.dir, "ca.crt"))
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		return fmt.Errorf("%s has no certificate", filepath.Join(a.dir, "ca.crt"))
	}
	body, err := json.Marshal(change)
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPatch, a.url+"/api/v1/nodes/"+url.PathEscape(a.node)+part, bytes.NewReader(body))
	if err != nil {
		return err
	}
	request.Header.Set("Authorization", "Bearer "+string(bytes.TrimSpace(token)))
	request.Header.Set("Content-Type", "application/merge-patch+json")
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}, DisableKeepAlives: true}
	response, err := (&http.Client{Transport: transport}).Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(response.Body, 1<<20))
	if response.StatusCode != http.StatusOK {
		var status struct{ Message string }
		_ = json.Unmarshal(answer, &status) // what is not JSON has no message
		return fmt.Errorf("the API server refuses to change node %s%s: %s: %s", a.node, part, response.Status, status.Message)
	}
	return err
}
