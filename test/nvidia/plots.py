"""Plots of what measure.py measured.

plots.py DIRECTORY MEASURE.json... writes SVG files. Each file is a run. The plot of announcements shows all runs; for the
others the last run that has the part counts.
"""

import json
import pathlib
import sys

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib import ticker  # noqa: E402

plt.rcParams.update({
    "svg.hashsalt": "gpreempt", "svg.fonttype": "none", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3,
    "axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.use": True,
})  # fmt: skip
# Of the palette of Okabe and Ito, which colour-blind people can tell apart.
COLORS = {
    "alone": "#000000", "shared": "#d55e00", "gpreempt": "#0072b2", "priority": "#009e73",
    "gpreempt, not awaited": "#56b4e9",
}  # fmt: skip
RUNS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
NAMES = {"alone": "alone", "shared": "shared (time slices)", "gpreempt": "gpreempt", "priority": "one process,\nstream priorities"}


def logarithmic(axis):
    """Ticks at 1, 2 and 5, as plain numbers."""
    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda v, _: f"{v:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def present(values):
    return sorted(v for v in values if v is not None)


def cdf(axes, values, label, **style):
    v = present(values)
    if v:
        axes.step([v[0], *v], [i / len(v) for i in range(len(v) + 1)], where="post", label=label, **style)
    axes.set_ylabel("share of values")
    axes.set_ylim(0, 1)


def tail(axes, values, label, **style):
    """The share of values that are longer: quantiles near 1 can be read from it."""
    v = present(values)
    if v:
        axes.step(v, [1 - i / len(v) for i in range(len(v))], where="pre", label=label, **style)


def announce(parts, finish, runs):
    runs = {name: run for name, run in runs.items() if "holds" in run}
    if not runs:
        return
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), sharey=True)
    columns = (
        ("1 jobs", "raw_announce_us", 1.5, "NotifyOnline to quiet, 1 job, ms"),
        ("4 jobs", "raw_announce_us", 2, "NotifyOnline to quiet, 4 jobs, ms"),
        ("1 jobs", "raw_all_run_us", None, "Complete until the job counts, 1 job, ms"),
    )
    for a, (jobs, key, limit, label) in zip(axes, columns):
        for number, (name, run) in enumerate(runs.items()):
            tail(a, [v / 1e3 for v in present(run["holds"][jobs][key])], name, color=RUNS[number % len(RUNS)], linewidth=1.2)
        a.axhline(0.01, color="black", linewidth=0.6, linestyle="--")
        if limit:
            a.plot([limit], [0.01], "v", color="black", label="the limit of p99", clip_on=False, linestyle="")
        a.set_xlabel(label)
        a.set_xscale("log")
        logarithmic(a.xaxis)
        a.set_yscale("log")
    if "clients" in parts:
        for name in ("no job", "idle job"):
            values = [v / 1e3 for v in present(parts["clients"][name]["raw_announce_us"])]
            tail(axes[0], values, None, color="#888888", linewidth=1)
            axes[0].text(values[len(values) // 2], 0.3, f"{name} ", color="#666666", fontsize=8, ha="right", va="center")
    axes[0].set_ylabel("share of values that are longer")
    axes[0].set_yticks([1, 0.5, 0.1, 0.01, 1 / 300], ["1", "0.5", "0.1", "0.01 (p99)", "1 of 300"])
    axes[0].minorticks_off()
    for a in axes:
        a.tick_params(axis="y", which="minor", length=0)
    axes[0].set_xlim(0.1, 10)
    axes[2].set_xlim(0.4, 10)
    axes[1].legend(loc="upper right", fontsize=8)
    finish(figure, "announce", "Announcements beside jobs whose kernels fill the GPU, and the resumption after them, 300 of each in a run")


def requests(parts, finish):
    counts = [name for name in ("1 jobs", "2 jobs", "4 jobs") if name in parts.get("requests", {})]
    if not counts:
        return
    figure, axes = plt.subplots(1, len(counts), figsize=(3.2 * len(counts) + 0.8, 3.8), sharey=True, squeeze=False)
    for a, name in zip(axes[0], counts):
        summary = parts["requests"][name]["summary_ms"]
        alone = [q["p50"] for q in summary["alone"].values()]
        arms = [arm for arm in COLORS if arm != "alone" and arm in summary]
        for i, arm in enumerate(arms):
            p50 = [q["p50"] / one for q, one in zip(summary[arm].values(), alone)]
            up = [(q["p90"] - q["p50"]) / one for q, one in zip(summary[arm].values(), alone)]
            at = [v * (1 + 0.05 * (i - (len(arms) - 1) / 2)) for v in alone]  # beside each other
            a.errorbar(at, p50, [[0] * len(up), up], fmt="o-", color=COLORS[arm], label=arm, markersize=3.5, linewidth=1, capsize=1.5)
        a.step([3, 7, 40], [1.25, 1.1, 1.1], where="post", color="black", linewidth=1, linestyle="--", label="the limit")
        a.set_xscale("log")
        a.set_yscale("log")
        a.set_xticks(alone, [f"{v:.3g}" for v in alone])
        a.minorticks_off()
        a.set_xlabel("request alone, p50, ms")
        a.set_title(name.replace("1 jobs", "beside 1 job").replace("2 jobs", "beside 2 jobs").replace("4 jobs", "beside 4 jobs"), fontsize=9)
    axes[0][0].set_ylabel("latency / p50 alone (the bar: p90)")
    ticks = [1, 1.1, 1.25, 1.5, 2, 3, 5, 8]
    axes[0][0].set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes[0][0].minorticks_off()
    axes[0][0].set_ylim(0.98, 12)
    axes[0][0].legend(fontsize=7, loc="upper right")
    n = parts["requests"][counts[0]]["summary_ms"]["alone"]["1 ms"]["n"]
    finish(figure, "requests", f"Latency of requests beside jobs whose kernels fill the GPU, at most {n} requests for each point")


def serving(parts, finish):
    of = parts.get("serving", {})
    if "arms" not in of:
        return
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), width_ratios=(1, 1, 0.8))
    for arm, runs in of["raw_arms"].items():
        answers = [r for run in runs for r in run["requests"]]
        style = {"color": COLORS[arm]}
        cdf(axes[0], [r["ttft_ms"] for r in answers], NAMES[arm], **style)
        cdf(axes[1], [t for r in answers for t in r["tpot_ms"]], NAMES[arm], **style)
    for a, label in ((axes[0], "time to first token, from arrival, ms"), (axes[1], "time per output token, ms")):
        a.set_xlabel(label)
    axes[0].set_xscale("log")
    logarithmic(axes[0].xaxis)
    axes[1].legend(loc="center", bbox_to_anchor=(0.29, 0.6), fontsize=7)
    arms = [arm for arm in ("shared", "gpreempt", "priority") if arm in of["arms"]]
    for i, arm in enumerate(arms):
        summary = of["arms"][arm]
        axes[2].bar(i, summary["training_share"], color=COLORS[arm], width=0.6)
        axes[2].plot([i - 0.4, i + 0.4], [summary["duty_leaves"]] * 2, color="black", label=None if i else "what the serving's duty leaves")
    axes[2].set_xticks(range(len(arms)), arms)
    axes[2].set_ylabel("training's speed / alone")
    axes[2].set_ylim(0, 1.05)
    axes[2].legend(fontsize=8)
    n = of["arms"]["gpreempt"]["ttft_ms"]["n"]
    finish(figure, "serving", f"A model of {of['size'].replace('b', ' B')} parameters is served beside training, {n} requests in each arm")


def kinds(parts, finish):
    of = {**parts.get("kinds", {}), **parts.get("managed", {})}
    of = {name: v for name, v in of.items() if isinstance(v, dict) and v.get("announce_us", {}).get("n")}
    if not of:
        return
    figure, axes = plt.subplots(1, 2, figsize=(9, 0.35 * len(of) + 1.4), sharey=True)
    names = [f"{name.replace('1 contexts', '1 context')}, n = {v['announce_us']['n']}" for name, v in of.items()]
    for a, key, label in ((axes[0], "raw_announce_us", "NotifyOnline to quiet, ms"), (axes[1], "raw_first_runs_us", "Complete until the job counts, ms")):
        for row, v in enumerate(of.values()):
            values = [x / 1e3 for x in present(v[key])]
            # Spread by the order of the values, the same in each drawing.
            a.plot(values, [row + (i * 0.618 % 1 - 0.5) * 0.5 for i in range(len(values))], ".", color="#0072b2", markersize=3, alpha=0.6)
            a.plot([values[len(values) // 2]] * 2 if values else [], [row - 0.35, row + 0.35] if values else [], color="black")
        a.set_yticks(range(len(of)), names)
        a.set_xlim(0)
        a.set_xlabel(label)
    axes[0].invert_yaxis()
    finish(figure, "kinds", "Announcements by number of contexts and kind of kernel; the bar is the median")


def deaths(parts, finish):
    of = parts.get("deaths", {})
    if "raw_runs_after_ms" not in of:
        return
    values = of["raw_runs_after_ms"]
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2))
    axes[0].plot(range(1, len(values) + 1), [float("nan") if v is None else v for v in values], ".", color="#0072b2", markersize=3)
    axes[0].set_xlabel("number of the kill")
    axes[0].set_ylabel("ms until the job counts")
    axes[0].set_yscale("log")
    axes[0].axhline(1000, color="#d55e00", linewidth=0.8)
    axes[0].text(1, 900, "the limit", color="#d55e00", va="top")
    cdf(axes[1], values, None, color="#0072b2")
    axes[1].set_xlabel("ms until the job counts")
    axes[1].set_xscale("log")
    logarithmic(axes[1].xaxis)
    logarithmic(axes[0].yaxis)
    finish(figure, "deaths", f"SIGKILL of the daemon while a job is off, n = {len(values)}; left off: {of['left_off']}")


def main():
    directory, parts, runs, gpu = pathlib.Path(sys.argv[1]), {}, {}, None
    directory.mkdir(parents=True, exist_ok=True)
    on = {}
    for path in sys.argv[2:]:
        file = json.loads(pathlib.Path(path).read_text())
        name, _, driver = file["gpu"].partition(", ")
        gpu = f"measured on {name}, driver {driver}"
        runs[pathlib.Path(path).stem] = file["parts"]
        for part, value in file["parts"].items():
            if "failed" not in value:
                parts[part], on[part] = value, gpu

    for plot in (announce, requests, serving, kinds, deaths):

        def finish(figure, name, title):
            part = {"announce": "holds"}.get(name, name)
            figure.suptitle(f"{title}\n{on.get(part, gpu)}", fontsize=10)
            figure.savefig(directory / f"{name}.svg", metadata={"Date": None})
            plt.close(figure)
            print(directory / f"{name}.svg")

        plot(parts, finish, *([runs] if plot is announce else []))


main()
