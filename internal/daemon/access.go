package daemon

import (
	"fmt"
	"os"
	"os/user"
	"strconv"
	"strings"

	"github.com/gpreempt/gpreempt/internal/authz"
	"github.com/gpreempt/gpreempt/internal/config"
	"github.com/gpreempt/gpreempt/internal/server"
)

// lookUpAccess turns the names of the config file into ids. A name this host does
// not know gives nobody a right, and is told.
func (d *daemon) lookUpAccess(a config.Access) *authz.Policy {
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
	}
	d.warnings.set("access")
	if len(unknown) > 0 {
		d.warnings.set("access", server.Warning{
			Code: "UNKNOWN_PRINCIPAL", Severity: "warning",
			Text:   fmt.Sprintf("access names what this host does not know: %s", strings.Join(unknown, ", ")),
			Remedy: "create it (groupadd --system gpreempt) or take it out of the config file, then reload; until then it gives nobody a right",
		})
	}
	return p
}
