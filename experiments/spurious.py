"""Spurious positives: right answers from wrong chains, counted in runs' samples.jsonl. docs/spurious.md explains them.

The toy can check its chains (toy.chain_is_right), so here one knows what a verifier of answers cannot see.
"""

import json
import math
import re
from collections import defaultdict
from pathlib import Path

from matplotlib.figure import Figure

import toy
from experiments.curves import mean_and_error
from experiments.plot import COLORS, MARKERS, finish, panels
from toy import boxed, chain_is_right, solve

BINS = {"0": 0, "1-2": 2, "3-8": 8, "9-16": 16}  # right answers of the base model, of 16; the same for all samplers
STYLES = {"balance": 0, "pos": 1, "grpo": 6}  # colour and marker, as in the figures of runs
EARLY = slice(0, 2)  # windows: the first two, while the base model's pass rates still say something


def base_rates(train_data: str) -> dict[str, int]:
    """Problem -> right answers of the base model, of 16."""
    toy.build_if_missing(train_data)
    rows = map(json.loads, Path(train_data).read_text().splitlines())
    return {row["problem"]: row["right_of_16"] for row in rows}


def count_answers(path: Path, ends: list[int], rates: dict[str, int]) -> dict[int, dict[str, list[int]]]:
    """How many answers were right, and how many of them by a wrong chain, in windows of steps that end at `ends`.

    An answer is right here if the box holds it, whatever the run's reward was. Counted are, by place: "first", the
    first four responses to a prompt, which all samplers draw; "drawn", all, by the prompt's bin; "kept", those in the
    update, also by it.

    Returns:
        end of the window -> place -> numbers of responses: all, right ones, spurious ones.
    """
    counts = {end: defaultdict(lambda: [0, 0, 0]) for end in ends}
    for line in path.read_text().splitlines():
        sample = json.loads(line)
        problem = re.search(r"\d([+-]\d)+", sample["prompt"]).group()
        right = boxed(sample["response"]) == boxed(solve(problem))
        spurious = right and not chain_is_right(problem, sample["response"])
        rate_bin = next(name for name, most in BINS.items() if rates[problem] <= most)
        places = [f"drawn {rate_bin}"]
        if sample["index"] < 4:
            places.append("first")
        if sample["advantage"] is not None:
            places += ["kept", f"kept {rate_bin}"]
        counted = counts[next(end for end in ends if end >= sample["step"])]
        for place in places:
            counted[place] = [n + more for n, more in zip(counted[place], (1, right, spurious), strict=True)]
    return {end: dict(counted) for end, counted in counts.items()}


def share_of_answers(record: dict, place: str, windows: slice, of: str = "right", what: str = "spurious") -> float:
    """Spurious ones among the right answers of a run in some of its windows; nan if there are no right ones.

    With of="all" a share of all responses, with what="chains" that of right answers by right chains.
    """
    counts = [window["answers"].get(place, [0, 0, 0]) for window in record["windows"][1:][windows]]
    n_all, right, spurious = map(sum, zip(*counts, strict=True))
    totals = {"all": n_all, "right": right, "spurious": spurious, "chains": right - spurious}
    return totals[what] / totals[of] if totals[of] else math.nan


def spurious_figure(samplers: dict[str, list[dict]]) -> Figure:
    """By pass rate; by step with the reward that sees answers only (solid) and the one that sees chains (dashed).

    `samplers`: the records of each sampler's runs, "balance" and "balance-chain" and so on.
    """
    figure, [axes] = panels(1, 3)
    for place, (name, style) in enumerate(STYLES.items()):
        color, marker = COLORS[style], MARKERS[style]
        by_rate = [mean_and_error([share_of_answers(run, f"drawn {b}", EARLY) for run in samplers[name]]) for b in BINS]
        means, errors = zip(*by_rate, strict=True)
        xs = [x + 0.27 * (place - 1) for x in range(len(BINS))]
        axes[0].bar(xs, means, 0.25, yerr=errors, capsize=3, color=color, label=name)
        for reward, dashes in (("", "-"), ("-chain", "--")):
            runs = samplers[name + reward]
            steps = [window["step"] for window in runs[0]["windows"]][1:]
            for axis, of, what in ((axes[1], "right", "spurious"), (axes[2], "all", "chains")):
                shares = [
                    [share_of_answers(run, "first", slice(j, j + 1), of, what) for run in runs]
                    for j in range(len(steps))
                ]
                means, errors = zip(*map(mean_and_error, shares), strict=True)
                low, high = zip(*((m - e, m + e) for m, e in zip(means, errors, strict=True)), strict=True)
                axis.plot(steps, means, dashes, marker=marker, color=color)
                axis.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
    axes[0].set_xticks(range(len(BINS)), BINS)
    axes[0].set(title="spurious right answers drawn,\nfirst quarter", xlabel="right ones of the base model's 16")
    axes[1].set(title="spurious right answers; reward for\nanswers (solid), chains (dashed)", xlabel="step")
    axes[2].set(title="responses with right chains; reward\nfor answers (solid), chains (dashed)", xlabel="step")
    axes[0].set_ylabel("share of right answers")
    axes[1].set_ylabel("share of right answers")
    axes[2].set_ylabel("share of responses")
    for axis in axes:
        axis.set_ylim(bottom=0)
    return finish(figure)
