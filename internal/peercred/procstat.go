package peercred

import (
	"fmt"
	"os"
	"strconv"

	"github.com/gpreempt/gpreempt/pkg/discovery"
)

// readStat reads the stat file of pid. It cannot be kept waiting by the process:
// the kernel takes no lock for it that user space can hold.
func readStat(pid int32) (discovery.ProcStat, error) {
	path := "/proc/" + strconv.Itoa(int(pid)) + "/stat"
	text, err := os.ReadFile(path)
	if err != nil {
		return discovery.ProcStat{}, err
	}
	stat, err := discovery.ParseProcStat(text)
	if err != nil {
		return discovery.ProcStat{}, fmt.Errorf("%s: %w", path, err)
	}
	return stat, nil
}
