package main

// s2 is TESTING_ROADMAP.
var s2 = []row{
	{
		id: "R12", asks: "one capture: HIP log, driver trace, pid map in a folder", on: "trial",
		command: `gplab trial --offline ` + offline + ` --progress '\],"packets":\d+,"count":(\d+)' --arm 'offline alone' --duration 2s --warm-up 100ms --repeats 1 --hip-log 4 --output-dir $DIR/cap
ls $DIR/cap; cat $DIR/cap/pids.json; cat $DIR/cap/logs/*.log | grep -c count`,
		shows:  []string{`^pids\.json$`, `"pid": ?\d+`, `no HIP logs: no command`, `no KFD trace: the machine is emulated`},
		partly: "kfdemu's programs write no HIP log, and an emulated machine has no trace of the driver",
	},
	{
		id: "R13", asks: "compare two cases: ids, HWq, kernels, common and unique queues", needs: []string{"captures"},
		command: `gplab amdlog compare $CAPTURES/amdlog/clr_level3_16streams.log $CAPTURES/amdlog/clr_level5_priorities_head.log`,
		shows: []string{
			`^stream priorities may be sufficient`, `^queues: 0 in both, 4 only in A, 4 only in B`, `^kernels: 1 in both of 1`, `^hsa ids - 1,2,3,4$`, `dummy_kernel`,
		},
		partly: "the workloads of the cases are not run",
	},
	{
		id: "R14", asks: "watch slots each second: ACTIVE, RPTR, WPTR; backlog; processes and their use", on: "job", waits: true,
		command: `timeout 4 gpctl queue moves --target $JOB --interval 1s
gpctl queue list --target $JOB --backlog
gpctl gpu list`,
		shows: []string{
			`^TIME CHANGE GPU KIND XCC PIPE SLOT TARGET QUEUE ADDRESS READ WRITTEN BEHIND$`, `moved \d+ cp 0 \d \d {JOB}@\d+ [012] 0x`,
			`BACKLOG`, `^{JOB} train 0 compute \d+ \d+ 0x[0-9a-f]+ .*\b\d packets?`, `^HIP .*QUEUES`,
		},
	},
	{
		id: "R15", asks: "S2's figures: quantum, backlog in packets, queues of a process, slots", on: "job", waits: true,
		command: `gpctl queue slots --target $JOB -o wide
gpctl target list
gpctl gpu list -o wide`,
		shows:  []string{`QUANTUM`, `\b1 ms\b`, `\d packets`, `^{JOB} train offline .* 3 `, `MAPPED`},
		partly: "no time to create a queue, no targets and verdict",
	},
	{
		id: "R16", asks: "choose a strategy: queues apart, stream priority; shared, suspension or time slices", on: "job", waits: true,
		command: `gplab advice $JOB $SERVER
gplab advice $JOB`,
		shows: []string{`^queues disjoint, on a common GPU`, `^1\. explicit suspend$`, `^2\. stream priority$`, `^3\. time slice$`, `priority -1 for online streams, 0 for`, `^queues shared`},
	},
	{
		id: "R17", asks: "stream priority against suspension: latency and preemption", on: "trial",
		command: `gplab trial --offline ` + offline + ` --progress '\],"packets":\d+,"count":(\d+)' --unit packets --online 'exec kfdemu answer --packets 30 --duration 200 --occupancy 900000 --priority $(test "$GPREEMPT_STREAM_PRIORITY" = -1 && echo high || echo normal)' --request stdin --ready '"ready"' --answer '"answer"' --rate 10 --count 30 --repeats 1 --warm-up 1s --arm shared --arm 'stream priority' --arm protected --output-dir $DIR/streams`,
		shows:   []string{`^shared 1 30 0 [\d.]+m?s`, `^stream priority 1 30 0 [\d.]+m?s`, `^protected 1 30 0 [\d.]+m?s`, `^protected suspend \d+ [\d.]+m?s`},
		hides:   []string{`no online queue has a higher priority`},
	},
	{
		id: "R18", asks: "S2's check-list and questions, answered by a run", on: "trial", after: "R8",
		command: `gplab report $DIR/run
sed -n '/^## S2/,/^## S3/p' docs/design-documents.md`,
		shows: []string{
			`What was checked`, `every arm ran \| yes`, `hardware slots of suspended queues became empty \| yes`, `A queue is made by CREATE_QUEUE`,
			`Programs never share a queue`, `a write to its doorbell`,
		},
	},
}
