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
	ids := func(kind string, names []string, lookup func(string) (id string, err error)) (all []uint32) {
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
	group := func(name string) (string, error) {
		g, err := user.LookupGroup(name)
		if err != nil {
			return "", err
		}
		return g.Gid, nil
	}
	account := func(name string) (string, error) {
		u, err := user.Lookup(name)
		if err != nil {
			return "", err
		}
		return u.Uid, nil
	}
	return &Policy{
		OwnerUID:   uint32(os.Geteuid()),
		OnlineGIDs: ids("group", n.OnlineGroups, group),
		AdminGIDs:  ids("group", n.AdminGroups, group),
		AdminUIDs:  ids("user", n.AdminUsers, account),

		ContainerAdmins: n.ContainerAdmins,
	}, unknown
}
