package container

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"time"

	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/internal/regular"
)

const (
	// kubeletTimeout bounds a query of the kubelet.
	kubeletTimeout = 10 * time.Second
	// kubeletPause is the shortest time between two queries. Each returns all pods.
	kubeletPause = 10 * time.Second
	// maxPodList bounds the kubelet's answer, in bytes: there are some 250 pods, few of
	// them with 20 KiB. maxPods bounds how many are kept.
	maxPodList = 16 << 20
	maxPods    = 2048
	// maxPEM bounds the files for its connection, in bytes.
	maxPEM = 1 << 20
)

// podFacts is what only the kubelet knows of a pod: a runtime has the labels from the
// start of the pod, and no priority class.
type podFacts struct {
	namespace, name, priorityClass string
	labels                         map[string]string
}

// podList is the last answer of the kubelet and the state of the queries.
type podList struct {
	// facts are the pods, by unique id.
	facts map[string]podFacts
	// asked is the time of the last query, next that of the next one.
	asked, next time.Time
	err         error
	failures    int
}

// runKubelet queries the kubelet after the first Lookup of each container in a pod, and
// every refreshEvery, until ctx ends.
func (r *Resolver) runKubelet(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.wakeKubelet:
		case <-timer.C:
		}
		pause := r.kubeletDue()
		if pause <= 0 {
			facts, err := r.kubeletPods(ctx)
			if ctx.Err() != nil {
				return
			}
			r.updatePods(facts, err)
			pause = r.kubeletDue()
		}
		timer.Reset(max(pause, 0))
	}
}

// kubeletDue returns the time until the next query of the kubelet.
func (r *Resolver) kubeletDue() time.Duration {
	now := r.cfg.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	next := now.Add(idleAfter)
	for _, e := range r.entries {
		if e.pod == "" || now.Sub(e.used) >= idleAfter {
			continue
		}
		at := r.pods.next
		if r.pods.failures == 0 && e.since.After(r.pods.asked) {
			at = r.pods.asked.Add(kubeletPause)
		}
		if at.Before(next) {
			next = at
		}
	}
	return next.Sub(now)
}

// updatePods stores the result of a query. A failure keeps the earlier answer.
func (r *Resolver) updatePods(facts map[string]podFacts, err error) {
	now := r.cfg.Now()
	var changed []string
	r.mu.Lock()
	p := &r.pods
	was := p.err
	p.asked, p.err = now, err
	if err == nil {
		p.facts, p.failures, p.next = facts, 0, now.Add(refreshEvery)
		for _, e := range r.entries {
			if e.show(facts) {
				changed = append(changed, e.key.id)
			}
		}
	} else {
		p.next = now.Add(max(kubeletPause, backOff(p.failures, refreshEvery)))
		p.failures++
	}
	r.mu.Unlock()
	switch {
	case err != nil && was == nil:
		r.cfg.Log.Warn("kubelet does not list its pods", log.Kubelet(r.cfg.Kubelet), log.Err(err))
	case err == nil && was != nil:
		r.cfg.Log.Info("kubelet lists its pods again", log.Kubelet(r.cfg.Kubelet))
	}
	for _, id := range changed {
		r.cfg.Changed(id)
	}
}

// kubeletPods returns all pods of the node. The token and the certificates are replaced
// while the daemon runs, so each query reads them again and no connection is reused.
func (r *Resolver) kubeletPods(ctx context.Context) (map[string]podFacts, error) {
	address, err := url.Parse(r.cfg.Kubelet)
	if err != nil {
		return nil, err
	}
	if address.Path == "" || address.Path == "/" {
		address.Path = "/pods"
	}
	ctx, cancel := context.WithTimeout(ctx, kubeletTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address.String(), nil)
	if err != nil {
		return nil, err
	}
	if r.cfg.KubeletToken != "" {
		if address.Scheme != "https" {
			return nil, errors.New("a token needs an encrypted connection: the address must begin with https://")
		}
		token, err := regular.ReadSoon(r.cfg.KubeletToken, maxPEM)
		if err != nil {
			return nil, err
		}
		request.Header.Set("Authorization", "Bearer "+string(bytes.TrimSpace(token)))
	}
	trust := &tls.Config{MinVersion: tls.VersionTLS12}
	if r.cfg.KubeletCA != "" {
		pem, err := regular.ReadSoon(r.cfg.KubeletCA, maxPEM)
		if err != nil {
			return nil, err
		}
		if trust.RootCAs = x509.NewCertPool(); !trust.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s has no certificate", r.cfg.KubeletCA)
		}
	}
	transport := &http.Transport{
		DialContext: new(net.Dialer).DialContext, TLSClientConfig: trust, DisableKeepAlives: true, MaxResponseHeaderBytes: maxHeader,
	}
	defer transport.CloseIdleConnections()
	response, err := transport.RoundTrip(request) // does not follow redirects, which would send the token
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("GET %s: HTTP status %s", address.Redacted(), response.Status)
	}
	return parsePods(response.Body)
}

// parsePods parses a list of pods (core/v1 PodList).
func parsePods(text io.Reader) (map[string]podFacts, error) {
	limited := &io.LimitedReader{R: text, N: maxPodList}
	var list *struct {
		Items []struct {
			Metadata struct {
				Name, Namespace, UID string
				Labels               map[string]string
			}
			Spec struct{ PriorityClassName string }
		}
	}
	err := json.NewDecoder(limited).Decode(&list)
	switch {
	case limited.N <= 0:
		return nil, fmt.Errorf("the list of pods is larger than %d MiB", maxPodList>>20)
	case err != nil:
		return nil, fmt.Errorf("the list of pods: %w", err)
	case list == nil:
		return nil, errors.New("the list of pods is null")
	case len(list.Items) > maxPods:
		return nil, fmt.Errorf("the list of pods has more than %d", maxPods)
	}
	facts := make(map[string]podFacts, len(list.Items))
	for _, pod := range list.Items {
		facts[cut(pod.Metadata.UID, maxText)] = podFacts{
			namespace: cut(pod.Metadata.Namespace, maxText), name: cut(pod.Metadata.Name, maxText),
			priorityClass: cut(pod.Spec.PriorityClassName, maxText), labels: cleanLabels(pod.Metadata.Labels),
		}
	}
	return facts, nil
}
