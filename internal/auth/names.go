package auth

import (
	"fmt"
	"os"
	"os/user"
	"slices"
	"strconv"
)

// Names grants rights by group and user: names or decimal ids.
type Names struct {
	OnlineGroups []string `yaml:"online_groups" write:"write a list of names and decimal ids such as [gpreempt, 1001], or [] for nobody"`
	AdminGroups  []string `yaml:"admin_groups" write:"write a list of names and decimal ids such as [gpreempt, 1001], or [] for nobody"`
	AdminUsers   []string `yaml:"admin_users" write:"write a list of names and decimal ids such as [gpreempt, 1001], or [] for nobody"`
	// ContainerAdmins is that of Policy.
	ContainerAdmins bool `yaml:"container_admins"`
}

// LookUp returns the policy of the names, with the effective user of the calling process
// as owner. unknown are the names that this host does not know, which have no right.
func (n Names) LookUp() (p *Policy, unknown []string) {
	ids := func(kind string, names []string, lookup func(string) (id string, known bool)) []uint32 {
		var all []uint32
		for _, name := range names {
			id, err := strconv.ParseUint(name, 10, 32)
			if err != nil {
				if text, known := lookup(name); known {
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
	return &Policy{
		OwnerUID:   uint32(os.Geteuid()),
		OnlineGIDs: ids("group", n.OnlineGroups, groupID),
		AdminGIDs:  ids("group", n.AdminGroups, groupID),
		AdminUIDs:  ids("user", n.AdminUsers, userID),

		ContainerAdmins: n.ContainerAdmins,
	}, unknown
}

// Unreachable returns a warning for each user and group with a right who cannot connect
// to the socket, because it belongs to another group. Unknown names are not in it.
func (n Names) Unreachable() (warnings []string) {
	socketGroup, gid := "root", "0"
	if len(n.OnlineGroups) > 0 {
		socketGroup = n.OnlineGroups[0]
		gid, _ = groupID(socketGroup)
	}
	warn := func(key, name string) {
		warnings = append(warnings, fmt.Sprintf("access.%s: %s cannot connect: the socket belongs to group %s; add a group of theirs as the first of access.online_groups", key, name, socketGroup))
	}
	for _, name := range n.AdminUsers {
		uid, known := userID(name)
		if !known || uid == "0" {
			continue
		}
		u, err := user.LookupId(uid)
		if err != nil {
			continue
		}
		if gids, err := u.GroupIds(); err == nil && !slices.Contains(gids, gid) {
			warn("admin_users", name)
		}
	}
	if len(n.OnlineGroups) == 0 {
		for _, name := range n.AdminGroups {
			if id, known := groupID(name); known && id != gid {
				warn("admin_groups", "members of "+name)
			}
		}
	}
	return warnings
}

// groupID returns the id of a group that is a name or an id.
func groupID(name string) (gid string, known bool) {
	if g, err := user.LookupGroup(name); err == nil {
		return g.Gid, true
	}
	return name, isID(name)
}

// userID returns the id of a user that is a name or an id.
func userID(name string) (uid string, known bool) {
	if u, err := user.Lookup(name); err == nil {
		return u.Uid, true
	}
	return name, isID(name)
}

// isID reports whether text is a decimal id. user.LookupId does not check for overflow.
func isID(text string) bool {
	_, err := strconv.ParseUint(text, 10, 32)
	return err == nil
}
