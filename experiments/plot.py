"""Figures from runs' metrics.jsonl and config.json, the counterparts of the paper's.

    python -m ada.plot out/toy-{grpo,pos,balance}-seed{0,1,2} --out out/plots

Runs whose folders differ only in a trailing -seedN are one line: the mean over seeds, and around it a band of one
standard error over seeds (none with a single seed). `plot_all` is the same from Python, with labels of one's choice.
"""

import argparse
import sys
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot: nothing to close, no screen needed
from matplotlib.ticker import EngFormatter, MaxNLocator

from ada.curves import Average, Line, Run, base_of, curve, gain, make_lines, plain_grpo, read_metrics, read_run

matplotlib.rcParams.update({"font.size": 12, "axes.titlesize": 12, "legend.fontsize": 11, "lines.markersize": 5})
matplotlib.rcParams.update({"axes.grid": True, "grid.alpha": 0.3, "savefig.dpi": 150})
COLORS = "#0072B2 #D55E00 #009E73 #CC79A7 #56B4E9 #E69F00 #666666".split()  # Okabe and Ito's, grey for their yellow
MARKERS = "osD^vPX*"
NOT_IN_ROUNDS = ("grpo", "passive", "two_stage")
WINDOW = 5  # steps
SMOOTHED = f"running mean over {WINDOW} steps"
OVERVIEW = (  # of one run: title, training metric, evaluation metric drawn as dots beside it
    ("reward", "reward/first_round", "eval/reward"),
    ("entropy (nats per token)", "policy/entropy", "eval/entropy"),
    ("samples per step", "sampling/samples", None),
)


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
        for make in (progress, pass_at_k, reward_entropy, dynamics):
            file = f"{make.__name__}-{name}.png" if len(data) > 1 else f"{make.__name__}.png"
            figures[out / file] = make([line for line in lines if line.data == name])
    if len(data) > 1:
        figures[out / "sets.png"] = sets({name: [line for line in lines if line.data == name] for name in data})
    figures = {path: figure for path, figure in figures.items() if figure}
    if not figures:
        raise ValueError(f"{', '.join(map(str, runs))}: no step and no evaluation, nothing to draw")
    out.mkdir(parents=True, exist_ok=True)
    for path, figure in figures.items():
        figure.savefig(path)
    return list(figures)


# ----------------------------------------------------------------------------------------------------------------
# The paper's figures


def progress(lines: list[Line]) -> Figure | None:
    """Figs. 1 and 3, and what they cost: reward and entropy against steps, samples and seconds of training.

    Of held-out prompts; of the training prompts where no run was evaluated.
    """
    keys, window = {"eval/reward": "held-out reward", "eval/entropy": "held-out entropy\n(nats per token)"}, 1
    if not any(len(curve(run, "eval/reward")[0]) for line in lines for run in line.runs):
        keys = {"reward/first_round": "training reward", "policy/entropy": "entropy (nats per token)"}
        keys, window = {key: f"{label}\n{SMOOTHED}" for key, label in keys.items()}, WINDOW
    xs = {"step": "step", "sampling/samples": "samples drawn so far", "time/step": "seconds of training so far"}
    figure, axes = panels(2, 3, sharex="col", sharey="row")
    for row, (key, label) in zip(axes, keys.items(), strict=True):
        for axis, (x, title) in zip(row, xs.items(), strict=True):
            for line in lines:
                draw(axis, line, line.average(key, x, window))
            count_along(axis, title)
            if x == "step":
                leave_out_the_long_end(axis)
            axis.set_ylabel(label)
            axis.label_outer()
    return finish(figure)


def pass_at_k(lines: list[Line]) -> Figure | None:
    """Fig. 2 and the right half of Fig. 4: Pass@k, and prompts whose k responses are all right or all wrong."""
    figure, [axes] = panels(1, 2)
    base = base_of(lines)
    for line in [base, *lines]:
        steps, *_ = line.average("eval/pass@1")
        if len(steps):
            draw_by_k(*axes, line, f"{line.label} (step {steps[-1]:.0f})", "--" if line is base else "-")
    return finish(figure)


def reward_entropy(lines: list[Line]) -> Figure | None:
    """Fig. 4, left: from the base model (star) to the end (large marker, with its errors), a dot per evaluation."""
    figure, [[axis]] = panels(1, 1)
    for line in [*lines, base_of(lines)]:
        (_, entropy, entropy_error), (_, reward, error) = line.average("eval/entropy"), line.average("eval/reward")
        if len(entropy) and len(reward):
            color, marker = look_of(line)
            axis.plot(entropy, reward, ".-", color=color)
            if error is not None:
                axis.errorbar(entropy[-1], reward[-1], error[-1], entropy_error[-1], color=color, capsize=3)
            size = {"s": 180 if line.look is None else 80, "edgecolor": "black", "zorder": 3}
            axis.scatter(entropy[-1], reward[-1], color=color, marker=marker, label=line.label, **size)
    axis.set(xlabel="held-out entropy (nats per token)", ylabel="held-out reward")
    axis.xaxis.set_major_locator(MaxNLocator(5))
    return finish(figure)


def dynamics(lines: list[Line]) -> Figure | None:
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
        for key, style in zip(keys, ("-", "--"), strict=False):
            for line in drawn:
                draw(axis, line, line.average(key, window=WINDOW), style)
        axis.set(title=title, ylabel=label)
        count_along(axis, f"step ({SMOOTHED})")
        leave_out_the_long_end(axis)
    return finish(figure)


def sets(by_set: dict[str, list[Line]]) -> Figure | None:
    """Fig. 6: the gain over plain GRPO, a panel for each set of training prompts that it was trained on."""
    by_set = {name: own for name, own in by_set.items() if plain_grpo(own)}
    if not by_set:
        return None
    figure, [axes] = panels(1, len(by_set), sharey=True)
    axes[0].set_ylabel("gain in held-out reward")
    for axis, lines in zip(axes, by_set.values(), strict=True):
        baseline = plain_grpo(lines)
        axis.axhline(0, color=look_of(baseline)[0], label=baseline.label)
        for line in lines:
            if line.method != baseline.method:  # or it would be the same, with more steps
                draw(axis, line, gain(line, baseline, "eval/reward"))
        axis.set_title(f"trained on {baseline.config['train_data']}")
        count_along(axis)
    return finish(figure)


# ----------------------------------------------------------------------------------------------------------------
# Their parts


def panels(rows: int, columns: int, **options) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(4.2 * columns, 3.3 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def look_of(line: Line) -> tuple[str, str]:
    """Colour and marker, the same in every figure."""
    return ("black", "*") if line.look is None else (COLORS[line.look % len(COLORS)], MARKERS[line.look % len(MARKERS)])


def draw(axis: Axes, line: Line, points: Average, style: str = "-", label: str = "") -> None:
    (xs, mean, error), (color, marker) = points, look_of(line)
    if len(xs):
        spaced = np.unique(np.searchsorted(xs, np.linspace(xs[0], xs[-1], 9))) if len(xs) > 9 else range(len(xs))
        axis.plot(xs, mean, style, color=color, marker=marker, markevery=list(spaced), label=label or line.label)
    if error is not None:
        axis.fill_between(xs, mean - error, mean + error, color=color, alpha=0.2, linewidth=0)


def draw_by_k(left: Axes, right: Axes, line: Line, label: str, style: str = "-", title: str = "") -> None:
    """Pass@k on the left; on the right the chance that k responses are all right, and that they are all wrong."""
    ks, passes, error = line.by_k("eval/pass")
    draw(left, line, (ks, passes, error), style, label)
    draw(right, line, line.by_k("eval/all_right"), "-", label)
    draw(right, line, (ks, 1 - passes, error), "--", label)
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
# For train.py and ada.eval


def plot_runs(runs: list[Path], out: Path) -> None:
    """Reward, entropy and samples against steps, one colour a run: a line for training, dots for held-out prompts."""
    figure, [axes] = panels(1, len(OVERVIEW))
    for i, path in enumerate(runs):
        run = Run(path, {}, read_metrics(path))
        for axis, (title, train_key, eval_key) in zip(axes, OVERVIEW, strict=True):
            axis.plot(*curve(run, train_key), ".-", color=f"C{i}", alpha=0.7, label=f"{path.name}, training")
            if eval_key:
                axis.plot(*curve(run, eval_key), "o", color=f"C{i}", label=f"{path.name}, held out")
            axis.set_title(title)
            count_along(axis)
    axes[-1].set_ylim(0, 1.05 * axes[-1].get_ylim()[1])
    out.parent.mkdir(parents=True, exist_ok=True)
    finish(figure).savefig(out)


def plot_pass_at_k(results: list[dict], out: Path) -> None:
    """Fig. 2: Pass@k, and the share of prompts whose k responses are all right or all wrong; a row per data set.

    `results` are those of ada.eval; one colour a model.
    """
    data = list(dict.fromkeys(result["data"] for result in results))
    models = list(dict.fromkeys(result["model"] for result in results))
    figure, axes = panels(len(data), 2)
    for result in results:
        row = {f"eval/{metric}@{k}": share for metric in ("pass", "all_right") for k, share in result[metric].items()}
        line = Line(
            result["model"], result["data"], [Run(out, {}, [{"step": 0, **row}])], models.index(result["model"])
        )
        draw_by_k(*axes[data.index(line.data)], line, line.label, title=f"{line.data}\n")
    finish(figure).savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the paper's figures from one or more runs.")
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, each with metrics.jsonl and config.json")
    parser.add_argument("--out", type=Path, default=Path("out/plots"), help="the folder for the PNGs (%(default)s)")
    args = parser.parse_args()
    try:
        print(*plot_all(args.runs, args.out), sep="\n")
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
