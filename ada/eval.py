"""Evaluation: Ave@k and the unbiased Pass@k, with the engine and grader of training (Table 1, Fig. 2 of the paper).

    python -m ada.eval --model Qwen/Qwen2.5-Math-1.5B out/my-run --data math500 minerva olympiadbench aime-like --k 32
    torchrun --nproc_per_node=8 -m ada.eval ...                                  # on all GPUs
    python -m ada.eval --model toy-demo/model --data toy-demo/test --plot        # the toy, half a minute

Every response and verdict is in out/eval/MODEL/ before anything is computed (ada/journal.py), so a killed evaluation
goes on where it was, and one more model or benchmark costs only its own responses. The numbers go to table.md and
results.json. Settings of the paper: k = 32, temperature 1.0, at most 4096 new tokens, or what a shorter context leaves.
"""

import argparse
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from math import comb, sqrt
from pathlib import Path

import numpy as np

from ada import UserError, run_command, toy
from ada.data import describe, load_prompts, load_tokenizer, shared_queue
from ada.journal import Journal, Parser, draw, fill, find_model, settings_of, short_name
from ada.sampler import Pool, Prompt, Sample, by_row, seed_of

BENCHMARKS = {  # name: Hugging Face data set, and its number of prompts in the paper
    "math500": ("weqweasdas/math500", 500),
    "minerva": ("weqweasdas/minerva_math", 272),
    "olympiadbench": ("weqweasdas/olympiadbench", 675),
    # AIME24, AIME25, HMMT24, HMMT25, BRUMO25, AMC23 and CMIMC25 in one
    "aime-like": ("weqweasdas/aime_hmmt_brumo_cmimc_amc23", 230),
}
MINERVA_NOTE = (
    "minerva is graded by math-verify like everything else; the paper's public code scores it by a function of its own "
    "(relative tolerance 1e-4), so its column is not comparable with the paper's to the digit."
)

# ----------------------------------------------------------------------------------------------------------------
# Estimators


def pass_at_k(n: int, n_correct: int, k: int) -> float:
    """Chance that at least one of k responses is right, estimated without bias from n of which n_correct are right.

    1 - C(n - n_correct, k) / C(n, k): the share of the k-subsets with a right one among them.

    Raises:
        ValueError: k is above n; there is no unbiased estimate then.

    >>> pass_at_k(n=4, n_correct=1, k=2)
    0.5
    """
    if k > n:
        raise ValueError(f"pass@{k} needs at least {k} samples per prompt, there are {n}")
    return 1 - comb(n - n_correct, k) / comb(n, k)


def all_right_at_k(n: int, n_correct: int, k: int) -> float:
    """Chance that all of k responses are right, estimated like pass_at_k: C(n_correct, k) / C(n, k) (Fig. 2).

    That all are wrong has the chance 1 - pass_at_k.

    >>> all_right_at_k(n=4, n_correct=3, k=2)
    0.5
    """
    return 1 - pass_at_k(n, n - n_correct, k)


def powers(k: int) -> list[int]:
    """1, 2, 4, ... up to k."""
    return [2**i for i in range(k.bit_length())]


def standard_error(values: list[float], seed: int, resamples: int = 1000) -> float:
    """Of the values' mean, one value per problem: how it varies when problems are drawn anew (bootstrap)."""
    rng = np.random.default_rng(seed_of("bootstrap", seed))
    array = np.array(values)
    return float(np.std([rng.choice(array, len(array)).mean() for _ in range(resamples)]))


def combine(means: list[float], errors: list[float], weights: list[float]) -> tuple[float, float]:
    """Weighted mean of benchmarks and its standard error, benchmarks being independent.

    >>> combine([0.5, 0.25], [0.04, 0.03], weights=[300, 300])
    (0.375, 0.025)
    """
    shares = [weight / sum(weights) for weight in weights]
    mean = sum(share * mean for share, mean in zip(shares, means, strict=True))
    return mean, sqrt(sum((share * error) ** 2 for share, error in zip(shares, errors, strict=True)))


# ----------------------------------------------------------------------------------------------------------------
# Evaluation while training


def summarise_eval(pools: list[Pool], k: int) -> dict[str, float]:
    """Means over prompts: Ave@k, and Pass@ and all right@ 1, 2, 4, ... up to k. Over the sampled tokens: entropy.

    Entropy is the mean of -log p over the sampled tokens: unbiased, since each was drawn from its distribution.
    """
    samples = [sample for pool in pools for sample in pool.samples]
    n_tokens = sum(len(sample.tokens) for sample in samples)

    def mean(estimate: Callable[[Pool], float]) -> float:
        return sum(map(estimate, pools)) / len(pools)

    def curve(name: str, chance: Callable[[int, int, int], float]) -> dict[str, float]:
        return {
            f"eval/{name}@{i}": mean(lambda pool, i=i: chance(len(pool.samples), pool.n_correct, i)) for i in powers(k)
        }

    return {
        "eval/reward": mean(lambda pool: pool.mean),
        **curve("pass", pass_at_k),
        **curve("all_right", all_right_at_k),
        "eval/entropy": -sum(sum(sample.logprobs) for sample in samples) / n_tokens,
        "eval/length": n_tokens / len(samples),
        "eval/truncated": sum(sample.truncated for sample in samples) / len(samples),
    }


def evaluate(
    engine,
    scorer,
    prompts: list[Prompt],
    ranks,
    *,
    k: int,
    seed: int,
    step: int,
    progress: Callable[[int, Sample], None] | None = None,
) -> dict[str, float]:
    """Draw and summarise; all ranks share one queue of prompts and get the same metrics. Empty without prompts."""
    if not prompts:
        return {}
    start = time.perf_counter()
    queue = shared_queue(prompts, ranks.store, f"eval/{step}")
    pools = draw(engine, scorer, queue, k=k, seed=seed, step=step, progress=progress)
    pools = ranks.gather([pool.without_tokens() for pool in pools], by_row)
    return {**summarise_eval(pools, k), "time/eval": time.perf_counter() - start}


# ----------------------------------------------------------------------------------------------------------------
# The table


def result(model: str, data: str, pools: list[Pool], k: int, seed: int) -> dict:
    """One model on one data set: a row of results.json. Shares, not percent; `error` is the one of `ave`."""

    def curve(chance: Callable[[int, int, int], float]) -> dict[str, float]:
        return {
            str(i): sum(chance(len(pool.samples), pool.n_correct, i) for pool in pools) / len(pools) for i in powers(k)
        }

    samples = [sample for pool in pools for sample in pool.samples]
    return {
        "model": model,
        "data": data,
        "prompts": len(pools),
        "k": k,
        "ave": sum(pool.mean for pool in pools) / len(pools),
        "error": standard_error([pool.mean for pool in pools], seed),
        "pass": curve(pass_at_k),
        "all_right": curve(all_right_at_k),
        "length": sum(len(sample.tokens) for sample in samples) / len(samples),
        "truncated": sum(sample.truncated for sample in samples) / len(samples),
    }


def tables(results: list[dict], title: str, notes: list[str]) -> str:
    """Table 1 as the paper prints it, with errors and the plain mean; Pass@k and lengths; notes. Markdown."""
    models = list(dict.fromkeys(r["model"] for r in results))
    data = {r["data"]: r["prompts"] for r in results}
    percent = "{:.1f} ± {:.1f}".format
    main = [["model", *(f"{name} ({n})" for name, n in data.items()), "mean", "weighted"]]
    for model in models:
        own = [r for r in results if r["model"] == model]
        columns = [r["ave"] for r in own], [r["error"] for r in own]
        plain, weighted = combine(*columns, [1] * len(own)), combine(*columns, [r["prompts"] for r in own])
        pairs = [*zip(*columns, strict=True), plain, weighted]
        main.append([model, *(percent(100 * mean, 100 * error) for mean, error in pairs)])
    more = [["model", "data", *(f"pass@{k}" for k in results[0]["pass"]), "all right", "all wrong", "tok", "truncated"]]
    for r in results:
        last = list(r["pass"])[-1]
        shares = [*r["pass"].values(), r["all_right"][last], 1 - r["pass"][last]]
        shown = [f"{100 * share:.1f}" for share in shares] + [f"{r['length']:.0f}", f"{100 * r['truncated']:.1f}"]
        more.append([r["model"], r["data"], *shown])
    return "\n\n".join(
        [
            f"{title}, in %, ± one standard error (bootstrap over problems). `weighted`: by number of prompts, the "
            "paper's average; `mean`: of the columns.",
            markdown(main),
            f"In %, but for `tok`, the mean length of a response. `all right`, `all wrong`: of {results[0]['k']}.",
            markdown(more),
            *notes,
        ]
    )


def markdown(rows: list[list[str]]) -> str:
    """A table whose first row is the head, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    rule = " | ".join("-" * width for width in widths)
    return "\n".join(f"| {line} |" for line in [lines[0], rule, *lines[1:]])


# ----------------------------------------------------------------------------------------------------------------
# python -m ada.eval


def parse(arguments: list[str]) -> argparse.Namespace:
    """Options; UserError says what is wrong with them."""
    parser = Parser(prog="python -m ada.eval", k=32, max_tokens=4096, max_prompt_tokens=2048)
    parser.add_argument("--model", nargs="+", required=True, help="Hugging Face folders or names, or runs' folders")
    names = ", ".join(BENCHMARKS)
    parser.add_argument("--data", nargs="+", required=True, help=f"{names}; files or Hugging Face data sets")
    parser.add_argument("--split", help="of Hugging Face data sets")
    parser.add_argument("--greedy", action="store_true", help="temperature 0, k = 1")
    parser.add_argument("--plot", action="store_true", help="draw Pass@k, all right and all wrong against k")
    parser.add_argument("--out", type=Path, default="out/eval", help="folder for everything (%(default)s)")
    options = parser.parse_args(arguments)
    if options.greedy:
        options.k = 1
    options.folders = [find_model(name) for name in options.model]
    for option, names in (
        ("--data", [label_of(name) for name in options.data]),
        ("--model", [short_name(folder) for folder in options.folders]),
    ):
        if len(set(names)) < len(names):
            raise UserError(f"{option}: two of these have the same name in the table: {', '.join(names)}")
    return options


def label_of(data: str) -> str:
    """A data set's name in tables and files.

    >>> label_of("math500"), label_of("toy-demo/test"), label_of("some/where/aime24.jsonl")
    ('math500', 'toy-demo/test', 'aime24')
    """
    return Path(data).stem if Path(data).suffix in (".jsonl", ".json", ".parquet") else data


def open_journals(folder: str, options: argparse.Namespace, ranks) -> tuple[list[Journal], list[str]]:
    """A journal per data set for one model, and what has to be said about them."""
    tokenizer = load_tokenizer(folder)
    settings = settings_of(folder, options, purpose="eval", temperature=0.0 if options.greedy else 1.0)
    journals, notes = [], []
    for data in options.data:
        source, expected = BENCHMARKS.get(data, (toy.locate(data), None))
        prompts, counts = load_prompts(
            source, tokenizer, max_prompt_tokens=options.max_prompt_tokens, split=options.split
        )
        name = label_of(data).replace("/", "--") + ".greedy" * options.greedy
        path = options.out / short_name(folder).replace("/", "--") / name
        journals.append(Journal(path, prompts, settings, ranks))
        if counts["kept"] < counts["read"] or expected not in (None, len(prompts)):
            paper = f"; the paper has {expected} prompts" if expected else ""
            notes.append(f"{label_of(data)}: {describe(counts)}{paper}.")
        if "minerva" in data:
            notes.append(MINERVA_NOTE)
    return journals, notes


def start_again(ranks, environment: dict[str, str]) -> None:
    """Replace this process by the same command: vLLM's sleep mode allows one engine per process. All drawn is on disk.

    The launcher's store still holds this process group's keys, so the ranks meet at a store of their own.
    """
    if ranks.world_size > 1:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = ranks.gather([probe.getsockname()[1]])[0]
        environment = {**environment, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, "-m", "ada.eval", *sys.argv[1:]], environment)


def report(results: list[dict], notes: list[str], options: argparse.Namespace) -> None:
    """Print the tables, write them and the numbers, draw the plot."""
    name = f"Ave@{options.k} at temperature 1.0" if not options.greedy else "Greedy accuracy"
    text = tables(results, f"{name}, at most {options.max_tokens} new tokens", notes)
    ending = ".greedy" * options.greedy
    (options.out / f"table{ending}.md").write_text(text + "\n")
    (options.out / f"results{ending}.json").write_text(json.dumps(results, indent=1) + "\n")
    print(f"\n{text}\n")
    if options.plot:
        from ada.plot import plot_pass_at_k  # matplotlib is slow to import

        plot_pass_at_k(results, options.out / f"pass_at_k{ending}.png")
        print(f"plot  {options.out / f'pass_at_k{ending}.png'}")


def main() -> None:
    from ada.trainer import init_ranks

    environment = dict(os.environ)
    options = parse(sys.argv[1:])
    ranks = init_ranks()
    if ranks.rank > 0:
        logging.getLogger("ada.data").setLevel(logging.ERROR)  # broken rows are reported once
    folders = options.folders
    opened = [open_journals(folder, options, ranks) for folder in folders]  # what is wrong shows before a long wait
    started = False
    for folder, (journals, _) in zip(folders, opened, strict=True):
        if any(journal.missing for journal in journals):
            if started:
                start_again(ranks, environment)
            fill(journals, folder, options, ranks)
            started = True
    results = [
        result(short_name(folder), label_of(data), journal.pools(), options.k, options.seed)
        for folder, (journals, _) in zip(folders, opened, strict=True)
        for data, journal in zip(options.data, journals, strict=True)
    ]
    if ranks.rank == 0:
        notes = list(dict.fromkeys(note for _, notes in opened for note in notes))
        report(results, notes, options)


if __name__ == "__main__":
    run_command(main)
