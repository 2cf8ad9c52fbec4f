"""Plots of what measure.py measured.

plots.py DIRECTORY MEASURE.json... writes SVG files. Of a part that is in several of the JSON files the last one counts.
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
COLORS = {"alone": "#000000", "shared": "#d55e00", "gpreempt": "#0072b2", "priority": "#009e73"}
NAMES = {"alone": "alone", "shared": "shared (time slices)", "gpreempt": "gpreempt", "priority": "one process, stream priorities"}


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


def announce(parts, finish):
    if "holds" not in parts:
        return
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2))
    clients = parts.get("clients", {})
    for name, style in (("no job", ":"), ("idle job", "--")):
        if name in clients:
            cdf(axes[0], [v / 1e3 for v in clients[name]["raw_announce_us"]], name, color="#777777", linestyle=style)
    for name, color in (("1 jobs", "#0072b2"), ("4 jobs", "#d55e00")):
        of = parts["holds"].get(name)
        if of:
            label = f"{name.replace('1 jobs', '1 job')} (n = {of['announce_us']['n']})"
            cdf(axes[0], [v / 1e3 for v in of["raw_announce_us"]], label, color=color)
            cdf(axes[1], [v / 1e3 for v in present(of["raw_all_run_us"])], label, color=color)
    axes[0].set_xlabel("NotifyOnline to quiet, ms")
    axes[1].set_xlabel("Complete until all jobs count again, ms")
    for a in axes:
        a.set_xscale("log")
        logarithmic(a.xaxis)
        a.legend(loc="lower right")
    finish(figure, "announce", "Suspending and resuming jobs that fill the GPU")


def requests(parts, finish):
    counts = [name for name in ("1 jobs", "2 jobs", "4 jobs") if name in parts.get("requests", {})]
    if not counts:
        return
    figure, axes = plt.subplots(1, len(counts), figsize=(3 * len(counts) + 1, 3.2), sharey=True, squeeze=False)
    for a, name in zip(axes[0], counts):
        summary = parts["requests"][name]["summary_ms"]
        alone = [q["p50"] for q in summary["alone"].values()]
        for arm in ("shared", "gpreempt"):
            for quantile, style in (("p50", "o-"), ("p90", "^:")):
                v = [q[quantile] / one for q, one in zip(summary[arm].values(), alone)]
                a.plot(alone, v, style, color=COLORS[arm], label=f"{arm}, {quantile}", markersize=4)
        a.axhline(1, color="black", linewidth=0.8)
        a.set_xscale("log")
        a.set_yscale("log")
        a.set_xticks(alone, [f"{v:.3g}" for v in alone])
        a.minorticks_off()
        a.set_xlabel("request alone, p50, ms")
        a.set_title(name.replace("1 jobs", "1 job"), fontsize=9)
    axes[0][0].set_ylabel("latency / p50 alone")
    ticks = [1, 1.5, 2, 3, 5, 10, 20]
    axes[0][0].set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes[0][-1].legend()
    finish(figure, "requests", "Latency of requests beside jobs that fill the GPU")


def serving(parts, finish):
    of = parts.get("serving", {})
    if "arms" not in of:
        return
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), width_ratios=(1, 1, 0.8))
    for arm, runs in of["raw_arms"].items():
        answers = [r for run in runs for r in run["requests"]]
        style = {"color": COLORS[arm]}
        cdf(axes[0], [r["ttft_ms"] for r in answers], NAMES[arm], **style)
        cdf(axes[1], [t for r in answers for t in r["tpot_ms"]], NAMES[arm], **style)
    for a, label in ((axes[0], "time to first token, from arrival, ms"), (axes[1], "time per output token, ms")):
        a.set_xlabel(label)
        a.set_xscale("log")
        logarithmic(a.xaxis)
    axes[1].legend(loc="lower right", fontsize=8)
    arms = [arm for arm in ("shared", "gpreempt", "priority") if arm in of["arms"]]
    for i, arm in enumerate(arms):
        summary = of["arms"][arm]
        axes[2].bar(i, summary["training_share"], color=COLORS[arm], width=0.6)
        axes[2].plot([i - 0.4, i + 0.4], [summary["duty_leaves"]] * 2, color="black", label=None if i else "what the serving's duty leaves")
    axes[2].set_xticks(range(len(arms)), arms)
    axes[2].set_ylabel("training's speed / alone")
    axes[2].set_ylim(0, 1.05)
    axes[2].legend(fontsize=8)
    finish(figure, "serving", f"A model of {of['size'].replace('b', ' B')} parameters is served beside training")


def kinds(parts, finish):
    of = {**parts.get("kinds", {}), **parts.get("managed", {})}
    of = {name: v for name, v in of.items() if isinstance(v, dict) and v.get("announce_us", {}).get("n")}
    if not of:
        return
    figure, axes = plt.subplots(1, 2, figsize=(9, 0.35 * len(of) + 1.4), sharey=True)
    names = [f"{name.replace('1 contexts', '1 context')} ({v['queues']} channels)" if v.get("queues") else name for name, v in of.items()]
    for a, key, label in ((axes[0], "raw_announce_us", "NotifyOnline to quiet, ms"), (axes[1], "raw_first_runs_us", "Complete until the job counts, ms")):
        for row, v in enumerate(of.values()):
            values = [x / 1e3 for x in present(v[key])]
            # Spread by the order of the values, the same in each drawing.
            a.plot(values, [row + (i * 0.618 % 1 - 0.5) * 0.5 for i in range(len(values))], ".", color="#0072b2", markersize=3, alpha=0.6)
            a.plot([values[len(values) // 2]] * 2 if values else [], [row - 0.35, row + 0.35] if values else [], color="black")
        a.set_yticks(range(len(of)), names)
        a.set_xscale("log")
        logarithmic(a.xaxis)
        a.set_xlabel(label)
    axes[0].invert_yaxis()
    finish(figure, "kinds", "By number of channels and kind of kernel; the bar is the median")


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
    directory, parts, gpu = pathlib.Path(sys.argv[1]), {}, None
    directory.mkdir(parents=True, exist_ok=True)
    on = {}
    for path in sys.argv[2:]:
        file = json.loads(pathlib.Path(path).read_text())
        name, _, driver = file["gpu"].partition(", ")
        gpu = f"measured on {name}, driver {driver}"
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

        plot(parts, finish)


main()
