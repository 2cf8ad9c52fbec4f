package main

// s1 has the requirements of document S1 (docs/design-documents.md).
var s1 = []row{
	{
		id: "R1", asks: "queue_finder PID [LOG]; its help without arguments", needs: []string{"captures"},
		command: `gpctl queue find
gplab amdlog match 459769 $CAPTURES/amdlog/clr_level5_priorities_head.log`,
		shows: []string{`^Usage:$`, `^gpctl queue find TARGET`, `^1 0x00007f8acd200000 1 459769 compute`, `^4 0x00007f8acc200000 4 459769 compute`, `from the log only`},
	},
	{
		id: "R2", asks: "queues from a HIP log by HWq and id; from debugfs active, RPTR, WPTR", on: "job", needs: []string{"captures"}, waits: true,
		command: `gpctl queue find $JOB
gpctl queue slots --target $JOB
gplab amdlog analyze $CAPTURES/amdlog/clr_level5_priorities_head.log`,
		shows: []string{
			`^1 0x[0-9a-f]{16} 0 {JOB} yes compute`, `^3 0x[0-9a-f]{16} 2 {JOB} yes compute`, `^24 slots in use`,
			`PRIO ADDRESS RING READ WRITTEN BEHIND`, `live {JOB}@\d+ 2 \d+ 7 medium 0x[0-9a-f]+ 4KiB \d+ \d+ \d+ packets`,
			`^PID HWQ HSA-ID`, `^459769 0x[0-9a-f]+ 1 `,
		},
	},
	{
		id: "R3", asks: "a boxed report: number, address 0x%016x, id, pid, active; total; the file", on: "job", waits: true,
		command: `cd $DIR && gpctl queue find $JOB --python-config`,
		shows:   []string{`^\| queue info summary \|$`, `^2 0x[0-9a-f]{16} 1 {JOB} yes`, `^total 3 queues, 3 active$`, `queue_config_pid_{JOB}\.py`},
		hides:   []string{`unknown`},
	},
	{
		id: "R4", asks: "queue_config_pid_PID.py, valid Python", on: "job", needs: []string{"Python"}, waits: true,
		command: `cd $DIR && gpctl queue find $JOB --python-config >/dev/null
$PYTHON -c "exec(open('$DIR/queue_config_pid_$JOB.py').read()); print(len(queues), [q['queue_id'] for q in queues], {q['pid'] for q in queues}, {q['is_active'] for q in queues}, sorted(queues[0]), 0 not in {q['addr'] for q in queues})"`,
		shows: []string{`^3 \[0, 1, 2\] \{{JOB}\} \{True\} \['addr', 'is_active', 'pid', 'queue_id'\] True$`},
	},
	{
		id: "R5", asks: "address and id are right, against the driver's own files; nobody is attached", on: "job", waits: true,
		command: `gpctl queue list --target $JOB --jq '.queues[].ring_address' | sort >$DIR/ours
gplab decode mqd /sys/kernel/debug/kfd/mqds --jq ".processes[] | select(.pid == $JOB) | .queues[].compute[0].ring_address" | sort >$DIR/drivers
diff $DIR/ours $DIR/drivers && echo "the same $(wc -l <$DIR/ours) addresses"
echo ids $(gpctl queue list --target $JOB --jq '.queues[].queue_id') as $(ls /sys/class/kfd/kfd/proc/$JOB/queues)
gpctl queue find $JOB`,
		shows: []string{`^the same 3 addresses$`, `^ids 0 1 2 as 0 1 2$`, `mechanism not attached`, `^total 3 queues, 3 active$`},
		hides: []string{`unknown`},
	},
	{
		id: "R6", asks: "live state from debugfs; the pid inside a container", on: "job", needs: []string{"root"}, waits: true,
		command: `gpctl queue find $INNER
grep NSpid /proc/$(gpctl queue find $INNER --jq '.queues[0].pid')/status`,
		shows: []string{`^own pid 1 in its pid namespace$`, `^NSpid:\t\d+\t1$`, `^total 2 queues, \d active$`, `from a reading of the hardware slots`},
		hides: []string{`unknown`},
	},
	{
		id: "R7", asks: "C: init, suspend, status, resume", on: "job", needs: []string{"C"}, waits: true,
		command: "make -s clib && " + cc + `suspend $JOB`,
		shows: []string{
			`^gpreempt_poc_init = 0`, `^suspend_queues = 0`, `^get_queue_status\(0\) = 0: is_active 0$`, `^resume_queues = 0`,
			`^get_queue_status\(0\) = 0: is_active 1$`,
		},
		hides: []string{`warning`},
	},
	{
		id: "R8", asks: "preempt automatically beside online and offline tasks: statistics, a report", on: "trial",
		command: `gplab trial ` + works0 + `--rate 10 --count 30 --repeats 1 --warm-up 1s --output-dir $DIR/run`,
		shows: []string{
			`^(PASS|FAIL|CANNOT TELL) \(EMULATED, profile \w+\): \w`, `^offline alone 1 0 0 `, `^online alone 1 \d\d+ 0 `, `^shared 1 \d\d+ 0 `, `^protected 1 \d\d+ 0 [\d.]+m?s`, `^protected suspend \d+ [\d.]+ms`,
			`^protected resume \d+ [\d.]+ms`, `^report: {DIR}/run/report\.html$`,
		},
	},
	{
		id: "R9", asks: "both cases started, logs and figures collected, a report written", on: "trial", after: "R8",
		command: `ls $DIR/run $DIR/run/logs; grep -c '^protected' $DIR/run/requests.csv; grep -o '<title>[^<]*' $DIR/run/report.html`,
		shows:   []string{`^protected-1-job-1-1\.log$`, `^protected-1-online\.log$`, `^suspends\.csv$`, `^report\.md$`, `^pids\.json$`, `^\d\d+$`, `^<title>`},
	},
	{
		id: "R10", asks: "find the process of a job in a container, query it, compare with hqds", on: "job", needs: []string{"root"}, waits: true,
		command: `pid=$(gpctl queue find 1 --jq '.queues[0].pid')
gpctl queue list --target $pid --jq '.queues[].ring_address' | sort >$DIR/queues
gpctl queue slots --target $pid --jq '.hqds[].ring_address' | sort -u >$DIR/slots
diff $DIR/queues $DIR/slots && echo "the same $(wc -l <$DIR/slots) rings have slots"`,
		shows: []string{`^the same 2 rings have slots$`},
	},
	{
		id: "R11", asks: "what is missing has a remedy: daemon, log, level of the log, rights", on: "bare", needs: []string{"captures", "root"},
		command: `gpctl --socket /nonexistent queue find 1
gplab amdlog match 1 /nonexistent.log
gplab amdlog analyze $CAPTURES/amdlog/clr_level3_16streams.log
setpriv --reuid 65534 --clear-groups gpctl --socket /nonexistent doctor`,
		shows: []string{
			`cannot reach the daemon`, `try: systemctl status gpreemptd`, `nonexistent\.log: no such file`, `try: AMD_LOG_LEVEL=4 writes them`,
			`uid 65534 may not read`, `or sudo gpctl doctor$`,
		},
	},
}
