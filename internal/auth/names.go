package auth

import (
	"os"
	"os/user"
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
