package main

// s2 has the requirements of document S2 (docs/design-documents.md).
var s2 = []row{
	{
		id: "R12", asks: "one capture of GEMM: HIP log, driver trace, pid map in a folder", on: "trial", needs: []string{"torch", "captures"},
		command: `gplab capture gemm="cp $CAPTURES/amdlog/clr_level5_priorities_head.log \${AMD_LOG_LEVEL_FILE}_1; exec $PYTHON examples/workloads/gemm.py" --duration 3s --output-dir $DIR/gemm
find $DIR/gemm -type f; cat $DIR/gemm/gemm/pids.json`,
		shows: []string{
			`^gemm: .*gemm\.py, \d s, [\d.]+ steps/s$`, `^compute queues of a process 1 to 3 1 met$`, `/gemm/gemm/logs/.*hip`, `/gemm/capture\.json$`, `"pid": ?\d+`,
			`no KFD trace: the machine is emulated`,
		},
		partly: "an emulated machine has no trace of the driver; make vm-kfd tests that on the real one. PyTorch has no HIP here: the log is a real one of another program",
	},
	{
		id: "R13", asks: "capture two cases, 60 s each (here 3 s), and compare: ids, HWq, kernels, common and unique queues", on: "trial", needs: []string{"captures"},
		command: `W='while sleep 0.1; do echo report; done | exec kfdemu work --runtime --depth 2 --duration 2000 --queues'
gplab capture cnn="$W 2" transformer="$W 1" --progress '\],"packets":\d+,"count":(\d+)' --unit packets --duration 3s --log cnn=$CAPTURES/amdlog/clr_level3_16streams.log --log transformer=$CAPTURES/amdlog/clr_level5_priorities_head.log --output-dir $DIR/cases
gplab amdlog analyze $CAPTURES/amdlog/clr_level3_16streams.log`,
		shows: []string{
			`^cnn: .*, \d s, [\d.]+ packets/s$`, `^compute queues of a process 1 to 3 2 1 met$`, `^stream priorities may be sufficient`, `^queues: 0 in both, 4 only in A, 4 only in B`,
			`^kernels: 1 in both of 1`, `^hsa ids - 1,2,3,4$`, `^96 5 dummy_kernel`, `^\? 0x7f3660c00000`, `^report: {DIR}/cases/report\.md$`,
		},
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
		id: "R15", asks: "S2's figures against their targets: create, queues of a process, kernel queues, backlog, quantum", on: "trial", after: "R13", needs: []string{"captures"},
		command: `cat $DIR/cases/report.md`,
		shows: []string{
			`^\| figure \| target \| cnn \| transformer \| result \|$`, `^\| backlog of a queue, most packets \| .*100 \| \d+ \| \d+ \| met \|$`, `^\| quantum of a slot \| 1 ms \| 1 ms \| 1 ms \| met \|$`,
			`^\| compute queues of a process \| 1 to 3 \| 2 \| 1 \| met \|$`, `^\| create a queue, p99 \| .*1 ms \| unknown`, `kernel queues`,
		},
		partly: "the time to create a queue, MQD writes and kernel queues are from the trace of the driver, which an emulated machine lacks; make vm-kfd tests that on the real one",
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
		shows:   []string{`^shared 1 \d\d+ 0 [\d.]+m?s`, `^stream priority 1 \d\d+ 0 [\d.]+m?s`, `^protected 1 \d\d+ 0 [\d.]+m?s`, `^protected suspend \d+ [\d.]+m?s`},
		hides:   []string{`no online queue has a higher priority`},
	},
	{
		id: "R18", asks: "S2's check-list and questions, answered by a run", on: "trial", after: "R8",
		command: `gplab report $DIR/run
sed -n '/^## S2/,/^## S3/p' docs/design-documents.md`,
		shows: []string{
			`What was checked`, `every arm ran \|( yes \|)? 4 arms, 4 repeats, 0 did not run`, `hardware slots of suspended queues became empty \|( yes \|)? \d+ readings, at most 0 slots`, `A queue is made by CREATE_QUEUE`,
			`Programs never share a queue`, `a write to its doorbell`,
		},
	},
}
