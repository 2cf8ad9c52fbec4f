package daemon

import (
	"fmt"
	"os"
	"strings"

	"github.com/gpreempt/gpreempt/internal/auth"
	"github.com/gpreempt/gpreempt/internal/config"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// lookUpAccess returns the access policy of the config. unknown are the names that this
// host does not know.
func lookUpAccess(cfg config.Config) (p *auth.Policy, unknown []string) {
	p, unknown = cfg.Access.LookUp()
	p.OnlineNames, p.AdminNames = cfg.TCP.Online, cfg.TCP.Admin
	return p, unknown
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
	// A link in place of the socket must not lead to another file.
	if err := os.Lchown(socket, -1, int(p.OnlineGIDs[0])); err != nil {
		d.warnings.set("socket", gpreempt.WarnSocketGroup.Warn(fmt.Sprintf("cannot set the group of the socket to %d, so its members cannot connect: %v", p.OnlineGIDs[0], err)))
	}
}
