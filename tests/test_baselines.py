"""The baselines on a scripted engine, as in test_sampler.py, on one rank and on several that talk through a fake."""

import random
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_sampler import FakeEngine, FakeScorer, FakeStore, coin, fake_ranks, make_prompts

from ada.sampler import SamplingConfig, make_groups
from ada.support.metrics import summarise, without_tokens
from ada.support.ranks import Ranks
from experiments.baselines import allocate, passive, two_stage


def run_passive(respond, batch, prompts, *, engine=None, step=1, **options):
    config = SamplingConfig(**{"max_rounds": 3, **options})
    engine = engine or FakeEngine(respond)
    return passive(engine, FakeScorer(), batch, config, step=step, ranks=fake_ranks(), train_prompts=prompts)


def run_two_stage(respond, n_prompts, *, engine=None, **options):
    config = SamplingConfig(**{"max_rounds": 3, **options})
    engine = engine or FakeEngine(respond)
    return two_stage(engine, FakeScorer(), make_prompts(n_prompts), config, step=1, ranks=fake_ranks())


def only(ids):
    """A policy that is right every other time on these prompts, and always wrong on the others."""
    return lambda key, seed: ("right" if key[0] in ids and key[1] % 2 else "wrong", 1)


def ids_of(pools):
    return {pool.prompt.prompt_id for pool in pools}


# ----------------------------------------------------------------------------------------------------------------
# Passive filtering


def test_passive_refills_until_the_batch_is_full():
    """In waves of the batch's size. What has zero variance was paid for, too: it counts, but gives no group."""
    prompts = make_prompts(40)
    pools = run_passive(only(range(0, 40, 2)), prompts[:4], prompts, max_rounds=9)
    waves = len(pools) // 4
    assert 2 <= waves < 9 and len(pools) == 4 * waves and ids_of(pools) >= {0, 1, 2, 3}
    groups = make_groups(pools, SamplingConfig(), step=1)
    assert len(groups) == sum(not pool.zero_variance for pool in pools) >= 4
    assert ids_of(groups) <= set(range(0, 40, 2))
    assert summarise(pools, groups, 4)["sampling/samples"] == 16 * waves


def test_passive_draws_no_wave_too_many():
    """Full after the first; and after the second where only that one filled it."""
    prompts = make_prompts(40)
    assert len(run_passive(only(range(40)), prompts[:4], prompts)) == 4
    assert len(run_passive(only(set(range(40)) - {2}), prompts[:4], prompts)) == 8


@pytest.mark.parametrize(("n_prompts", "expected"), [(40, 12), (10, 10), (4, 4)])
def test_passive_stops_at_the_cap_and_at_the_end_of_the_data(n_prompts, expected):
    """All wrong: three waves of 4, or whatever there is, and no prompt twice; the step has no group, not an error."""
    prompts = make_prompts(n_prompts)
    pools = run_passive(coin(0), prompts[:4], prompts)
    assert len(pools) == len(ids_of(pools)) == expected
    assert make_groups(pools, SamplingConfig(), step=1) == []


def test_passive_needs_no_state():
    """A resumed run must refill with what the uninterrupted one did; another step with something else."""
    prompts = make_prompts(40)

    def ids(**changes):
        return ids_of(run_passive(coin(0), prompts[:4], prompts, **changes))

    assert ids() == ids()
    assert ids() != ids(step=2) and ids() != ids(seed=1)


# ----------------------------------------------------------------------------------------------------------------
# Two stages


def test_two_stage_spends_exactly_its_budget():
    """6 prompts, 8 responses a round, 3 rounds: 144 responses, whatever the pass rates are."""
    pools = run_two_stage(coin(0.3), 6)
    assert summarise(pools, [], 4)["sampling/samples"] == 144
    assert [len(pool.unused) for pool in pools] == [8] * 6
    assert all(4 <= len(pool.samples) <= 24 and len(pool.samples) % 4 == 0 for pool in pools)
    assert all(pool.resolved for pool in pools)


def test_two_stage_spends_by_the_root_of_the_pass_rate():
    """Right half of the time against never, in a pilot of 8: 5/10 and 1/10, so 1 to sqrt(5), 10 to 22 of 32."""
    pools = run_two_stage(only(range(3)), 6, group_size=2)
    assert [len(pool.samples) for pool in pools] == [10, 10, 10, 22, 22, 22]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [8, 24]),  # by the roots of 9/10 and 1/10; 24 is the cap, too
        ({"group_size": 16, "round_size": 16, "max_rounds": 2}, [16, 16]),  # nobody gets less than a group
    ],
)
def test_two_stage_keeps_its_bounds(changes, expected):
    pools = run_two_stage(lambda key, seed: ("wrong" if key[0] else "right", 1), 2, **changes)
    assert [len(pool.samples) for pool in pools] == expected


def test_the_pilot_is_thrown_away_but_counted():
    """Kept, it would bias the pool's mean; drawn from the same seeds, it would be kept after all."""
    engine = FakeEngine(lambda key, seed: (str(seed), key[1] + 1))
    pools = run_two_stage(None, 3, engine=engine)
    seeds = [seed for *_, seed in engine.requests]
    assert len(set(seeds)) == len(seeds) == 72
    for pool in pools:
        assert {s.text for s in pool.unused}.isdisjoint(s.text for s in pool.samples)
    metrics = summarise(pools, [], 4)
    assert metrics["sampling/samples"] == 72
    assert metrics["sampling/tokens"] == sum(len(s.tokens) for pool in pools for s in pool.unused + pool.samples)
    assert summarise([without_tokens(pool) for pool in pools], [], 4) == metrics


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


def test_allocate_gives_what_it_can():
    """More than the bounds allow is nobody's."""
    assert allocate([1.0, 5.0], total=100, least=1, most=3) == [3, 3]


# ----------------------------------------------------------------------------------------------------------------
# Ranks


class Together:
    """Ranks that are threads: `gather` is a meeting, as torch.distributed's is."""

    def __init__(self, world_size):
        self.lists = [None] * world_size
        self.barrier = threading.Barrier(world_size, timeout=20)
        self.lock = threading.Lock()
        self.store = FakeStore()


class RankOf(Ranks):
    """One of them, which is its own store."""

    def __init__(self, together, number):
        super().__init__(number, len(together.lists), None, store=self)
        self.together = together

    def add(self, name, amount):
        time.sleep(1e-3)  # or the first rank would have the whole queue before the next one has begun
        with self.together.lock:
            return self.together.store.add(name, amount)

    def gather(self, items, key=None):
        self.together.lists[self.rank] = items
        self.together.barrier.wait()
        everybody = [item for items in self.together.lists for item in items]
        self.together.barrier.wait()
        return everybody


def run_on(world_size, function):
    """Everybody's pools in one list, sorted by prompt; function(ranks) runs on each rank."""
    together, results, failures = Together(world_size), [None] * world_size, []

    def work(number):
        try:
            results[number] = function(RankOf(together, number))
        except Exception as error:
            failures.append(error)
            together.barrier.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert all(results), "a rank had nothing to do"
    return sorted((pool for pools in results for pool in pools), key=lambda pool: pool.prompt.prompt_id)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("sampler", [passive, two_stage])
def test_ranks_draw_what_one_rank_draws(sampler, world_size):
    """Ranks must agree on when the waves end and on the budget, or the results depend on the number of GPUs."""
    prompts = make_prompts(40)
    batch = prompts[:8] if sampler is passive else prompts
    # 40 prompts share 100 groups of 4: some get one more than others that were as often right
    config = SamplingConfig(round_size=5, max_rounds=3)

    def run(ranks):
        rng = random.Random(ranks.rank)
        engine = FakeEngine(coin(0.1), capacity=4, steps=lambda key: rng.randint(1, 9))
        return sampler(engine, FakeScorer(rng), batch, config, step=1, ranks=ranks, train_prompts=prompts)

    alone = run(fake_ranks())
    assert run_on(world_size, run) == alone
    assert len(alone) > len(batch) or any(pool.unused for pool in alone)
