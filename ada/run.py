"""A run's folder: options, logs, checkpoints, resuming, and what is printed.

out/RUN/config.json       the options it was started with; another start with others is refused
        metrics.jsonl     one object a step, step 0 being the base model's evaluation
        samples.jsonl     some prompts' responses with verdicts and advantages
        checkpoints/      see ada/checkpoint.py
        plot.png          reward, entropy, samples
"""

import fcntl
import json
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

from ada import UserError, checkpoint
from ada.curves import read_metrics
from ada.plot import plot_runs
from ada.reward import FAILURES, Scorer
from ada.sampler import Group, Pool, Sample
from ada.trainer import Ranks, Trainer

GAP_WARNING = 0.05  # nats; bf16 kernels that differ make about 0.01, a wrong temperature or stale weights far more
TRUNCATED_WARNING = 0.5
SAME_INTERRUPT_SEC = 2


class RunError(UserError):
    """The run's folder belongs to another run, or an optional package is missing."""


def refuse_other_options(path: Path, options: dict, advice: str) -> None:
    """Raise RunError, naming them, if `path` (JSON) holds other values: continuing would mix two experiments."""
    if not path.exists():
        return
    earlier = json.loads(path.read_text())
    differing = [
        f"{name} was {earlier.get(name)!r}, is {value!r}"
        for name, value in options.items()
        if value != earlier.get(name)
    ]
    if differing:
        raise RunError(
            f"{path.parent} was started with other options ({'; '.join(differing)}): {advice}, or delete the folder"
        )


def hold_lock(path: Path):
    """A lock that lasts until this process ends, however it ends: keep what is returned. Raises RunError if taken."""
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunError(f"{path.parent}: another process is at work here") from None
    return file


class Run:
    """One run, seen from one rank. Only rank 0 writes and prints.

    Args:
        path: the run's folder.
        options: all of them, by name.
        may_change: names of those that may differ when the run is continued.

    Raises:
        RunError: the folder was made with other options, or is in use.
    """

    def __init__(self, path: Path, options: dict, ranks: Ranks, *, may_change: tuple[str, ...], keep: int, wandb: bool):
        self.path = path
        self.options = options
        self.ranks = ranks
        self.keep = keep
        self.introduced = False
        self.interrupted_at: float | None = None
        self.bars_off = None if ranks.rank == 0 else True  # None: only where somebody looks at a terminal
        self.wandb = _import_wandb() if wandb and ranks.rank == 0 else None
        kept_options = {name: value for name, value in options.items() if name not in may_change}
        refuse_other_options(self.path / "config.json", kept_options, "give this run another --name")
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self._interrupt)

    def _claim(self) -> None:
        """Make the folder and hold its lock until this process ends, however it ends."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = hold_lock(self.path / ".lock")
            checkpoint.write_atomically(self.path / "config.json", json.dumps(self.options, indent=1) + "\n")
            if self.wandb:
                self.wandb.init(project="reinforce-ada", name=self.path.name, config=self.options, dir=self.path)
        except OSError as error:
            raise RunError(f"{self.path}: {error.strerror}") from error

    def _on_rank_0(self, action: Callable[[], None]) -> None:
        """Do it there; if it fails, say so and end on every rank, rather than leave the others waiting."""
        problem = None
        if self.ranks.rank == 0:
            try:
                action()
            except RunError as error:
                problem = error
        problem, *_ = self.ranks.gather([problem])
        if problem:
            raise problem

    def _interrupt(self, number: int, _) -> None:
        """Finish the step, save, leave; asked again, end at once. Ctrl-C under torchrun comes twice, counts once."""
        first, self.interrupted_at = self.interrupted_at, time.monotonic()
        if first and self.interrupted_at - first > SAME_INTERRUPT_SEC:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def should_stop(self) -> bool:
        """Has any rank been told to stop? On all ranks, at the same step."""
        return any(self.ranks.gather([self.interrupted_at is not None]))

    # ---- checkpoints

    def resume(self, trainer: Trainer) -> int:
        """Take the folder, load the newest complete checkpoint, cut the logs back to it; returns its step or 0.

        Only from here on is anything written: whatever could be wrong with the options has shown by now.
        """
        self._on_rank_0(self._claim)
        newest = checkpoint.newest(self.path / "checkpoints")
        if len(set(self.ranks.gather([(self.path / "config.json").exists() and newest]))) > 1:
            raise RunError(f"{self.path}: ranks see different files there; it must be on a shared file system")
        step = checkpoint.load(newest, trainer) if newest else 0
        if self.ranks.rank == 0:
            for name in ("metrics.jsonl", "samples.jsonl"):
                checkpoint.cut_log(self.path / name, step if newest else -1)
        if newest:
            self.say(f"continuing from {newest}")
        return step

    def save(self, trainer: Trainer, step: int, tokenizer) -> None:
        checkpoint.save(self.path / "checkpoints", trainer, step=step, tokenizer=tokenizer, keep=self.keep)

    # ---- logs

    def say(self, text: str) -> None:
        if self.ranks.rank == 0:
            tqdm.write(text)
            sys.stdout.flush()

    def log(self, metrics: dict) -> None:
        """One line to metrics.jsonl, one to the terminal, warnings where a number says that something is wrong."""
        if self.ranks.rank != 0:
            return
        self._append("metrics.jsonl", [metrics])
        if self.wandb:
            self.wandb.log(metrics, step=metrics["step"])
        self.say(_step_line(metrics))
        if (gap := metrics.get("engine/logprob_gap_mean")) and gap > GAP_WARNING:
            self.say(f"warning: engine and trainer disagree by {gap:.3f} nats per token (engine/logprob_gap_mean)")
        if metrics.get("response/truncated", 0) > TRUNCATED_WARNING:
            self.say(f"warning: {metrics['response/truncated']:.0%} of responses hit max_response_tokens")

    def log_samples(self, step: int, pools: list[Pool], groups: list[Group], rows: set[int]) -> None:
        """All responses to the prompts `rows`, whichever rank drew them, to samples.jsonl. On every rank."""
        kept = {(s.row, s.index): a for g in groups for s, a in zip(g.samples, g.advantages, strict=True)}
        lines = [
            {
                "step": step,
                "row": sample.row,
                "index": sample.index,
                "prompt": pool.prompt.text,
                "response": sample.text,
                "gold": pool.prompt.gold,
                "correct": sample.correct,
                "truncated": sample.truncated,
                "advantage": kept.get((sample.row, sample.index)),  # null: not in the group
            }
            for pool in pools
            if pool.prompt.row in rows
            for sample in pool.samples
        ]
        lines = self.ranks.gather(lines, key=lambda line: (line["row"], line["index"]))
        if self.ranks.rank == 0:
            self._append("samples.jsonl", lines)
            if lines and not self.introduced:
                self.introduced = True
                first = lines[0]
                verdict = "right" if first["correct"] else "wrong"
                self.say(f"a response to {first['prompt']!r}")
                self.say(f"is {first['response']!r}, gold {first['gold']!r}: {verdict}")

    def _append(self, name: str, lines: list[dict]) -> None:
        try:
            with (self.path / name).open("a") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))
        except OSError as error:
            raise RunError(f"{self.path / name}: {error.strerror}") from error

    def close(self) -> None:
        if self.wandb:
            self.wandb.finish()

    def report(self) -> None:
        """Draw the plot and print the table at the end: base against trained model, cost, where things are."""
        if self.ranks.rank != 0:
            return
        rows = read_metrics(self.path)
        plot_runs([self.path], self.path / "plot.png")
        evaluated = [row for row in rows if "eval/reward" in row]
        if evaluated:
            base, trained = evaluated[0], evaluated[-1]
            self.say(f"\n{'held out':<18}{'base':>9}{'step ' + str(trained['step']):>12}")
            for key in ("eval/reward", *_largest_pass(base), "eval/entropy"):
                self.say(f"{key.removeprefix('eval/'):<18}{base[key]:>9.3f}{trained[key]:>12.3f}")
        samples = sum(row.get("sampling/samples", 0) for row in rows)
        seconds = sum(row.get("time/step", 0) for row in rows)
        evaluating = sum(row.get("time/eval", 0) for row in rows)
        self.say(f"\n{samples:,} samples in {seconds:.1f} s of training; {evaluating:.1f} s of evaluation")
        self.say(f"checkpoint  {checkpoint.newest(self.path / 'checkpoints')}")
        self.say(f"plot        {self.path / 'plot.png'}")


def _largest_pass(row: dict) -> list[str]:
    keys = [key for key in row if key.startswith("eval/pass@")]
    return [max(keys, key=lambda key: int(key.partition("@")[2]))]


def _step_line(metrics: dict) -> str:
    """The metrics that one wants to see scroll by, those that there are."""
    shown = {
        "reward/first_round": "reward {:.3f}",
        "policy/entropy": "entropy {:.3f}",
        "sampling/samples": "samples {:,}",
        "update/groups": "groups {}",
        "update/grad_norm": "grad norm {:.2f}",
        "time/step": "{:.1f} s",
        "eval/reward": "held out: reward {:.3f}",
        "eval/pass@16": "pass@16 {:.3f}",
    }
    parts = [text.format(metrics[key]) for key, text in shown.items() if metrics.get(key) is not None]
    return "  ".join([f"step {metrics['step']:4}", *parts])


def _import_wandb():
    try:
        import wandb
    except ImportError:
        raise RunError("--wandb: the package wandb is not installed") from None
    return wandb


class SamplingBar:
    """A progress bar that `sample_adaptively` can call: active prompts, samples, tokens per second.

    With `total`, the number of samples to come, also the time left.
    """

    def __init__(self, what: str, off: bool | None, total: int | None = None):
        self.bar = tqdm(desc=what, total=total, unit=" samples", position=1, leave=False, disable=off)
        self.n_tokens = 0
        self.start = time.perf_counter()

    def __call__(self, n_active: int, sample: Sample) -> None:
        self.n_tokens += len(sample.tokens)
        if not self.bar.disable:
            rate = self.n_tokens / (time.perf_counter() - self.start)
            self.bar.set_postfix_str(f"{n_active} prompts active, {rate:,.0f} tok/s", refresh=False)
            self.bar.update()

    def __enter__(self) -> "SamplingBar":
        return self

    def __exit__(self, *_) -> None:
        self.bar.close()


def grading_failures(scorer: Scorer, ranks: Ranks) -> dict[str, int]:
    """Responses of all ranks since the last call that were wrong because grading them failed, by cause."""
    everybody = ranks.gather([dict(scorer.failures)])
    scorer.failures.clear()
    return {f"grading/{cause}": sum(failures.get(cause, 0) for failures in everybody) for cause in FAILURES}


def memory_in_use(device: torch.device, when: str) -> dict[str, float]:
    """GiB of the GPU in anybody's hands: torch's own counters do not tell the engine's share from the trainer's.

    Without a GPU the most that this process has ever held of the host's memory.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return {f"memory/gpu_{when}": (total - free) / 2**30}
    return {f"memory/host_peak_{when}": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


class Clock:
    """Seconds of the phases of a step."""

    def __init__(self):
        self.seconds = {"time/step": 0.0}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """The seconds since the last lap are this phase's; time/step is the sum of all."""
        now = time.perf_counter()
        self.seconds[phase] = now - self._last
        self.seconds["time/step"] += now - self._last
        self._last = now
