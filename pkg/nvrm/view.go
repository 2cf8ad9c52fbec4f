package nvrm

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Channel is a channel of a process: a queue of work for an engine of a GPU.
type Channel struct {
	// File is the number of the process's file descriptor to which the client belongs.
	File           int
	Client, Handle Handle
	// Subdevice is the client's own object of the channel's GPU.
	Subdevice Handle
	GPU       gpreempt.GPUID
	// Compute is set for a channel of a group with compute engines. Other channels feed copy engines.
	Compute bool
}

// Is reports whether c and other are the same channel, however it was found.
func (c Channel) Is(other Channel) bool { return c.Client == other.Client && c.Handle == other.Handle }

const (
	// clientBase is the first handle of a client (RS_CLIENT_HANDLE_BASE). After clientCount handles
	// RM starts with it again (serverAllocClient).
	clientBase  Handle = 0xc1d00000
	clientCount        = 1 << 20
	// firstObject is where CUDA's user-mode driver begins to count the handles of objects.
	firstObject Handle = 0x5c000000
	// clientChunk is the number of handles of older clients that one scan tries for each file while no
	// client of the process is known. A call takes two microseconds. A new process has a new client.
	clientChunk = 4096
	// near is the distance from a client of the process within which other clients are looked for, in
	// all of its files.
	near = 1024
	// newestEvery is the time between requests for the newest client while the files of a process do
	// not change: each request uses up one handle.
	newestEvery = time.Minute
	// wideGap and gap are the numbers of handles without an object that end a scan of objects, which
	// starts after the last object found. A process that frees many objects leaves such gaps. A scan
	// is wide while a client has no channels, and once each wideEvery.
	wideGap   = 2048
	gap       = 128
	wideEvery = 30 * time.Second
	// objectCount is the largest number of handles that one scan of a client tries.
	objectCount = 1 << 20
)

// View is what is known about the clients and channels of one process. An update is cheap: known
// objects are only checked, and new ones are looked for where user-mode CUDA creates them. It is not
// safe for concurrent use.
type View struct {
	sys     Sys
	process Process
	files   map[int]*viewFile
	asked   time.Time // NewestClient
	wide    time.Time // the last wide scan began
	// channels and unknown are the result of Channels while listed is set.
	channels []Channel
	unknown  int
	listed   bool
	newest   Handle
}

// viewFile is a control file of the process. Tried handles of clients: all from first to next, the
// newest ones below first, whose number is tried, and those near a client if near is set.
type viewFile struct {
	first, next Handle
	tried       int
	near        bool
	since       time.Time // when it was found
	clients     map[Handle]*viewClient
}

// young reports whether a client may still be created for the file.
func (k *viewFile) young() bool { return len(k.clients) == 0 && time.Since(k.since) < newestEvery }

type viewClient struct {
	next    Handle // no object is known from here on
	objects map[Handle]object
	gpus    map[Handle]gpreempt.GPUID // by subdevice
}

type object struct {
	class  Class
	parent Handle
}

// NewView returns a view that knows nothing yet. The process stays the caller's.
func NewView(sys Sys, p Process) *View {
	return &View{sys: sys, process: p, files: map[int]*viewFile{}}
}

// Scan updates the view. It holds copies of the process's files only meanwhile.
func (v *View) Scan() error {
	numbers, err := v.process.Files()
	if err != nil {
		return err
	}
	v.listed = false
	fresh := slices.ContainsFunc(numbers, func(n int) bool { return v.files[n] == nil || v.files[n].young() })
	if fresh || time.Since(v.asked) >= newestEvery {
		if v.newest, err = v.sys.NewestClient(); err != nil {
			return err
		}
		v.asked = time.Now()
	}
	for n := range v.files {
		if !slices.Contains(numbers, n) {
			delete(v.files, n)
		}
	}
	allowed := gap
	if time.Since(v.wide) >= wideEvery {
		allowed, v.wide = wideGap, time.Now()
	}
	var errs []error // the other files are scanned after an error
	for _, n := range numbers {
		errs = append(errs, v.scanFile(n, allowed))
	}
	return errors.Join(errs...)
}

func (v *View) scanFile(number, allowed int) error {
	f, err := v.process.Copy(number)
	if errors.Is(err, unix.EBADF) { // closed meanwhile
		delete(v.files, number)
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	known := v.files[number]
	if known != nil {
		if same, err := known.isStill(f); err != nil {
			return err
		} else if !same { // another file has the number now
			known = nil
		}
	}
	if known == nil {
		known = &viewFile{first: v.newest, next: v.newest, since: time.Now(), clients: map[Handle]*viewClient{}}
		v.files[number] = known
	}
	for ; known.next != v.newest; known.next = behind(known.next, 1) {
		known.try(f, known.next)
	}
	for n := 0; n < clientChunk && len(v.Clients()) == 0 && known.tried < clientCount; n++ {
		known.tried++
		known.try(f, behind(known.first, -known.tried))
	}
	if all := v.Clients(); len(all) > 0 && !known.near {
		known.near = true
		for n := -near; n <= near; n++ {
			known.try(f, behind(slices.Min(all), n))
		}
	}
	for h, c := range known.clients {
		c.check(f, h)
		gap := allowed
		if !c.hasChannels() {
			gap = wideGap
		}
		if err := c.find(f, h, gap); err != nil {
			return err
		}
	}
	return nil
}

// behind returns the handle of a client that RM assigns n later.
func behind(h Handle, n int) Handle {
	return clientBase + Handle((int(h-clientBase)+n)&(clientCount-1))
}

// Quick looks for channels that were created since the last Scan, in known clients. It tries at most
// gap handles without an object.
func (v *View) Quick(gap int) error {
	for n, known := range v.files {
		if len(known.clients) == 0 {
			continue
		}
		f, err := v.process.Copy(n)
		if errors.Is(err, unix.EBADF) { // closed meanwhile: the next Scan forgets it
			continue
		}
		if err != nil {
			return err
		}
		for h, c := range known.clients {
			if n := len(c.objects); n > 0 && err == nil {
				err = c.find(f, h, gap)
				v.listed = v.listed && len(c.objects) == n
			}
		}
		if _ = f.Close(); err != nil { // it was only read
			return err
		}
	}
	return nil
}

// Searched reports whether, for each file, every handle or every handle near a client was tried.
func (v *View) Searched() bool {
	for _, known := range v.files {
		if !known.near && known.tried < clientCount {
			return false
		}
	}
	return true
}

// Clients returns the clients that the last Scan found.
func (v *View) Clients() (all []Handle) {
	for _, known := range v.files {
		all = slices.AppendSeq(all, maps.Keys(known.clients))
	}
	return all
}

// isStill forgets clients that were freed. It reports whether f can still be the same file: it had no
// client, or still has one.
func (k *viewFile) isStill(f File) (bool, error) {
	none := len(k.clients) == 0
	for h := range k.clients {
		_, err := classOf(f, h, h)
		if errors.Is(err, InvalidClient) || absent(err) {
			delete(k.clients, h)
		} else if err != nil {
			return false, err
		}
	}
	return none || len(k.clients) > 0, nil
}

// try adds a client if it is one of the file.
func (k *viewFile) try(f File, h Handle) {
	if _, err := classOf(f, h, h); err == nil && k.clients[h] == nil {
		k.clients[h] = &viewClient{next: firstObject, objects: map[Handle]object{}, gpus: map[Handle]gpreempt.GPUID{}}
	}
}

func (c *viewClient) hasChannels() bool {
	for _, o := range c.objects {
		if o.class.IsChannel() {
			return true
		}
	}
	return false
}

// check forgets objects that were freed.
func (c *viewClient) check(f File, client Handle) {
	for h, o := range c.objects {
		if class, err := classOf(f, client, h); absent(err) || err == nil && class != o.class {
			delete(c.objects, h)
			delete(c.gpus, h)
		}
	}
}

// find finds new objects.
func (c *viewClient) find(f File, client Handle, allowed int) error {
	first := c.next
	for h, misses := c.next, 0; misses < allowed && h-first < objectCount; h++ {
		found, err := c.add(f, client, h)
		switch {
		case err != nil:
			return err
		case !found:
			misses++
			continue
		}
		// Handles count upwards: objects with lower ones may have been created after these were tried.
		for earlier := c.next; earlier < h; earlier++ {
			if _, err := c.add(f, client, earlier); err != nil {
				return err
			}
		}
		misses, c.next = 0, h+1
	}
	return nil
}

// add adds the object with a handle if it matters, and reports whether there is one.
func (c *viewClient) add(f File, client, h Handle) (found bool, err error) {
	class, err := classOf(f, client, h)
	if err != nil {
		if absent(err) {
			err = nil
		}
		return false, err
	}
	if !class.IsChannel() && !class.IsCompute() && class != ClassGroup && class != ClassDevice && class != ClassSubdevice {
		return true, nil
	}
	parent, err := info(f, client, h, IndexParent)
	if err == nil && class == ClassSubdevice {
		c.gpus[h], err = gpuOf(f, client, h)
	}
	if absent(err) { // freed meanwhile
		return true, nil
	}
	if err == nil {
		c.objects[h] = object{class, Handle(parent)}
	}
	return true, err
}

// Channels returns the known channels, ascending by client and handle, and the number of channels
// whose GPU is not known. The caller must not change the slice.
func (v *View) Channels() (all []Channel, unknown int) {
	if !v.listed {
		v.channels, v.unknown = v.list()
		v.listed = true
	}
	return v.channels, v.unknown
}

func (v *View) list() (all []Channel, unknown int) {
	for n, f := range v.files {
		for client, c := range f.clients {
			compute := map[Handle]bool{} // groups and channels
			for _, o := range c.objects {
				if o.class.IsCompute() {
					compute[o.parent] = true
					compute[c.objects[o.parent].parent] = true
				}
			}
			for h, o := range c.objects {
				if !o.class.IsChannel() {
					continue
				}
				sub, id, found := c.subdevice(o.parent)
				if !found {
					unknown++
					continue
				}
				inGroup := c.objects[o.parent].class == ClassGroup && compute[o.parent]
				all = append(all, Channel{File: n, Client: client, Handle: h, Subdevice: sub, GPU: id, Compute: compute[h] || inGroup})
			}
		}
	}
	slices.SortFunc(all, func(a, b Channel) int {
		return cmp.Or(cmp.Compare(a.Client, b.Client), cmp.Compare(a.Handle, b.Handle), cmp.Compare(a.File, b.File))
	})
	return slices.CompactFunc(all, Channel.Is), unknown // several descriptors may have one client
}

// subdevice returns the subdevice on the GPU of an object below a device.
func (c *viewClient) subdevice(h Handle) (Handle, gpreempt.GPUID, bool) {
	for range 4 { // channel, group, device
		o, known := c.objects[h]
		if !known {
			return 0, 0, false
		}
		if o.class == ClassDevice {
			break
		}
		h = o.parent
	}
	var newest Handle
	for sub := range c.gpus {
		if c.objects[sub].parent == h {
			newest = max(newest, sub)
		}
	}
	return newest, c.gpus[newest], newest != 0
}

// Group is a set of channels of one process.
type Group struct {
	Process  Process
	Channels []Channel
}

// Set disables the channels of all groups, and returns when they are off their GPUs, or enables them.
// It makes a call for each GPU and MaxChannels, as the client of the first of these channels, through
// a copy of its file. It stops at the first error: how much of that call was done is not known.
func Set(groups []Group, disable bool) error {
	type member struct {
		Channel
		process Process
	}
	gpus := map[gpreempt.GPUID][]member{}
	var order []gpreempt.GPUID
	for _, g := range groups {
		for _, c := range g.Channels {
			if gpus[c.GPU] == nil {
				order = append(order, c.GPU)
			}
			gpus[c.GPU] = append(gpus[c.GPU], member{c, g.Process})
		}
	}
	for _, gpu := range order {
		for some := range slices.Chunk(gpus[gpu], MaxChannels) {
			var list DisableList
			if disable {
				list.Disable = 1
			}
			list.Number = uint32(len(some))
			for i, c := range some {
				list.Clients[i], list.Channels[i] = c.Client, c.Handle
			}
			first := some[0]
			f, err := first.process.Copy(first.File)
			if err == nil {
				err = f.Control(first.Client, first.Subdevice, DisableChannels, Bytes(&list))
				_ = f.Close() // the call is over
			}
			if err != nil {
				return &SetError{GPU: gpu, Disable: disable, Err: err}
			}
		}
	}
	return nil
}

// EnableEach enables channels of a process one by one, and continues after errors. A channel that was
// freed, or whose client or file is gone, is skipped; lost reports whether there was one.
func EnableEach(p Process, channels []Channel) (lost bool, err error) {
	var errs []error
	for _, c := range channels {
		err := Set([]Group{{p, []Channel{c}}}, false)
		switch {
		case errors.Is(err, InvalidChannel), errors.Is(err, InvalidClient), errors.Is(err, unix.EBADF), absent(err):
			lost = true
		case err != nil:
			errs = append(errs, err)
		}
	}
	return lost, errors.Join(errs...)
}

// SetError is the error of disabling or enabling channels of a GPU.
type SetError struct {
	GPU     gpreempt.GPUID
	Disable bool
	Err     error
}

func (e *SetError) Error() string {
	what := "enable channels of GPU %v: %v"
	if e.Disable {
		what = "disable channels of GPU %v: %v"
	}
	return fmt.Sprintf(what, e.GPU, e.Err)
}

// Unwrap returns the cause.
func (e *SetError) Unwrap() error { return e.Err }

// absent reports whether an error says that there is no such object.
func absent(err error) bool { return errors.Is(err, ObjectNotFound) || errors.Is(err, InvalidObject) }

func classOf(f File, client, h Handle) (Class, error) {
	result, err := info(f, client, h, IndexClass)
	return Class(result), err
}

func info(f File, client, h Handle, index uint32) (uint64, error) {
	p := HandleInfo{Object: h, Index: index}
	err := f.Control(client, client, GetHandleInfo, Bytes(&p))
	return p.Result, err
}

func gpuOf(f File, client, subdevice Handle) (gpreempt.GPUID, error) {
	var p GPUIDInfo
	err := f.Control(client, subdevice, GetGPUID, Bytes(&p))
	return gpreempt.GPUID(p.GPU), err
}
