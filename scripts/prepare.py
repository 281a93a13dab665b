"""From raw problems to training prompts of a chosen difficulty: the data pipeline of the paper (section 4).

    python scripts/prepare.py --source open-r1/OpenR1-Math-220k --model Qwen/Qwen2.5-Math-1.5B --out solvable.jsonl
    torchrun --nproc_per_node=8 scripts/prepare.py ... --preset hard --out hard.jsonl             # on all GPUs
    python scripts/prepare.py --source out/toy-demo/train.jsonl --model out/toy-demo/model --out out/toy.jsonl

Rows are cleaned by load_prompts (ada/data.py): duplicates go, as does what is too long and what has no answer that can
be read, neither annotated nor in its solution's box. Then the model tries each problem k times, and a problem is kept
if the number of correct responses lies within limits. Beside FILE.jsonl, FILE.prepare/ holds all responses with their
verdicts, and dropped.log with every dropped row and why. Another --out with other limits and the same folder (--work)
draws nothing again.
"""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ada import UserError, option, run_command  # noqa: E402  first: it sets the number of threads

# isort: split
import toy  # noqa: E402
from ada.data import load_prompts, load_tokenizer  # noqa: E402
from ada.sampler import Pool, Prompt  # noqa: E402
from ada.support.files import FileError, write_atomically  # noqa: E402
from ada.support.options import parse_options  # noqa: E402
from ada.support.ranks import Ranks, init_ranks  # noqa: E402
from scripts.responses import DrawConfig, Journal, draw_missing, find_model, settings_of  # noqa: E402

PRESETS = {  # pass rates above 0, up to and including
    "solvable": 1.0,  # correct at least once
    "easy": 0.313,  # the public code's easy set: 1 to 5 of 16
    "hard": 0.125,  # 1 or 2 of 16, in the paper and in the public code
}


@dataclass
class PrepareConfig(DrawConfig):
    """Every option."""

    source: str = option("", "JSONL, JSON or parquet file, or Hugging Face data set")
    model: str = option("", "Hugging Face folder or name, or a run's folder")
    out: str = option("", "the JSONL file to write")
    work: str = option("", "folder for responses and dropped.log; by default FILE.prepare beside FILE.jsonl")
    preset: Literal["solvable", "easy", "hard"] = option("solvable", "pass rates above 0 up to 1, 0.313 or 0.125")
    min_correct: int = option(1, "fewest correct responses of k", at_least=1)
    max_correct: int = option(0, "most correct responses of k; 0: what the preset allows", at_least=0)
    k: int = option(16, "responses per problem", at_least=1)
    max_response_tokens: int = option(2048, "longer responses are cut and marked truncated", at_least=1)
    max_prompt_tokens: int = option(1024, "longer prompts, in the chat template, are dropped and counted", at_least=1)
    max_problem_tokens: int = option(700, "likewise longer problems, without the template", at_least=1)
    strict: bool = option(False, "stop at the first broken row instead of dropping it")

    def check(self) -> None:
        if not (self.source and self.model and self.out):
            raise UserError("--source, --model and --out are needed")
        if Path(self.out).suffix != ".jsonl":
            raise UserError(f"--out {self.out}: must end in .jsonl")
        if self.max_correct and self.preset != "solvable":
            raise UserError(f"--preset {self.preset} stands for a --max_correct: give one of them")
        self.max_correct = self.max_correct or math.floor(PRESETS[self.preset] * self.k)
        if not self.min_correct <= self.max_correct <= self.k:
            raise UserError(f"no prompt can have {self.min_correct} to {self.max_correct} correct of {self.k}")


def read_prompts(config: PrepareConfig, model: str, dropped: Path, ranks: Ranks) -> tuple[list[Prompt], dict[str, int]]:
    """load_prompts, with every dropped row in the file `dropped`. Raises FileError where nothing can be written."""
    lines, out = [], Path(config.out)

    def try_to_write() -> None:  # now, rather than after hours of sampling
        try:
            for file in (dropped, out.with_name(out.name + ".tmp")):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text("")
            file.unlink()
        except OSError as error:
            raise FileError(f"{file.parent}: {error.strerror}") from error

    def note(cause: str, where: str, why) -> None:
        if config.strict and isinstance(why, Exception):
            raise UserError(f"{where}: {why}")
        lines.append(f"{where}: dropped: {why}\n")

    ranks.on_rank_0(try_to_write)
    longest = config.max_problem_tokens
    try:
        return load_prompts(config.source, load_tokenizer(model), config, max_problem_tokens=longest, on_drop=note)
    finally:
        if ranks.rank == 0:
            dropped.write_text("".join(lines))


def select(pools: list[Pool], config: PrepareConfig) -> tuple[list[dict], dict[str, int]]:
    """The rows to write, and how many were dropped for what."""
    least, most = config.min_correct, config.max_correct
    rows = [
        {
            "problem": pool.prompt.problem,
            "answer": pool.prompt.gold,
            "pass_rate": pool.mean,
            "n_correct": pool.n_correct,
            "n_samples": len(pool.samples),
        }
        for pool in pools
        if least <= pool.n_correct <= most
    ]
    dropped = {
        "never correct": sum(pool.n_correct == 0 for pool in pools),
        f"correct, but fewer than {least} times": sum(0 < pool.n_correct < least for pool in pools),
        f"correct more than {most} times": sum(pool.n_correct > most for pool in pools),
    }
    return rows, dropped


def account(counts: dict[str, int], dropped: dict[str, int], n_kept: int, out: Path) -> str:
    """What became of every row. Each is counted at the first thing wrong with it, so the lines add up to the first."""
    causes = {cause.replace("_", " "): n for cause, n in counts.items() if cause not in ("read", "kept")} | dropped
    lines = [("rows read", counts["read"]), *((f"  - {cause}", n) for cause, n in causes.items() if n)]
    return "\n".join(f"{what:<36}{n:>9,}" for what, n in [*lines, (f"kept in {out.name}", n_kept)])


def main() -> None:
    config = parse_options(PrepareConfig, sys.argv[1:])
    out, ranks = Path(config.out), init_ranks()
    work = Path(config.work) if config.work else out.with_suffix(".prepare")
    for path in (config.source, config.model):
        toy.build_if_missing(path)
    model = find_model(config.model)
    prompts, counts = read_prompts(config, model, work / "dropped.log", ranks)
    journal = Journal(work / "responses", prompts, settings_of(model, config, "prepare"), ranks)
    if journal.missing():
        draw_missing([journal], model, config, ranks)
    if ranks.rank == 0:
        rows, dropped = select(journal.pools(), config)
        print(account(counts, dropped, len(rows), out))
        if not rows:
            raise UserError(f"{out}: not written, no prompt is left")
        write_atomically(out, "".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    run_command(main)
