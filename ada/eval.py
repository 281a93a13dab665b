"""Evaluation: Ave@k and the unbiased Pass@k over held-out prompts, with the engine and grader of training."""

import time
from collections.abc import Callable, Iterable
from math import comb

from ada.data import shared_queue
from ada.sampler import Pool, Prompt, Sample, by_row, exit_fixed, sample_adaptively


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


def draw(
    engine,
    scorer,
    prompts: Iterable[Prompt],
    *,
    k: int,
    seed: int,
    step: int,
    progress: Callable[[int, Sample], None] | None = None,
) -> list[Pool]:
    """k responses per prompt: the sampler of training with one round and nothing to decide."""
    return sample_adaptively(
        engine,
        scorer,
        prompts,
        exit_rule=exit_fixed,
        n=k,
        round_size=k,
        max_rounds=1,
        seed=seed,
        step=step,
        purpose="eval",
        progress=progress,
    )


def summarise_eval(pools: list[Pool], k: int) -> dict[str, float]:
    """Means over prompts of the pools' Ave@k and Pass@1, 2, 4, ... up to k; of the sampled tokens, means over tokens.

    Entropy is the mean of -log p over the sampled tokens: unbiased, since each was drawn from its distribution.
    """
    samples = [sample for pool in pools for sample in pool.samples]
    n_tokens = sum(len(sample.tokens) for sample in samples)
    powers = [2**i for i in range(k.bit_length())]
    return {
        "eval/reward": sum(pool.mean for pool in pools) / len(pools),
        **{
            f"eval/pass@{power}": sum(pass_at_k(len(pool.samples), pool.n_correct, power) for pool in pools)
            / len(pools)
            for power in powers
        },
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
