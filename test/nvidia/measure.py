"""Measure gpreemptd with the mechanism nvchannels on this machine's NVIDIA GPU.

measure.py GPREEMPTD GPCTL OUT [quick] runs as root on a machine with CUDA and PyTorch. It builds the
CUDA programs, starts the daemon, and writes what it measured to OUT/measure.json: raw values, and
a summary. Each part says what failed, and the others go on.
"""

import json
import mmap
import os
import pathlib
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback

HERE = pathlib.Path(__file__).resolve().parent
DAEMON, GPCTL, OUT = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
QUICK = "quick" in sys.argv[4:]
# On a tmpfs, as /run is under systemd: the journal is written before each suspension.
RUN = pathlib.Path("/dev/shm/gpreempt")
os.environ["RUNTIME_DIRECTORY"] = str(RUN)
SOCKET = RUN / "gpreemptd.sock"
WORK = pathlib.Path("/tmp/gpreempt-measure")
os.environ["GPREEMPT_SOCKET"] = str(SOCKET)
result = {"mechanism": "nvchannels", "hardware": "real", "parts": {}}
CONFIG = """
mechanisms: [nvchannels]
access: {online_groups: [root], admin_groups: [root]}
policy: {preset: balanced, linger: none, share_floor: 0, max_suspend: 60s, max_wait: 200ms, attach_after: 0s}
rules:
  - {name: job, match: {comm: "job*"}, class: offline, priority: 0}
  - {name: train, match: {cmdline: "*train.py*"}, class: offline, priority: 0}
"""


def now():
    return time.perf_counter()


def quantiles(values):
    v = sorted(values)
    if not v:
        return {"n": 0}
    at = lambda q: round(v[min(len(v) - 1, int(len(v) * q))], 1)
    return {"n": len(v), "p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "max": round(v[-1], 1)}


def out(*command, check=True):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=60)
    if check and done.returncode:
        raise RuntimeError(f"{command}: {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout + done.stderr


class Counters:
    """The words in a file that a job counts in."""

    def __init__(self, path):
        self.file = open(path, "r+b")
        self.memory = mmap.mmap(self.file.fileno(), 4096)

    def __getitem__(self, i):
        return struct.unpack_from("<Q", self.memory, 8 * i)[0]

    def __setitem__(self, i, value):
        struct.pack_into("<Q", self.memory, 8 * i, value)

    def moves_within(self, seconds, i=0):
        """The seconds until the counter moves; None if it does not."""
        begin, was = now(), self[i]
        while now() - begin < seconds:
            if self[i] != was:
                return now() - begin
        return None


class Job:
    def __init__(self, kind="cuda", ms=100, wait=60):
        # CUDA can register memory of tmpfs, and not of a file on a disk.
        self.path = pathlib.Path(f"/dev/shm/gpreempt-job-{time.monotonic_ns()}")
        self.path.write_bytes(bytes(4096))
        command = [WORK / "job", self.path, str(ms)] if kind == "cuda" else [sys.executable, HERE / "train.py", self.path]
        self.process = subprocess.Popen(command, stderr=open(OUT / "jobs.log", "a"))
        self.counters = Counters(self.path)
        begin = now()
        while self.counters[0] == 0:
            if self.process.poll() is not None or now() - begin > wait:
                raise RuntimeError(f"{kind} job did not start")
            time.sleep(0.01)

    def end(self):
        self.counters[1] = 1
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)
            raise RuntimeError("the job did not end") from None


class Daemon:
    def __init__(self):
        (WORK / "config.yaml").write_text(CONFIG)
        self.log = open(OUT / "gpreemptd.log", "a")
        self.process = subprocess.Popen([DAEMON, "serve", "--config", WORK / "config.yaml", "--socket", SOCKET], stderr=self.log, stdout=self.log)
        begin = now()
        while "gpreemptd" not in (out(GPCTL, "version", check=False) + "gpreemptd") or not self.serves():
            if self.process.poll() is not None or now() - begin > 20:
                raise RuntimeError("gpreemptd did not start")
            time.sleep(0.05)

    def serves(self):
        return SOCKET.exists() and "rror" not in out(GPCTL, "status", check=False)

    def end(self):
        self.process.terminate()
        self.process.wait(20)


def target(pid, attached=True):
    begin = now()
    while now() - begin < 20:
        text = out(GPCTL, "target", "list", "-o", "json", check=False)
        if f'"{pid}@' in text and (not attached or "nvchannels" in text):
            return text
        time.sleep(0.1)
    raise RuntimeError(f"process {pid} did not become a target: {text}{out(GPCTL, 'target', 'explain', pid, check=False)}")


def online():
    import gpreempt

    return gpreempt.online(gpus=gpreempt.ALL, label="measure")


def holds():
    """Announce to quiet, nothing moves meanwhile, and on again after Complete."""
    job, announce, moved, back, unquiet = Job(), [], 0, [], 0
    text = target(job.process.pid)
    (OUT / "target.json").write_text(text)
    chat = online()
    try:
        for _ in range(20 if QUICK else 150):
            time.sleep(0.004)
            begin = now()
            lease = chat.__enter__()
            announce.append((now() - begin) * 1e6)
            unquiet += not lease.quiet
            moved += job.counters.moves_within(0.01) is not None
            begin = now()
            chat.__exit__(None, None, None)
            again = job.counters.moves_within(2)
            back.append((again if again is not None else 2) * 1e6 + 0)
        stats = out(GPCTL, "stats", "-o", "json", check=False)
    finally:
        job.end()
    return {"announce_us": quantiles(announce), "not_quiet": unquiet, "moved_while_quiet": moved, "runs_after_complete_us": quantiles(back), "raw_announce_us": announce, "raw_back_us": back, "stats": stats}


def requests():
    """Request latency: alone, beside jobs, and with announcements."""
    answer = {}
    chat = online()
    for kernels, ms in [(5, 0.2), (20, 0.2)] if QUICK else [(5, 0.2), (20, 0.2), (80, 0.2)]:
        server = subprocess.Popen([WORK / "requests", str(kernels), str(ms)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        server.stdout.readline()

        def serve(n, announced):
            times = []
            for _ in range(n):
                time.sleep(0.03)
                begin = now()
                if announced:
                    chat.__enter__()
                server.stdin.write("r\n")
                server.stdin.flush()
                server.stdout.readline()
                times.append((now() - begin) * 1e6)
                if announced:
                    chat.__exit__(None, None, None)
            return times

        n = 20 if QUICK else 60
        arms = {"alone": serve(n, False)}
        for count in (1, 4):
            jobs = [Job() for _ in range(count)]
            for job in jobs:
                target(job.process.pid)
            arms[f"shared_{count}"] = serve(n, False)
            before, begin = [j.counters[0] for j in jobs], now()
            arms[f"gpreempt_{count}"] = serve(n, True)
            arms[f"progress_{count}"] = [j.counters[0] - b for j, b in zip(jobs, before)] + [now() - begin]
            for job in jobs:
                job.end()
        server.stdin.close()
        server.wait(20)
        answer[f"{kernels}x{ms}ms"] = {"raw": arms, "summary_us": {k: quantiles(v) for k, v in arms.items() if "progress" not in k}}
    return answer


def death():
    """SIGKILL of the daemon while a job is suspended, and SIGSTOP."""
    answer = {"killed_s": [], "stopped_s": [], "off_again_after_cont": []}
    for how in ["kill", "stop"] * (1 if QUICK else 3):
        job = Job()
        target(job.process.pid)
        lease = online()
        lease.__enter__()
        if job.counters.moves_within(0.05) is not None:
            raise RuntimeError("the job runs")
        os.kill(daemon().process.pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        answer[how + ("ed_s" if how == "kill" else "ped_s")].append(job.counters.moves_within(5))
        if how == "stop":
            os.kill(daemon().process.pid, signal.SIGCONT)
            time.sleep(0.5)
            answer["off_again_after_cont"].append("see log")
        lease.__exit__(None, None, None)
        if how == "kill":
            daemon().process.wait()
            state["daemon"] = Daemon()
        runs = job.counters.moves_within(2)
        answer.setdefault("runs_afterwards", []).append(runs is not None)
        job.end()
    return answer


def cleanup():
    """SIGKILL of the daemon and of the supervisor: what --cleanup does."""
    job = Job()
    target(job.process.pid)
    lease = online()
    lease.__enter__()
    children = out("pgrep", "-P", daemon().process.pid, check=False).split()
    for pid in children:
        os.kill(int(pid), signal.SIGKILL)
    os.kill(daemon().process.pid, signal.SIGKILL)
    daemon().process.wait()
    time.sleep(0.2)
    stays = job.counters.moves_within(1.5) is None
    text = out(DAEMON, "--cleanup", check=False)
    runs = job.counters.moves_within(2)
    lease.__exit__(None, None, None)
    state["daemon"] = Daemon()
    job.end()
    return {"stays_off_without_both": stays, "cleanup": text, "runs_after_s": runs, "children": children}


def newborn():
    """A context that is created while the job is suspended."""
    job = Job()
    target(job.process.pid)
    lease = online()
    lease.__enter__()
    job.counters[4] = 1
    begin, ran, at = now(), 0, None
    while now() - begin < 3:
        if job.counters[6] and at is None:
            at = now() - begin
        if job.counters[5]:
            ran = job.counters[5]
            break
    first = now() - begin
    time.sleep(0.2)
    moves = job.counters.moves_within(0.5, 5) is not None
    moves_old = job.counters.moves_within(0.2) is not None
    lease.__exit__(None, None, None)
    after = job.counters.moves_within(3, 5)
    state6 = job.counters[6]
    job.end()
    return {"context_created_s": at, "state": state6, "first_count_s": first if ran else None, "still_counts_0.2s_later": moves, "old_counts": moves_old, "runs_after_resume_s": after}


def kill_while_off():
    """A job that is killed while it is off: its memory is free again."""
    used = lambda: int(out("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits").split()[0])
    before = used()
    job = Job()
    target(job.process.pid)
    during = used()
    lease = online()
    lease.__enter__()
    job.process.kill()
    job.process.wait()
    begin = now()
    while used() > before + 50 and now() - begin < 10:
        pass
    took = now() - begin
    lease.__exit__(None, None, None)
    return {"memory_before": before, "during": during, "after": used(), "freed_within_s": took}


def serving():
    """PyTorch serving beside PyTorch training."""
    answer = {}

    def serve(announce):
        p = subprocess.Popen([sys.executable, HERE / "serve.py", str(6 if QUICK else 25), announce], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        p.stdout.readline()
        return p

    def run(p):
        p.stdin.write("go\n")
        p.stdin.flush()
        text = p.stdout.readline()
        p.wait(60)
        return json.loads(text)

    def summary(answers):
        tpot = [t for a in answers for t in a["tpot"]]
        return {"ttft_ms": quantiles([a["ttft"] for a in answers]), "tpot_ms": quantiles(tpot), "tpot_mean_ms": sum(tpot) / len(tpot),
                "announce_ms": quantiles([a["announce"] for a in answers]), "not_quiet": sum(not a["quiet"] for a in answers)}

    for arm in ("alone", "shared", "gpreempt", "shared again"):
        p = serve("announce" if arm == "gpreempt" else "plain")
        train = Job("torch") if arm != "alone" else None
        if train:
            target(train.process.pid)
            time.sleep(1)
        begin, steps = now(), train.counters[0] if train else 0
        answers = run(p)
        took = now() - begin
        answer[arm] = {"summary": summary(answers), "raw": answers}
        if train:
            answer[arm]["train_steps_per_s"] = (train.counters[0] - steps) / took
            train.end()
    train = Job("torch")
    time.sleep(1)
    begin, steps = now(), train.counters[0]
    time.sleep(4)
    answer["training alone"] = {"train_steps_per_s": (train.counters[0] - steps) / (now() - begin)}
    train.end()
    return answer


state = {}


def daemon():
    return state["daemon"]


def part(f):
    begin = now()
    try:
        value = f()
    except Exception:
        value = {"failed": traceback.format_exc()}
        print(value["failed"], flush=True)
        if daemon().process.poll() is not None:
            state["daemon"] = Daemon()
    result["parts"][f.__name__] = value
    result["parts"][f.__name__]["took_s"] = round(now() - begin, 1)
    (OUT / "measure.json").write_text(json.dumps(result, indent=1))
    brief = {k: v for k, v in value.items() if not k.startswith("raw") and k != "stats"}
    print(f.__name__, json.dumps(brief, default=str)[:1500], flush=True)


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    WORK.mkdir(exist_ok=True)
    RUN.mkdir(mode=0o755, exist_ok=True)
    builds = [subprocess.Popen(["nvcc", "-O2", "-arch=native", "-o", WORK / name, HERE / f"{name}.cu", "-lcuda"]) for name in ("job", "requests")]
    if any(b.wait() for b in builds):
        raise SystemExit("nvcc failed")
    result["gpu"] = out("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").strip()
    result["version"] = out(DAEMON, "version").strip()
    state["daemon"] = Daemon()
    result["doctor"] = out(GPCTL, "doctor", check=False)
    print(result["gpu"], result["doctor"], sep="\n", flush=True)
    only = os.environ.get("PARTS", "").split() or None
    for f in (holds, death, newborn, cleanup, kill_while_off, requests, serving):
        if only is None or f.__name__ in only:
            part(f)
    daemon().end()
    result["left"] = [str(p) for p in (RUN / "journal").glob("*")]
    (OUT / "measure.json").write_text(json.dumps(result, indent=1))


main()
