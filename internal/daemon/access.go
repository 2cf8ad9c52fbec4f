package daemon

import (
	"fmt"
	"os"
	"os/user"
	"strconv"
	"strings"

	"github.com/gpreempt/gpreempt/internal/authz"
	"github.com/gpreempt/gpreempt/internal/config"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// lookUpAccess turns the names of users and groups of the config file into ids. A name this host does
// not know gives nobody a right, and is told.
func (d *daemon) lookUpAccess(cfg config.Config) *authz.Policy {
	a := cfg.Access
	var unknown []string
	group := func(name string) (string, error) {
		g, err := user.LookupGroup(name)
		if err != nil {
			return "", err
		}
		return g.Gid, nil
	}
	person := func(name string) (string, error) {
		u, err := user.Lookup(name)
		if err != nil {
			return "", err
		}
		return u.Uid, nil
	}
	ids := func(kind string, names []string, lookup func(string) (string, error)) []uint32 {
		var all []uint32
		for _, name := range names {
			id, err := strconv.ParseUint(name, 10, 32)
			if err != nil {
				var text string
				if text, err = lookup(name); err == nil {
					id, err = strconv.ParseUint(text, 10, 32)
				}
			}
			if err != nil {
				unknown = append(unknown, kind+" "+name)
				continue
			}
			all = append(all, uint32(id))
		}
		return all
	}
	p := &authz.Policy{
		OwnerUID:   uint32(os.Geteuid()),
		OnlineGIDs: ids("group", a.OnlineGroups, group),
		AdminGIDs:  ids("group", a.AdminGroups, group),
		OnlineUIDs: ids("user", a.OnlineUsers, person),
		AdminUIDs:  ids("user", a.AdminUsers, person),

		OnlineNames: cfg.TCP.Online,
		AdminNames:  cfg.TCP.Admin,
	}
	d.warnings.set("access")
	if len(unknown) > 0 {
		d.warnings.set("access", gpreempt.WarnUnknownPrincipal.Warn(fmt.Sprintf("access names what this host does not know: %s", strings.Join(unknown, ", "))))
	}
	return p
}

// openSocket lets the members of the first online group connect: a socket has one
// group, so admins who are not root belong to it as well. What they may do is
// decided call by call.
func (d *daemon) openSocket(p *authz.Policy, socket string) {
	d.warnings.set("socket")
	if len(p.OnlineGIDs) == 0 {
		return
	}
	if err := os.Chown(socket, -1, int(p.OnlineGIDs[0])); err != nil {
		d.warnings.set("socket", gpreempt.WarnSocketGroup.Warn(fmt.Sprintf("the socket could not be given to group %d, so its members cannot connect: %v", p.OnlineGIDs[0], err)))
	}
}
