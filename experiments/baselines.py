"""What Reinforce-Ada is compared with: passive filtering and two-stage allocation, as samplers for --sampler.

    torchrun train.py --sampler experiments.baselines:passive
    torchrun train.py --sampler experiments.baselines:two_stage --max_rounds 3

GRPO is ada.sampler.grpo. All of them return pools, from which the same `make_groups` makes the batch; whatever they
draw and throw away counts in the metrics like everything else.
"""

import heapq
import random
from dataclasses import replace
from math import sqrt

from ada.sampler import Pool, Prompt, SamplingConfig, by_prompt, exit_fixed, sample_adaptively, seed_of


def passive(
    engine, scorer, prompts: list[Prompt], config: SamplingConfig, *, step: int, ranks, train_prompts, progress=None
) -> list[Pool]:
    """Passive filtering, DAPO's "dynamic sampling" (arXiv 2503.14476): more prompts instead of more responses.

    One round of `group_size` for the batch. The prompts whose groups have zero variance are replaced by new ones, a
    wave of the batch's size at a time, until there are as many mixed pools as the batch has prompts, or `max_rounds`
    waves are spent. What the last wave brings beyond that, the trainer leaves out, at random. It makes no sense
    together with --keep_zero_variance.

    New prompts come in an order drawn for this step, none twice: so this needs no state that a restart would lose. If
    the data runs out, so do the waves. A wave ends when all ranks are through with it, since only all of them know how
    many of its pools are mixed.

    Returns:
        The pools that this rank drew in all waves, sorted by prompt_id.
    """
    taken = {prompt.prompt_id for prompt in prompts}
    others = [prompt for prompt in train_prompts if prompt.prompt_id not in taken]
    random.Random(seed_of("refill", config.seed, step)).shuffle(others)
    order = prompts + others
    config = replace(config, round_size=config.group_size)
    pools: list[Pool] = []
    n_mixed = 0
    for wave in range(config.max_rounds):
        chosen = order[wave * len(prompts) : (wave + 1) * len(prompts)]
        queue = ranks.share(chosen, f"train/{step}/wave {wave}")
        drawn = sample_adaptively(engine, scorer, queue, config, exit_rule=exit_fixed, step=step, progress=progress)
        pools += drawn
        n_mixed += len(ranks.gather([pool.prompt.prompt_id for pool in drawn if not pool.zero_variance]))
        if n_mixed >= len(prompts) or not chosen:
            break
    return sorted(pools, key=by_prompt)


def two_stage(
    engine, scorer, prompts: list[Prompt], config: SamplingConfig, *, step: int, ranks, train_prompts=(), progress=None
) -> list[Pool]:
    """GVM-RAFT's two stages (arXiv 2505.02391), in short: estimate each pass rate p, then spend by 1/sqrt(p).

    The pilot's responses, one round, estimate p and are thrown away: used for both, those that set the budget would
    bias the mean of the pool. The whole budget is `max_rounds` rounds a prompt, the pilot being one of them. The others
    are spread in multiples of n; no prompt gets fewer than n, or more than `max_rounds` rounds.

    A rank draws the second stage of the prompts whose pilot it drew, and so has both to report.

    Returns:
        This rank's pools, sorted by prompt_id, each with its pilot as `unused`.
    """
    n = config.group_size
    queue = ranks.share(prompts, f"train/{step}/pilot")
    context = dict(step=step, progress=progress)
    pilots = sample_adaptively(engine, scorer, queue, config, exit_rule=exit_fixed, purpose="pilot", **context)
    # One correct response and one incorrect one on top keep the estimate off 0 and 1 (Laplace's rule of succession).
    rates = {pool.prompt.prompt_id: (pool.n_correct + 1) / (len(pool.samples) + 2) for pool in pilots}
    rates = dict(sorted(ranks.gather(list(rates.items()))))
    most = config.round_size * config.max_rounds // n  # in groups of n
    total = len(rates) * config.round_size * (config.max_rounds - 1) // n
    shares = allocate([1 / sqrt(p) for p in rates.values()], total=total, least=1, most=most)
    budget = dict(zip(rates, shares, strict=True))

    def exit_spent(pool: Pool, n: int) -> bool:
        return pool.rounds == budget[pool.prompt.prompt_id]

    second = replace(config, round_size=n, max_rounds=most)
    mine = [pilot.prompt for pilot in pilots]
    pools = sample_adaptively(engine, scorer, mine, second, exit_rule=exit_spent, **context)
    for pool, pilot in zip(pools, pilots, strict=True):  # both sorted by prompt_id
        pool.unused = pilot.samples
    return pools


def allocate(weights: list[float], *, total: int, least: int, most: int) -> list[int]:
    """`total` units in proportion to the weights, as whole numbers from `least` to `most`.

    Each unit goes to whoever is furthest below its due, that is, has the largest weight per unit so far (counting
    half of the one at stake: Webster's method). Equal weights: the earlier one first.

    >>> allocate([3.0, 1.0], total=8, least=1, most=8)
    [6, 2]
    >>> allocate([9.0, 1.0, 1.0], total=8, least=1, most=4)
    [4, 2, 2]
    """
    units = [least] * len(weights)
    due = [(-weight / (least + 0.5), i) for i, weight in enumerate(weights) if least < most]
    heapq.heapify(due)
    for _ in range(total - least * len(weights)):
        if not due:
            break
        _, i = heapq.heappop(due)
        units[i] += 1
        if units[i] < most:
            heapq.heappush(due, (-weights[i] / (units[i] + 0.5), i))
    return units
