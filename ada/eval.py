"""Evaluation: Ave@k and the unbiased Pass@k, with the engine and grader of training (Table 1, Fig. 2 of the paper).

    python -m ada.eval --model Qwen/Qwen2.5-Math-1.5B out/my-run --data math500 minerva olympiadbench aime-like --k 32
    torchrun --nproc_per_node=8 -m ada.eval ...                                        # on all GPUs
    python -m ada.eval --model out/toy-demo/model --data out/toy-demo/test.jsonl       # the toy, half a minute

Every response and verdict is in out/eval/MODEL/ before anything is computed (ada/support/journal.py), so a killed
evaluation goes on where it was, and one more model or benchmark costs only its own responses. The numbers go to
table.md and results.json. Settings of the paper: k = 32, temperature 1.0, at most 4096 new tokens, or what a shorter
context leaves.
"""

from ada import UserError, option, run_command  # first: it sets the number of threads, which torch reads on import

# isort: split
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import comb, sqrt
from pathlib import Path

from ada.data import DataConfig, describe, load_prompts, load_tokenizer
from ada.engine import Engine, EngineConfig
from ada.reward import Scorer
from ada.sampler import Pool, Prompt, SamplingConfig, by_prompt, exit_fixed, sample_adaptively
from ada.support import checkpoint
from ada.support.files import digest
from ada.support.journal import Journal
from ada.support.metrics import SamplingBar, grading_failures, without_tokens
from ada.support.options import parse_options
from ada.support.ranks import Ranks, init_ranks

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
class DrawConfig(EngineConfig, DataConfig):
    """Options of a command that draws k responses to each prompt of some data."""

    k: int = option(32, "responses per prompt", at_least=1)
    max_response_tokens: int = option(4096, "longer responses are cut and marked truncated", at_least=1)
    max_prompt_tokens: int = option(2048, "longer prompts, in the chat template, are dropped and counted", at_least=1)
    gpu_memory_share: float = option(0.85, "of each GPU's memory, for vLLM", above=0, below=1)
    graders: int = option(1, "grading processes per rank", at_least=1)
    seed: int = option(0, "everything random derives from it", at_least=0)
    config: str = option("", "YAML file of options")


@dataclass
class EvalConfig(DrawConfig):
    """Every option of python -m ada.eval."""

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


def curve(pools: list[Pool], k: int, chance: Callable[[int, int, int], float]) -> dict[str, float]:
    """Means over the pools of pass_at_k or all_right_at_k, by "1", "2", "4", ... up to k."""
    return {str(i): sum(chance(len(pool.samples), pool.n_correct, i) for pool in pools) / len(pools) for i in powers(k)}


def standard_error(values: list[float]) -> float:
    """Of the values' mean, one value per problem: how it varies when problems are drawn anew.

    >>> standard_error([0.0, 0.0, 1.0, 1.0, 1.0])
    0.2449489742783178
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


# ----------------------------------------------------------------------------------------------------------------
# Evaluation while training


def summarise_eval(pools: list[Pool], k: int) -> dict[str, float]:
    """Means over prompts of the pools' Ave@k, and of the chances that one or all of 1, 2, 4, ... k are right (Fig. 2).

    Entropy is the mean of -log p over the sampled tokens: unbiased, since each was drawn from its distribution.
    """
    samples = [sample for pool in pools for sample in pool.samples]
    n_tokens = sum(sample.n_tokens for sample in samples)
    return {
        "eval/reward": sum(pool.mean for pool in pools) / len(pools),
        **{f"eval/pass@{i}": share for i, share in curve(pools, k, pass_at_k).items()},
        **{f"eval/all_right@{i}": share for i, share in curve(pools, k, all_right_at_k).items()},
        "eval/entropy": -sum(sample.logprob_sum for sample in samples) / n_tokens,
        "eval/length": n_tokens / len(samples),
        "eval/truncated": sum(sample.truncated for sample in samples) / len(samples),
    }


def evaluate(engine, scorer, prompts: list[Prompt], ranks: Ranks, k: int, seed: int, *, step: int) -> dict[str, float]:
    """k responses to each prompt, in numbers; all ranks share one queue and get the same. Empty without prompts."""
    if not prompts:
        return {}
    start = time.perf_counter()
    queue = ranks.share(prompts, f"eval/{step}")
    config = SamplingConfig(group_size=k, round_size=k, seed=seed)
    with SamplingBar("evaluating", ranks) as progress:
        pools = sample_adaptively(
            engine, scorer, queue, config, exit_rule=exit_fixed, step=step, purpose="eval", progress=progress
        )
    pools = ranks.gather([without_tokens(pool) for pool in pools], by_prompt)
    failures = grading_failures(scorer, ranks, prefix="eval/")
    return {**summarise_eval(pools, k), **failures, "time/eval": time.perf_counter() - start}


# ----------------------------------------------------------------------------------------------------------------
# The table


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
# Drawing k responses to each prompt, on disk; scripts/prepare.py does the same


def find_model(name: str) -> str:
    """A folder or hub name: of a training run its newest checkpoint, else `name` itself."""
    newest = checkpoint.newest(Path(name) / "checkpoints")
    return str(newest / "hf") if newest else name


def short_name(model: str) -> str:
    """Of a model, for tables and folders: out/RUN/checkpoints/step-000080/hf is RUN/step-000080.

    >>> short_name("out/toy-hard/checkpoints/step-000080/hf"), short_name("Qwen/Qwen2.5-Math-1.5B")
    ('toy-hard/step-000080', 'Qwen/Qwen2.5-Math-1.5B')
    """
    parts = [part for part in Path(model).parts if part not in ("checkpoints", "hf")]
    return "/".join(parts[-2:])


def label_of(data: str) -> str:
    """A data set's name in tables and files.

    >>> label_of("math500"), label_of("out/toy-demo/test.jsonl"), label_of("some/where/aime24.jsonl")
    ('math500', 'test', 'aime24')
    """
    return Path(data).stem if Path(data).suffix in (".jsonl", ".json", ".parquet") else data


def settings_of(folder: str, config: DrawConfig, purpose: str) -> dict:
    """What a Journal is told about how its responses are drawn; a model folder counts as changed when its files are."""
    files = [file for file in sorted(Path(folder).glob("*")) if file.suffix in (".safetensors", ".bin", ".json")]
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return {
        "purpose": purpose,
        "model": folder,
        "files": digest(stamps) if files else "of the hub",
        "k": config.k,
        "temperature": config.temperature,
        "max_response_tokens": config.max_response_tokens,
        "seed": config.seed,
    }


def draw_missing(journals: list[Journal], folder: str, config: DrawConfig, ranks: Ranks) -> None:
    """Draw all that is missing, with one engine. On all ranks; once per process (see start_again)."""
    scorer = Scorer(config.graders)  # starts beside the engine
    longest = max(len(prompt.tokens) for journal in journals for prompt in journal.prompts)
    engine = Engine(folder, config, max_prompt_tokens=longest, dtype=ranks.compute_dtype, cut_at_context=True)
    scorer.wait_until_ready()
    for journal in journals:
        if missing := journal.missing():
            if ranks.rank == 0:
                print(f"{journal.path}: the first prompt is {missing[0].text!r}", flush=True)
            journal.draw_missing(engine, scorer, f"{short_name(folder)} on {journal.path.name}")
    failed = {cause: n for cause, n in grading_failures(scorer, ranks).items() if n}
    if failed and ranks.rank == 0:
        print(f"wrong because grading failed: {failed}")
    scorer.close()
    engine.close()


# ----------------------------------------------------------------------------------------------------------------
# python -m ada.eval


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
    os.execve(sys.executable, [sys.executable, "-m", "ada.eval", *sys.argv[1:]], environment)


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
