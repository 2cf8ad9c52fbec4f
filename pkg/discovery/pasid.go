package discovery

import (
	"io/fs"
	"strconv"
	"strings"
)

// PASID returns the PASID of a process, by which drivers before 7.x name it in the kernel log;
// 0 if it has none or is not known (kfd_procfs_show). root is that of the host.
func PASID(root fs.FS, pid int32) uint32 {
	text, err := fs.ReadFile(root, procsDir+"/"+strconv.Itoa(int(pid))+"/pasid")
	if err != nil {
		return 0
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 32)
	if err != nil {
		return 0
	}
	return uint32(n)
}
