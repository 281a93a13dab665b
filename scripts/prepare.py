"""From raw problems to training prompts of a chosen difficulty: the data pipeline of the paper (section 4).

    python -m ada.data prepare --source open-r1/OpenR1-Math-220k --model Qwen/Qwen2.5-Math-1.5B --out moderate.jsonl
    torchrun --nproc_per_node=8 -m ada.data prepare ... --preset hard --out hard.jsonl      # on all GPUs
    python -m ada.data prepare --source toy-demo/train --model toy-demo/model --preset hard --out out/hard.jsonl

Rows are cleaned by load_prompts (ada/data.py): duplicates go, as does what is too long and what has no answer that can
be read, neither annotated nor in its solution's box. Then the model tries each problem k times, and a problem is kept
if the number of right responses lies within limits. Beside FILE.jsonl, FILE.prepare/ holds all responses with their
verdicts, and dropped.log with every dropped row and why. Another --out with other limits and the same folder (--work)
draws nothing again.
"""

import argparse
import json
import logging
import math
from pathlib import Path

from ada import UserError, run_command, toy
from ada.checkpoint import write_atomically
from ada.data import load_prompts, load_tokenizer
from ada.journal import Journal, Parser, count, fill, find_model, settings_of
from ada.sampler import Pool
from ada.trainer import Ranks, init_ranks

# Pass rates above 0, up to and including
PRESETS = {
    "solvable": 1.0,  # right at least once
    "easy": 0.313,  # the public code's easy set: 1 to 5 of 16
    "hard": 0.125,  # 1 or 2 of 16, in the paper and in the public code
}


def parse(arguments: list[str]) -> argparse.Namespace:
    """Options, with min_correct and max_correct filled in. Raises UserError."""
    parser = Parser(prog="python -m ada.data prepare", k=16, max_tokens=2048, max_prompt_tokens=1024)
    parser.add_argument("--source", required=True, help="JSONL, JSON or parquet file, or Hugging Face data set")
    parser.add_argument("--split", help="of a Hugging Face data set")
    parser.add_argument("--model", required=True, help="Hugging Face folder or name, or a run's folder")
    parser.add_argument("--out", required=True, type=Path, help="the JSONL file to write")
    parser.add_argument("--work", type=Path, help="folder for responses and dropped.log (FILE.prepare)")
    parser.add_argument("--preset", choices=PRESETS, help="limits by the paper: pass rates up to 1, 0.313 or 0.125")
    parser.add_argument("--min-correct", type=count, help="fewest right responses of k (1)")
    parser.add_argument("--max-correct", type=count, help="most right responses of k (k)")
    parser.add_argument("--max-problem-tokens", type=count, default=700, help="of the problem alone (%(default)s)")
    parser.add_argument("--strict", action="store_true", help="stop at the first broken row instead of dropping it")
    options = parser.parse_args(arguments)
    if options.out.suffix != ".jsonl":
        raise UserError(f"--out {options.out}: must end in .jsonl")
    if options.preset and (options.min_correct or options.max_correct):
        raise UserError("--preset stands for --min-correct and --max-correct: give it or them")
    options.min_correct = options.min_correct or 1
    options.max_correct = options.max_correct or limit(options.preset or "solvable", options.k)
    if not options.min_correct <= options.max_correct <= options.k:
        raise UserError(f"no prompt can have {options.min_correct} to {options.max_correct} right of {options.k}")
    return options


def limit(preset: str, k: int) -> int:
    """Most right responses of k that a preset allows. Raises UserError if that is none.

    >>> [limit(preset, 16) for preset in PRESETS]
    [16, 5, 2]
    """
    most = math.floor(PRESETS[preset] * k)
    if most == 0:
        raise UserError(f"--preset {preset}: at most {PRESETS[preset]:.1%} right is none of --k {k}")
    return most


def log_dropped(path: Path, ranks: Ranks) -> None:
    """Every dropped row to a file, the first broken ones to the terminal, too; from rank 0 alone.

    Raises:
        UserError: the file cannot be written.
    """
    log = logging.getLogger("ada.data")
    log.propagate = False
    if ranks.rank > 0:
        log.addHandler(logging.NullHandler())
        return
    log.setLevel(logging.INFO)
    console = logging.StreamHandler()
    console.setLevel(logging.WARNING)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log.addHandler(logging.FileHandler(path, mode="w"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    log.addHandler(console)


def select(pools: list[Pool], options: argparse.Namespace) -> tuple[list[dict], dict[str, int]]:
    """The rows to write, and how many were dropped for what."""
    rows = [
        {
            "problem": pool.prompt.problem,
            "answer": pool.prompt.gold,
            "pass_rate": pool.mean,
            "n_correct": pool.n_correct,
            "n_samples": len(pool.samples),
        }
        for pool in pools
        if options.min_correct <= pool.n_correct <= options.max_correct
    ]
    dropped = {
        "never right": sum(pool.n_correct == 0 for pool in pools),
        f"right, but fewer than {options.min_correct} times": sum(
            0 < pool.n_correct < options.min_correct for pool in pools
        ),
        f"right more than {options.max_correct} times": sum(pool.n_correct > options.max_correct for pool in pools),
    }
    return rows, dropped


def table(counts: dict[str, int], dropped: dict[str, int], n_kept: int, options: argparse.Namespace) -> str:
    """What became of every row read.

    The lines between the first and the last add up: each row is counted at the first thing wrong with it.
    """
    causes = {
        "broken row": counts["bad_row"],
        "answer unreadable": counts["gold_unreadable"],
        "duplicate": counts["duplicate"],
        "too long": counts["too_long"],
        **dropped,
    }
    lines = [f"{'rows read':<36}{counts['read']:>9,}"]
    lines += [f"{'  - ' + cause:<36}{n:>9,}" for cause, n in causes.items() if n]
    return "\n".join([*lines, f"{'kept in ' + options.out.name:<36}{n_kept:>9,}"])


def prepare(options: argparse.Namespace) -> None:
    """Read, draw, select, write."""
    ranks = init_ranks()
    folder = find_model(options.model)
    work = options.work or options.out.with_suffix(".prepare")
    log_dropped(work / "dropped.log", ranks)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    prompts, counts = load_prompts(
        toy.locate(options.source),
        load_tokenizer(folder),
        split=options.split,
        max_prompt_tokens=options.max_prompt_tokens,
        max_problem_tokens=options.max_problem_tokens,
        fatal="rows" if options.strict else "nothing",
    )
    settings = settings_of(folder, options, purpose="prepare", temperature=1.0)
    journal = Journal(work / "responses", prompts, settings, ranks)
    if journal.missing:
        fill([journal], folder, options, ranks)
    rows, dropped = select(journal.pools(), options)
    if ranks.rank == 0:
        print(table(counts, dropped, len(rows), options))
        if not rows:
            raise UserError(f"{options.out}: not written, no prompt is left")
        write_atomically(options.out, "".join(json.dumps(row) + "\n" for row in rows))


def main(arguments: list[str]) -> None:
    """`arguments` are what follows python -m ada.data."""

    def command():
        if arguments[:1] != ["prepare"]:
            raise UserError("usage: python -m ada.data prepare --source DATA --model MODEL --out FILE.jsonl")
        prepare(parse(arguments[1:]))

    run_command(command)
