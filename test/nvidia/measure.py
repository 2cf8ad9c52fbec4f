"""Measure gpreemptd with the mechanism nvchannels on this machine's NVIDIA GPUs.

measure.py GPREEMPTD GPCTL OUT [quick] runs as root on a machine with CUDA and PyTorch, and the client package gpreempt.
It builds the CUDA programs, starts the daemon, runs parts, and writes OUT/measure.json after each: raw values, and a
summary. PARTS="holds kinds" selects parts (the table PARTS has them, and how long each may take); all of them take longer
than 10 minutes. quick takes a tenth of the values. AWAKE=1 keeps the processors from sleeping. SERVING_SIZE=1.2b,
SERVING_SECONDS and SERVING_REPEATS change the part serving. A part that fails, or takes far longer than it may, says so,
and the others go on with a new daemon.

Times are of time.perf_counter. While it waits for a counter this program is busy on one core, and on none otherwise.
"""

import contextlib
import json
import mmap
import os
import pathlib
import random
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback

import arrivals

HERE = pathlib.Path(__file__).resolve().parent
DAEMON, GPCTL, OUT = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
QUICK = "quick" in sys.argv[4:]
# On a tmpfs, as /run is under systemd: the journal is written before each suspension.
RUN = pathlib.Path("/dev/shm/gpreempt")
WORK = pathlib.Path("/tmp/gpreempt-measure")
SOCKET = RUN / "gpreemptd.sock"
os.environ["RUNTIME_DIRECTORY"] = str(RUN)
os.environ["GPREEMPT_SOCKET"] = str(SOCKET)
# The client of this tree, unless one is installed.
BINDINGS = HERE.parent.parent / "bindings" / "python"
sys.path.append(str(BINDINGS))
os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (os.environ.get("PYTHONPATH"), str(BINDINGS)) if p)

import gpreempt  # noqa: E402

CONFIG = """
mechanisms: [nvchannels]
access: {online_groups: [root], admin_groups: [root]}
policy: {preset: balanced, share_floor: 0, max_suspend: %s, max_wait: 200ms, attach_after: 0s}
rules:
  - {name: job, match: {comm: "job*"}, class: offline, priority: 0}
  - {name: check, match: {comm: "check*"}, class: offline, priority: 0}
  - {name: train, match: {cmdline: "*train.py*"}, class: offline, priority: 0}
  - {name: nccl, match: {cmdline: "*nccl.py*"}, class: offline, priority: 0}
safety: {hazards: [{id: measure, nvidia: ">=0", action: allow, why: It is being measured.}]}
"""
# The directory of libgpreempt.so, for an arm with the C client; "" for none.
CLIENT = os.environ.get("GPREEMPT_CLIB", "")
AWAKE = os.environ.get("AWAKE") == "1"
result = {"mechanism": "nvchannels", "hardware": "real", "quick": QUICK, "awake": AWAKE, "parts": {}}
now = time.perf_counter


def amount(n):
    return max(3, n // 10) if QUICK else n


def quantiles(values):
    v = sorted(x for x in values if x is not None)
    if not v:
        return {"n": 0}
    at = lambda q: round(v[min(len(v) - 1, int(len(v) * q))], 2)
    return {"n": len(v), "p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "max": round(v[-1], 2)}


def rounded(values, digits=1):
    return [None if v is None else round(v, digits) for v in values]


def out(*command, check=True, timeout=60):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=timeout)
    if check and done.returncode:
        raise RuntimeError(f"{command}: {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def smi(fields):
    return out("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", check=False).strip()


def xids():
    """The driver's reports of errors in the kernel's log; None if it cannot be read."""
    done = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace")
    return None if done.returncode else [line for line in done.stdout.splitlines() if "Xid" in line]


class Counters:
    """The words in a file that a job counts in."""

    def __init__(self, path):
        self.file = open(path, "r+b")
        self.memory = mmap.mmap(self.file.fileno(), 4096)

    def __getitem__(self, i):
        return struct.unpack_from("<Q", self.memory, 8 * i)[0]

    def __setitem__(self, i, value):
        struct.pack_into("<Q", self.memory, 8 * i, value)

    def total(self):
        """The counts of all contexts."""
        return sum(struct.unpack_from("<48Q", self.memory, 8 * 16), self[0])

    def moves_within(self, seconds, i=0):
        """The seconds until the counter moves; None if it does not."""
        begin, was = now(), self[i]
        while now() - begin < seconds:
            if self[i] != was:
                return now() - begin
        return None


spawned = []


def spawn(command, **options):
    with open(OUT / "jobs.log", "a") as log:
        process = subprocess.Popen([str(c) for c in command], stderr=log, **options)
    spawned.append(process)
    return process


class Job:
    def __init__(self, *command, wait=90):
        # CUDA can register memory of tmpfs, and not of a file on a disk.
        self.path = pathlib.Path(f"/dev/shm/gpreempt-job-{time.monotonic_ns()}")
        self.path.write_bytes(bytes(4096))
        program = [WORK / command[0]] if command[0] in ("job", "check") else [sys.executable, HERE / command[0]]
        self.name = " ".join(str(c) for c in command)
        self.process = spawn([*program, self.path, *command[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.counters = Counters(self.path)
        self.wait = wait

    def started(self):
        begin = now()
        # The counts of all contexts.
        while self.counters[0] == 0 or not all(self.counters[15 + i] for i in range(1, self.counters[12])):
            if self.process.poll() is not None or now() - begin > self.wait:
                raise RuntimeError(f"{self.name} did not start: exit status {self.process.poll()}")
            time.sleep(0.01)
        return self

    def attached(self):
        """Wait until the daemon can suspend it."""
        begin = now()
        while now() - begin < 20:
            text = out(GPCTL, "target", "list", "-o", "json", check=False)
            if f'"{self.process.pid}@' in text and "nvchannels" in text:
                return self
            time.sleep(0.1)
        raise RuntimeError(f"{self.name} did not become a target: {out(GPCTL, 'target', 'explain', self.process.pid, check=False)}")

    def pause(self, wanted):
        """Have it leave the GPU idle, or go on."""
        contexts = self.counters[12] or 1
        self.counters[7] = int(wanted)
        begin = now()
        while self.counters[8] != (contexts if wanted else 0):
            if now() - begin > 20 or self.process.poll() is not None:
                raise RuntimeError(f"{self.name} does not {'pause' if wanted else 'go on'}")
            time.sleep(0.001)

    def end(self):
        self.counters[1] = 1
        if self.process.stdin:
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)
            raise RuntimeError(f"{self.name} did not end") from None
        finally:
            self.path.unlink(missing_ok=True)


def cuda(ms=100, *mode):
    return Job("job", ms, *mode)


def ask(process, line):
    """Send a command to a server, and read its answer of one line."""
    process.stdin.write(line + "\n")
    process.stdin.flush()
    text = process.stdout.readline()
    if not text:
        raise RuntimeError(f"{process.args[1]} ended: see jobs.log")
    return text


def answered(text):
    answer = json.loads(text)
    if "failed" in answer:
        raise RuntimeError(answer["failed"])
    return answer


class Daemon:
    def __init__(self, max_suspend="60s"):
        (WORK / "config.yaml").write_text(CONFIG % max_suspend)
        with open(OUT / "gpreemptd.log", "a") as log:
            self.process = subprocess.Popen([DAEMON, "serve", "--config", WORK / "config.yaml", "--socket", SOCKET], stderr=log, stdout=log)
        begin = now()
        while not self.serves():
            if self.process.poll() is not None or now() - begin > 20:
                raise RuntimeError("gpreemptd did not start")
            time.sleep(0.002)
        self.started_s = now() - begin
        # A client that met a dead daemon does not try again at once; each daemon gets a new one.
        self.client = gpreempt.Client(str(SOCKET))

    @staticmethod
    def serves():
        with socket.socket(socket.AF_UNIX) as s:
            try:
                s.connect(str(SOCKET))
            except OSError:
                return False
        return True

    def online(self, **options):
        return gpreempt.online(gpus=gpreempt.ALL, label="measure", client=self.client, **options)

    def end(self, how=signal.SIGTERM):
        self.process.send_signal(how)
        self.process.wait(20)


state = {}


def daemon():
    return state["daemon"]


def restart(how=signal.SIGTERM, **options):
    daemon().client.close()
    if daemon().process.poll() is None:
        daemon().process.send_signal(signal.SIGCONT)
        daemon().end(how)
    state["daemon"] = Daemon(**options)


def gpreemptds():
    """The processes of the daemon's program: itself and its supervisor."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if os.path.realpath(entry / "exe") == os.path.realpath(DAEMON):
                    found.append(int(entry.name))
    return found


def held(jobs, online=None, seconds=20):
    """A lease under which all jobs are off. It may take a few: a daemon that has just started looks for processes."""
    online = online or daemon().online()
    begin = now()
    while now() - begin < seconds:
        lease = online.acquire()
        if lease.quiet:
            before = [j.counters.total() for j in jobs]
            time.sleep(0.005)
            if before == [j.counters.total() for j in jobs]:
                return lease
        lease.release()
        time.sleep(0.01)
    raise RuntimeError("the jobs were not suspended")


def all_move_within(jobs, seconds):
    """The seconds until the first and until the last job counts; None for later ones."""
    begin, first = now(), None
    waiting = {j: j.counters.total() for j in jobs}
    while waiting and now() - begin < seconds:
        for j, was in list(waiting.items()):
            if j.counters.total() != was:
                first = first if first is not None else now() - begin
                del waiting[j]
    return first, None if waiting else now() - begin


def hold_often(jobs, n, budget, still=0.01, gap=0.004):
    """Announce to quiet, nothing moves meanwhile, and Complete until the jobs run."""
    online, begin = daemon().online(), now()
    announce, first, last, moved, unquiet = [], [], [], 0, 0
    for _ in range(n):
        if now() - begin > budget:
            break
        time.sleep(gap)
        at = now()
        lease = online.acquire()
        announce.append((now() - at) * 1e6)
        unquiet += not lease.quiet
        before = [j.counters.total() for j in jobs]
        time.sleep(still)
        moved += before != [j.counters.total() for j in jobs]
        lease.release()
        if jobs:
            one, every = all_move_within(jobs, 2)
            first.append(None if one is None else one * 1e6)
            last.append(None if every is None else every * 1e6)
    return {
        "announce_us": quantiles(announce), "first_runs_us": quantiles(first), "all_run_us": quantiles(last), "not_quiet": unquiet,
        "moved_while_quiet": moved, "not_back_in_2s": last.count(None), "raw_announce_us": rounded(announce),
        "raw_first_runs_us": rounded(first), "raw_all_run_us": rounded(last),
    }  # fmt: skip


def clients(budget):
    """What the client, gRPC and the scheduler take: announcements with no job, and with a job that has no work."""
    answer = {"no job": hold_often([], amount(300), budget / 2, still=0.001)}
    job = cuda().started().attached()
    job.pause(True)
    idle = hold_often([], amount(300), budget / 2, still=0.001)
    job.end()
    answer["idle job"] = idle
    return answer


def holds(budget):
    """1 and 4 jobs whose kernels fill the GPU."""
    answer, jobs = {}, []
    for count in (1, 4):
        while len(jobs) < count:
            jobs.append(cuda())
        for job in jobs:
            job.started().attached()
        answer[f"{count} jobs"] = hold_often(jobs, amount(300), budget / 2)
    answer["stats"] = json.loads(out(GPCTL, "stats", "-o", "json"))
    for job in jobs:
        job.end()
    return answer


def kind(n, budget, *mode, still=0.01):
    job = cuda(*mode).started().attached()
    time.sleep(0.7)  # the daemon looks for more channels twice a second
    answer = {"queues": queues(job.process.pid), **hold_often([job], n, budget, still=still)}
    answer["job_failed"] = job.counters[3]
    job.end()
    return answer


def queues(pid):
    """How many channels the daemon sees, with those of copy engines."""

    def find(value):
        if isinstance(value, dict):
            if value.get("pid") == pid and "queue_count" in value:
                return value["queue_count"]
            value = list(value.values())
        if isinstance(value, list):
            return next((found for found in map(find, value) if found is not None), None)

    try:
        return find(json.loads(out(GPCTL, "target", "list", "-o", "json")))
    except ValueError:
        return None


def kinds(budget):
    """Latency by the number of channels and by the kind of kernel."""
    modes = {f"long, {n} contexts": (100, "long", "--contexts", n) for n in (1, 2, 4)}
    modes |= {name: (100, name) for name in ("coop", "tensor", "graph")}
    answer = {}
    for name, mode in modes.items():
        try:
            answer[name] = kind(amount(60), budget / len(modes), *mode)
        except RuntimeError as e:
            answer[name] = {"failed": str(e)}
            for process in spawned:
                if process.poll() is None:
                    process.kill()
                    process.wait()
    return answer


def managed(budget):
    """Kernels on managed memory that faults. It is a part of its own, after most others."""
    return {"managed": kind(amount(60), budget, 100, "managed", still=0.05)}


def requests(budget):
    """Latency of requests by length: alone, beside jobs, and with announcements."""
    kernel_ms, lengths, rounds, each = 0.2, (5, 20, 50, 80, 150), 2 if QUICK else 10, 6
    server = spawn([WORK / "requests", kernel_ms], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    server.stdout.readline()
    begin = now()
    announces = {"gpreempt": daemon().online(), "gpreempt, not awaited": daemon().online(max_wait=0)}
    answer, jobs = {}, []
    for number, count in enumerate((1, 2, 4)):
        while len(jobs) < count:
            jobs.append(cuda())
        for job in jobs:
            job.started().attached()
        raw = {arm: {f"{k * kernel_ms:g} ms": [] for k in lengths} for arm in ("alone", "shared", "gpreempt", "gpreempt, not awaited", *(["gpreempt, C client"] if CLIENT else []))}
        progress, unquiet, c_client = {arm: [0, 0.0] for arm in raw}, 0, []
        for turn in range(rounds):
            if now() - begin > budget * (0.28, 0.58, 1)[number]:
                break
            for arm in list(raw)[turn % len(raw) :] + list(raw)[: turn % len(raw)]:
                for job in jobs:  # all at once, as each ends its kernel first
                    job.counters[7] = int(arm == "alone")
                for job in jobs:
                    job.pause(arm == "alone")
                ask(server, "50")  # the clocks of the GPU are those of a long run
                before, since = sum(j.counters.total() for j in jobs), now()
                for kernels in lengths:
                    for _ in range(each):
                        time.sleep(0.01)
                        at = now()
                        lease = announces[arm].acquire() if arm in announces else None
                        done = ask(server, f"{kernels} announce" if arm == "gpreempt, C client" else str(kernels))
                        raw[arm][f"{kernels * kernel_ms:g} ms"].append((now() - at) * 1e3)
                        if lease is not None:
                            unquiet += arm == "gpreempt" and not lease.quiet
                            lease.release()
                        elif arm == "gpreempt, C client":
                            unquiet += done.split()[2] != "1"
                            c_client.append(float(done.split()[1]))
                progress[arm][0] += sum(j.counters.total() for j in jobs) - before
                progress[arm][1] += now() - since
        ratio = lambda arm, length: quantiles(raw[arm][length]).get("p50", 0) / max(quantiles(raw["alone"][length]).get("p50", 0), 1e-9)
        answer[f"{count} jobs"] = {
            "summary_ms": {arm: {length: quantiles(v) for length, v in of.items()} for arm, of in raw.items()},
            "p50_to_alone": {arm: {length: round(ratio(arm, length), 3) for length in raw[arm]} for arm in raw if arm != "alone"},
            "counts_per_s": {arm: round(n / s, 1) for arm, (n, s) in progress.items() if s},
            "not_quiet": unquiet, "c_client_announce_us": quantiles(c_client), "raw_c_client_announce_us": rounded(c_client), "raw_ms": {arm: {length: rounded(v, 3) for length, v in of.items()} for arm, of in raw.items()},
        }  # fmt: skip
        so_far("requests", answer)
    server.stdin.close()
    server.wait(20)
    for job in jobs:
        job.end()
    return answer


def serving(budget):
    """A language model is served beside training. Arms: alone; shared (time slices); gpreempt; priority (streams in one process)."""
    size = os.environ.get("SERVING_SIZE", "7b")
    seconds, repeats = (6.0, 1) if QUICK else (float(os.environ.get("SERVING_SECONDS", 16)), int(os.environ.get("SERVING_REPEATS", 3)))
    begin = now()
    server = spawn([sys.executable, HERE / "serve.py", size], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if not server.stdout.readline():
        raise RuntimeError("serve.py did not start: see jobs.log")
    cost = answered(ask(server, "cost"))  # before anything else uses the GPU
    train = Job("train.py")
    both = Job("priority.py", size)
    train.started().attached()
    if not both.process.stdout.readline():
        raise RuntimeError("priority.py did not start: see jobs.log")
    both.started()
    plan = arrivals.schedule(
        arrivals.read(), seconds, 0.4, lambda prompt, generated: (prompt / 1024 * cost["prefill_1024_ms"] + generated * cost["tpot_ms"]) / 1e3
    )
    (WORK / "arrivals.json").write_text(json.dumps(plan))
    ready = now() - begin
    arms = {
        "alone": (server, "plain", None), "shared": (server, "plain", train),
        "gpreempt": (server, "announce", train), "priority": (both.process, "plain", both),
    }  # fmt: skip
    raw, training_alone = {arm: [] for arm in arms}, {"train.py": [], "priority.py": []}
    for turn in range(repeats):
        # What the training does alone, in each repeat: clocks may change.
        for name, job in (("train.py", train), ("priority.py", both)):
            train.pause(job is not train)
            both.pause(job is not both)
            time.sleep(0.3)
            steps, since = job.counters[0], now()
            time.sleep(3)
            training_alone[name].append((job.counters[0] - steps) / (now() - since))
        for arm in list(arms)[turn % 4 :] + list(arms)[: turn % 4]:
            if now() - begin + seconds * 1.3 > budget and raw[arm]:
                continue  # at least one of each
            process, mode, job = arms[arm]
            train.pause(job is not train)
            both.pause(job is not both)
            time.sleep(0.3)
            steps, since = job.counters[0] if job else 0, now()
            answer = answered(ask(process, f"run {mode} {WORK / 'arrivals.json'}"))
            answer["train_steps_per_s"] = (job.counters[0] - steps) / (now() - since) if job else None
            raw[arm].append(answer)
            so_far("serving", {"size": size, "cost": cost, "training_alone_steps_per_s": training_alone, "raw_arrivals": plan, "raw_arms": raw})
    both.pause(False)
    train.pause(False)
    server.stdin.close()
    server.wait(20)
    train.end()
    both.end()

    def summary(arm):
        runs = raw[arm]
        requests = [r for a in runs for r in a["requests"]]
        span = sum(a["span_s"] for a in runs)
        duty = sum(a["leased_s" if arm == "gpreempt" else "busy_s"] for a in runs) / span
        answer = {
            "ttft_ms": quantiles([r["ttft_ms"] for r in requests]),
            "tpot_ms": quantiles([t for r in requests for t in r["tpot_ms"]]),
            "queue_ms": quantiles([r["queue_ms"] for r in requests]), "total_ms": quantiles([r["total_ms"] for r in requests]),
            "announce_ms": quantiles([r["announce_ms"] for r in requests if r["announced"]]),
            "not_quiet": sum(r["quiet"] is False for r in requests),
            "duty": round(duty, 3), "repeats": len(runs),
            "same_tokens": sum(r["digest"] == a["digest"] for run in runs for r, a in zip(run["requests"], raw["alone"][0]["requests"])),
        }  # fmt: skip
        if arm != "alone":
            alone = training_alone["priority.py" if arm == "priority" else "train.py"]
            rate = sum(a["train_steps_per_s"] for a in runs) / len(runs)
            answer["train_steps_per_s"] = round(rate, 2)
            answer["training_share"] = round(rate / (sum(alone) / len(alone)), 3)
            answer["duty_leaves"] = round(1 - duty, 3)
        return answer

    return {
        "size": size, "cost": cost, "start_up_s": round(ready, 1), "training_alone_steps_per_s": training_alone,
        "arms": {arm: summary(arm) for arm in raw}, "raw_arrivals": plan, "raw_arms": raw,
    }  # fmt: skip


def identical(budget):
    """Results of a job that is held ten thousand times, in the midst of its kernels."""
    job = Job("check", 30).started().attached()
    while job.counters[2] < 1:  # the round that the others are compared with
        time.sleep(0.01)
    online, begin, rounds = daemon().online(), now(), job.counters[2]
    announce, moved, unquiet, lost, n = [], 0, 0, 0, amount(10000)
    chance = random.Random(1)
    while len(announce) < n and now() - begin < budget:
        at = now()
        lease = online.acquire()
        announce.append((now() - at) * 1e6)
        unquiet += not lease.quiet
        before = job.counters[0]
        time.sleep(0.001)
        moved += job.counters[0] != before
        lease.release()
        lost += job.counters.moves_within(2) is None
        time.sleep(chance.uniform(0, 0.003))  # where in a kernel the next begins
    took, rounds = now() - begin, job.counters[2] - rounds
    time.sleep(0.5)
    mismatches = job.counters[9]
    job.counters[14] = 1  # a wrong bit must be found
    at = now()
    while job.counters[9] == mismatches and now() - at < 10:
        time.sleep(0.01)
    answer = {
        "holds": len(announce), "seconds": round(took, 1), "rounds": rounds, "mismatches": mismatches, "planted_found": job.counters[9] == mismatches + 1,
        "moved_while_quiet": moved, "not_quiet": unquiet, "not_back_in_2s": lost, "job_failed": job.counters[3],
        "checksum": f"{job.counters[10]:016x}", "announce_us": quantiles(announce), "raw_announce_us": rounded(announce),
    }  # fmt: skip
    job.end()
    return answer


def deaths(budget):
    """SIGKILL of the daemon while the job is held; the supervisor must have it run within a second."""
    job = cuda(20).started().attached()
    begin, runs, starts, off, again = now(), [], [], 0, []
    for _ in range(amount(200)):
        if now() - begin > budget:
            break
        at = now()
        lease = held([job])
        again.append((now() - at) * 1e3)
        daemon().process.send_signal(signal.SIGKILL)
        moved = job.counters.moves_within(3)
        runs.append(None if moved is None else moved * 1e3)
        daemon().process.wait()
        daemon().client.close()
        del lease
        state["daemon"] = Daemon()
        starts.append(daemon().started_s * 1e3)
        off += job.counters.moves_within(1) is None
    time.sleep(1)
    answer = {
        "runs_after_ms": quantiles(runs), "over_1s": sum(r is None or r > 1000 for r in runs), "left_off": off,
        "daemon_start_ms": quantiles(starts), "held_again_ms": quantiles(again), "daemon_processes": len(gpreemptds()),
        "job_failed": job.counters[3], "raw_runs_after_ms": rounded(runs, 3), "raw_daemon_start_ms": rounded(starts),
    }  # fmt: skip
    job.end()
    return answer


def stops(budget):
    """SIGSTOP of the daemon: the supervisor has the job run; when the daemon goes on, it suspends the job again."""
    job = cuda(20).started().attached()
    runs, again, lost, after = [], [], [], []
    for _ in range(2 if QUICK else 5):
        lease = held([job])
        daemon().process.send_signal(signal.SIGSTOP)
        runs.append(job.counters.moves_within(3))
        daemon().process.send_signal(signal.SIGCONT)
        time.sleep(0.1)
        again.append(job.counters.moves_within(0.1) is None)
        lost.append(lease.lost)
        lease.release()
        after.append(job.counters.moves_within(2))
        time.sleep(0.3)
    job.end()
    return {"runs_after_s": rounded(runs, 4), "off_again_after_cont": again, "lease_lost": lost, "runs_after_complete_s": rounded(after, 4)}


def newborn(budget):
    """A context that is created while the job is suspended."""
    job = cuda().started().attached()
    lease = held([job])
    job.counters[4] = 1
    begin, created = now(), None
    while now() - begin < 3 and not job.counters[5]:
        if job.counters[6] and created is None:
            created = now() - begin
        time.sleep(0.001)
    first = now() - begin if job.counters[5] else None
    time.sleep(0.2)
    moves, old = job.counters.moves_within(0.5, 5) is not None, job.counters.moves_within(0.2) is not None
    lease.release()
    answer = {"context_created_s": created, "first_count_s": first, "still_counts_0.2s_later": moves, "old_counts": old,
              "runs_after_resume_s": job.counters.moves_within(5, 5), "state": job.counters[6]}  # fmt: skip
    lease = held([job])
    before = job.counters[5]
    time.sleep(0.1)
    answer["both_off_in_the_next_hold"] = job.counters[5] == before
    lease.release()
    job.end()
    return answer


def kill_both():
    """Kill the daemon and its supervisor, so that neither sees the other's death."""
    pids = gpreemptds()
    daemon().process.send_signal(signal.SIGSTOP)
    for pid in pids:
        if pid != daemon().process.pid:
            os.kill(pid, signal.SIGKILL)
    daemon().end(signal.SIGKILL)
    daemon().client.close()
    time.sleep(0.2)
    return len(pids)


def cleanup(budget):
    """SIGKILL of the daemon and of the supervisor: the job stays off until --cleanup."""
    job = cuda().started().attached()
    held([job])
    killed = kill_both()
    stays = job.counters.moves_within(1.5) is None
    text = out(DAEMON, "--cleanup", check=False)
    runs = job.counters.moves_within(2)
    state["daemon"] = Daemon()
    answer = {"killed": killed, "stays_off_without_both": stays, "cleanup": text, "runs_after_s": runs}
    # The next daemon alone does it, too.
    job.attached()
    held([job])
    kill_both()
    answer["stays_off_again"] = job.counters.moves_within(0.5) is None
    state["daemon"] = Daemon()
    answer["runs_after_a_start_s"] = job.counters.moves_within(3)
    job.end()
    return answer


def kill_while_off(budget):
    """A job that is killed while it is off: its memory is free again."""
    used = lambda: int(smi("memory.used").split()[0])
    before, freed, during = used(), [], None
    for _ in range(1 if QUICK else 5):
        job = cuda().started().attached()
        during = used()
        lease = held([job])
        job.process.kill()
        job.process.wait()
        begin = now()
        while used() > before + 50 and now() - begin < 10:
            pass
        freed.append(now() - begin)
        lease.release()
        job.path.unlink(missing_ok=True)
    return {"memory_before_mib": before, "during_mib": during, "after_mib": used(), "freed_within_s": rounded(freed, 3)}


def forked(budget):
    """A job with a forked child that has its descriptors, as a data loader's worker; the child ends while the job is off."""
    answer = {}
    job = cuda(100, "long", "--child").started().attached()
    time.sleep(1)
    answer["child_is_a_target"] = f'"{job.counters[10]}@' in out(GPCTL, "target", "list", "-o", "json", check=False)
    answer["with_child"] = hold_often([job], amount(60), budget / 2)
    lease = held([job])
    job.counters[11] = 1
    time.sleep(0.2)
    answer["off_after_the_childs_end"] = job.counters.moves_within(0.1) is None
    lease.release()
    answer["runs_after_complete_s"] = job.counters.moves_within(3)
    if answer["runs_after_complete_s"] is None:
        restart()
        answer["runs_after_a_restart_s"] = job.counters.moves_within(3)
        if answer["runs_after_a_restart_s"] is None:
            job.process.kill()
            return answer
    answer["then"] = hold_often([job.attached()], 5, 10)
    job.end()
    train = Job("train.py", "late").started().attached()
    train_holds = hold_often([], 10, 10, still=0.02, gap=0.1)
    answer["train.py late"] = {"announce_us": train_holds["announce_us"], "not_quiet": train_holds["not_quiet"], "runs_after_s": train.counters.moves_within(3)}
    train.end()
    return answer


def long_hold(budget):
    """One hold of a minute; then the results are the same."""
    seconds = 5 if QUICK else 60
    restart(max_suspend="5m")
    before = xids()
    job = Job("check", 30).started().attached()
    while job.counters[2] < 3:
        time.sleep(0.01)
    lease = held([job])
    count, begin = job.counters[0], now()
    time.sleep(seconds)
    moved, took, lost = job.counters[0] - count, now() - begin, lease.lost
    lease.release()
    runs, rounds = job.counters.moves_within(3), job.counters[2]
    while job.counters[2] < rounds + 5 and now() - begin < seconds + 15:
        time.sleep(0.01)
    answer = {"held_s": round(took, 2), "lease_lost": lost, "counts_while_held": moved, "runs_after_s": runs, "rounds_after": job.counters[2] - rounds,
              "mismatches": job.counters[9], "job_failed": job.counters[3], "new_xids": None if before is None else len(xids()) - len(before)}  # fmt: skip
    job.end()
    restart()
    return answer


def nccl(budget):
    """All-reduce over two GPUs, held often and once for long."""
    restart(max_suspend="5m")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    ranks = [Job("nccl.py", rank, 2, port) for rank in range(2)]
    for rank in ranks:
        rank.started().attached()
    online, begin = daemon().online(), now()
    announce, first, moved, unquiet, late = [], [], 0, 0, 0

    def hold(seconds):
        nonlocal moved, unquiet, late
        at = now()
        lease = online.acquire()
        announce.append((now() - at) * 1e6)
        unquiet += not lease.quiet
        time.sleep(0.01)  # the CPU counts what the GPU had ended before
        before = [r.counters[0] for r in ranks]
        time.sleep(seconds)
        moved += before != [r.counters[0] for r in ranks]
        lease.release()
        one, every = all_move_within(ranks, 5)
        first.append(None if every is None else every * 1e3)
        late += every is None

    for _ in range(amount(100)):
        if now() - begin > budget / 2:
            break
        time.sleep(0.02)
        hold(0.03)
    often = {"holds": len(announce), "announce_us": quantiles(announce), "both_count_after_ms": quantiles(first), "not_quiet": unquiet,
             "moved_while_quiet": moved, "not_back_in_5s": late, "raw_announce_us": rounded(announce), "raw_both_count_after_ms": rounded(first, 3)}  # fmt: skip
    rate, since = ranks[0].counters[0], now()
    time.sleep(1)
    rate = (ranks[0].counters[0] - rate) / (now() - since)
    moved = unquiet = late = 0
    hold(5 if QUICK else 20)
    time.sleep(1)
    answer = {**often, "long": {"moved_while_quiet": moved, "not_quiet": unquiet, "not_back_in_5s": late}, "all_reduces_per_s": round(rate, 1),
              "wrong_sums": [r.counters[9] for r in ranks], "failed": [r.counters[3] for r in ranks],
              "all_reduces": [r.counters[0] for r in ranks], "ended": [r.process.poll() for r in ranks]}  # fmt: skip
    if any(answer["failed"]) or any(e is not None for e in answer["ended"]):
        answer["failed_ranks"] = answer["failed"]
    del answer["failed"]  # part() would take it for a failure of the part
    for rank in ranks:
        rank.counters[1] = 1
    for rank in ranks:
        rank.end()
    restart()
    return answer


# The parts in their order, and the seconds that each may take. The riskiest are last.
PARTS = {
    clients: 10, holds: 40, kinds: 50, requests: 120, identical: 100, stops: 15, newborn: 10, cleanup: 20, kill_while_off: 15, forked: 50,
    long_hold: 85, deaths: 150, serving: 360, managed: 25, nccl: 90,
}  # fmt: skip


class Overdue(Exception):
    pass


def overdue(*_):
    raise Overdue("the part took too long")


def part(function, budget):
    begin, failed = now(), False
    signal.signal(signal.SIGALRM, overdue)
    # A part ends itself by its budget; starts and ends are not counted, and get half as much again.
    signal.alarm(int(budget * 1.5) + 30)
    try:
        value = function(budget / 10 if QUICK and function is not serving else budget)
    except Exception:
        failed = True
        value = {"failed": traceback.format_exc()}
    finally:
        signal.alarm(0)
    for process in spawned:
        if process.poll() is None:
            process.kill()
            process.wait()
    spawned.clear()
    for path in pathlib.Path("/dev/shm").glob("gpreempt-job-*"):
        path.unlink(missing_ok=True)
    try:
        if failed:
            restart(signal.SIGKILL)
        elif daemon().process.poll() is not None:
            value["daemon_died"] = daemon().process.poll()
            restart()
    except Exception:
        value.setdefault("failed", traceback.format_exc())
    value["took_s"], value["clocks"] = round(now() - begin, 1), smi("clocks.sm,clocks.mem,temperature.gpu,power.draw")
    result["parts"][function.__name__] = value
    write()
    print(function.__name__, json.dumps(brief(value), default=str).replace('"', "")[:1600], flush=True)


def so_far(name, value):
    """Write what a long part has: the whole run may be ended before it."""
    result["parts"][name] = {"unfinished": True, **value}
    write()


def brief(value):
    """What is printed of a part: without raw values; quantiles as p50/p90/p99/max."""
    if isinstance(value, dict):
        if value.get("n") == 0 or "p50" in value:
            return f"{value['p50']}/{value['p90']}/{value['p99']}/{value['max']} n{value['n']}" if value["n"] else None
        shown = {k: brief(v) for k, v in value.items() if not k.startswith("raw") and k not in ("stats", "clocks", "all_run_us", "summary_ms")}
        return {k: v for k, v in shown.items() if v is not None}
    return round(value, 4) if isinstance(value, float) else value


def write():
    result["xids"] = xids()
    (OUT / "measure.json").write_text(json.dumps(result, separators=(",", ":"), default=str))


def build():
    header = HERE.parent.parent / "bindings" / "c"
    client = ["-DCLIENT", f"-I{header}", f"-L{CLIENT}", "-lgpreempt", "-Xlinker", f"-rpath,{CLIENT},-rpath-link,{CLIENT}"] if CLIENT else []
    builds = [
        subprocess.Popen(["nvcc", "-std=c++17", "-O2", "-arch=native", "-o", WORK / name, HERE / f"{name}.cu", "-lcuda", *more])
        for name, more in {"job": [], "requests": client, "check": []}.items()
    ]
    # Each program that was built is used, and a part without its program fails alone.
    for b in builds:
        if b.wait():
            print("nvcc failed:", b.args[5], flush=True)


@contextlib.contextmanager
def awake():
    """Keep each processor busy with a loop that every other thread displaces, so that none sleeps: like idle=poll of the kernel."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    try:
        for loop, processor in zip(loops, os.sched_getaffinity(0)):
            os.sched_setaffinity(loop.pid, {processor})
            os.sched_setscheduler(loop.pid, os.SCHED_IDLE, os.sched_param(0))
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main():
    only = os.environ.get("PARTS", "").split()
    unknown = set(only) - {f.__name__ for f in PARTS}
    if unknown:
        raise SystemExit(f"no such parts: {unknown}")
    OUT.mkdir(parents=True, exist_ok=True)
    WORK.mkdir(exist_ok=True)
    RUN.mkdir(mode=0o755, exist_ok=True)
    build()
    gpus = smi("name,driver_version").splitlines()
    result["gpu"], result["gpus"] = (gpus or ["unknown"])[0], len(gpus)
    result["version"] = out(DAEMON, "version").strip()
    result["xids_before"] = xids()
    state["daemon"] = Daemon()
    result["doctor"] = out(GPCTL, "doctor", check=False)
    chosen = {f: s for f, s in PARTS.items() if f.__name__ in only or (not only and (f is not nccl or len(gpus) > 1))}
    print(result["gpu"], f"{len(gpus)} GPUs", result["version"], f"{sum(chosen.values())} s at most as planned", sep="; ", flush=True)
    print(result["doctor"], flush=True)
    try:
        with awake() if AWAKE else contextlib.nullcontext():
            for function, budget in chosen.items():
                part(function, budget)
    finally:
        daemon().end()
    result["journal_left"] = [p.name for p in (RUN / "journal").glob("*")]
    result["processes_left"] = len(gpreemptds())
    write()


main()
