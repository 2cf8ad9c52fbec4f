package container

import (
	"cmp"
	"context"
	"net"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// The labels by which the kubelet tells a runtime whose a container is
// (pkg/types/labels.go of k8s.io/kubelet and cri-client). They are added to the
// pod's own.
const (
	labelContainer    = "io.kubernetes.container.name"
	labelPod          = "io.kubernetes.pod.name"
	labelPodNamespace = "io.kubernetes.pod.namespace"
	labelPodUID       = "io.kubernetes.pod.uid"
)

// criTalk asks over the Kubernetes container runtime interface. A connection
// serves one question: they are few, and so nothing has to be kept alive, or put
// right when the runtime was restarted.
func criTalk(ctx context.Context, conn net.Conn, id string) (gpreempt.Container, error) {
	var once sync.Once
	client, err := grpc.NewClient("passthrough:///runtime",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithAuthority("localhost"),
		grpc.WithDisableServiceConfig(),
		grpc.WithDisableRetry(),
		grpc.WithMaxHeaderListSize(maxHeader),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer)),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			var mine net.Conn
			if once.Do(func() { mine = conn }); mine == nil {
				return nil, net.ErrClosed
			}
			return mine, nil
		}),
	)
	if err != nil {
		return gpreempt.Container{}, err
	}
	defer client.Close()
	c, err := criContainer(ctx, cri.NewRuntimeServiceClient(client), id)
	return c, criError(err)
}

// criContainer joins what the runtime has about a container and about its pod.
func criContainer(ctx context.Context, runtime cri.RuntimeServiceClient, id string) (gpreempt.Container, error) {
	// The status of a container does not name its sandbox, the list does. The filter
	// takes the beginning of an id too.
	list, err := runtime.ListContainers(ctx, &cri.ListContainersRequest{Filter: &cri.ContainerFilter{Id: id}})
	if err != nil {
		return gpreempt.Container{}, err
	}
	var listed *cri.Container
	for _, l := range list.GetContainers() {
		if l.GetId() == id {
			listed = l
		}
	}
	if listed == nil {
		return gpreempt.Container{}, errUnknown
	}
	labels := listed.GetLabels()
	c := gpreempt.Container{
		Name:      cmp.Or(listed.GetMetadata().GetName(), labels[labelContainer]),
		Image:     listed.GetImage().GetUserSpecifiedImage(),
		Namespace: labels[labelPodNamespace], Pod: labels[labelPod],
		Labels: cleanLabels(labels),
	}
	if c.Image == "" {
		// Older kubelets give the list an image's digest only.
		s, err := runtime.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: id})
		if err != nil {
			return gpreempt.Container{}, err
		}
		image := s.GetStatus().GetImage()
		c.Image = cmp.Or(image.GetUserSpecifiedImage(), image.GetImage(), listed.GetImage().GetImage(), listed.GetImageRef())
	}
	s, err := runtime.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: listed.GetPodSandboxId()})
	switch {
	case status.Code(err) == codes.NotFound:
		// It is being removed: the container's labels have to do.
	case err != nil:
		return gpreempt.Container{}, err
	default:
		pod := s.GetStatus()
		c.Namespace, c.Pod = cmp.Or(pod.GetMetadata().GetNamespace(), c.Namespace), cmp.Or(pod.GetMetadata().GetName(), c.Pod)
		c.PodLabels = cleanLabels(pod.GetLabels(), labelPod, labelPodNamespace, labelPodUID)
	}
	return clean(c), nil
}

// criError tells an answer that cannot be used, and a runtime that has no such
// container, from one that does not answer.
func criError(err error) error {
	s, ok := status.FromError(err)
	if !ok || err == nil {
		return err
	}
	switch s.Code() {
	case codes.NotFound:
		return errUnknown
	case codes.Unimplemented:
		// Docker's containerd comes with its CRI turned off.
		return errUnknown
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled:
		return err
	default:
		return &answerError{s.Code().String() + ": " + cut(s.Message(), maxText)}
	}
}
