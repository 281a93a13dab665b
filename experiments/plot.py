"""Figures from runs' metrics.jsonl and config.json, the counterparts of the paper's.

    python -m experiments.plot out/toy-{grpo,pos,balance}-seed{0,1,2} --out out/plots
    python -m experiments.plot out/eval/results.json --out out/eval        # Pass@k, of scripts/evaluate.py's results

Runs whose folders differ only in a trailing -seedN are one line: the mean over seeds, and around it a band of one
standard error over seeds (none with a single seed). `plot_all` is the same from Python, with labels of one's choice.
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot: nothing to close, no screen needed
from matplotlib.ticker import EngFormatter, MaxNLocator

from experiments.curves import Average, Line, RunLog, base_of, gain, make_lines, plain_grpo, read_run, series_of

matplotlib.rcParams.update({"font.size": 12, "axes.titlesize": 12, "legend.fontsize": 11, "lines.markersize": 5})
matplotlib.rcParams.update({"axes.grid": True, "grid.alpha": 0.3, "savefig.dpi": 150})
COLORS = "#0072B2 #D55E00 #009E73 #CC79A7 #56B4E9 #E69F00 #666666".split()  # Okabe and Ito's, grey for their yellow
MARKERS = "osD^vPX*"
NOT_IN_ROUNDS = ("grpo", "passive", "two_stage")
WINDOW = 5  # steps
SMOOTHED = f"running mean over {WINDOW} steps"


def plot_all(runs: list[Path], out: Path, labels: dict[str, str] | None = None) -> list[Path]:
    """Every figure that the runs have the numbers for, once for each set of training prompts; returns the files.

    Args:
        labels: what a line is called in the legends, by its runs' common folder name.

    Raises:
        ValueError: something is wrong with a run's files, or with the choice of runs; nothing was written.
    """
    lines = make_lines([read_run(run) for run in runs], labels or {})
    data = list(dict.fromkeys(line.data for line in lines))
    figures = {}
    for name in data:
        for kind, make in FIGURES.items():
            file = f"{kind}-{name}.png" if len(data) > 1 else f"{kind}.png"
            figures[out / file] = make([line for line in lines if line.data == name])
    if len(data) > 1:
        figures[out / "sets.png"] = sets_figure({name: [line for line in lines if line.data == name] for name in data})
    figures = {path: figure for path, figure in figures.items() if figure}
    if not figures:
        raise ValueError(f"{', '.join(map(str, runs))}: no step and no evaluation, nothing to draw")
    out.mkdir(parents=True, exist_ok=True)
    for path, figure in figures.items():
        figure.savefig(path)
    return list(figures)


# ----------------------------------------------------------------------------------------------------------------
# The paper's figures


def progress_figure(lines: list[Line]) -> Figure | None:
    """Figs. 1 and 3, and what they cost: reward and entropy against steps, samples and seconds of training.

    Of held-out prompts; of the training prompts where no run was evaluated.
    """
    keys, window = {"eval/reward": "held-out reward", "eval/entropy": "held-out entropy\n(nats per token)"}, 1
    if not any(len(series_of(run, "eval/reward")[0]) for line in lines for run in line.runs):
        keys = {"reward/first_round": "training reward", "policy/entropy": "entropy (nats per token)"}
        keys, window = {key: f"{label}\n{SMOOTHED}" for key, label in keys.items()}, WINDOW
    xs = {"step": "step", "sampling/samples": "samples drawn so far", "time/step": "seconds of training so far"}
    figure, axes = panels(2, 3, sharex="col", sharey="row")
    for row, (key, label) in zip(axes, keys.items(), strict=True):
        for axis, (x, title) in zip(row, xs.items(), strict=True):
            for line in lines:
                draw_line(axis, line, line.average(key, x, window))
            count_along(axis, title)
            if x == "step":
                leave_out_the_long_end(axis)
            axis.set_ylabel(label)
            axis.label_outer()
    return finish(figure)


def pass_at_k_figure(lines: list[Line]) -> Figure | None:
    """Fig. 2 and the right half of Fig. 4: Pass@k, and prompts whose k responses are all right or all wrong."""
    figure, [axes] = panels(1, 2)
    base = base_of(lines)
    for line in [base, *lines]:
        steps, *_ = line.average("eval/pass@1")
        if len(steps):
            draw_by_k(*axes, line, f"{line.label} (step {steps[-1]:.0f})", "--" if line is base else "-")
    return finish(figure)


def reward_entropy_figure(lines: list[Line]) -> Figure | None:
    """Fig. 4, left: from the base model (star) to the end (large marker, with its errors), a dot per evaluation."""
    figure, [[axis]] = panels(1, 1)
    for line in [*lines, base_of(lines)]:
        (_, entropy, entropy_error), (_, reward, error) = line.average("eval/entropy"), line.average("eval/reward")
        if len(entropy) and len(reward):
            color, marker = color_and_marker(line)
            axis.plot(entropy, reward, ".-", color=color)
            if error is not None:
                axis.errorbar(entropy[-1], reward[-1], error[-1], entropy_error[-1], color=color, capsize=3)
            size = {"s": 180 if line.style is None else 80, "edgecolor": "black", "zorder": 3}
            axis.scatter(entropy[-1], reward[-1], color=color, marker=marker, label=line.label, **size)
    axis.set(xlabel="held-out entropy (nats per token)", ylabel="held-out reward")
    axis.xaxis.set_major_locator(MaxNLocator(5))
    return finish(figure)


def dynamics_figure(lines: list[Line]) -> Figure | None:
    """Fig. 5: samples per prompt (GRPO's are n); prompts unresolved, by what they lack; settled within two rounds.

    Enough right ones are n/2, as balance wants them, also for samplers whose rule is another. Those that don't sample
    in rounds are in the first panel only.
    """
    share = "share of prompts"
    rounds = [line for line in lines if line.config["max_rounds"] > 1 and line.config["sampler"] not in NOT_IN_ROUNDS]
    contents = (
        (lines, "cost of a step", "samples per prompt of the batch", ["per_prompt"]),
        (
            rounds,
            "never resolved: too few right\n(solid), too few wrong (dashed)",
            share,
            ["sampling/unresolved_no_right", "sampling/unresolved_no_wrong"],
        ),
        (
            rounds,
            "within two rounds: enough right\n(solid), resolved (dashed)",
            share,
            ["sampling/right_in_two_rounds", "sampling/resolved_in_two_rounds"],
        ),
    )
    figure, [axes] = panels(1, 3 if rounds else 1)
    for axis, (drawn, title, label, keys) in zip(axes, contents, strict=False):
        for key, dashes in zip(keys, ("-", "--"), strict=False):
            for line in drawn:
                draw_line(axis, line, line.average(key, window=WINDOW), dashes)
        axis.set(title=title, ylabel=label)
        count_along(axis, f"step ({SMOOTHED})")
        leave_out_the_long_end(axis)
    return finish(figure)


def sets_figure(by_set: dict[str, list[Line]]) -> Figure | None:
    """Fig. 6: the gain over plain GRPO, a panel for each set of training prompts that it was trained on."""
    by_set = {name: own for name, own in by_set.items() if plain_grpo(own)}
    if not by_set:
        return None
    figure, [axes] = panels(1, len(by_set), sharey=True)
    axes[0].set_ylabel("gain in held-out reward")
    for axis, lines in zip(axes, by_set.values(), strict=True):
        baseline = plain_grpo(lines)
        axis.axhline(0, color=color_and_marker(baseline)[0], label=baseline.label)
        for line in lines:
            if line.method != baseline.method:  # or it would be the same, with more steps
                draw_line(axis, line, gain(line, baseline, "eval/reward"))
        axis.set_title(f"trained on {baseline.config['train_data']}")
        count_along(axis)
    return finish(figure)


FIGURES = {
    "progress": progress_figure,
    "pass_at_k": pass_at_k_figure,
    "reward_entropy": reward_entropy_figure,
    "dynamics": dynamics_figure,
}


# ----------------------------------------------------------------------------------------------------------------
# Their parts


def panels(rows: int, columns: int, **options) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(4.2 * columns, 3.3 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def color_and_marker(line: Line) -> tuple[str, str]:
    """The same in every figure."""
    if line.style is None:
        return "black", "*"
    return COLORS[line.style % len(COLORS)], MARKERS[line.style % len(MARKERS)]


def draw_line(axis: Axes, line: Line, points: Average, dashes: str = "-", label: str = "") -> None:
    (xs, mean, error), (color, marker) = points, color_and_marker(line)
    if len(xs):
        spaced = np.unique(np.searchsorted(xs, np.linspace(xs[0], xs[-1], 9))) if len(xs) > 9 else range(len(xs))
        axis.plot(xs, mean, dashes, color=color, marker=marker, markevery=list(spaced), label=label or line.label)
    if error is not None:
        axis.fill_between(xs, mean - error, mean + error, color=color, alpha=0.2, linewidth=0)


def draw_by_k(left: Axes, right: Axes, line: Line, label: str, dashes: str = "-", title: str = "") -> None:
    """Pass@k on the left; on the right the chance that k responses are all right, and that they are all wrong."""
    ks, passes, error = line.by_k("eval/pass")
    draw_line(left, line, (ks, passes, error), dashes, label)
    draw_line(right, line, line.by_k("eval/all_right"), "-", label)
    draw_line(right, line, (ks, 1 - passes, error), "--", label)
    left.set(title=f"{title}at least one right", ylabel="pass@k")
    right.set(title=f"{title}all right (solid), all wrong (dashed)", ylabel="share of prompts")
    for axis in (left, right):
        axis.set(xlabel="k responses", ylim=(-0.02, 1.02))
        axis.set_xscale("log", base=2)
        axis.set_xticks(ks, ks)


def count_along(axis: Axes, label: str = "step") -> None:
    axis.set_xlabel(label)
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))


def leave_out_the_long_end(axis: Axes) -> None:
    """Where a line has more than twice the usual steps, say so on the axis and end it where most lines end."""
    ends = [line.get_xdata()[-1] for line in axis.lines]
    if ends and 0 < np.median(ends) < max(ends) / 2:
        axis.set_xlim(-0.05 * np.median(ends), 1.05 * np.median(ends))
        axis.set_xlabel(f"{axis.get_xlabel()}\nthe longest line goes on to {max(ends):.0f}")


def finish(figure: Figure) -> Figure | None:
    """With one legend for all panels, below them, or to the right of a single one; None if nothing was drawn."""
    handles = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if not handles:
        return None
    width, height = figure.get_size_inches()
    column = 0.8 + 0.09 * max(map(len, handles))  # inches
    if len(figure.axes) == 1:
        figure.set_size_inches(width + column, height)
        figure.legend(handles.values(), handles, loc="outside right upper")
    else:
        columns = max(1, int(width / column))
        figure.set_size_inches(width, height + 0.2 + 0.25 * -(-len(handles) // columns))
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=columns)
    return figure


# ----------------------------------------------------------------------------------------------------------------
# Evaluations


def plot_evaluations(files: list[Path], out: Path) -> list[Path]:
    """Fig. 2 from results.json of scripts/evaluate.py: a row of panels for each data set, a colour for each model.

    Raises:
        ValueError: a file isn't what that writes.
    """
    try:
        results = [result for file in files for result in json.loads(file.read_text())]
        models, data = (list(dict.fromkeys(result[key] for result in results)) for key in ("model", "data"))
        lines = [evaluation_line(result, models.index(result["model"])) for result in results]
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{', '.join(map(str, files))}: not results of scripts/evaluate.py") from error
    figure, axes = panels(len(data), 2)
    for line in lines:
        draw_by_k(*axes[data.index(line.data)], line, line.label, title=f"{line.data}\n")
    out.mkdir(parents=True, exist_ok=True)
    finish(figure).savefig(out / "pass_at_k.png")
    return [out / "pass_at_k.png"]


def evaluation_line(result: dict, style: int) -> Line:
    """A row of results.json as if it were a run's only evaluation."""
    row = {f"eval/{metric}@{k}": share for metric in ("pass", "all_right") for k, share in result[metric].items()}
    return Line(result["model"], result["data"], [RunLog(Path(), {}, [{"step": 0, **row}])], style)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the paper's figures.")
    parser.add_argument("paths", nargs="+", type=Path, help="folders of runs; or results.json of scripts/evaluate.py")
    parser.add_argument("--out", type=Path, default=Path("out/plots"), help="the folder for the PNGs (%(default)s)")
    args = parser.parse_args()
    draw_them = plot_evaluations if all(path.suffix == ".json" for path in args.paths) else plot_all
    try:
        print(*draw_them(args.paths, args.out), sep="\n")
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
