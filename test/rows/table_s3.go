package main

// s3 has the requirements of document S3 (docs/design-documents.md).
var s3 = []row{
	{
		id: "R19", asks: "roles: online with priority 15, offline with 2", on: "job", waits: true,
		command: `gpctl target explain $SERVER; gpctl target explain $TAGGED`,
		shows:   []string{`class online, priority 15, by tag`, `class offline, priority 2, by tag`, `AMD_QUEUE_TAG is "OFFLINE_AI"; AMD_QUEUE_PRIORITY is 2`},
	},
	{
		id: "R20", asks: "criteria: online < 50 ms, loss < 5 %, nothing lost, no crash", on: "trial", after: "R8",
		command: `gplab trial judge $DIR/run --profile loss-5; gplab report $DIR/run`,
		shows: []string{
			`^offline_loss_percent protected \S+ < 5\.00 %`, `^online_p99_ms protected \S+ < 50\.0 ms`, `no packet of offline work was lost or repeated \|( yes \|)? 0 lost, 0 repeated`,
			`no fault of the run \|( yes \|)? 0 faults`, `no alarm of daemon or kernel \|( yes \|)? 0 alarms`,
		},
	},
	{
		id: "R21", asks: "suspend by KFD_IOC_DBG_TRAP", on: "job",
		command: `gpctl target suspend $JOB --ttl 5s; gpctl target explain $JOB; gpctl queue slots --target $JOB; gpctl target resume $JOB; gpctl events --all`,
		shows:   []string{`^Suspended: .*by-hand`, `mechanism dbgtrap`, `^0 slots in use`, `target {JOB}@\d+ suspending > suspended done, took [\d.]+`},
	},
	{
		id: "R22", asks: "detect online work, suspend, wait for its end, resume", on: "job", waits: true,
		command: `gpctl lease create --ttl 300ms --label r22 && sleep 1; gpctl events --all`,
		shows: []string{
			`lease \S+ requested announced`, `lease \S+ requested > quiescing`, `target {JOB}@\d+ running > suspending lease`, `lease \S+ quiescing > held quiet`,
			`lease \S+ held > ended`, `target {JOB}@\d+ suspended > resuming`, `target {JOB}@\d+ resuming > running done`,
		},
	},
	{
		id: "R23", asks: "both schedulers of the driver, CPSCH (HWS) and MES", on: "mes", waits: true,
		command: `gpctl doctor; gpctl lease create --ttl 2s; gpctl target list
grep 'From gfx11 on' docs/mechanisms.md`,
		shows: []string{`gfx1201 .*MES`, `^{JOB} train offline .* suspended`, `\*\*MES\*\*`},
	},
	{
		id: "R24", asks: "identify by AMD_QUEUE_PRIORITY and AMD_QUEUE_TAG; find_queues_by_tag", on: "job", needs: []string{"C"}, waits: true,
		command: "make -s clib && " + cc + `tag $JOB`,
		shows:   []string{`^find_queues_by_tag\(OFFLINE_AI\) = 0: 1 queues$`, `process_id {TAGGED} .*tag \[OFFLINE_AI\]`, `priority 15 .*process_id {SERVER} .*tag \[ONLINE_AI\]`},
	},
	{
		id: "R25", asks: "identify by process, and by priority of queues", on: "rules", waits: true,
		command: `gpctl target list; gpctl target explain $JOB; gpctl target explain $SERVER`,
		shows: []string{
			`^{JOB} train offline 2 rule low-priority`, `^{SERVER} kfdemu online 15 rule server`, `decides rule low-priority offline .*priority`,
			`mechanism not attached`,
		},
	},
	{
		id: "R26", asks: "C: queue_info_t with tag, get_all_queues, find_queues_by_priority; grace", on: "job", needs: []string{"C"}, waits: true,
		command: "make -s clib && " + cc + `list $JOB`,
		shows: []string{
			`^get_all_queues = 0: 7 queues$`, `^find_queues_by_priority\(0, 5\) = 0: 6 queues$`, `^find_queues_by_priority\(10, 15\) = 0: 1 queues$`,
			`priority 2 .*process_id {TAGGED}.*tag \[OFFLINE_AI\]`, `priority 15 .*process_id {SERVER}.*tag \[ONLINE_AI\]`,
		},
	},
	{
		id: "R27", asks: "the scheduler class: register, notify, complete, [SCHED] lines", on: "job", needs: []string{"Python"},
		command: `$PYTHON test/rows/testdata/scheduler.py`,
		shows: []string{
			`^\[SCHED\] online_queues: 1$`, `^\[SCHED\] offline_queues: 1$`, `^\[SCHED\] online_tasks: 6$`, `^\[SCHED\] running_tasks: 0$`,
			`^\[SCHED\] unprotected_tasks: 0$`, `^\[SCHED\] suspended_targets: [1-9]`, `^\[SCHED\] announce_ms: count 6, mean [\d.]+`,
		},
	},
	{
		id: "R28", asks: "the demo: offline first, then online; 10 requests every 500 ms", on: "trial",
		command: `gplab trial --plan epochs ` + works0 + `--count 10 --repeats 1 --arm shared --arm protected --output-dir $DIR/demo; grep -c ^protected $DIR/demo/requests.csv`,
		shows:   []string{`^shared 1 1\d 0 `, `^protected 1 1\d 0 `, `^protected suspend [1-9]\d* `, `^protected resume [1-9]\d* `, `^1\d$`},
	},
	{
		id: "R29", asks: "TC1: offline is suspended, online measured, resumed, no kernel error", on: "trial", after: "R8",
		command: `gplab report $DIR/run; gplab trial judge $DIR/run --profile loss-5`,
		shows: []string{
			`offline work was suspended and resumed \|( yes \|)? \d+ suspensions, \d+ resumes`, `hardware slots of suspended queues became empty \|( yes \|)? \d+ readings, at most 0 slots`,
			`no alarm of daemon or kernel \|( yes \|)? 0 alarms`, `^online_p99_ms protected [\d.-]+ < 50\.0 ms`,
		},
	},
	{
		id: "R30", asks: "TC2: a request every 100 ms, loss < 10 %, 10 minutes (here 10 s)", on: "trial",
		command: `gplab trial --plan every-100ms-10min ` + works0 + `--duration 10s --warm-up 1s --repeats 1 --arm 'offline alone' --arm protected --output-dir $DIR/tc2; gplab report $DIR/tc2`,
		shows: []string{
			`^protected 1 1\d\d 0 `, `^offline_loss_percent protected [\d.-]+ < 10\.0 %`, `no fault of the run \|( yes \|)? 0 faults`, `0 lost, 0 repeated`,
		},
	},
	{
		id: "R31", asks: "TC3: no offline queue; several online tasks at once", on: "trial",
		command: `gpctl lease create --ttl 1s
gplab trial --plan five-at-once ` + works0 + `--count 30 --warm-up 1s --repeats 1 --arm protected --output-dir $DIR/tc3; gplab report $DIR/tc3`,
		shows: []string{`quiet after [\d.]+.s`, `\b0 targets`, `^protected 1 [3-9]\d 0 `, `online requests have a result \|( yes \|)? \d+ of \d+`},
	},
	{
		id: "R32", asks: "KPIs: online < 50 ms, suspend and resume < 5 ms, loss < 10 %",
		command: `gplab trial profiles`,
		shows:   []string{`^loss-10 offline_loss_percent 10\.0$`, `^loss-10 online_p99_ms 50\.0$`, `^loss-10 suspend_p99_ms 5\.00$`, `^loss-10 resume_p99_ms 5\.00$`},
	},
	{
		id: "R33", asks: "documented limits: root, side effects of debugging, format of debugfs, cost of a call",
		command: `grep -E 'CAP_SYS_PTRACE|rocgdb|GPU core dumps|LeakSanitizer|a cycle for each suspend' docs/mechanisms.md
grep -i 'prints no register names' docs/design-documents.md
grep 'dbgtrap, p50' docs/performance.md`,
		shows: []string{`CAP_SYS_PTRACE`, `\*\*rocgdb\*\*`, `\*\*GPU core dumps\*\*`, `a cycle for each suspend and resume`, `prints no register names`, `NotifyOnline by dbgtrap, p50`},
	},
	{
		id: "R34", asks: "the path to stage 2 (CWSR direct) and stage 3 (scheduler in the kernel)",
		command: `grep -E '^\| stage 1, 2, 3|CWSR from user space|only hardware can answer' docs/design-documents.md docs/lab/kernel-extension.md`,
		shows:   []string{`stage 1, 2, 3 \| gpreempt; the kernel extension; a scheduler in driver or firmware`, `CWSR from user space.* cannot exist`, `What only hardware can answer`},
	},
}
