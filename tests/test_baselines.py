"""The baselines on a scripted engine, as in test_sampler.py, on one rank and on several that talk through a fake."""

import random
import threading
from collections import Counter
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_sampler import FakeEngine, FakeScorer, FakeStore, coin, make_prompts

from ada.baselines import allocate, passive, two_stage
from ada.sampler import make_groups, sample_adaptively, summarise


class OneRank:
    """What the baselines need of ada.trainer.Ranks."""

    def __init__(self):
        self.store = FakeStore()

    def gather(self, items):
        return items


class Together:
    """Ranks that are threads: `gather` is a meeting, as torch.distributed's is."""

    def __init__(self, world_size):
        self.lists = [None] * world_size
        self.barrier = threading.Barrier(world_size, timeout=20)
        self.lock = threading.Lock()
        self.counts = Counter()

    def rank(self, number):
        together = self

        class Rank:
            store = property(lambda self: self)

            def add(self, name, amount):
                with together.lock:
                    together.counts[name] += amount
                    return together.counts[name]

            def gather(self, items):
                together.lists[number] = items
                together.barrier.wait()
                everybody = [item for items in together.lists for item in items]
                together.barrier.wait()
                return everybody

        return Rank()


def run_on(world_size, function, make_draw):
    """Everybody's pools in one list, sorted by row; `function(draw, ranks)` runs on each rank."""
    together, results, failures = Together(world_size), [None] * world_size, []

    def work(number):
        try:
            results[number] = function(make_draw(number), together.rank(number))
        except Exception as error:
            failures.append(error)
            together.barrier.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    return sorted((pool for pools in results for pool in pools), key=lambda pool: pool.prompt.row)


def drawer(respond, *, rng=None, **options):
    """What train.py hands to a baseline, on a scripted engine; with `rng` responses and verdicts come in any order."""
    settings = {"n": 4, "round_size": 4, "max_rounds": 3, "seed": 0, "step": 1} | options
    engine = FakeEngine(respond, capacity=32, steps=(lambda key: rng.randint(1, 9)) if rng else None)
    return partial(sample_adaptively, engine, FakeScorer(rng), **settings)


def only(rows):
    """A policy that is right every other time on these prompts, and always wrong on the others."""
    return lambda key, seed: ("right" if key[0] in rows and key[1] % 2 else "wrong", 1)


# ----------------------------------------------------------------------------------------------------------------
# Passive filtering


def test_passive_refills_until_the_batch_is_full():
    """Of each wave of 4 the prompts with even rows are mixed: two waves are needed, and none more is drawn."""
    prompts = make_prompts(40)
    draw = drawer(only(range(0, 40, 2)), max_rounds=5)
    batch = prompts[:4]
    pools = passive(draw, batch, prompts, OneRank())
    assert {pool.prompt.row for pool in pools} >= {0, 1, 2, 3}
    assert len(pools) % 4 == 0 and all(len(pool.samples) == 4 for pool in pools)
    groups = make_groups(pools, n=4, seed=0, step=1)
    assert len(groups) == 4
    mixed = [pool for pool in pools if not pool.uniform]
    assert len(mixed) - sum(pool.surplus for pool in pools) == 4
    assert summarise(pools, groups, 4)["sampling/samples"] == 4 * len(pools)  # what is thrown away was paid for


def test_passive_keeps_the_first_in_the_order_of_the_waves():
    """In the order of rows the data's last prompts would be trained on less than its first."""
    prompts = make_prompts(40)
    batch = [prompts[row] for row in (39, 2, 30, 31)]
    draw = drawer(only(range(40)))
    kept = {pool.prompt.row for pool in passive(draw, batch, prompts, OneRank()) if not pool.surplus}
    assert kept == {39, 2, 30, 31}  # all mixed: no second wave

    draw = drawer(only(set(range(40)) - {39}))
    pools = passive(draw, batch, prompts, OneRank())
    second_wave = [row for row in dict.fromkeys(key[0] for key, *_ in draw.args[0].requests)][4:]
    assert len(second_wave) == 4
    kept = {pool.prompt.row for pool in pools if not pool.surplus and not pool.uniform}
    assert kept == {2, 30, 31, second_wave[0]}
    assert {pool.prompt.row for pool in pools if pool.surplus} == set(second_wave[1:])


@pytest.mark.parametrize(("n_prompts", "expected"), [(40, 12), (10, 10), (4, 4)])
def test_passive_stops_at_the_cap_and_at_the_end_of_the_data(n_prompts, expected):
    """All wrong: three waves of 4, or whatever there is, and no prompt twice; the step has no group, not an error."""
    prompts = make_prompts(n_prompts)
    pools = passive(drawer(coin(0)), prompts[:4], prompts, OneRank())
    assert len(pools) == len({pool.prompt.row for pool in pools}) == expected
    assert make_groups(pools, n=4, seed=0, step=1) == []


def test_passive_needs_no_state():
    """A resumed run must refill with what the uninterrupted one did; another step with something else."""
    prompts = make_prompts(40)

    def rows(**options):
        return [pool.prompt.row for pool in passive(drawer(coin(0), **options), prompts[:4], prompts, OneRank())]

    assert rows() == rows()
    assert rows() != rows(step=2) and rows() != rows(seed=1)


# ----------------------------------------------------------------------------------------------------------------
# Two stages


def test_two_stage_spends_exactly_its_budget():
    """6 prompts, 8 responses a round, 3 rounds: 144 responses, whatever the pass rates are."""
    pools = two_stage(drawer(coin(0.3), round_size=8), make_prompts(6), OneRank())
    assert summarise(pools, [], 4)["sampling/samples"] == 144
    assert [len(pool.pilot) for pool in pools] == [8] * 6
    assert all(4 <= len(pool.samples) <= 24 and len(pool.samples) % 4 == 0 for pool in pools)
    assert all(pool.resolved for pool in pools)


def test_two_stage_gives_more_to_hard_prompts():
    """Never right against always right: sqrt(9) = 3 times as many, by the rule of succession over 8."""
    pools = two_stage(
        drawer(lambda key, seed: ("right" if key[0] < 3 else "wrong", 1), round_size=8), make_prompts(6), OneRank()
    )
    assert [len(pool.samples) for pool in pools] == [8, 8, 8, 24, 24, 24]


def test_the_pilot_is_thrown_away_but_counted():
    """Kept, it would bias the pool's mean; drawn from the same seeds, it would be kept after all."""
    draw = drawer(lambda key, seed: (str(seed), key[1] + 1), round_size=8)
    pools = two_stage(draw, make_prompts(3), OneRank())
    seeds = [seed for *_, seed in draw.args[0].requests]
    assert len(set(seeds)) == len(seeds) == 72
    for pool in pools:
        assert {s.text for s in pool.pilot}.isdisjoint(s.text for s in pool.samples)
    metrics = summarise(pools, [], 4)
    assert metrics["sampling/samples"] == 72
    assert metrics["sampling/tokens"] == sum(len(s.tokens) for pool in pools for s in pool.pilot + pool.samples)
    assert summarise([pool.without_tokens() for pool in pools], [], 4) == metrics


@given(
    weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=20),
    least=st.integers(0, 4),
    spread=st.integers(0, 9),
    share=st.floats(0, 1),
)
def test_allocate(weights, least, spread, share):
    """All is given out, within bounds, and moving a unit would not bring anybody nearer to proportion."""
    most = least + spread
    total = round(len(weights) * (least + share * spread))
    units = allocate(weights, total=total, least=least, most=most)
    assert sum(units) == total and all(least <= u <= most for u in units)
    givers = [weight / (u - 0.5) for weight, u in zip(weights, units, strict=True) if u > least]
    takers = [weight / (u + 0.5) for weight, u in zip(weights, units, strict=True) if u < most]
    assert not givers or not takers or max(takers) <= min(givers) * (1 + 1e-12)


def test_allocate_is_in_proportion_where_no_bound_is_in_the_way():
    assert allocate([1, 2, 3, 4], total=100, least=0, most=100) == [10, 20, 30, 40]


def test_allocate_gives_what_it_can():
    """More than the bounds allow is nobody's."""
    assert allocate([1.0, 5.0], total=100, least=1, most=3) == [3, 3]


# ----------------------------------------------------------------------------------------------------------------
# Ranks


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("sampler", ["passive", "two_stage"])
def test_ranks_draw_what_one_rank_draws(sampler, world_size):
    """Ranks must agree on when the waves end and on the budget, or the results depend on the number of GPUs."""
    prompts = make_prompts(40)

    def run(draw, ranks):
        return passive(draw, prompts[:8], prompts, ranks) if sampler == "passive" else two_stage(draw, prompts, ranks)

    alone = run(drawer(coin(0.1)), OneRank())
    apart = run_on(world_size, run, lambda number: drawer(coin(0.1), rng=random.Random(number)))
    assert apart == alone
    assert any(pool.surplus or pool.pilot for pool in alone)
