// Command kube is the control plane of a Kubernetes cluster and its kubelet in one program, which
// links what they share once. Its first argument, or the name of its file, says which it is.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/metrics/prometheus/clientgo" // registers metrics of clients
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func main() {
	commands := map[string]func() *cobra.Command{
		"kube-apiserver":          apiserver.NewAPIServerCommand,
		"kube-controller-manager": controllermanager.NewControllerManagerCommand,
		"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
		"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
	}
	name := filepath.Base(os.Args[0])
	if commands[name] == nil && len(os.Args) > 1 {
		os.Args = os.Args[1:]
		name = os.Args[0]
	}
	command := commands[name]
	if command == nil {
		fmt.Fprintf(os.Stderr, "kube: %q is no program of it: name kube-apiserver, kube-controller-manager, kube-scheduler or kubelet\n", name)
		os.Exit(2)
	}
	os.Exit(cli.Run(command()))
}
