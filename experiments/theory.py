"""The method in exact numbers: signal collapse, what each sampler climbs, what it costs. docs/method.md explains them.

    python -m experiments.theory [--out docs/figures]      # ten seconds, no model: three figures and method.json

A prompt is its pass rate p, the chance that a response is correct. Everything that the method decides, it decides by
verdicts, so pools are counts (correct, incorrect) and expectations over them are sums, whatever the model. Only
`monte_carlo` samples; it runs the real sampler, to show that the sums are about the same thing.

A sampler here is a dict of options: exit_rule, n (group size), round_size (M in Algorithm 1) and max_rounds (N there).
Equation numbers are those of arXiv 2510.04996.
"""

import argparse
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import toy
from ada.sampler import (
    ExitRule,
    Pool,
    Prompt,
    Sample,
    SamplingConfig,
    exit_balance,
    exit_fixed,
    exit_pos,
    make_groups,
    sample_adaptively,
)
from experiments.plot import COLORS, finish, panels
from scripts.evaluate import markdown

SETTINGS = {  # with the sizes of the paper's public code
    "grpo4": {"exit_rule": exit_fixed, "n": 4, "round_size": 4, "max_rounds": 1},
    "grpo24": {"exit_rule": exit_fixed, "n": 24, "round_size": 24, "max_rounds": 1},
    "pos": {"exit_rule": exit_pos, "n": 4, "round_size": 8, "max_rounds": 4},
    "balance": {"exit_rule": exit_balance, "n": 4, "round_size": 8, "max_rounds": 4},
}
NAMES = {"grpo4": "GRPO, n = 4", "grpo24": "GRPO, n = 24", "pos": "pos, 8 x 4", "balance": "balance, 8 x 4"}
COLOR_OF = {
    "balance": COLORS[0],
    "pos": COLORS[1],
    "grpo24": COLORS[5],
    "grpo4": COLORS[6],
}  # as in the figures of runs
TRAIN_DATA = "out/toy-demo/train.jsonl"
RATES = (0.02, 0.05, 0.1, 0.3, 0.5, 0.9, 0.98)  # rows of the tables

# ----------------------------------------------------------------------------------------------------------------
# Signal collapse


def collapse(p: float, n: int) -> float:
    """The chance that n responses agree, so that every advantage of Eq. 2 is zero."""
    return p**n + (1 - p) ** n


def zero_variance_share(right_of_16: list[int], n: int) -> tuple[float, float]:
    """Share of groups of n <= 16 responses that are (all correct, all incorrect), over prompts tried 16 times each.

    Of all groups that the 16 responses can make: unbiased, while p = k/16 in `collapse` takes 0 of 16 for never.
    """
    groups = math.comb(16, n) * len(right_of_16)
    all_right = sum(math.comb(k, n) for k in right_of_16)
    return all_right / groups, sum(math.comb(16 - k, n) for k in right_of_16) / groups


# ----------------------------------------------------------------------------------------------------------------
# How sampling ends


@cache
def may_stop(exit_rule: ExitRule, correct: int, incorrect: int, n: int, rounds: int) -> bool:
    """What the real rule says of a pool with these counts."""
    verdicts = [True] * correct + [False] * incorrect
    samples = [Sample(0, i, [], [], "", False, verdict) for i, verdict in enumerate(verdicts)]
    return exit_rule(Pool(Prompt(0, "", [], None), samples, rounds), n)


def final_pools(
    p: float, exit_rule: ExitRule, n: int = 4, round_size: int = 8, max_rounds: int = 4
) -> dict[tuple[int, int], float]:
    """(correct, incorrect) -> the exact chance that sampling ends there (Algorithm 1, line 2).

    For any exit rule that decides by the counts. Samples drawn are correct + incorrect, rounds that over `round_size`.
    """
    active, ended = {(0, 0): 1.0}, Counter()
    for rounds in range(1, max_rounds + 1):
        reached = Counter()
        for (correct, incorrect), chance in active.items():
            for k in range(round_size + 1):
                likely = math.comb(round_size, k) * p**k * (1 - p) ** (round_size - k)
                reached[correct + k, incorrect + round_size - k] += chance * likely
        active = {}
        for counts, chance in reached.items():
            stops = rounds == max_rounds or may_stop(exit_rule, *counts, n, rounds)
            (ended if stops else active)[counts] = chance
    return dict(ended)


def expect(pools: dict[tuple[int, int], float], value: Callable[[int, int], float]) -> float:
    """The mean of value(correct, incorrect) over `final_pools`."""
    return sum(chance * value(*counts) for counts, chance in pools.items())


def cost(rates: list[float], *, exit_rule: ExitRule, n: int, round_size: int, max_rounds: int) -> dict[str, float]:
    """What a sampler draws and gets, on average over prompts with these pass rates.

    Returns:
        samples: drawn per prompt; mixed: share of pools with both kinds; per_mixed: samples over mixed;
        on_unresolved: share of the samples that prompts took whose exit rule never held; on_uniform: that ended with
        zero variance.
    """

    def resolves(correct: int, incorrect: int) -> bool:
        return may_stop(exit_rule, correct, incorrect, n, (correct + incorrect) // round_size)

    def spent(where: Callable[[int, int], bool]) -> float:
        return expect(pools, lambda *counts: sum(counts) * where(*counts))

    pools = Counter()
    for p, times in Counter(rates).items():
        for counts, chance in final_pools(p, exit_rule, n, round_size, max_rounds).items():
            pools[counts] += chance * times / len(rates)
    samples = spent(lambda *counts: True)
    mixed = expect(pools, lambda *counts: min(counts) > 0)
    return {
        "samples": samples,
        "mixed": mixed,
        "per_mixed": samples / mixed if mixed else math.inf,
        "on_unresolved": spent(lambda *counts: not resolves(*counts)) / samples,
        "on_uniform": spent(lambda *counts: min(counts) == 0) / samples,
    }


def pool_mean(p: float, **sampler) -> float:
    """E[share of correct responses in the final pool]: p where sampling has one round, biased where it may stop."""
    return expect(final_pools(p, **sampler), lambda correct, incorrect: correct / (correct + incorrect))


# ----------------------------------------------------------------------------------------------------------------
# The weight of a prompt: expected gradient of its group = weight x grad p
#
# With s = grad log pi of a response, E[s | correct] = grad p / p, E[s | incorrect] = -grad p / (1 - p). So the weight
# is the mean of (1/n) sum A_i / p over the group's correct responses, minus A_i / (1 - p) over its incorrect ones.
# Lengths are equal, the update is the first one after sampling (ratio 1). Plain REINFORCE has weight 1 at every p.


def exact_weight(
    p: float,
    exit_rule: ExitRule,
    n: int = 4,
    round_size: int = 8,
    max_rounds: int = 4,
    *,
    baseline: str = "global",
    normalize_std: bool = False,
) -> float:
    """The weight with a finite budget, by enumeration; zero-variance pools count with 0. Options as in `advantages`."""

    def weight(correct: int, incorrect: int) -> float:
        kept = sorted((n - incorrect, n // 2, correct))[1]  # correct ones: n // 2, or the nearest that the pool allows
        mean = correct / (correct + incorrect) if baseline == "global" else kept / n
        scale = 1 / (math.sqrt(mean * (1 - mean)) + 1e-6) if normalize_std else 1.0
        return scale * (kept * (1 - mean) / p + (n - kept) * mean / (1 - p)) / n

    return expect(final_pools(p, exit_rule, n, round_size, max_rounds), weight)


def balance_limit(p: float) -> float:
    """The weight of a balanced group against the true p: an infinite budget. It is the slope of logit(p)/2 - p."""
    return ((1 - p) ** 2 + p**2) / (2 * p * (1 - p))


def grpo_std_limit(p: float) -> float:
    """The weight of GRPO (Eq. 2) as n grows. It is the slope of 2 arcsin sqrt(p)."""
    return 1 / math.sqrt(p * (1 - p))


class CoinEngine:
    """In the place of vLLM: a response is correct with chance p, and its text says so at once."""

    capacity = 256

    def __init__(self, p: float):
        self.p, self.done = p, []

    def submit(self, key, tokens, seed):
        text = "correct" if seed < self.p * 2**63 else "incorrect"  # seeds are 63 bits, evenly spread
        self.done.append(Sample(*key, [0], [0.0], text, truncated=False))

    def poll(self):
        done, self.done = self.done, []
        return done


class CoinScorer:
    def __init__(self):
        self.verdicts = []

    def submit(self, key, response, gold):
        self.verdicts.append((key, response == "correct"))

    def poll(self, timeout):
        verdicts, self.verdicts = self.verdicts, []
        return verdicts


def monte_carlo(
    p: float, n_prompts: int = 2000, *, baseline: str = "global", normalize_std: bool = False, seed: int = 0, **sampler
) -> tuple[float, float]:
    """The weight as `exact_weight` has it, from the real sample_adaptively and make_groups: (mean, standard error)."""
    exit_rule, n = sampler.pop("exit_rule"), sampler.pop("n")
    config = SamplingConfig(group_size=n, baseline=baseline, normalize_std=normalize_std, seed=seed, **sampler)
    prompts = [Prompt(i, "", [], None) for i in range(n_prompts)]
    pools = sample_adaptively(CoinEngine(p), CoinScorer(), prompts, config, exit_rule=exit_rule, step=0)
    weights = [0.0] * n_prompts  # of the prompts that give no group
    for group in make_groups(pools, config, step=0):
        slopes = [1 / p if sample.correct else -1 / (1 - p) for sample in group.samples]
        weights[group.prompt.prompt_id] = sum(map(math.prod, zip(group.advantages, slopes, strict=True))) / n
    return statistics.fmean(weights), statistics.stdev(weights) / math.sqrt(n_prompts)


# ----------------------------------------------------------------------------------------------------------------
# Numbers and tables of docs/method.md


def numbers(right_of_16: list[int]) -> dict:
    """All that docs/method.md quotes. `right_of_16`: how often the toy's base model was correct on each prompt."""

    def at_rates(value: Callable[[float], object]) -> dict:
        return {str(p): value(p) for p in RATES}

    def weights(p: float) -> dict[str, float]:
        grpo, balance = SETTINGS["grpo4"], SETTINGS["balance"]
        return {
            "grpo": exact_weight(p, **grpo),
            "grpo_std": exact_weight(p, **grpo, normalize_std=True),
            "grpo_std_limit": grpo_std_limit(p),
            "pos": exact_weight(p, **SETTINGS["pos"]),
            "balance": exact_weight(p, **balance),
            "balance_group_mean": exact_weight(p, **balance, baseline="group"),
            "balance_std": exact_weight(p, **balance, normalize_std=True),
            "balance_limit": balance_limit(p),
        }

    def means(p: float) -> dict[str, float]:
        by_rule = {name: pool_mean(p, **SETTINGS[name]) for name in ("pos", "balance")}
        return by_rule | {"pos_one_by_one": -p * math.log(p) / (1 - p)}

    def shares(n: int) -> dict[str, float]:
        correct, incorrect = zero_variance_share(right_of_16, n)
        return {"right": correct, "wrong": incorrect}

    toy_rates = [k / 16 for k in right_of_16]
    return {
        "collapse": {str(p): {str(n): collapse(p, n) for n in (4, 32, 512)} for p in (0.02, 0.1, 0.5)},
        "cost": at_rates(lambda p: {name: cost([p], **sampler) for name, sampler in SETTINGS.items()}),
        "pool_mean": at_rates(means),
        "std_factor_1_in_512": 1 / (math.sqrt(511) / 512 + 1e-6),
        "toy_cost": {name: cost(toy_rates, **sampler) for name, sampler in SETTINGS.items()},
        "toy_right_of_16": [right_of_16.count(k) for k in range(17)],
        "toy_uniform": {str(n): shares(n) for n in (2, 4, 8, 16)},
        "weight": at_rates(weights),
    }


def rounded(value):
    """Floats to 4 significant digits, all the way down."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def method_tables(of: dict) -> list[str]:
    """The tables of docs/method.md, from what `numbers` returns."""
    costs = of["cost"] | {"toy": of["toy_cost"]}
    names = ("grpo", "grpo_std", "grpo_std_limit", "pos", "balance", "balance_limit")
    weights = [[p, *(f"{weight[name]:.2f}" for name in names)] for p, weight in of["weight"].items()]
    draws = [
        [
            *(p, *(f"{samplers[name]['samples']:.1f}" for name in ("pos", "balance"))),
            *(f"{samplers[name]['mixed']:.1%}" for name in SETTINGS),
        ]
        for p, samplers in costs.items()
    ]
    per_mixed = [
        [
            *(p, *(f"{samplers[name]['per_mixed']:.1f}" for name in SETTINGS)),
            *(f"{samplers['balance'][key]:.0%}" for key in ("on_unresolved", "on_uniform")),
        ]
        for p, samplers in costs.items()
    ]
    means = [
        [p, *(f"{mean[name]:.3f}" for name in ("pos_one_by_one", "pos", "balance"))]
        for p, mean in of["pool_mean"].items()
    ]
    heads = {
        "p | GRPO, no std | GRPO, std | GRPO, std, n → ∞ | pos | balance | balance, budget → ∞": weights,
        "p | drawn: pos | balance | mixed: GRPO 4 | GRPO 24 | pos | balance": draws,
        "p | drawn per mixed group: GRPO 4 | GRPO 24 | pos | balance | balance: on unresolved | in uniform pools": (
            per_mixed
        ),
        "p | pos, rounds of 1, no limit | pos, 8 x 4 | balance, 8 x 4": means,
    }
    return [markdown([head.split(" | "), *rows]) for head, rows in heads.items()]


# ----------------------------------------------------------------------------------------------------------------
# Figures


def rate_axis(axis, title: str, **settings) -> None:
    """p from 0.01 to 0.99, the ends drawn out: that is where samplers differ."""
    axis.set(xscale="logit", xlim=(0.01, 0.99), xlabel="pass rate p", title=title, **settings)
    ticks = (0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98)
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_xticks([], minor=True)


def method_figures(right_of_16: list[int], out: Path) -> None:
    """method-collapse.png, method-weights.png and method-cost.png."""
    grid = [1 / (1 + math.exp(-x / 20)) for x in range(-92, 93, 2)]  # p, evenly spaced in logit

    figure, [[left, right]] = panels(1, 2)
    for p, style in ((0.5, "-"), (0.3, "--"), (0.1, "-."), (0.02, ":")):
        label = "p = 0.5" if p == 0.5 else f"p = {p:g} or {1 - p:g}"
        left.plot(range(1, 257), [collapse(p, n) for n in range(1, 257)], linestyle=style, label=label)
    left.set(title="chance that n responses agree", xlabel="n", ylim=(0, 1))
    left.set_xscale("log", base=2)
    sizes = [4**i for i in range(5)]
    left.set_xticks(sizes, sizes)
    few = range(1, 17)
    all_right, all_wrong = zip(*(zero_variance_share(right_of_16, n) for n in few), strict=True)
    right.stackplot(few, all_wrong, all_right, colors=COLORS[1:3], alpha=0.6, labels=("all wrong", "all right"))
    right.set(title="zero-variance groups, the toy's base model", xlabel="n", xlim=(1, 16), ylim=(0, 1))
    right.set_xticks((1, 4, 8, 12, 16))
    finish(figure).savefig(out / "method-collapse.png")

    figure, [[axis]] = panels(1, 1)
    figure.set_size_inches(6.5, 4.8)
    axis.plot(grid, [balance_limit(p) for p in grid], "--", color=COLOR_OF["balance"], label="balance, budget → ∞")
    axis.plot(grid, [grpo_std_limit(p) for p in grid], "--", color=COLOR_OF["grpo4"], label="GRPO with std, n → ∞")
    for name, color, label, options in (
        ("balance", COLOR_OF["balance"], "balance, 8 x 4", {}),
        ("pos", COLOR_OF["pos"], "pos, 8 x 4", {}),
        ("grpo4", COLOR_OF["grpo4"], "GRPO with std, n = 4", {"normalize_std": True}),
        ("grpo4", COLORS[3], "GRPO without std, n = 4", {}),
    ):
        exact = [exact_weight(p, **SETTINGS[name], **options) for p in grid]
        axis.plot(grid, exact, color=color, label=label)
        rates = (0.02, 0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98)
        runs = [monte_carlo(p, 8000, seed=i, **SETTINGS[name], **options) for i, p in enumerate(rates)]
        means, errors = zip(*runs, strict=True)
        axis.errorbar(rates, means, errors, fmt="o", color=color, markersize=4, capsize=3)
    axis.axhline(1, color="black", linewidth=1, linestyle=":", label="REINFORCE")
    axis.errorbar([], [], [], fmt="o", color="black", markersize=4, capsize=3, label="the real sampler, ± 1 s.e.")
    rate_axis(axis, "weight of a prompt: expected gradient / ∇p", yscale="log", ylim=(0.5, 60))
    axis.set_yticks((0.5, 1, 2, 5, 10, 20, 50), ("0.5", "1", "2", "5", "10", "20", "50"))
    axis.set_yticks([], minor=True)
    finish(figure).savefig(out / "method-weights.png")

    figure, [axes] = panels(1, 3)
    titles = ("responses drawn per prompt", "chance of a mixed group", "responses drawn per mixed group")
    for axis, title, key in zip(axes, titles, ("samples", "mixed", "per_mixed"), strict=True):
        for name, sampler in SETTINGS.items():
            values = [cost([p], **sampler)[key] for p in grid]
            dashed = {"linestyle": "--", "zorder": 3} if name == "pos" else {}  # over balance, where they are equal
            axis.plot(grid, values, color=COLOR_OF[name], label=NAMES[name], **dashed)
        rate_axis(axis, title, yscale="log" if key == "per_mixed" else "linear")
    axes[0].set_ylim(0, 34)
    axes[1].set_ylim(0, 1.02)
    axes[2].set_yticks((5, 10, 20, 50, 100), ("5", "10", "20", "50", "100"))
    axes[2].set_yticks([], minor=True)
    finish(figure).savefig(out / "method-cost.png")


def write_method(out: Path) -> dict:
    """Figures and numbers into the folder `out`; returns the latter."""
    out.mkdir(parents=True, exist_ok=True)
    toy.build_if_missing(TRAIN_DATA)
    rows = Path(TRAIN_DATA).read_text().splitlines()
    right_of_16 = [json.loads(row)["right_of_16"] for row in rows]
    found = numbers(right_of_16)
    (out / "method.json").write_text(json.dumps(rounded(found), indent=1, sort_keys=True) + "\n")
    method_figures(right_of_16, out)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the figures of docs/method.md, write its numbers.")
    parser.add_argument("--out", type=Path, default=Path("docs/figures"), help="the folder for them")
    print(*method_tables(write_method(parser.parse_args().out)), sep="\n\n")


if __name__ == "__main__":
    main()
