package evidence

import "testing/fstest"

// Encode returns the files of a run in memory.
func Encode(run *Run) (fstest.MapFS, error) {
	files, err := encode(run)
	all := fstest.MapFS{}
	for _, f := range files {
		all[f.name] = &fstest.MapFile{Data: f.data}
	}
	return all, err
}
