package container

import (
	"cmp"
	"context"
	"encoding/json"
	"net"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// The labels that the kubelet adds to those of a pod (pkg/types/labels.go of
// k8s.io/kubelet and cri-client).
const (
	labelContainer    = "io.kubernetes.container.name"
	labelPod          = "io.kubernetes.pod.name"
	labelPodNamespace = "io.kubernetes.pod.namespace"
	labelPodUID       = "io.kubernetes.pod.uid"
)

// criTalk queries over the Kubernetes container runtime interface. A connection serves
// one query: there are few, and no connection breaks when the runtime restarts.
func criTalk(ctx context.Context, conn net.Conn, id string) (reported, error) {
	var once sync.Once
	client, err := grpc.NewClient("passthrough:///runtime",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithAuthority("localhost"),
		grpc.WithDisableServiceConfig(),
		grpc.WithDisableRetry(),
		grpc.WithMaxHeaderListSize(maxHeader),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer)),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			var only net.Conn
			if once.Do(func() { only = conn }); only == nil {
				return nil, net.ErrClosed
			}
			return only, nil
		}),
	)
	if err != nil {
		return reported{}, err
	}
	defer client.Close()
	c, err := queryCRI(ctx, cri.NewRuntimeServiceClient(client), id)
	return c, criError(err)
}

// queryCRI combines what the runtime reports of a container and of its pod.
func queryCRI(ctx context.Context, runtime cri.RuntimeServiceClient, id string) (reported, error) {
	// The list names the sandbox of a container, the status does not. The filter accepts
	// prefixes of an id too.
	list, err := runtime.ListContainers(ctx, &cri.ListContainersRequest{Filter: &cri.ContainerFilter{Id: id}})
	if err != nil {
		return reported{}, err
	}
	var listed *cri.Container
	for _, l := range list.GetContainers() {
		if l.GetId() == id {
			listed = l
		}
	}
	if listed == nil {
		return reported{}, errUnknown
	}
	// Only the status has the first process, and with older kubelets the list has the digest
	// of an image instead of its name.
	detail, err := runtime.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: id, Verbose: true})
	if err != nil {
		return reported{}, err
	}
	labels, image := listed.GetLabels(), detail.GetStatus().GetImage()
	c := gpreempt.Container{
		Name: cmp.Or(listed.GetMetadata().GetName(), labels[labelContainer]),
		Image: cmp.Or(listed.GetImage().GetUserSpecifiedImage(), image.GetUserSpecifiedImage(), image.GetImage(),
			listed.GetImage().GetImage(), listed.GetImageRef()),
		Namespace: labels[labelPodNamespace], Pod: labels[labelPod],
		Labels: cleanLabels(labels),
	}
	uid := labels[labelPodUID]
	s, err := runtime.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: listed.GetPodSandboxId()})
	switch {
	case status.Code(err) == codes.NotFound:
		// It is being removed: only the container's labels are left.
	case err != nil:
		return reported{}, err
	default:
		pod := s.GetStatus()
		c.Namespace, c.Pod = cmp.Or(pod.GetMetadata().GetNamespace(), c.Namespace), cmp.Or(pod.GetMetadata().GetName(), c.Pod)
		uid = cmp.Or(pod.GetMetadata().GetUid(), uid)
		c.PodLabels = cleanLabels(pod.GetLabels(), labelPod, labelPodNamespace, labelPodUID)
	}
	return reported{container: clean(c), pid: firstProcess(detail.GetInfo()), pod: uid}, nil
}

// firstProcess returns the pid in the verbose status of a container: "info" is JSON in
// containerd (toCRIContainerInfo) and in CRI-O (createContainerInfo); cri-dockerd has none.
func firstProcess(info map[string]string) int32 {
	var at struct{ Pid *int32 }
	if err := json.Unmarshal([]byte(info["info"]), &at); err != nil || at.Pid == nil {
		return unsaid
	}
	return *at.Pid
}

// criError returns errUnknown for a runtime without the container and an *answerError for
// an unusable answer. Other errors mean that the runtime does not answer.
func criError(err error) error {
	s, ok := status.FromError(err)
	if !ok || err == nil {
		return err
	}
	switch s.Code() {
	case codes.NotFound:
		return errUnknown
	case codes.Unimplemented:
		// The containerd of Docker has its CRI disabled.
		return errUnknown
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled:
		return err
	default:
		return &answerError{s.Code().String() + ": " + cut(s.Message(), maxText)}
	}
}
