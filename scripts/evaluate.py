"""Evaluation on benchmarks: Ave@k and the unbiased Pass@k with standard errors (Table 1, Fig. 2 of the paper).

    python scripts/evaluate.py --model Qwen/Qwen2.5-Math-1.5B out/my-run --data math500 minerva aime-like --k 32
    torchrun --nproc_per_node=8 scripts/evaluate.py ...                                       # on all GPUs
    python scripts/evaluate.py --model out/toy-demo/model --data out/toy-demo/test.jsonl      # the toy, half a minute

Every response and verdict is in out/eval/MODEL/ before anything is computed (responses.py), so a killed evaluation
goes on where it was, and one more model or benchmark costs only its own responses. The numbers go to table.md and
results.json. Settings of the paper: k = 32, temperature 1.0, at most 4096 new tokens, or what a shorter context leaves.
"""

import json
import os
import socket
import statistics
import sys
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ada import UserError, option, run_command  # noqa: E402  first: it sets the number of threads

# isort: split
import toy  # noqa: E402
from ada.data import describe, load_prompts, load_tokenizer  # noqa: E402
from ada.eval import all_right_at_k, curve, pass_at_k, summarise_eval  # noqa: E402
from ada.sampler import Pool  # noqa: E402
from ada.support.options import parse_options  # noqa: E402
from ada.support.ranks import Ranks, init_ranks  # noqa: E402
from scripts.responses import DrawConfig, Journal, draw_missing, find_model, settings_of, short_name  # noqa: E402

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


@dataclass
class EvalConfig(DrawConfig):
    """Every option."""

    model: list[str] = field(default_factory=list, metadata={"help": "Hugging Face folders or names, or runs' folders"})
    data: list[str] = field(
        default_factory=list, metadata={"help": f"{', '.join(BENCHMARKS)}; files or Hugging Face data sets"}
    )
    greedy: bool = option(False, "temperature 0, k = 1")
    out: str = option("out/eval", "folder for everything")

    def check(self) -> None:
        if self.greedy:
            self.k, self.temperature = 1, 0.0
        self.folders = [find_model(name) for name in self.model]
        for which, names in (
            ("--data", [label_of(name) for name in self.data]),
            ("--model", [short_name(folder) for folder in self.folders]),
        ):
            if not names:
                raise UserError(f"{which}: give at least one")
            if len(set(names)) < len(names):
                raise UserError(f"{which}: two of these have the same name in the table: {', '.join(names)}")


def label_of(data: str) -> str:
    """A data set's name in tables and files.

    >>> label_of("math500"), label_of("out/toy-demo/test.jsonl"), label_of("some/where/aime24.jsonl")
    ('math500', 'test', 'aime24')
    """
    return Path(data).stem if Path(data).suffix in (".jsonl", ".json", ".parquet") else data


# ----------------------------------------------------------------------------------------------------------------
# The table


def standard_error(values: list[float]) -> float:
    """Of the values' mean, one value per problem: how it varies when problems are drawn anew.

    >>> round(standard_error([0.0, 0.0, 1.0, 1.0, 1.0]), 3)
    0.245
    """
    return statistics.stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0


def combine(means: list[float], errors: list[float], weights: list[float]) -> tuple[float, float]:
    """Weighted mean of benchmarks and its standard error, benchmarks being independent.

    >>> combine([0.5, 0.25], [0.04, 0.03], weights=[300, 300])
    (0.375, 0.025)
    """
    shares = [weight / sum(weights) for weight in weights]
    mean = sum(share * mean for share, mean in zip(shares, means, strict=True))
    return mean, sqrt(sum((share * error) ** 2 for share, error in zip(shares, errors, strict=True)))


def result(model: str, data: str, pools: list[Pool], k: int) -> dict:
    """One model on one data set: a row of results.json. Shares, not percent; `error` is the one of `ave`."""
    metrics = summarise_eval(pools, k)
    return {
        "model": model,
        "data": data,
        "prompts": len(pools),
        "k": k,
        "ave": metrics["eval/reward"],
        "error": standard_error([pool.mean for pool in pools]),
        "pass": curve(pools, k, pass_at_k),
        "all_right": curve(pools, k, all_right_at_k),
        "length": metrics["eval/length"],
        "truncated": metrics["eval/truncated"],
    }


def tables(results: list[dict], title: str, notes: list[str]) -> str:
    """Table 1 as the paper prints it, with errors and the plain mean; Pass@k and lengths; notes. Markdown."""

    def prompts(data: str) -> str:  # a model's template may have made some prompts too long
        return " or ".join(dict.fromkeys(str(r["prompts"]) for r in results if r["data"] == data))

    data = list(dict.fromkeys(r["data"] for r in results))
    main = [["model", *(f"{name} ({prompts(name)})" for name in data), "mean", "weighted"]]
    for model in dict.fromkeys(r["model"] for r in results):
        own = [r for r in results if r["model"] == model]
        means, errors = [r["ave"] for r in own], [r["error"] for r in own]
        pairs = [*zip(means, errors, strict=True)]
        pairs += [combine(means, errors, [1] * len(own)), combine(means, errors, [r["prompts"] for r in own])]
        main.append([model, *(f"{100 * mean:.1f} ± {100 * error:.1f}" for mean, error in pairs)])
    more = [["model", "data", *(f"pass@{k}" for k in results[0]["pass"]), "all right", "all wrong", "tok", "truncated"]]
    for r in results:
        last = list(r["pass"])[-1]
        shares = [*r["pass"].values(), r["all_right"][last], 1 - r["pass"][last]]
        shown = [f"{100 * share:.1f}" for share in shares] + [f"{r['length']:.0f}", f"{100 * r['truncated']:.1f}"]
        more.append([r["model"], r["data"], *shown])
    texts = [
        f"{title}, in %, ± one standard error over problems. `weighted`: by number of prompts, the paper's average; "
        "`mean`: of the columns.",
        markdown(main),
        f"In %, but for `tok`, the mean length of a response. `all right`, `all wrong`: of {results[0]['k']}.",
        markdown(more),
    ]
    return "\n\n".join([*texts, *notes])


def markdown(rows: list[list[str]]) -> str:
    """A table whose first row is the head, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    rule = " | ".join("-" * width for width in widths)
    return "\n".join(f"| {line} |" for line in [lines[0], rule, *lines[1:]])


# ----------------------------------------------------------------------------------------------------------------
# The command


def open_journals(folder: str, config: EvalConfig, ranks: Ranks) -> tuple[list[Journal], list[str]]:
    """A journal per data set for one model, and what has to be said about them."""
    tokenizer = load_tokenizer(folder)
    settings = settings_of(folder, config, "eval")
    journals, notes = [], []
    for data in config.data:
        source, expected = BENCHMARKS.get(data, (data, None))
        prompts, counts = load_prompts(source, tokenizer, config)
        name = label_of(data).replace("/", "--") + ".greedy" * config.greedy
        path = Path(config.out) / short_name(folder).replace("/", "--") / name
        journals.append(Journal(path, prompts, settings, ranks))
        if counts["kept"] < counts["read"] or expected not in (None, len(prompts)):
            paper = f"; the paper has {expected} prompts" if expected else ""
            notes.append(f"{label_of(data)}: {describe(counts)}{paper}.")
        if "minerva" in data:
            notes.append(MINERVA_NOTE)
    return journals, notes


def start_again(ranks: Ranks, environment: dict[str, str]) -> None:
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
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def report(results: list[dict], notes: list[str], config: EvalConfig) -> None:
    """Print the tables; write them and the numbers."""
    name = "Greedy accuracy" if config.greedy else f"Ave@{config.k} at temperature {config.temperature}"
    text = tables(results, f"{name}, at most {config.max_response_tokens} new tokens", notes)
    ending, out = ".greedy" * config.greedy, Path(config.out)
    (out / f"table{ending}.md").write_text(text + "\n")
    (out / f"results{ending}.json").write_text(json.dumps(results, indent=1) + "\n")
    print(f"\n{text}\n")


def main() -> None:
    environment = dict(os.environ)
    config = parse_options(EvalConfig, sys.argv[1:])
    ranks = init_ranks()
    for path in config.model + config.data:
        toy.build_if_missing(path)
    opened = [open_journals(folder, config, ranks) for folder in config.folders]  # errors show before a long wait
    started = False
    for folder, (journals, _) in zip(config.folders, opened, strict=True):
        if any(journal.missing() for journal in journals):
            if started:
                start_again(ranks, environment)
            draw_missing(journals, folder, config, ranks)
            started = True
    results = [
        result(short_name(folder), label_of(data), journal.pools(), config.k)
        for folder, (journals, _) in zip(config.folders, opened, strict=True)
        for data, journal in zip(config.data, journals, strict=True)
    ]
    if ranks.rank == 0:
        report(results, list(dict.fromkeys(note for _, notes in opened for note in notes)), config)


if __name__ == "__main__":
    run_command(main)
