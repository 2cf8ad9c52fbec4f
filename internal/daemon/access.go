package daemon

import (
	"fmt"
	"os"
	"os/user"
	"slices"
	"strconv"
	"strings"

	"github.com/gpreempt/gpreempt/internal/auth"
	"github.com/gpreempt/gpreempt/internal/config"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// lookUpAccess returns the access policy of the config, with the ids of its users and
// groups. unknown are the names that this host does not know, which have no right.
func lookUpAccess(cfg config.Config) (p *auth.Policy, unknown []string) {
	group := func(name string) (string, error) {
		g, err := user.LookupGroup(name)
		if err != nil {
			return "", err
		}
		return g.Gid, nil
	}
	lookupUser := func(name string) (string, error) {
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
	a := cfg.Access
	return &auth.Policy{
		OwnerUID:   uint32(os.Geteuid()),
		OnlineGIDs: ids("group", a.OnlineGroups, group),
		AdminGIDs:  ids("group", a.AdminGroups, group),
		OnlineUIDs: ids("user", a.OnlineUsers, lookupUser),
		AdminUIDs:  ids("user", a.AdminUsers, lookupUser),

		OnlineNames: cfg.TCP.Online,
		AdminNames:  cfg.TCP.Admin,
	}, unknown
}

// setAccess uses an access policy, and lets the members of the first online group connect
// to the socket. A socket has one group, so admins who are not root must belong to it as
// well; what they may do is decided call by call.
func (d *daemon) setAccess(p *auth.Policy, unknown []string, socket string) {
	d.authz.Store(p)
	d.warnings.set("access")
	if len(unknown) > 0 {
		d.warnings.set("access", gpreempt.WarnUnknownPrincipal.Warn("access has names that this host does not know: "+strings.Join(unknown, ", ")))
	}
	d.warnings.set("socket")
	if len(p.OnlineGIDs) == 0 {
		return
	}
	if err := os.Chown(socket, -1, int(p.OnlineGIDs[0])); err != nil {
		d.warnings.set("socket", gpreempt.WarnSocketGroup.Warn(fmt.Sprintf("cannot set the group of the socket to %d, so its members cannot connect: %v", p.OnlineGIDs[0], err)))
	}
}

// unreachable returns a warning for each user and group with a right who cannot connect
// to the socket, because it belongs to another group. Names that this host does not know
// are not in it.
func unreachable(cfg config.Config) (warnings []string) {
	a := cfg.Access
	socketGroup, gid := "root", "0"
	if len(a.OnlineGroups) > 0 {
		socketGroup = a.OnlineGroups[0]
		gid, _ = groupID(socketGroup)
	}
	warn := func(key, name string) {
		warnings = append(warnings, fmt.Sprintf("access.%s: %s cannot connect: the socket belongs to group %s; add a group of theirs as the first of access.online_groups", key, name, socketGroup))
	}
	for _, list := range []struct {
		key   string
		names []string
	}{{"online_users", a.OnlineUsers}, {"admin_users", a.AdminUsers}} {
		for _, name := range list.names {
			u, err := user.Lookup(name)
			if err != nil {
				u, err = user.LookupId(name)
			}
			if err != nil || u.Uid == "0" {
				continue
			}
			if gids, err := u.GroupIds(); err == nil && !slices.Contains(gids, gid) {
				warn(list.key, name)
			}
		}
	}
	if len(a.OnlineGroups) == 0 {
		for _, name := range a.AdminGroups {
			if id, known := groupID(name); known && id != gid {
				warn("admin_groups", "members of "+name)
			}
		}
	}
	return warnings
}

// groupID returns the id of a group that is a name or an id.
func groupID(name string) (gid string, known bool) {
	g, err := user.LookupGroup(name)
	if err != nil {
		g, err = user.LookupGroupId(name)
	}
	if err != nil {
		return "", false
	}
	return g.Gid, true
}
