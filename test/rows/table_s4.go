package main

// s4 has the requirements of document S4 (docs/design-documents.md).
var s4 = []row{
	{
		id: "R35", asks: "BATCH_UNMAP_QUEUES of several queues by one call", on: "job", needs: []string{"C"}, waits: true,
		command: "make -s clib && " + cc + `unmap $JOB; gpctl queue slots --target $JOB; gpctl target resume $JOB
grep -E 'BATCH_UNMAP as written|All queues of a process are one call' docs/design-documents.md`,
		shows:   []string{`^batch_unmap_queues = 0`, `^get_queue_status\(2\) = 0: is_active 0$`, `^0 slots in use`, `BATCH_UNMAP as written takes the caller's own queues`, `one call and one cycle already`},
		refused: "the ioctl as written works on the caller's own queues; replaced by the driver's SUSPEND_QUEUES, one call for all queues of a process",
	},
	{
		id: "R36", asks: "FAST_REMAP of several queues by one call", on: "job", needs: []string{"C"}, waits: true,
		command: "make -s clib && " + cc + `remap $JOB; gpctl target list
grep 'FAST_REMAP and the reservation' docs/design-documents.md`,
		shows:   []string{`^fast_remap_queues = 0`, `^get_queue_status\(2\) = 0: is_active 0$`, `^get_queue_status\(2\) = 0: is_active 1$`, `use .allocate_hqd., which only .create_queue_nocpsch. calls`},
		refused: "allocate_hqd is not used with HWS; replaced by RESUME_QUEUES, after which the firmware maps the queues",
	},
	{
		id: "R37", asks: "SET_HQD_RESERVATION of percentages of a GPU's slots", on: "job", needs: []string{"C"}, waits: true,
		command: "make -s clib && " + cc + `reserve $JOB`,
		shows:   []string{`^set_hqd_reservation\(30, 70\) = -95 .*firmware assigns the hardware slots`, `^set_hqd_reservation\(80, 30\) = -22 `},
		refused: "the firmware assigns the slots, so nothing can be reserved (EOPNOTSUPP); hqd_budget keeps some free, see R40",
	},
	{
		id: "R38", asks: "queues of high priority have slots of their own", on: "full", waits: true,
		command: `gpctl queue find $SERVER; gpctl gpu list -o wide
grep 'firmware chooses the slots' docs/design-documents.md`,
		shows:   []string{`^total 2 queues, 2 active$`, `FREE`, `firmware chooses the slots`},
		refused: "pipes cannot be split with HWS; instead idle offline jobs are parked, so that 2 online queues among 26 for 24 slots are mapped",
	},
	{
		id: "R39", asks: "library v2: batch_unmap, fast_remap, set_hqd_reservation, grace", on: "job", needs: []string{"C"}, waits: true,
		command: "make -s clib && " + cc + `remap $JOB && $DIR/poc reserve $JOB; grep -E 'grace_us is ignored|grace_period' bindings/c/gpreempt_poc.h docs/design-documents.md`,
		shows: []string{
			`^gpreempt_poc_init = 0`, `^batch_unmap_queues = 0`, `^fast_remap_queues = 0`, `^set_hqd_reservation\(30, 70\) = -95`, `grace_us is ignored`, `is not a time`,
		},
		refused: "the functions exist over suspend and resume; the reservation is refused, and the grace period is not a time",
	},
	{
		id: "R40", asks: "HQDResourceMonitor and SmartQueueScheduler: warn, park idle offline queues", on: "full", waits: true,
		command: `gpctl gpu list -o wide; gpctl target list; gpctl target explain $IDLE1; gpctl status`,
		shows:   []string{`MAPPED`, `26/24`, `^{IDLE1} train offline .* suspended`, `hqd-budget`, `^{SERVER} kfdemu unmanaged .* running`},
	},
	{
		id: "R41", asks: "the new scheme if it is available, otherwise suspend and resume", on: "fallback", waits: true,
		command: `gpctl doctor -o wide; gpctl lease create --ttl 2s; gpctl target list -o wide`,
		shows:   []string{`^{JOB} train dbgtrap`, `criu`, `^{JOB} train offline .* suspended .* dbgtrap`},
	},
	{
		id: "R42", asks: "tests of the kernel's calls, and that the others behave as before",
		command: `go test -count=1 -v -run '^TestFakeDriversMeetTheTable$' ./accept/conformance
grep -E '^(kernel-check|vm-kmap):' Makefile`,
		shows: []string{`^--- PASS: TestFakeDriversMeetTheTable`, `--- PASS: TestFakeDriversMeetTheTable/\S*kmap`, `^kernel-check:`, `^vm-kmap:`},
		hides: []string{`--- FAIL`},
	},
	{
		id: "R43", asks: "tests of users: preemption, batches, reservation, latency, throughput, a comparison", on: "trial", after: "R8",
		command: `gplab trial plans; gplab trial compare $DIR/run $DIR/run; gplab report $DIR/run $DIR/run | head -n 20`,
		shows: []string{
			`^basic `, `^ten-queues `, `^schemes-3-queues `, `^every-100ms `, `^two-per-second `, `^protected .*1\.00`,
		},
	},
	{
		id: "R44", asks: "schemes compared: 100 iterations, 3 queues, 10 ms online, 100 ms gap", on: "trial",
		command: `gplab compare --offline 'exec kfdemu work --runtime --queues {queues} --duration 2000' --queues 3 --processes 1 --policy strict --policy balanced --iterations 100 --hold 10ms --gap 100ms --repeats 1 --output-dir $DIR/schemes`,
		shows:   []string{`^ARM N MEAN STD P50 P95 P99 MAX$`, `^protected:strict, queues 3, processes 1 suspend [1-9]\d+ `, `^protected:strict, queues 3, processes 1 1 1\d\d 0 `, `^protected:balanced, queues 3, processes 1 1 1\d\d 0 `},
	},
	{
		id: "R45", asks: "BERT-like training and ResNet-18 inference, 20 requests every 500 ms", on: "trial", needs: []string{"torch"}, waits: true,
		command: `rm -rf $DIR/models; gplab trial --plan bert-resnet --offline "exec $PYTHON examples/workloads/bert.py" --online "exec $PYTHON examples/workloads/resnet18.py" --request stdin --ready '^ready$' --answer '^answer' --count 20 --warm-up 2s --repeats 1 --arm shared --arm protected --output-dir $DIR/models
gplab report $DIR/models`,
		shows: []string{`^shared 1 [23]\d 0 [\d.]+m?s`, `^protected 1 [23]\d 0 [\d.]+m?s`, `^protected suspend [1-9]\d* `, `online requests have a result \|( yes \|)? \d+ of \d+`},
	},
	{
		id: "R46", asks: "targets: must, should, best, MVP, final",
		command: `gplab trial profiles`,
		shows: []string{
			`^suspend-1ms suspend_p99_ms 1\.00$`, `^suspend-1ms online_p99_ms 15\.0$`, `^suspend-500us suspend_p99_ms 0\.500$`, `^suspend-300us suspend_p99_ms 0\.300$`,
			`^online-10ms online_p99_ms 10\.0$`, `^online-5ms-hour protected_seconds 3600$`, `^online-5ms-hour utilisation_percent 80\.0$`,
		},
	},
	{
		id: "R47", asks: "after the unmap: inactive in mqds, no slot in hqds", on: "job", waits: true,
		command: `gpctl queue slots --target $JOB | tail -n 2
gpctl target suspend $JOB --ttl 8s >/dev/null; gpctl queue find $JOB; gpctl queue slots --target $JOB
gpctl target resume $JOB >/dev/null; sleep 1; gpctl queue find $JOB`,
		shows: []string{`^24 slots in use`, `^total 3 queues, 0 active$`, `^0 slots in use`, `^total 3 queues, 3 active$`},
	},
	{
		id: "R48", asks: "patch, test of the calls, report with charts and advice, result folders", on: "trial", after: "R8",
		command: `gplab report $DIR/run -o $DIR/r.html --markdown $DIR/r.md --csv $DIR/r.csv; grep -o '<svg' $DIR/r.html | sort | uniq -c; cat $DIR/r.md; head -n 1 $DIR/r.csv
ls deploy/kernel`,
		shows: []string{`\d+ <svg`, `^(## |<summary>)Verdict`, `^(## |<summary>)Recommendation`, `mean time to suspend \| [\d.]+ ms`, `^run,`, `^kfd_kmap\.patch$`, `^prepare$`},
	},
	{
		id: "R49", asks: "diagnosis: EINVAL, make.log of DKMS, trace events", needs: []string{"root"},
		command: `sed -n '/^## Diagnosis/,$p' deploy/kernel/README.md; gplab trace kfd --duration 1s`,
		shows:   []string{`/var/lib/dkms/.*make\.log`, `EPERM, EACCES`, `ENOTTY`, `gplab trace kfd --duration 30s`, `^gplab: `},
	},
}
