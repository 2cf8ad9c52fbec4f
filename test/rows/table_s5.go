package main

// s5 has the requirements of document S5 (docs/design-documents.md).
var s5 = []row{
	{
		id: "R50", asks: "test of the calls: they exist, suspend and resume work, error codes, rights", on: "bare",
		command: `gpaccept --gpu 23256 --quick --out $DIR/accept.tgz`,
		shows:   []string{`EMULATED \(1\d EMULATED, \d+ NOT RUN\)$`, `^EMULATED conformance`, `^EMULATED latency`, `^EMULATED destroy`},
		hides:   []string{`^FAIL`},
	},
	{
		id: "R51", asks: "C: queue_info with address, of all processes; nobody is attached to most", on: "job", needs: []string{"C"}, waits: true,
		command: "make -s clib && " + cc + `list $JOB`,
		shows: []string{
			`^find_queues_by_process = 0: 3 queues$`, `queue_id 2 priority 0 gpu_id \d+ process_id {JOB} is_active 1 address known`, `process_id {SERVER} is_active 1 address known`,
			`process_id {TAGGED} is_active 1 address known`,
		},
		hides: []string{`address unknown`},
	},
	{
		id: "R52", asks: "the library builds without warnings and installs", needs: []string{"C"},
		command: `make -C bindings/c install BUILD=$DIR/clib DESTDIR=$DIR/root PREFIX=/usr; find $DIR/root -type f -o -type l`,
		shows:   []string{`-Wall -Wextra .*-Werror`, `/usr/include/gpreempt\.h$`, `/usr/include/gpreempt_poc\.h$`, `/libgpreempt\.so\.0$`, `/gpreempt\.pc$`},
		hides:   []string{`warning:`, `error:`},
	},
	{
		id: "R53", asks: "mqds of a real host: pid, priority, address; tolerant", needs: []string{"captures"},
		command: `gplab decode mqd $CAPTURES/debugfs/mqds_active_16streams.txt; head -c 20000 $CAPTURES/debugfs/mqds_active_16streams.txt >$DIR/cut; gplab decode mqd $DIR/cut`,
		shows: []string{
			`^process 94314, PASID 94314: 5 queues$`, `^1 compute 63420 0 7 medium 0x7f41b5200000 1MiB`, `^5 compute 63420 0 7 medium 0x7f61c15a6000 4KiB`,
			`^5 queues of 1 process$`, `^process 94314, PASID 94314: [1-4] queues?$`,
		},
	},
	{
		id: "R54", asks: "classes by a threshold of priority from the environment, by process, by range of addresses", on: "threshold", waits: true,
		command: `gpctl target list
printf 'rules: [{name: heap, match: {ring_address: {from: 0x7f0000000000, to: 0x7fffffffffff}}, class: offline}]\n' >$DIR/address.yaml && gpreemptd config check --config $DIR/address.yaml
gpctl target explain $JOB`,
		shows: []string{`^{JOB} kfdemu offline \d+ rule below GPREEMPT_PRIORITY_THRESHOLD`, `^{SERVER} kfdemu online \d+ rule GPREEMPT_PRIORITY_THRESHOLD or more`, `valid`, `^\d+ decides rule below`},
	},
	{
		id: "R55", asks: "queues that are created and destroyed are found and classified", on: "rules", waits: true,
		command: `(sleep 1; sleep 4 | train work --queues 2 --rate 10 --packets 25 --duration 500 --runtime >/dev/null) & timeout 7 gpctl queue watch; wait`,
		shows:   []string{`added \d+ train 1 compute`, `modified \d+ train [01] compute .*class unmanaged > offline`, `removed \d+ (train )?1 compute`},
	},
	{
		id: "R56", asks: "the scheduler resumes after a time slice or when the work has ended", on: "job", waits: true,
		command: `gpctl lease create --ttl 300ms >/dev/null; sleep 1; gpctl events --all; grep 'complete_on_idle' docs/reference/requests.md`,
		shows:   []string{`held > ended: expired`, `suspended > resuming`, `resuming > running done`, `complete_on_idle`},
	},
	{
		id: "R57", asks: "wrappers: an online task that announces, an offline task with a loop", on: "job", needs: []string{"Python"},
		command: `$PYTHON test/rows/testdata/scheduler.py; gpctl stats`,
		shows:   []string{`^answers \[0, 2, 4, 6, 8\]$`, `^steps 100$`, `^announcements \d+$`},
	},
	{
		id: "R58", asks: "the main test: 20 requests every 500 ms beside a job of 100 epochs", on: "trial",
		command: `gplab trial --plan epochs ` + works0 + `--warm-up 1s --repeats 1 --arm shared --arm protected --output-dir $DIR/main; gplab report $DIR/main`,
		shows:   []string{`^protected 1 [23]\d 0 `, `^protected suspend [1-9]\d* `, `online requests have a result \|( yes \|)? \d+ of \d+`, `0 lost, 0 repeated`},
	},
	{
		id: "R59", asks: "statistics: counts, means of latencies", on: "job", after: "R22",
		command: `gpctl stats`,
		shows:   []string{`^announcements [1-9]`, `^suspends [1-9]`, `^resumes [1-9]`, `^LATENCY COUNT MEAN P50 P95 P99 MAX NOTE$`, `^suspend [1-9]\d* [\d.]+.?s`, `^resume [1-9]\d* [\d.]+.?s`},
	},
	{
		id: "R60", asks: "a log: time, event, state, latency", on: "job", after: "R22",
		command: `gpctl events --all`,
		shows:   []string{`^TIME REVISION KIND OBJECT CHANGE REASON$`, `^\d\d:\d\d:\d\d\.\d{6} \d+ target {JOB}@\d+ suspending > suspended done, took [\d.]+`},
	},
	{
		id: "R61", asks: "TC1: 10 s to settle, active to inactive, data intact (here 1 s)", on: "trial", after: "R8",
		command: `gplab trial plans --jq '.plans[] | select(.name=="basic") | .plan'; gplab report $DIR/run`,
		shows:   []string{`warm_up: 10s`, `hardware slots of suspended queues became empty \|( yes \|)? \d+ readings, at most 0 slots`, `0 lost, 0 repeated`, `no alarm of daemon or kernel \|( yes \|)? 0 alarms`},
	},
	{
		id: "R62", asks: "TC2: every 100 ms for 5 minutes, loss < 20 %, no leak (here 10 s)", on: "trial", after: "R30",
		command: `gplab trial judge $DIR/tc2 --profile loss-20-long; gplab trial plans`,
		shows:   []string{`^protected 1 1\d\d 0 `, `^offline_loss_percent protected [\d.-]+ < 20\.0 %`, `^daemon_growth_mib protected [\d.-]+ < 16\.0 MiB`, `^every-100ms-5min .*loss-20-long`},
	},
	{
		id: "R63", asks: "TC3: no such queue; suspended twice, resumed twice; a part of the queues", on: "job", needs: []string{"C"}, waits: true,
		command: "make -s clib && " + cc + `suspend $JOB; gpctl target suspend 999999 --ttl 1s`,
		shows: []string{
			`^suspend_queues = 0`, `^suspend_queues again = 0`, `^resume_queues = 0`, `^resume_queues again = 0`, `^suspend_queues of nobody = -2 `,
			`^a part of its queues = -95 `, `999999.*(owns no GPU queues|exited)`,
		},
	},
	{
		id: "R64", asks: "latency: 100 repetitions with mean and standard deviation", on: "trial", after: "R44",
		command: `gplab trial judge $DIR/schemes --profile suspend-1ms`,
		shows: []string{
			`^ARM N MEAN STD P50 P95 P99 MAX$`, `^protected:strict, queues 3, processes 1 suspend [1-9]\d+ [\d.]+.?s [\d.]+.?s `, `^protected:strict, queues 3, processes 1 resume [1-9]\d+ [\d.]+.?s`,
			`^suspend_p99_ms protected:strict.* < 1\.00 ms`,
		},
	},
	{
		id: "R65", asks: "throughput: alone and beside 2 requests a second, 5 minutes each (here 10 s)", on: "trial",
		command: `gplab trial --plan two-per-second ` + works0 + `--duration 10s --warm-up 1s --repeats 1 --output-dir $DIR/two`,
		shows:   []string{`^offline alone 1 0 0 .* [\d.]+ packets/s 100\.0%$`, `^protected 1 (19|[23]\d) 0 .* [\d.]+ packets/s \d+\.\d%$`, `^offline_loss_percent protected [\d.-]+ < 20\.0 %`},
	},
	{
		id: "R66", asks: "stability for 1 h, CPU and memory watched; stress every 10 ms, 10 queues (here 5 s)", on: "trial",
		command: `gplab trial --plan every-10ms-10min ` + works0 + `--duration 5s --warm-up 1s --output-dir $DIR/stress; cut -d, -f5 $DIR/stress/samples.csv | sort | uniq -c; gplab trial plans`,
		shows:   []string{`^protected 1 (49\d|[5-7]\d\d) 0 `, `\d cpu$`, `\d rss_mib$`, `\d daemon_cpu$`, `\d daemon_rss_mib$`, `^daemon_growth_mib protected [\d.-]+ < 16\.0 MiB`, `^daemon_cpu_percent `, `^stability-1h 1h stability `},
	},
	{
		id: "R67", asks: "reports: functions, charts, histogram of latency, bottlenecks, list of faults", on: "trial", after: "R8",
		command: `gplab report $DIR/run; gplab report $DIR/run -o $DIR/r67.html; grep -o '<svg' $DIR/r67.html | sort | uniq -c`,
		shows:   []string{`What was checked`, `Latency of requests`, `Bottlenecks`, `Suspend and resume`, `\d+ <svg`},
	},
	{
		id: "R68", asks: "responses to risks: too slow, identification unreliable, unstable", on: "trial", after: "R8",
		command: `gplab report $DIR/run; sed -n '/^## Causes/,/^## Tune/p' docs/operate.md; grep 'AMD_QUEUE_TAG' docs/design-documents.md`,
		shows:   []string{`(consider|next stage|stay)`, `mean time to suspend \| &lt; 3 ms \| 3 to 10 ms \| > 10 ms`, `breaker-open`, `quarantine`, `gpreempt reads both`},
	},
	{
		id: "R69", asks: "suspended when online work comes; resumed at its end or when its time slice ends", on: "job", waits: true,
		command: `id=$(gpctl lease create --ttl 20s --label r69 --jq .announced.lease_id); gpctl target list; gpctl lease release $id; sleep 0.5; gpctl target list; gpctl lease create --ttl 300ms >/dev/null; sleep 1; gpctl events --all; gpctl target list`,
		shows:   []string{`^{JOB} train offline .* suspended`, `held > ended: released`, `held > ended: expired`, `^{JOB} train offline .* running`},
	},
}
