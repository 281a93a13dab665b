"""Evaluation on held-out prompts: Ave@k and the unbiased Pass@k (Table 1, Fig. 2 of the paper).

Training evaluates with its own engine and graders; scripts/evaluate.py makes the table of benchmarks.
"""

import time
from collections.abc import Callable
from math import comb

from ada.sampler import Pool, Prompt, SamplingConfig, by_prompt, exit_fixed, sample_adaptively
from ada.support.metrics import SamplingBar, grading_failures, without_tokens
from ada.support.ranks import Ranks


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
