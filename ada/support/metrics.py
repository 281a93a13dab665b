"""What is measured of an iteration: the sampling in numbers, seconds, memory, failures; and its progress bar."""

import resource
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from tqdm import tqdm

from ada.reward import FAILURES
from ada.sampler import Group, Pool, Sample
from ada.support.ranks import Ranks


def without_tokens(pool: Pool) -> Pool:
    """A copy that is small enough to send to all ranks: verdicts and lengths, no tokens and no text."""

    def light(samples: list[Sample]) -> list[Sample]:
        return [replace(sample, tokens=[], logprobs=[], text="") for sample in samples]

    prompt = replace(pool.prompt, text="", tokens=[], problem="")
    return replace(pool, prompt=prompt, samples=light(pool.samples), unused=light(pool.unused))


def first_rounds(pool: Pool, count: int) -> list[Sample]:
    """The samples of a pool's first `count` rounds, or of all if there were fewer.

    Those of the first were drawn before any exit rule was asked: they are independent, their mean is unbiased.
    """
    return pool.samples[: count * len(pool.samples) // pool.rounds]


def summarise(pools: list[Pool], groups: list[Group], n: int) -> dict[str, float | None]:
    """What one iteration's sampling looked like. Pure; shares and means are over prompts unless said otherwise.

    The three rewards differ on purpose. `first_round` is the policy's: independent draws, no rule asked yet. (In
    small batches passive filtering biases it a little, drawing more prompts where many have zero variance.)
    Stopping biases the mean of the `pool` (pos upwards, balance towards 1/2), and that of the `kept` responses
    sits near 1/2 in balance mode whatever the policy does.
    """

    def share(condition: Callable[[Pool], bool]) -> float:
        return sum(map(condition, pools)) / len(pools)

    def mean(values: list[float]) -> float | None:
        return sum(values) / len(values) if values else None  # no groups, nothing kept

    independent = [sample for pool in pools for sample in first_rounds(pool, 1)]
    drawn = [sample for pool in pools for sample in pool.unused + pool.samples]
    return {
        "reward/first_round": mean([sample.correct for sample in independent]),
        "reward/pool": mean([pool.mean for pool in pools]),
        "reward/kept": mean([sample.correct for group in groups for sample in group.samples]),
        "sampling/samples": len(drawn),
        "sampling/tokens": sum(sample.n_tokens for sample in drawn),
        # what GRPO would have lost: the first n responses agree
        "sampling/uniform_at_n": share(lambda pool: len({sample.correct for sample in pool.samples[:n]}) == 1),
        "sampling/uniform_after": share(lambda pool: pool.zero_variance),
        # Fig. 5: prompts still active after the last round, by what they lacked
        "sampling/unresolved_no_right": share(lambda pool: not pool.resolved and pool.n_correct < max(1, n // 2)),
        "sampling/unresolved_no_wrong": share(lambda pool: not pool.resolved and pool.n_incorrect < n - n // 2),
        # of correct ones as many as balance wants, and whatever the rule wants, by then
        "sampling/right_in_two_rounds": share(
            lambda pool: sum(sample.correct for sample in first_rounds(pool, 2)) >= max(1, n // 2)
        ),
        "sampling/resolved_in_two_rounds": share(lambda pool: pool.resolved and pool.rounds <= 2),
        "response/length": mean([sample.n_tokens for sample in independent]),  # tok
        "response/truncated": mean([sample.truncated for sample in independent]),
    }


def grading_failures(scorer, ranks: Ranks, prefix: str = "") -> dict[str, int]:
    """Responses of all ranks since the last call that were wrong because grading them failed, by cause."""
    everybody = ranks.gather([dict(scorer.failures)])
    scorer.failures.clear()
    return {f"{prefix}grading/{cause}": sum(failures.get(cause, 0) for failures in everybody) for cause in FAILURES}


def memory_in_use(device: torch.device, when: str) -> dict[str, float]:
    """GiB of the GPU that are taken, by whomever: torch's own counters do not see what the engine still holds.

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


class SamplingBar:
    """A progress bar that `sample_adaptively` can call: active prompts, samples, tokens per second.

    With `total`, the number of samples to come, also the time left. It shows on rank 0, if that is at a terminal.
    """

    def __init__(self, what: str, ranks: Ranks, total: int | None = None):
        off = None if ranks.rank == 0 else True  # None: off where nobody looks at a terminal
        self.bar = tqdm(desc=what, total=total, unit=" samples", position=1, leave=False, disable=off)
        self.n_tokens = 0
        self.start = time.perf_counter()

    def __call__(self, n_active: int, sample: Sample) -> None:
        self.n_tokens += sample.n_tokens
        if not self.bar.disable:
            rate = self.n_tokens / (time.perf_counter() - self.start)
            self.bar.set_postfix_str(f"{n_active} prompts active, {rate:,.0f} tok/s", refresh=False)
            self.bar.update()

    def __enter__(self) -> "SamplingBar":
        return self

    def __exit__(self, *_) -> None:
        self.bar.close()
