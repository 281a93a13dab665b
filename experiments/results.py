"""From runs' logs to numbers, and from numbers to the tables in README.md and docs/.

docs/figures/results.json holds a record per run, made of metrics.jsonl and samples.jsonl. Every table is made of that
file alone, and stands in a page between two marks, <!-- table: NAME --> and <!-- end -->. To refresh them by hand:

    python -m experiments.results
"""

import json
import math
import re
import statistics
from collections import defaultdict
from pathlib import Path

from experiments.curves import mean_and_error, read_config, read_metrics
from experiments.spurious import BINS, EARLY, base_rates, count_answers, share_of_answers
from scripts.evaluate import markdown

RESULTS = Path("docs/figures/results.json")
COMPARED = ("grpo", "grpo-std", "grpo-24", "grpo-long", "passive", "two_stage", "pos", "pos-long", "balance")
RULES = ("balance", "signal", "memory")
SEEDS = 3  # of the comparison; balance has two more for that of the rules
PAGES = [Path("README.md"), Path("docs/claims.md"), Path("docs/spurious.md")]
MEANS = (  # over the steps of a window
    *("reward/first_round", "sampling/uniform_at_n", "sampling/uniform_after", "sampling/unresolved_no_right"),
    *("sampling/unresolved_no_wrong", "sampling/right_in_two_rounds", "sampling/resolved_in_two_rounds"),
    "response/truncated",
)
EVALUATED = (
    *("eval/reward", "eval/entropy", "eval/truncated", "eval/pass@4", "eval/pass@16"),
    *("eval/all_right@4", "eval/all_right@16"),
)
TOTALS = {"samples": "sampling/samples", "tokens": "sampling/tokens", "groups": "update/groups", "seconds": "time/step"}

# ----------------------------------------------------------------------------------------------------------------
# A record per run


def record_of(folder: Path) -> dict:
    """What the tables need of a run: a window per evaluation, from the one before it.

    A window has the evaluation at its end, totals so far, means over its steps, and counts of spurious answers among
    the logged responses (those to `log_prompts` prompts a step).
    """
    config = read_config(folder / "config.json")
    rows = read_metrics(folder)
    ends = [row["step"] for row in rows if "eval/reward" in row]
    counts = count_answers(folder / "samples.jsonl", ends, base_rates(config["train_data"]))
    windows, totals, steps = [], dict.fromkeys(TOTALS, 0), []
    for row in rows:
        for name, key in TOTALS.items():
            totals[name] += row.get(key, 0)
        steps += [row] if row["step"] else []
        if "eval/reward" in row:
            evaluation = {key: round(row[key], 5) for key in EVALUATED}
            means = {key: round(statistics.fmean(s[key] for s in steps), 5) for key in MEANS if steps}
            whole = {name: round(total, 2) for name, total in totals.items()}
            windows.append({"step": row["step"], **whole, **evaluation, **means, "answers": counts[row["step"]]})
            steps = []
    return {"prompts": config["prompts_per_step"], "windows": windows}


def collect(names: list[str], out: Path, path: Path) -> dict[str, dict]:
    """The records of all runs, by name (SET-SAMPLER-seedN), also written to `path`, a run a line."""
    results = {name: record_of(out / name) for name in sorted(names)}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(results[name])}" for name in results)
    path.write_text("{\n" + lines + "\n}\n")
    return results


# ----------------------------------------------------------------------------------------------------------------
# Numbers


def by_sampler(results: dict[str, dict], set_name: str) -> dict[str, list[dict]]:
    """sampler -> the records of its seeds."""
    found = defaultdict(list)
    for name, record in results.items():
        set_, sampler = re.fullmatch(r"([^-]+)-(.+)-seed\d+", name).groups()
        if set_ == set_name:
            found[sampler].append(record)
    return dict(found)


def show(values: list[float | None], scale: float = 1, digits: int = 1) -> str:
    """Mean ± standard error. Shares of nothing, which are nan, don't count; what a seed lacks, a None, leaves a blank.

    >>> show([0.5, 0.52, 0.54], scale=100)
    '52.0 ± 1.2'
    """
    if None in values:
        return ""
    mean, error = mean_and_error([scale * value for value in values])
    if math.isnan(mean):
        return ""
    return f"{mean:.{digits}f}" + ("" if math.isnan(error) else f" ± {error:.{digits}f}")


def last(record: dict, key: str) -> float:
    return record["windows"][-1][key]


def at(record: dict, key: str, axis: str, place: float) -> float | None:
    """A metric where `axis` (samples, reward, ...) first reaches `place`, between evaluations in a straight line.

    None if the run ends before; 5% are forgiven, for what costs about as much.
    """
    windows = record["windows"]
    if last(record, axis) < 0.95 * place:
        return None
    if windows[0][axis] >= place:
        return windows[0][key]
    for before, after in zip(windows, windows[1:], strict=False):
        if after[axis] >= place:
            way = (place - before[axis]) / (after[axis] - before[axis])
            return before[key] + way * (after[key] - before[key])
    return windows[-1][key]


# ----------------------------------------------------------------------------------------------------------------
# Tables


def ends(records: list[dict]) -> list[str]:
    """Steps, samples, reward, pass@16 and entropy at the end of a sampler's runs."""
    shown = {"samples": (1e-3, 0), "eval/reward": (100, 1), "eval/pass@16": (100, 1), "eval/entropy": (1, 3)}
    cells = [show([last(record, key) for record in records], *how) for key, how in shown.items()]
    return [str(last(records[0], "step")), *cells]


def readme_table(results: dict[str, dict]) -> str:
    """The comparison in short."""
    samplers = by_sampler(results, "mixed")
    names = ("grpo", "grpo-long", "pos", "balance")
    head = ["sampler", "steps", "1000 samples", "reward", "pass@16", "entropy"]
    return markdown([head, *([name, *ends(samplers[name][:SEEDS])] for name in names)])


def final_table(samplers: dict[str, list[dict]]) -> str:
    """What each run ends with and has cost."""
    per_step = {
        name: statistics.median(last(record, "seconds") / last(record, "step") for record in records)
        for name, records in samplers.items()
    }
    rows = [["sampler", "steps", "1000 samples", "s/step", "x grpo", "reward", "pass@16", "entropy", "cut off"]]
    for name, records in samplers.items():
        steps, samples, *evaluation = ends(records)
        times = f"{per_step[name]:.2f}", f"{per_step[name] / per_step['grpo']:.1f}"
        cut_off = f"{100 * statistics.fmean(last(record, 'eval/truncated') for record in records):.0f}"
        rows.append([name, steps, samples, *times, *evaluation, cut_off])
    return markdown(rows)


def steps_table(samplers: dict[str, list[dict]]) -> str:
    """Held-out reward on the way, as the paper compares."""
    steps = (20, 40, 60, 80)
    rows = [["sampler", *(f"step {step}" for step in steps)]]
    for name, records in samplers.items():
        rows.append(
            [name, *(show([at(record, "eval/reward", "step", step) for record in records], 100) for step in steps)]
        )
    return markdown(rows)


def reward_table(samplers: dict[str, list[dict]], rewards: tuple[float, ...]) -> str:
    """Entropy and pass@16 where the held-out reward is the same (Fig. 4 in numbers)."""
    keys = {"entropy": ("eval/entropy", 1, 3), "pass@16": ("eval/pass@16", 100, 1)}
    rows = [["sampler", *(f"{key} at {reward:.0%}" for key in keys for reward in rewards)]]
    for name, records in samplers.items():
        cells = [
            show([at(record, key, "eval/reward", reward) for record in records], scale, digits)
            for key, scale, digits in keys.values()
            for reward in rewards
        ]
        rows.append([name, *cells])
    return markdown(rows)


def samples_table(samplers: dict[str, list[dict]]) -> str:
    """Held-out reward where each has drawn as much as grpo, pos and balance at their ends (the thriftiest seed)."""
    places = {name: min(last(record, "samples") for record in samplers[name]) for name in ("grpo", "pos", "balance")}
    rows = [["sampler", *(f"{name}'s {place / 1000:.0f}k" for name, place in places.items())]]
    for name, records in samplers.items():
        values = [[at(record, "eval/reward", "samples", place) for record in records] for place in places.values()]
        rows.append([name, *(show(column, 100) for column in values)])
    return markdown(rows)


def zero_variance_table(samplers: dict[str, list[dict]]) -> str:
    """Fig. 2 in numbers: held-out prompts whose 4 or 16 responses agree, before training and after."""
    rows = [["model", "pass@4", "pass@16", "all right of 4", "all right of 16", "all wrong of 4", "all wrong of 16"]]
    models = {"before training": [record["windows"][0] for record in samplers["grpo"]]}  # all began with the same
    models |= {name: [record["windows"][-1] for record in records] for name, records in samplers.items()}
    for name, windows in models.items():
        shares = [[window[f"eval/{key}@{k}"] for window in windows] for key in ("pass", "all_right") for k in (4, 16)]
        shares += [[1 - value for value in passes] for passes in shares[:2]]
        rows.append([name, *(show(column, 100) for column in shares)])
    return markdown(rows)


def dynamics_table(samplers: dict[str, list[dict]]) -> str:
    """Fig. 5 in numbers: the first window of steps and the last."""
    keys = {
        "too few right": "sampling/unresolved_no_right",
        "too few wrong": "sampling/unresolved_no_wrong",
        "right in 2 rounds": "sampling/right_in_two_rounds",
        "resolved in 2": "sampling/resolved_in_two_rounds",
        "uniform at 4": "sampling/uniform_at_n",
        "uniform pools": "sampling/uniform_after",
    }
    rows = [["sampler", "steps", "samples per prompt", *keys]]
    for name, records in samplers.items():
        for i in (1, len(records[0]["windows"]) - 1):
            pairs = [(record["windows"][i - 1], record["windows"][i]) for record in records]
            steps = f"{pairs[0][0]['step'] + 1}-{pairs[0][1]['step']}"
            prompts = [
                (after["samples"] - before["samples"]) / (after["step"] - before["step"]) / record["prompts"]
                for record, (before, after) in zip(records, pairs, strict=True)
            ]
            shares = [show([after[key] for _, after in pairs], 100) for key in keys.values()]
            rows.append([name, steps, show(prompts), *shares])
    return markdown(rows)


def spurious_table(samplers: dict[str, list[dict]]) -> str:
    """Wrong chains among right answers at both ends of a run, and what the policy is worth at its end."""
    head = ["sampler", "reward for", "first steps", "last steps", "kept, first steps", "kept, last steps"]
    rows = [[*head, "right answers, last", "right chains, last"]]
    first, last = slice(0, 1), slice(-1, None)
    for name, records in samplers.items():
        cells = [(place, window, "right", "spurious") for place in ("first", "kept") for window in (first, last)]
        cells += [("first", last, "all", what) for what in ("right", "chains")]
        shares = [show([share_of_answers(record, *cell) for record in records], 100) for cell in cells]
        rows.append([name.removesuffix("-chain"), "chains" if name.endswith("-chain") else "answers", *shares])
    return markdown(rows)


def spurious_by_rate_table(samplers: dict[str, list[dict]]) -> str:
    """Wrong chains among right answers, by how often the base model was right on the prompt, early in a run."""
    places = [f"{what} {rate_bin}" for what in ("drawn", "kept") for rate_bin in BINS]
    rows = [["sampler", *places]]
    for name, records in samplers.items():
        shares = [[share_of_answers(record, place, EARLY) for record in records] for place in places]
        rows.append([name, *(show(column, 100) for column in shares)])
    return markdown(rows)


def rules_table(samplers: dict[str, list[dict]], part: float) -> str:
    """Exit rules where they have drawn a part of what balance draws in all; differences paired by seed."""
    keys = {"reward": ("eval/reward", 100, 1), "pass@16": ("eval/pass@16", 100, 1), "entropy": ("eval/entropy", 1, 4)}
    rows = [["rule", "seeds", "steps", "groups per 1000 samples", *keys, *(f"{key} - balance's" for key in keys)]]
    for name, records in samplers.items():
        trios = [
            (record, balance, part * last(balance, "samples"))
            for record, balance in zip(records, samplers["balance"], strict=False)  # of the seeds that both have
        ]

        def there(key, trios=trios):
            return [at(record, key, "samples", place) for record, _, place in trios]

        def gains(key, trios=trios):
            pairs = [[at(run, key, "samples", place) for run in runs] for *runs, place in trios]
            return [None if None in pair else pair[0] - pair[1] for pair in pairs]

        groups = [count and count / place for count, (*_, place) in zip(there("groups"), trios, strict=True)]
        values = [show(there(key), scale, digits) for key, scale, digits in keys.values()]
        differences = [show(gains(key), scale, digits) for key, scale, digits in keys.values()]
        rows.append(
            [
                *(name, str(len(trios)), show(there("step"), 1, 0), show(groups, 1000), *values),
                *(differences if name != "balance" else [""] * len(keys)),
            ]
        )
    return markdown(rows)


def make_tables(results: dict[str, dict]) -> dict[str, str]:
    """All tables by name."""
    found = {"readme": readme_table(results)}
    for set_name, rewards in (("mixed", (0.5, 0.7)), ("hard", (0.35, 0.42))):
        samplers = by_sampler(results, set_name)
        compared = {name: samplers[name][:SEEDS] for name in COMPARED}
        found[f"final {set_name}"] = final_table(compared)
        on_the_way = {name: compared[name] for name in COMPARED if not name.endswith("-long")}  # they go the same way
        found[f"steps {set_name}"] = steps_table(on_the_way)
        found[f"reward {set_name}"] = reward_table(on_the_way, rewards)
        found[f"samples {set_name}"] = samples_table(compared)
        found[f"uniform {set_name}"] = zero_variance_table(compared)
        found[f"dynamics {set_name}"] = dynamics_table({name: compared[name] for name in ("pos", "balance")})
    chains = by_sampler(results, "chains")
    by_reward = [f"{name}{reward}" for name in ("grpo", "pos", "balance") for reward in ("", "-chain")]
    found["spurious"] = spurious_table({name: chains[name] for name in by_reward})
    found["spurious by rate"] = spurious_by_rate_table({name: chains[name] for name in ("grpo", "pos", "balance")})
    samplers = by_sampler(results, "mixed")
    found["rules reward"] = reward_table({name: samplers[name] for name in (*RULES, "pos")}, (0.5, 0.7, 0.9))
    found["rules early"] = rules_table({name: samplers[name] for name in (*RULES, "pos")}, part=0.4)
    found["rules"] = rules_table({name: samplers[name] for name in RULES}, part=1)
    return found


def refresh(page: Path, tables: dict[str, str]) -> None:
    """Put the tables between their marks. Raises KeyError for a mark without a table."""
    text = page.read_text()
    fresh = re.sub(
        r"(<!-- table: ([^>]+) -->\n)(?:(?!<!--).)*(<!-- end -->)",
        lambda match: f"{match[1]}{tables[match[2]]}\n{match[3]}",
        text,
        flags=re.DOTALL,
    )
    if fresh != text:
        page.write_text(fresh)


def main() -> None:
    made = make_tables(json.loads(RESULTS.read_text()))
    for page in PAGES:
        refresh(page, made)


if __name__ == "__main__":
    main()
