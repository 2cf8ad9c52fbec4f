package term

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/spell"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// GPUNames are the GPUs of the daemon's host, by topology node. HIP numbers them in this order
// in a process whose environment hides none.
type GPUNames []*gpreemptv1.Gpu

// NameGPUs returns the names for people; none for programs, and when the daemon does not list
// them: names are an addition.
func (a *App) NameGPUs(ctx context.Context, admin AdminClient) GPUNames {
	if a.ForPrograms() {
		return nil
	}
	resp, err := admin.ListGpus(ctx, &gpreemptv1.ListGpusRequest{})
	if err != nil {
		return nil
	}
	return resp.GetGpus()
}

// index returns the HIP index of a GPU, -1 when it is unknown.
func (n GPUNames) index(id uint32) int {
	return slices.IndexFunc(n, func(g *gpreemptv1.Gpu) bool { return g.GetGpuId() == id })
}

// HIP formats the HIP indices of GPUs.
func (n GPUNames) HIP(ids ...uint32) string {
	var indices []int
	for _, id := range ids {
		if i := n.index(id); i >= 0 {
			indices = append(indices, i)
		}
	}
	slices.Sort(indices)
	return Numbers(indices)
}

// Product formats the names of GPUs.
func (n GPUNames) Product(ids ...uint32) string {
	var products []string
	for _, id := range ids {
		if i := n.index(id); i >= 0 && !slices.Contains(products, n[i].GetName()) {
			products = append(products, n[i].GetName())
		}
	}
	return Or(strings.Join(products, ","), "-")
}

// Full formats GPUs with their indices and names.
func (n GPUNames) Full(ids []uint32) string {
	text := GPUs(ids, true)
	if hip := n.HIP(ids...); hip != "-" {
		text += fmt.Sprintf(" (HIP %s, %s)", hip, n.Product(ids...))
	}
	return text
}

var bdf = regexp.MustCompile(`^([0-9a-fA-F]{1,8}:)?[0-9a-fA-F]{1,2}:[0-9a-fA-F]{1,2}\.[0-7]$`)

// SelectorHelp describes how a GPU is named.
const SelectorHelp = "a HIP index, gpu_id, product name, PCI address, node:N or renderDN, as gpctl gpu list shows them"

// matches reports whether s is a name of a GPU with a HIP index.
func (n GPUNames) matches(i int, s string) bool {
	g := n[i]
	number := func(text string, of uint32) bool {
		v, err := strconv.ParseUint(text, 10, 32)
		return err == nil && uint32(v) == of
	}
	address := strings.ToLower(s)
	if strings.Count(s, ":") == 1 {
		address = "0000:" + address
	}
	index, isIndex := strings.CutPrefix(s, "hip:")
	node, isNode := strings.CutPrefix(s, "node:")
	minor, isMinor := strings.CutPrefix(strings.TrimPrefix(s, "/dev/dri/"), "renderD")
	switch {
	case isIndex:
		return number(index, uint32(i))
	case isNode:
		return number(node, g.GetNode())
	case isMinor:
		return number(minor, g.GetRenderMinor()) && g.GetRenderMinor() > 0
	case bdf.MatchString(s):
		return address == g.GetBdf()
	case strings.Trim(s, "0123456789") == "":
		return number(s, uint32(i)) || number(s, g.GetGpuId())
	}
	return strings.EqualFold(s, g.GetName())
}

// Find returns the only GPU that s names.
func (n GPUNames) Find(s string) (*gpreemptv1.Gpu, error) {
	var found []int
	for i := range n {
		if n.matches(i, s) {
			found = append(found, i)
		}
	}
	describe := func(list []int) string {
		var all []string
		for _, i := range list {
			all = append(all, fmt.Sprintf("hip:%d (GPU %d, %s, %s)", i, n[i].GetGpuId(), n[i].GetName(), Or(n[i].GetBdf(), "-")))
		}
		return strings.Join(all, ", ")
	}
	switch len(found) {
	case 1:
		return n[found[0]], nil
	case 0:
		next := "gpctl gpu list; a GPU is " + SelectorHelp
		if strings.ContainsAny(s, ", ") {
			next = "--gpu for each of them, one name a time"
		}
		return nil, &Failure{Code: ExitNotFound, Message: fmt.Sprintf("GPU %q not found on this host", s), Next: next}
	}
	return nil, &Failure{Code: ExitRefused, Message: fmt.Sprintf("%q names %d GPUs: %s", s, len(found), describe(found)), Next: "use hip:N"}
}

// FindGPU returns the gpu_id of the GPU that s names, 0 for "".
func FindGPU(ctx context.Context, admin AdminClient, s string) (uint32, error) {
	if s == "" {
		return 0, nil
	}
	resp, err := admin.ListGpus(ctx, &gpreemptv1.ListGpusRequest{})
	if err != nil {
		return 0, err
	}
	g, err := GPUNames(resp.GetGpus()).Find(s)
	return g.GetGpuId(), err
}

// TargetOfCommand returns the target of the only process with KFD queues whose command is name.
func TargetOfCommand(ctx context.Context, admin AdminClient, name string) (string, error) {
	resp, err := admin.ListTargets(ctx, &gpreemptv1.ListTargetsRequest{})
	if err != nil {
		return "", err
	}
	var found, commands []string
	for _, g := range resp.GetTargets() {
		if commands = append(commands, g.GetComm()); g.GetComm() == name {
			found = append(found, g.GetTargetId())
		}
	}
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		next := "gpctl target list; a target is PID, PID@START, or the COMMAND of one process"
		if near := spell.Nearest(name, commands); near != "" {
			next = near + ", or " + next
		}
		return "", &Failure{Code: ExitNotFound, Message: fmt.Sprintf("no process %q has KFD queues", name), Next: next}
	}
	return "", &Failure{
		Code: ExitRefused, Message: fmt.Sprintf("%q is the command of %d processes: %s", name, len(found), strings.Join(found, ", ")),
		Next: "use the PID of one",
	}
}

// OneTarget returns the only process with the key, in the container unless that is "".
func OneTarget(ctx context.Context, admin AdminClient, key gpreempt.ProcessKey, container string) (*gpreemptv1.Target, error) {
	resp, err := admin.ListTargets(ctx, &gpreemptv1.ListTargetsRequest{Pid: key.PID, Container: container})
	if err != nil {
		return nil, err
	}
	matching := resp.GetTargets()
	name := strconv.Itoa(int(key.PID))
	if key.Start != 0 {
		name = key.String()
		matching = slices.DeleteFunc(matching, func(g *gpreemptv1.Target) bool { return g.GetTargetId() != name })
	}
	switch len(matching) {
	case 1:
		return matching[0], nil
	case 0:
		if container != "" {
			return nil, &Failure{
				Code: ExitNotFound, Message: fmt.Sprintf("no process %s in container %s has KFD queues", name, container),
				Next: "gpctl target list -o wide",
			}
		}
		return nil, &Failure{
			Code: ExitNotFound, Message: fmt.Sprintf("process %s has no KFD queues", name),
			Next: "gpctl target list; use the pid on the host or in the container",
		}
	}
	var which []string
	for _, g := range matching {
		where := "on the host"
		if len(g.GetNamespacePids()) > 0 {
			where = "pid " + OwnPID(g) + " in a pid namespace"
		}
		if c := g.GetContainer(); c != nil {
			where = fmt.Sprintf("pid %s in container %s", Or(strings.TrimPrefix(OwnPID(g), "-"), name), ContainerName(c))
		}
		which = append(which, fmt.Sprintf("%s (%s, %s)", g.GetTargetId(), g.GetComm(), where))
	}
	return nil, &Failure{
		Code: ExitRefused, Message: fmt.Sprintf("pid %s is ambiguous, %d processes have it: %s", name, len(matching), strings.Join(which, "; ")),
		Next: "use PID@START, or --container",
	}
}

// Simulated returns the name of the simulated machine, "" for hardware.
func Simulated(st *gpreemptv1.GetStatusResponse) string {
	machine, found := strings.CutPrefix(st.GetBackend(), "simulated")
	if !found {
		return ""
	}
	return Or(strings.TrimSpace(machine), "machine")
}

// ContainerName returns a container's name, or the beginning of its id.
func ContainerName(c *gpreemptv1.Container) string {
	id := c.GetContainerId()
	return Or(c.GetName(), Or(id[:min(12, len(id))], "-"))
}

// OwnPID returns the pid of a process in its own pid namespace.
func OwnPID(g *gpreemptv1.Target) string {
	own := g.GetNamespacePids()
	if len(own) == 0 {
		return "-"
	}
	return strconv.Itoa(int(own[len(own)-1]))
}
