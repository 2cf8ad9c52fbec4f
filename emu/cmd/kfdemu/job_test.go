package main

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestJobIsParsedOrItsWrongPartNamed(t *testing.T) {
	gpus := []gpreempt.GPU{{ID: 7}, {ID: 8}}
	job, err := parseJob("train:10:25ms:2", gpus)
	want := Job{Comm: "train", Queues: 10, Kernel: gpumodel.Packet{Duration: 25 * time.Millisecond, Occupancy: jobOccupancy}, GPUs: []gpreempt.GPUID{7, 8}}
	if diff := cmp.Diff(want, job); err != nil || diff != "" {
		t.Errorf("error %v, job (-want +got):\n%s", err, diff)
	}
	for text, want := range map[string]string{
		"train":           `"train" is not a job: use COMMAND:QUEUES:KERNEL-DURATION[:GPUS], such as train:10:25ms`,
		":2:5ms":          `":2:5ms" is not a job: COMMAND is empty`,
		"train:x:5ms":     `"train:x:5ms" is not a job: QUEUES "x": use a number of queues, 1 or more`,
		"train:2:5":       `"train:2:5" is not a job: KERNEL-DURATION "5": use a number with its unit, such as 25ms`,
		"train-b:2:5ms:0": `"train-b:2:5ms:0" is not a job: GPUS "0": use how many GPUs it has, 1 to 2 (--gpus)`,
		"train:2:5ms:3":   `"train:2:5ms:3" is not a job: GPUS "3": use how many GPUs it has, 1 to 2 (--gpus)`,
	} {
		if _, err := parseJob(text, gpus); err == nil || err.Error() != want {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
}
