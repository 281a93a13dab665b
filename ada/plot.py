"""Figures from metrics.jsonl.

python -m ada.plot out/toy-balance-seed0 out/toy-pos-seed0 --out compare.png
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # to files, also without a screen
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

PANELS = (  # title, training metric, evaluation metric drawn as dots beside it
    ("reward", "reward/first_round", "eval/reward"),
    ("entropy (nats per token)", "policy/entropy", "eval/entropy"),
    ("samples per step", "sampling/samples", None),
)


def read_metrics(run: Path) -> list[dict]:
    """The objects of a run's metrics.jsonl, one a step.

    Raises:
        ValueError: there is no such file, or a line is not JSON.
    """
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
    return rows


def series(rows: list[dict], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, where it was measured."""
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]


def plot_runs(runs: list[Path], out: Path) -> None:
    """Reward, entropy and samples against steps, one colour a run: a line for training, dots for held-out prompts."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(4.5 * len(PANELS), 3.4), layout="constrained")
    for i, run in enumerate(runs):
        rows = read_metrics(run)
        for axis, (title, train_key, eval_key) in zip(axes, PANELS, strict=True):
            axis.plot(*series(rows, train_key), ".-", color=f"C{i}", alpha=0.7, label=f"{run.name}, training")
            if eval_key:
                axis.plot(*series(rows, eval_key), "o", color=f"C{i}", markersize=4, label=f"{run.name}, held out")
            axis.set(title=title, xlabel="step")
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axis.grid(alpha=0.3)
    axes[-1].set_ylim(0, 1.05 * axes[-1].get_ylim()[1])
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
    plt.close(figure)


def plot_pass_at_k(results: list[dict], out: Path) -> None:
    """Fig. 2: Pass@k, and the share of prompts whose k responses are all right or all wrong; a row per data set.

    `results` are those of ada.eval; one colour a model.
    """
    data = list(dict.fromkeys(result["data"] for result in results))
    models = list(dict.fromkeys(result["model"] for result in results))
    figure, axes = plt.subplots(len(data), 2, figsize=(9, 3.2 * len(data)), layout="constrained", squeeze=False)
    for result in results:
        left, right = axes[data.index(result["data"])]
        color = f"C{models.index(result['model'])}"
        ks = [int(k) for k in result["pass"]]
        passes, all_right = list(result["pass"].values()), list(result["all_right"].values())
        left.plot(ks, passes, "o-", color=color, markersize=4, label=result["model"])
        right.plot(ks, all_right, "o-", color=color, markersize=4)
        right.plot(ks, [1 - value for value in passes], "x--", color=color, markersize=5)
    for name, (left, right) in zip(data, axes, strict=True):
        left.set(title=f"{name}: pass@k", xlabel="k")
        right.set(title=f"{name}: all right (solid), all wrong (dashed)", xlabel="k")
        for axis in (left, right):
            axis.set_xscale("log", base=2)
            axis.set_xticks(ks, ks)
            axis.set_ylim(0, 1)
            axis.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=8)
    figure.savefig(out, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Plot reward, entropy and samples of one or more runs.")
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, each with a metrics.jsonl")
    parser.add_argument("--out", type=Path, default=Path("out/plot.png"), help="the PNG to write")
    args = parser.parse_args()
    try:
        plot_runs(args.runs, args.out)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(args.out)


if __name__ == "__main__":
    main()
