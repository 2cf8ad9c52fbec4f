package main

import "slices"

// machines are what rows run on, by name.
var machines = map[string]setup{
	// The default config with a rule for jobs. The daemon attaches to nothing before the first lease.
	"job": {
		config: `rules: [{name: training, match: {comm: "train*"}, class: offline}]` + "\n",
		programs: []program{
			{"JOB", "exec train work --queues 3 --duration 2000 --runtime"},
			{"SERVER", "AMD_QUEUE_TAG=ONLINE_AI AMD_QUEUE_PRIORITY=15 exec kfdemu answer --packets 20 --duration 200 --runtime"},
			{"TAGGED", "AMD_QUEUE_TAG=OFFLINE_AI AMD_QUEUE_PRIORITY=2 exec kfdemu work --rate 20 --duration 500 --runtime"},
			{"INNER", "exec unshare --fork --pid train work --queues 2 --rate 20 --duration 500 --runtime"},
		},
	},
	// Classes by the priority of queues: all of kfdemu's have 7, as HIP's normal streams.
	"rules": {
		config: `rules:
  - {name: server, match: {cmdline: "*answer*"}, class: online, priority: 15}
  - {name: low-priority, match: {queue_priority: {max: 9}}, class: offline, priority: 2}
  - {name: high-priority, match: {queue_priority: {min: 10}}, class: online}
`,
		programs: []program{
			{"JOB", "exec train work --queues 3 --rate 20 --duration 500 --runtime"},
			{"SERVER", "exec kfdemu answer --packets 20 --duration 200 --runtime"},
		},
	},
	// Classes by a threshold of priority, and no rule.
	"threshold": {
		environment: []string{"GPREEMPT_PRIORITY_THRESHOLD=10"},
		programs: []program{
			{"JOB", "exec kfdemu work --queues 3 --priority low --rate 20 --duration 500 --runtime"},
			{"SERVER", "exec kfdemu answer --priority high --packets 20 --duration 200 --runtime"},
		},
	},
	// A GPU whose firmware schedules by MES.
	"mes": {
		flags:    []string{"--machine", "gfx1201", "--profile", "7.3"},
		config:   `rules: [{name: training, match: {comm: "train*"}, class: offline}]` + "\n",
		programs: []program{{"JOB", "exec train work --queues 2 --duration 500 --runtime"}},
	},
	// More compute queues than the 24 slots of the GPU.
	"full": {
		config: `hqd_budget: 80
rules: [{name: training, match: {comm: "train*"}, class: offline}]
`,
		programs: []program{
			{"SERVER", "exec kfdemu work --queues 2 --rate 100 --duration 500 --runtime"},
			{"JOB", "exec train work --queues 12 --rate 100 --duration 200 --runtime"},
			{"IDLE1", "exec train answer --queues 6 --packets 20 --duration 200 --runtime"},
			{"IDLE2", "exec train answer --queues 6 --packets 20 --duration 200 --runtime"},
		},
	},
	// The first mechanism cannot be used here.
	"fallback": {
		flags: []string{"--profile", "6.12+kmap"},
		config: `mechanisms: [criu, dbgtrap]
rules: [{name: training, match: {comm: "train*"}, class: offline}]
`,
		programs: []program{{"JOB", "exec train work --queues 3 --duration 500 --runtime"}},
	},
	// gplab starts the jobs.
	"trial": {},
	// Nobody uses the driver.
	"bare": {config: "-"},
}

// table has the rows in the order in which they run on their machine.
var table = slices.Concat(s1, s2, s3, s4, s5)

// cc builds the functions of the design documents in C and runs them.
const cc = "cc -Wall -Wextra -Werror -Ibindings/c test/rows/testdata/poc.c -Lbuild/clib -lgpreempt -Wl,-rpath,$PWD/build/clib -o $DIR/poc && $DIR/poc "

// job and server are the command lines of trials.
const (
	offline = `'while sleep 0.1; do echo report; done | kfdemu work --runtime --queues 3 --depth 2 --duration 5000 --occupancy 300000'`
	online  = `'exec kfdemu answer --packets 30 --duration 200 --occupancy 900000'`
	works0  = `--offline ` + offline + ` --progress '\],"packets":\d+,"count":(\d+)' --unit packets --online ` + online +
		` --request stdin --ready '"ready"' --answer '"answer"' `
)
