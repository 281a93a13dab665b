"""What Reinforce-Ada is compared with, in its terms: passive filtering and two-stage allocation.

GRPO is not here: it is `sample_adaptively` with one round and `exit_fixed`. All of them hand over pools, from which the
same `make_groups` makes the batch; whatever they draw and throw away counts in the metrics like everything else.
`settings` are further arguments of `sample_adaptively`.
"""

import heapq
import random
from math import sqrt

from ada.data import shared_queue
from ada.sampler import Pool, Prompt, by_row, exit_fixed, sample_adaptively, seed_of


def passive(
    engine,
    scorer,
    batch: list[Prompt],
    everything: list[Prompt],
    ranks,
    *,
    max_rounds: int,
    seed: int,
    step: int,
    **settings,
) -> list[Pool]:
    """Passive filtering, DAPO's "dynamic sampling" (arXiv 2503.14476): more prompts instead of more responses.

    One round for the batch. The prompts that turn out uniform are replaced by new ones, a wave of the batch's size at
    a time, until there are as many mixed pools as the batch has prompts, or `max_rounds` waves are spent. The first
    ones in the order of the waves are kept; those beyond are marked as surplus. (In the order of their rows the end
    of the data would be seen less.)

    New prompts come in an order drawn for this step, none twice: so this needs no state that a restart would lose.

    Args:
        batch: the first wave, as every other sampler would get it.
        everything: all prompts of the data, the batch among them. If they run out, so do the waves.
        ranks: a wave ends when all ranks are through with it, since only all of them know how many are mixed.

    Returns:
        The pools that this rank drew in all waves, uniform ones among them, sorted by row.
    """
    taken = {prompt.row for prompt in batch}
    others = [prompt for prompt in everything if prompt.row not in taken]
    random.Random(seed_of("refill", seed, step)).shuffle(others)
    order = batch + others
    waves = [order[i : i + len(batch)] for i in range(0, len(order), len(batch))]
    my_pools: list[Pool] = []
    n_mixed = 0
    for wave, prompts in enumerate(waves[:max_rounds]):
        queue = shared_queue(prompts, ranks.store, f"train/{step}/wave {wave}")
        drawn = sample_adaptively(
            engine, scorer, queue, exit_rule=exit_fixed, max_rounds=1, seed=seed, step=step, **settings
        )
        mixed = set(ranks.gather([pool.prompt.row for pool in drawn if not pool.uniform]))
        surplus = [prompt.row for prompt in prompts if prompt.row in mixed][len(batch) - n_mixed :]
        for pool in drawn:
            pool.surplus = pool.prompt.row in surplus
        my_pools += drawn
        n_mixed += len(mixed)
        if n_mixed >= len(batch):
            break
    return sorted(my_pools, key=by_row)


def two_stage(
    engine, scorer, prompts: list[Prompt], ranks, *, n: int, round_size: int, max_rounds: int, step: int, **settings
) -> list[Pool]:
    """GVM-RAFT's two stages (arXiv 2505.02391), in short: estimate each pass rate p, then spend by 1/sqrt(p).

    The pilot's responses estimate p and are thrown away: used for both, those that set the budget would bias the mean
    of the pool. The whole budget is `max_rounds` rounds a prompt, the pilot being one of them. The others are spread
    in multiples of n; no prompt gets fewer than n, or more than `max_rounds` rounds.

    Args:
        ranks: a rank draws the second stage of the prompts whose pilot it drew, and so has both to report.

    Returns:
        This rank's pools, sorted by row, each with its pilot beside it.
    """
    settings |= {"n": n, "step": step}
    queue = shared_queue(prompts, ranks.store, f"train/{step}/pilot")
    pilots = sample_adaptively(
        engine, scorer, queue, exit_rule=exit_fixed, round_size=round_size, max_rounds=1, purpose="pilot", **settings
    )
    # One right response and one wrong one on top keep the estimate off 0 and 1 (Laplace's rule of succession).
    rates = {pool.prompt.row: (pool.n_correct + 1) / (len(pool.samples) + 2) for pool in pilots}
    rates = dict(sorted(ranks.gather(list(rates.items()))))
    total, most = len(rates) * round_size * (max_rounds - 1) // n, round_size * max_rounds // n  # in groups of n
    shares = allocate([1 / sqrt(p) for p in rates.values()], total=total, least=1, most=most)
    budget = dict(zip(rates, shares, strict=True))

    def exit_spent(pool: Pool, n: int) -> bool:
        return pool.rounds == budget[pool.prompt.row]

    mine = [pilot.prompt for pilot in pilots]
    my_pools = sample_adaptively(engine, scorer, mine, exit_rule=exit_spent, round_size=n, max_rounds=most, **settings)
    for pool, pilot in zip(my_pools, pilots, strict=True):  # both sorted by row
        pool.pilot = pilot.samples
    return my_pools


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
