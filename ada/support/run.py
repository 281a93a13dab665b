"""A run's folder: options, logs, checkpoints, resuming, and what is printed.

out/RUN/config.json       the options it was started with; another start with others is refused
        metrics.jsonl     one object a step, step 0 being the base model's evaluation
        samples.jsonl     some prompts' responses with verdicts and advantages
        checkpoints/      see checkpoint.py
        plot.png          reward, entropy, samples
"""

import dataclasses
import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from ada import UserError
from ada.sampler import Group, Pool, Prompt
from ada.support import checkpoint
from ada.support.files import append_lines, cut_log, digest, hold_lock, refuse_other_options, write_atomically
from ada.support.ranks import Ranks
from ada.trainer import Trainer

# Nats. bf16 kernels that differ make about 0.01; a wrong temperature makes more; stale or broken weights, above 1.
GAP_WARNING, GAP_LIMIT = 0.05, 1.0
TRUNCATED_WARNING = 0.5
SAME_INTERRUPT_SEC = 2

SHOWN = {  # in a step's line, where it was measured
    "reward/first_round": "reward {:.3f}",
    "policy/entropy": "entropy {:.3f}",
    "sampling/samples": "samples {:,}",
    "update/groups": "groups {}",
    "update/grad_norm": "grad norm {:.2f}",
    "time/step": "{:.1f} s",
    "eval/reward": "held out: reward {:.3f}",
}
PLOTTED = {  # title: training metric, evaluation metric
    "reward": ("reward/first_round", "eval/reward"),
    "entropy (nats per token)": ("policy/entropy", "eval/entropy"),
    "samples per step": ("sampling/samples", None),
}


class RunError(UserError):
    """The run cannot go on: its files are not as they should be, or an optional package is missing."""


class Run:
    """One run, seen from one rank. Only rank 0 writes and prints.

    Args:
        config: train.py's Config. Options that it lists in `may_change` may differ when the run is continued.
        data: what the prompts were read as; that may not differ.

    Raises:
        FileError: the folder was made with other options.
        RunError: --wandb without the package.
    """

    def __init__(self, config, ranks: Ranks, *, data: list[Prompt]):
        self.config = config
        self.ranks = ranks
        self.path = Path(config.out) / config.name
        self.options = dataclasses.asdict(config) | {"data": digest([(prompt.text, prompt.gold) for prompt in data])}
        self.interrupted_at: float | None = None
        self.showed_a_response = False
        self.wandb = _import_wandb() if config.wandb and ranks.rank == 0 else None
        fixed = {name: value for name, value in self.options.items() if name not in config.may_change}
        refuse_other_options(self.path / "config.json", fixed, "give this run another --name")
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self._interrupt)

    # ---- start and stop

    def resume(self, trainer: Trainer) -> int:
        """Take the folder, load the newest complete checkpoint, cut the logs back to it; returns its step or 0.

        Only from here on is anything written: whatever could be wrong with the options has shown by now.
        """
        self.ranks.on_rank_0(self._claim)
        newest = checkpoint.newest(self.path / "checkpoints")
        if len(set(self.ranks.gather([(self.path / "config.json").exists() and newest]))) > 1:
            raise RunError(f"{self.path}: ranks see different files there; it must be on a shared file system")
        step = checkpoint.load(newest, trainer) if newest else 0
        if self.ranks.rank == 0:
            for name in ("metrics.jsonl", "samples.jsonl"):
                cut_log(self.path / name, step if newest else -1)
        if newest:
            self.print(f"continuing from {newest}")
        return step

    def _claim(self) -> None:
        """Make the folder and hold its lock until this process ends, however it ends."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = hold_lock(self.path / ".lock")
            write_atomically(self.path / "config.json", json.dumps(self.options, indent=1) + "\n")
            if self.wandb:  # the same id again: a resumed run goes on there, too
                self.wandb.init(
                    project="reinforce-ada",
                    name=self.path.name,
                    id=digest(str(self.path.absolute())),
                    resume="allow",
                    config=self.options,
                    dir=self.path,
                )
        except OSError as error:
            raise RunError(f"{self.path}: {error.strerror}") from error

    def steps(self, start: int) -> Iterator[int]:
        """The steps that are left after `start`, with a progress bar."""
        total, off = self.config.steps, None if self.ranks.rank == 0 else True
        yield from tqdm(range(start + 1, total + 1), "training", initial=start, total=total, disable=off)

    def _interrupt(self, number: int, _) -> None:
        """Finish the step, save, leave; asked again, end at once. Ctrl-C under torchrun comes twice, counts once."""
        first, self.interrupted_at = self.interrupted_at, time.monotonic()
        if first and self.interrupted_at - first > SAME_INTERRUPT_SEC:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def should_stop(self) -> bool:
        """Has any rank been told to stop? On all ranks, at the same step."""
        return any(self.ranks.gather([self.interrupted_at is not None]))

    def save(self, trainer: Trainer, step: int, tokenizer) -> None:
        keep = self.config.keep_checkpoints
        checkpoint.save(self.path / "checkpoints", trainer, step=step, tokenizer=tokenizer, keep=keep)

    def close(self) -> None:
        if self.wandb:
            self.wandb.finish()

    # ---- logs

    def print(self, text: str) -> None:
        if self.ranks.rank == 0:
            tqdm.write(text)
            sys.stdout.flush()

    def log(self, metrics: dict) -> None:
        """One line to metrics.jsonl, one to the terminal, warnings where a number says that something is wrong.

        Raises:
            RunError: engine and trainer are no longer the same model; on all ranks.
        """
        if self.ranks.rank == 0:
            append_lines(self.path / "metrics.jsonl", [metrics])
            if self.wandb:
                self.wandb.log(metrics, step=metrics["step"])
        largest = _largest_pass(metrics)
        shown = SHOWN | {largest: largest.removeprefix("eval/") + " {:.3f}"}
        parts = [text.format(metrics[key]) for key, text in shown.items() if metrics.get(key) is not None]
        self.print("  ".join([f"step {metrics['step']:4}", *parts]))
        gap = metrics.get("engine/logprob_gap_mean") or 0.0
        if gap > GAP_LIMIT:
            raise RunError(
                f"engine and trainer disagree by {gap:.1f} nats per token: vLLM does not run the weights it was sent"
            )
        if gap > GAP_WARNING:
            self.print(f"warning: engine and trainer disagree by {gap:.3f} nats per token (engine/logprob_gap_mean)")
        if metrics.get("response/truncated", 0) > TRUNCATED_WARNING:
            self.print(f"warning: {metrics['response/truncated']:.0%} of responses hit max_response_tokens")
        if failed := metrics.get("engine/logprobs_not_finite"):
            self.print(f"warning: {failed} tokens without a finite log-prob from the engine got weight 1")

    def log_samples(self, step: int, pools: list[Pool], groups: list[Group], prompts: list[Prompt]) -> None:
        """All responses to the prompts, whichever rank drew them, to samples.jsonl. On every rank."""
        kept = {(s.prompt_id, s.index): a for g in groups for s, a in zip(g.samples, g.advantages, strict=True)}
        chosen = {prompt.prompt_id for prompt in prompts}
        lines = [
            {
                "step": step,
                "prompt_id": sample.prompt_id,
                "index": sample.index,
                "prompt": pool.prompt.text,
                "response": sample.text,
                "gold": pool.prompt.gold,
                "correct": sample.correct,
                "truncated": sample.truncated,
                "advantage": kept.get((sample.prompt_id, sample.index)),  # null: not in the group
            }
            for pool in pools
            if pool.prompt.prompt_id in chosen
            for sample in pool.samples
        ]
        lines = self.ranks.gather(lines, key=lambda line: (line["prompt_id"], line["index"]))
        if self.ranks.rank == 0:
            append_lines(self.path / "samples.jsonl", lines)
        if lines and not self.showed_a_response:
            self.showed_a_response = True
            first = lines[0]
            verdict = "right" if first["correct"] else "wrong"
            self.print(f"a response to {first['prompt']!r}")
            self.print(f"is {first['response']!r}, gold {first['gold']!r}: {verdict}")

    def report(self) -> None:
        """Draw the plot and print the table at the end: base against trained model, cost, where things are."""
        if self.ranks.rank != 0:
            return
        rows = [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]
        plot(rows, self.path / "plot.png")
        evaluated = [row for row in rows if "eval/reward" in row]
        if evaluated:
            base, trained = evaluated[0], evaluated[-1]
            self.print(f"\n{'held out':<18}{'base':>9}{'step ' + str(trained['step']):>12}")
            for key in ("eval/reward", _largest_pass(base), "eval/entropy"):
                self.print(f"{key.removeprefix('eval/'):<18}{base[key]:>9.3f}{trained[key]:>12.3f}")
        samples = sum(row.get("sampling/samples", 0) for row in rows)
        seconds = sum(row.get("time/step", 0) for row in rows)
        evaluating = sum(row.get("time/eval", 0) for row in rows)
        self.print(f"\n{samples:,} samples in {seconds:.1f} s of training; {evaluating:.1f} s of evaluation")
        self.print(f"checkpoint  {checkpoint.newest(self.path / 'checkpoints')}")
        self.print(f"plot        {self.path / 'plot.png'}")


def plot(rows: list[dict], out: Path) -> None:
    """Reward, entropy and samples against steps: lines for training, dots for held-out prompts."""
    from matplotlib.figure import Figure  # slow to import; not pyplot: nothing to close, no screen needed

    figure = Figure(figsize=(13, 3.6), layout="constrained")
    for axis, (title, keys) in zip(figure.subplots(1, len(PLOTTED)), PLOTTED.items(), strict=True):
        for key, style, label in zip(keys, ("-", "o"), ("training", "held out"), strict=True):
            measured = [row for row in rows if row.get(key) is not None]
            if measured:
                axis.plot([row["step"] for row in measured], [row[key] for row in measured], style, label=label)
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
        axis.legend()
    axis.set_ylim(bottom=0)  # of the last: samples
    figure.savefig(out, dpi=150)


def _largest_pass(metrics: dict) -> str:
    """The key of Pass@k for the largest k, e.g. "eval/pass@16"."""
    sizes = [int(key.partition("@")[2]) for key in metrics if key.startswith("eval/pass@")]
    return f"eval/pass@{max(sizes, default=0)}"


def _import_wandb():
    try:
        import wandb
    except ImportError:
        raise RunError("--wandb: the package wandb is not installed") from None
    return wandb
