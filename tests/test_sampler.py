"""The method on a scripted engine: no model, no vLLM, so whole runs take milliseconds and every order can be tried.

Statistical tests have fixed seeds and allow four standard errors of their own sample. So they always pass or always
fail, and what they would catch is far outside (the tests say what that is).
"""

import math
import os
import random
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ada.data import shared_queue
from ada.sampler import (
    Pool,
    Prompt,
    Sample,
    advantages,
    downsample,
    exit_balance,
    exit_fixed,
    exit_pos,
    make_groups,
    sample_adaptively,
    seed_of,
    summarise,
)
from experiments.theory import balance_limit, exact_weight, final_pools

# The exit rules once more, on counts: (right, wrong, n) -> may the prompt stop?
RULES = {
    exit_fixed: lambda right, wrong, n: True,
    exit_pos: lambda right, wrong, n: right > 0,
    exit_balance: lambda right, wrong, n: 2 * right >= n - n % 2 and 2 * wrong >= n,
}

# ----------------------------------------------------------------------------------------------------------------
# The fakes


class FakeEngine:
    """Each poll is a step: every response gets one token further, and those that are complete come back.

    respond(key, seed) -> (text, number of tokens) is the script; steps(key), if given, says how many steps a response
    takes instead of one a token, so that the order of completion has nothing to do with the contents.
    """

    def __init__(self, respond, *, capacity=256, steps=None):
        self.respond, self.capacity, self.steps = respond, capacity, steps
        self.requests = []  # (key, tokens, seed) of all that was ever submitted
        self.in_flight = {}  # key -> [steps left, text, number of tokens]

    def submit(self, key, tokens, seed):
        text, n_tokens = self.respond(key, seed)
        self.requests.append((key, tokens, seed))
        self.in_flight[key] = [self.steps(key) if self.steps else n_tokens, text, n_tokens]

    def poll(self):
        assert self.in_flight, "an idle engine was polled"
        for response in self.in_flight.values():
            response[0] -= 1
        done = [(key, text, n_tokens) for key, (left, text, n_tokens) in self.in_flight.items() if left == 0]
        for key, *_ in done:
            del self.in_flight[key]
        return [(key, [key[1]] * n, [-0.5] * n, text, n >= 20) for key, text, n in done]


class FakeScorer:
    """Right is what is in the gold, a set of texts. With an rng it hands verdicts out late and in any order."""

    def __init__(self, rng=None):
        self.rng = rng
        self.waiting = []
        self.timeouts = []  # of each poll

    def submit(self, key, response, gold):
        self.waiting.append((key, response in gold))

    def poll(self, timeout):
        self.timeouts.append(timeout)
        n_ready = len(self.waiting)
        if self.rng:
            self.rng.shuffle(self.waiting)
            n_ready = self.rng.randint(min(n_ready, 1) if timeout is None else 0, n_ready)
        ready, self.waiting = self.waiting[:n_ready], self.waiting[n_ready:]
        return ready


def coin(p):
    """A policy that is right with probability p, on one token. Seeds are 63 bits, evenly spread."""
    return lambda key, seed: ("right" if seed < p * 2**63 else "wrong", 1)


def make_prompts(n, gold=("right",)):
    return [Prompt(row, f"question {row}", [row], set(gold)) for row in range(n)]


def sample(prompts, respond=None, *, engine=None, scorer=None, **options):
    """sample_adaptively with the paper's settings, unless told otherwise."""
    usual = {"exit_rule": exit_balance, "n": 4, "round_size": 8, "max_rounds": 4, "seed": 0, "step": 1}
    return sample_adaptively(engine or FakeEngine(respond), scorer or FakeScorer(), prompts, **(usual | options))


def pool_of(verdicts, *, row=0, rounds=1, resolved=True):
    """A pool from a string such as "1100 0000": 1 is right, spaces don't count. Sample i has i + 1 tokens."""
    verdicts = verdicts.replace(" ", "")
    samples = [
        Sample(row, i, [7] * (i + 1), [-0.1] * (i + 1), f"text {i}", truncated=i == 0, correct=verdict == "1")
        for i, verdict in enumerate(verdicts)
    ]
    return Pool(Prompt(row, "question", [1, 2], "gold"), samples, rounds, resolved)


def mean_and_error(values):
    """Mean and its standard error."""
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def assert_mean(values, expected):
    mean, error = mean_and_error(values)
    assert abs(mean - expected) < 4 * error, f"{mean:.4f} is not {expected:.4f}; standard error {error:.4f}"


# ----------------------------------------------------------------------------------------------------------------
# Exit rules and downsampling


def test_exit_rules_on_every_pool_up_to_32():
    """Off by one here, and prompts stop with a lopsided group or draw for nothing; odd n rounds the right ones down."""
    for right in range(33):
        for wrong in range(33):
            pool = pool_of("1" * right + "0" * wrong)
            for n in range(1, 33):
                for rule, on_counts in RULES.items():
                    assert rule(pool, n) == on_counts(right, wrong, n), (rule.__name__, right, wrong, n)


@pytest.mark.parametrize(
    "n, right, wrong, may_stop",
    [(4, 2, 2, True), (4, 1, 3, False), (4, 3, 1, False), (5, 2, 3, True), (5, 3, 2, False), (5, 1, 9, False)],
)
def test_exit_balance_at_its_edges(n, right, wrong, may_stop):
    """RULES could share a mistake with the code; these cases are written down one by one."""
    assert exit_balance(pool_of("1" * right + "0" * wrong), n) is may_stop


def test_downsample_every_pool_up_to_32():
    """A group must be as near to balanced as its pool allows, no larger than n, and have no response twice."""
    rng = random.Random(0)
    for right in range(33):
        for wrong in range(33):
            pool = pool_of("1" * right + "0" * wrong)
            for n in range(1, 33):
                kept = downsample(pool, n, rng)
                size = min(n, right + wrong)
                possible = range(max(0, size - wrong), min(right, size) + 1)
                assert sum(s.correct for s in kept) == min(possible, key=lambda k: abs(k - n // 2)), (right, wrong, n)
                indices = [s.index for s in kept]
                assert len(indices) == size and indices == sorted(set(indices))
                assert all(pool.samples[s.index] is s for s in kept)


def test_a_resolved_pool_gives_a_balanced_group():
    """Exit rule and downsampling must agree on what balanced means, for odd n too."""
    for n in range(2, 12):
        for right in range(13):
            for wrong in range(13):
                pool = pool_of("1" * right + "0" * wrong)
                kept = Counter(s.correct for s in downsample(pool, n, random.Random(n)))
                assert exit_balance(pool, n) == (kept[True] == n // 2 and kept[False] == n - n // 2)


def test_each_response_of_a_side_has_the_same_chance():
    """Keeping the first ones of a side would drop what later rounds drew."""
    pool, draws = pool_of("1000 1001 0000 0010"), 4000  # 4 right, 12 wrong
    times_kept = Counter(s.index for i in range(draws) for s in downsample(pool, 4, random.Random(i)))
    for s in pool.samples:
        chance = 2 / 4 if s.correct else 2 / 12
        error = math.sqrt(chance * (1 - chance) / draws)
        assert abs(times_kept[s.index] / draws - chance) < 4 * error, s.index


def test_what_is_kept_depends_on_seed_step_and_row_alone():
    """A shared stream would make it depend on which other prompts the rank has, and on resuming."""
    verdicts = "1010" * 8
    alone = make_groups([pool_of(verdicts, row=5)], n=4, seed=0, step=3)[0]
    among_others = make_groups([pool_of(verdicts, row=row) for row in range(8)], n=4, seed=0, step=3)
    assert among_others[5] == alone

    def indices(**where):
        row = where.pop("row", 5)
        group = make_groups([pool_of(verdicts, row=row)], n=4, **({"seed": 0, "step": 3} | where))[0]
        return tuple(s.index for s in group.samples)

    assert len({indices(), indices(row=6), indices(step=4), indices(seed=1)}) == 4


# ----------------------------------------------------------------------------------------------------------------
# Adaptive sampling


def by_the_book(prompts, p, *, exit_rule, n, round_size, max_rounds, seed, step):
    """Algorithm 1 prompt by prompt, without an engine: row -> (verdicts, resolved)."""
    pools = {}
    for prompt in prompts:
        verdicts, resolved = [], False
        while not resolved and len(verdicts) < round_size * max_rounds:
            for index in range(len(verdicts), len(verdicts) + round_size):
                verdicts.append(seed_of("train", seed, step, prompt.row, index) < p * 2**63)
            resolved = RULES[exit_rule](sum(verdicts), len(verdicts) - sum(verdicts), n)
        pools[prompt.row] = (verdicts, resolved)
    return pools


class Spy:
    """An exit rule that notes what it is asked."""

    def __init__(self, rule):
        self.rule, self.asked = rule, []

    def __call__(self, pool, n):
        self.asked.append((pool.prompt.row, pool.rounds, [s.index for s in pool.samples]))
        return self.rule(pool, n)


ANY_RUN = {
    "rng": st.randoms(use_true_random=True),  # of the order of arrival, grading and prompts
    "n_prompts": st.integers(0, 6),
    "capacity": st.integers(1, 40),
    "p": st.sampled_from([0.0, 0.15, 0.5, 1.0]),
    "options": st.fixed_dictionaries(
        {
            "exit_rule": st.sampled_from(list(RULES)),
            "n": st.integers(1, 9),
            "round_size": st.integers(1, 9),
            "max_rounds": st.integers(1, 4),
            "seed": st.integers(0, 3),
            "step": st.integers(0, 3),
        }
    ),
}


@given(**ANY_RUN)
@settings(max_examples=150, deadline=None)
def test_order_never_decides(rng, n_prompts, capacity, p, options):
    """Whatever order responses, verdicts and prompts come in, the pools are those of Algorithm 1, in row order."""
    prompts = rng.sample(make_prompts(n_prompts), n_prompts)
    engine = FakeEngine(coin(p), capacity=capacity, steps=lambda key: rng.randint(1, 9))
    pools = sample(iter(prompts), engine=engine, scorer=FakeScorer(rng), **options)

    assert [pool.prompt.row for pool in pools] == list(range(n_prompts))
    book = by_the_book(prompts, p, **options)
    for pool in pools:
        verdicts, resolved = book[pool.prompt.row]
        assert [s.correct for s in pool.samples] == verdicts
        assert [(s.row, s.index) for s in pool.samples] == [(pool.prompt.row, i) for i in range(len(verdicts))]
        assert pool.resolved == resolved
    assert pools == sample(make_prompts(n_prompts), coin(p), **options)  # texts, tokens, log-probs: everything
    assert not engine.in_flight


@given(**ANY_RUN)
@settings(max_examples=100, deadline=None)
def test_nobody_is_asked_in_the_middle_of_a_round(rng, n_prompts, capacity, p, options):
    """Asked at each arrival, a rule would let a prompt stop on its short responses, which arrive first."""
    spy = Spy(options["exit_rule"])
    engine = FakeEngine(coin(p), capacity=capacity, steps=lambda key: rng.randint(1, 9))
    pools = sample(make_prompts(n_prompts), engine=engine, scorer=FakeScorer(rng), **(options | {"exit_rule": spy}))

    once_a_round = [(pool.prompt.row, t) for pool in pools for t in range(1, pool.rounds + 1)]
    assert sorted((row, t) for row, t, _ in spy.asked) == once_a_round
    for _, t, indices in spy.asked:
        assert indices == list(range(t * options["round_size"]))  # the whole round, in order of submission


@pytest.mark.parametrize("round_size, max_rounds", [(1, 1), (8, 1), (1, 5), (8, 4)])
def test_caps_hold(round_size, max_rounds):
    """A prompt that can't be solved would otherwise be sampled for ever."""
    engine = FakeEngine(coin(0))
    caps = {"round_size": round_size, "max_rounds": max_rounds}
    pools = sample(make_prompts(3), engine=engine, n=1, exit_rule=exit_pos, **caps)
    assert len(engine.requests) == 3 * round_size * max_rounds
    for pool in pools:
        assert (len(pool.samples), pool.rounds, pool.resolved) == (round_size * max_rounds, max_rounds, False)


def test_a_prompt_that_may_stop_stops():
    """Sampling on would cost what the method promises to save, and count as unresolved."""
    pools = sample(make_prompts(3), coin(1), exit_rule=exit_pos)
    assert [(len(pool.samples), pool.rounds, pool.resolved) for pool in pools] == [(8, 1, True)] * 3


def test_a_rule_that_holds_in_the_last_round_counts_as_resolved():
    """Fig. 5 counts prompts that ran out of rounds; one that made it in the last is none of them."""

    def right_in_the_last_round(key, seed):
        return ("right" if key[1] == 31 else "wrong"), 1

    pool = sample(make_prompts(1), right_in_the_last_round, exit_rule=exit_pos)[0]
    assert (pool.rounds, pool.resolved) == (4, True)


@given(rng=st.randoms(use_true_random=True), capacity=st.integers(1, 40))
@settings(max_examples=50, deadline=None)
def test_prompts_are_pulled_only_while_the_engine_has_room(rng, capacity):
    """With a queue shared by ranks, pulling ahead would hand one rank prompts that another could have begun with."""
    engine = FakeEngine(coin(0.1), capacity=capacity, steps=lambda key: rng.randint(1, 9))
    left = make_prompts(12)

    def queue():
        while left:
            assert len(engine.in_flight) < capacity
            yield left.pop()

    def poll(poll=engine.poll):
        assert len(engine.in_flight) >= capacity or not left, "the engine idles while there are prompts"
        return poll()

    engine.poll = poll
    assert len(sample(queue(), engine=engine, scorer=FakeScorer(rng))) == 12


def test_verdicts_are_waited_for_only_when_nothing_generates():
    """Waiting for a grader while responses are in flight would stop the engine, which only works when polled."""
    engine, scorer = FakeEngine(coin(0.1), capacity=8, steps=lambda key: 1 + key[1] % 5), FakeScorer(random.Random(0))
    busy, poll = [], scorer.poll

    def watched(timeout):
        busy.append(bool(engine.in_flight))
        return poll(timeout)

    scorer.poll = watched
    sample(make_prompts(10), engine=engine, scorer=scorer)
    assert scorer.timeouts == [0 if generating else None for generating in busy]
    assert None in scorer.timeouts


def test_a_prompt_does_not_wait_for_the_others():
    """With a barrier the engine would idle until the slowest response of all prompts' rounds is in."""
    slow_row = {0: 100}
    engine = FakeEngine(coin(0), steps=lambda key: slow_row.get(key[0], 1))
    order = []
    sample(make_prompts(2), engine=engine, progress=lambda active, s: order.append(s.row))
    assert order == [1] * 32 + [0] * 32


def test_progress_sees_every_graded_response():
    """The bar of a long sampling phase is the only sign of life; its count of active prompts has to end at one."""
    seen = []
    pools = sample(make_prompts(5), coin(0.3), progress=lambda active, s: seen.append((active, s)))
    assert sorted((s.row, s.index) for _, s in seen) == [(s.row, s.index) for pool in pools for s in pool.samples]
    assert (seen[0][0], seen[-1][0]) == (5, 1)


def test_equal_text_stays_two_prompts():
    """Keyed by text, two rows would share a pool and one of them be graded against the other's gold."""
    twins = [Prompt(0, "same", [1], {"right"}), Prompt(1, "same", [1], {"something else"})]
    pools = sample(twins, coin(1), exit_rule=exit_pos)
    assert [(pool.n_correct, pool.n_wrong) for pool in pools] == [(8, 0), (0, 32)]


def test_a_duplicate_row_is_refused():
    """Its responses would overwrite the other one's."""
    with pytest.raises(ValueError, match="row 1 occurs twice"):
        sample([*make_prompts(3), make_prompts(2)[1]], coin(0.3))


def test_short_responses_are_not_favoured():
    """Half of the responses are short and come back first; half of what is kept must be short, not nearly all.

    Keeping the first to arrive, and asking a rule before the round is in, both fail this.
    """

    def respond(key, seed):
        return coin(0.4)(key, seed)[0], random.Random(seed).choice([1, 19])

    pools = sample(make_prompts(600), respond)
    assert_mean([len(s.tokens) == 1 for pool in pools for s in pool.samples], 0.5)
    groups = make_groups(pools, n=4, seed=0, step=1)
    assert_mean([len(s.tokens) == 1 for group in groups for s in group.samples], 0.5)


# ----------------------------------------------------------------------------------------------------------------
# Groups and advantages


def test_a_uniform_pool_gives_no_group():
    """Its advantages are all zero; in the update it would only dilute the token mean."""
    pools = [pool_of("0" * 8, row=0), pool_of("01" * 4, row=1), pool_of("1" * 8, row=2)]
    assert [group.prompt.row for group in make_groups(pools, n=4, seed=0, step=0)] == [1]
    kept = make_groups(pools, n=4, seed=0, step=0, keep_uniform=True)
    assert [group.prompt.row for group in kept] == [0, 1, 2]
    for group in (kept[0], kept[2]):
        assert len(group.samples) == 4 and group.advantages == [0.0] * 4


def test_a_pool_is_uniform_only_if_all_agree():
    """One dissenter among many is what adaptive sampling is looking for."""
    assert [pool_of(v).uniform for v in ("1", "0", "111", "000", "110", "00000001")] == [True] * 4 + [False] * 2


ROOT_3 = math.sqrt(3)


@pytest.mark.parametrize(
    "pool, kept, options, expected",
    [
        # 2 right of 8, of which 2 right and 2 wrong are kept
        ("11000000", [0, 1, 2, 3], {}, [0.75, 0.75, -0.25, -0.25]),
        ("11000000", [0, 1, 2, 3], {"baseline": "group"}, [0.5, 0.5, -0.5, -0.5]),
        ("11000000", [0, 1, 2, 3], {"normalize_std": True}, [ROOT_3, ROOT_3, -1 / ROOT_3, -1 / ROOT_3]),
        ("11000000", [0, 1, 2, 3], {"baseline": "group", "normalize_std": True}, [1, 1, -1, -1]),
        # 1 right of 4, all kept: both baselines are the same
        ("0100", [0, 1, 2, 3], {}, [-0.25, 0.75, -0.25, -0.25]),
        ("0100", [0, 1, 2, 3], {"baseline": "group"}, [-0.25, 0.75, -0.25, -0.25]),
        # all right: zero, and no division by a zero std
        ("1111", [0, 3], {"normalize_std": True}, [0, 0]),
        # a group of one teaches nothing against itself
        ("10", [0], {"baseline": "group", "normalize_std": True}, [0]),
        # why the paper leaves the std out: 1 right in 512
        ("1" + "0" * 511, [0], {"normalize_std": True}, [22.605]),
        ("1" + "0" * 511, [0], {}, [511 / 512]),
    ],
)
def test_advantages_by_hand(pool, kept, options, expected):
    """A baseline or std taken over the wrong responses still trains, only worse, and shows nowhere else."""
    pool = pool_of(pool)
    assert advantages([pool.samples[i] for i in kept], pool, **options) == pytest.approx(expected, rel=1e-4)


def test_make_groups_passes_the_switches_on():
    """--baseline and --normalize_std would silently do nothing."""
    pool = pool_of("11000000")

    def largest(**switches):
        return max(make_groups([pool], n=4, seed=0, step=0, **switches)[0].advantages)

    assert largest() == pytest.approx(0.75)
    assert largest(baseline="group") == pytest.approx(0.5)
    assert largest(normalize_std=True) == pytest.approx(ROOT_3, rel=1e-4)


def test_an_unknown_baseline_is_refused():
    """Falling back to some baseline would train something else than was asked for."""
    with pytest.raises(KeyError):
        advantages(pool_of("10").samples, pool_of("10"), baseline="globl")


# ----------------------------------------------------------------------------------------------------------------
# Seeds and ranks


def test_seeds_differ_wherever_any_part_does():
    """Equal seeds give equal responses: rounds that repeat the last one, evaluation on training samples."""
    parts = [
        (purpose, seed, step, row, index)
        for purpose in ("train", "eval", "prepare", "downsample")
        for seed in range(4)
        for step in (0, 1, 2, 11, 12)
        for row in (0, 1, 2, 11, 12, 21)
        for index in range(32)
    ]
    seeds = {seed_of(*part) for part in parts}
    assert len(seeds) == len(parts)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of("train", 1, 23) != seed_of("train", 12, 3)  # as they would be, were the parts just strung together


def test_seeds_are_the_same_in_every_process():
    """Python's hash() differs from process to process: ranks would disagree, and a resumed run draw anew."""
    code = "from ada.sampler import seed_of; print(seed_of('train', 0, 1, 2, 3))"
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[1]
        )
        assert int(run.stdout) == seed_of("train", 0, 1, 2, 3), run.stderr
    assert seed_of("train", 0, 1, 2, 3) == 916916935743577946  # nor may they change with Python or this file


def test_each_request_gets_the_seed_of_its_key():
    """The engine draws from this seed and nothing else, so all of the above depends on it."""
    for purpose in ("train", "eval"):
        engine = FakeEngine(coin(0.3))
        sample(make_prompts(5), engine=engine, seed=7, step=9, purpose=purpose)
        for (row, index), tokens, seed in engine.requests:
            assert tokens == [row]
            assert seed == seed_of(purpose, 7, 9, row, index)
        assert len({seed for *_, seed in engine.requests}) == len(engine.requests)


def test_two_ranks_draw_what_one_rank_draws():
    """Results would depend on the number of GPUs."""
    prompts = make_prompts(20)
    together = sample(prompts, coin(0.3))
    apart = sample(prompts[::2], coin(0.3)) + sample(prompts[1::2], coin(0.3))
    assert sorted(apart, key=lambda pool: pool.prompt.row) == together


class FakeStore:
    """The one call of a torch.distributed store that the queue needs."""

    def __init__(self):
        self.counts = Counter()

    def add(self, name, amount):
        self.counts[name] += amount
        return self.counts[name]


@given(n_prompts=st.integers(0, 12), turns=st.lists(st.booleans(), max_size=30))
@settings(deadline=None)
def test_a_shared_queue_gives_each_prompt_to_one_rank(n_prompts, turns):
    """A prompt taken twice would be trained on twice; one taken by nobody would be missing without a word."""
    prompts, store = make_prompts(n_prompts), FakeStore()
    ranks = [shared_queue(prompts, store, "train/1") for _ in range(2)]
    taken = [next(ranks[turn], None) for turn in [*turns, *[0, 1] * n_prompts]]
    assert [prompt.row for prompt in taken if prompt] == list(range(n_prompts))
    assert list(shared_queue(prompts, store, "train/2")) == prompts  # another step begins at the beginning


# ----------------------------------------------------------------------------------------------------------------
# Metrics

MIXED = [
    pool_of("1100", row=0, rounds=1, resolved=True),
    pool_of("0000 0011", row=1, rounds=2, resolved=True),
    pool_of("0000 0000 0001", row=2, rounds=3, resolved=False),
    pool_of("1111 1111 1110", row=3, rounds=3, resolved=False),
    pool_of("0000 0000 0000", row=4, rounds=3, resolved=False),
]


def test_summarise_balance_by_hand():
    """Scripts, plots and the reader rely on these keys, and each metric has a near twin it could be mistaken for."""
    groups = make_groups(MIXED, n=4, seed=0, step=0)
    assert summarise(MIXED, groups, 4) == pytest.approx(
        {
            "reward/first_round": 6 / 20,  # 2 + 0 + 0 + 4 + 0 right of 5 times 4
            "reward/pool": (2 / 4 + 2 / 8 + 1 / 12 + 11 / 12 + 0) / 5,  # prompts weigh the same, whatever they drew
            "reward/kept": (2 + 2 + 1 + 3) / 16,
            "sampling/samples": 4 + 8 + 12 + 12 + 12,
            "sampling/tokens": 10 + 36 + 78 + 78 + 78,  # 1 + 2 + ... per pool
            "sampling/uniform_at_n": 4 / 5,  # all but the first
            "sampling/uniform_after": 1 / 5,  # the last
            "sampling/unresolved_no_right": 2 / 5,  # rows 2 and 4
            "sampling/unresolved_no_wrong": 1 / 5,  # row 3
            "sampling/right_in_two_rounds": 3 / 5,  # rows 0, 1 and 3; row 2's one comes in the third round
            "sampling/resolved_in_two_rounds": 2 / 5,
            "update/groups": 4,
            "response/length": 2.5,  # 1, 2, 3 and 4 tokens in each first round
            "response/truncated": 1 / 4,
        }
    )


def test_summarise_pos():
    """pos lacks only right ones: an all-right pool is resolved, uniform, and gives no group."""
    pools = [
        pool_of("1111", row=0),
        pool_of("0001", row=1),
        pool_of("0000 1000", row=2, rounds=2),
        pool_of("0000 0000 0000", row=3, rounds=3, resolved=False),
    ]
    metrics = summarise(pools, make_groups(pools, n=2, seed=0, step=0), 2)
    assert metrics["sampling/unresolved_no_right"] == 1 / 4
    assert metrics["sampling/unresolved_no_wrong"] == 0
    assert metrics["sampling/resolved_in_two_rounds"] == 3 / 4
    assert metrics["sampling/uniform_after"] == 2 / 4
    assert metrics["sampling/uniform_at_n"] == 4 / 4
    assert metrics["update/groups"] == 2
    assert metrics["reward/kept"] == 2 / 4


def test_summarise_grpo():
    """One round of n: what would have been uniform is uniform, nothing is unresolved, all three rewards are of use."""
    pools = [pool_of(verdicts, row=row) for row, verdicts in enumerate(["1111", "0001", "0011", "0000"])]
    metrics = summarise(pools, make_groups(pools, n=4, seed=0, step=0), 4)
    assert metrics["sampling/uniform_at_n"] == metrics["sampling/uniform_after"] == 2 / 4
    assert metrics["sampling/unresolved_no_right"] == metrics["sampling/unresolved_no_wrong"] == 0
    assert metrics["reward/first_round"] == metrics["reward/pool"] == 7 / 16
    assert metrics["reward/kept"] == 3 / 8


def test_summarise_without_groups():
    """An iteration in which every pool is uniform must be logged, not end the run."""
    pools = [pool_of("0000"), pool_of("1111", row=1)]
    metrics = summarise(pools, [], 4)
    assert (metrics["update/groups"], metrics["reward/kept"], metrics["sampling/uniform_after"]) == (0, None, 1)


def test_running_out_of_rounds_early_is_not_resolving_early():
    """With --max_rounds 1 or 2 every prompt would count as resolved in two rounds."""
    metrics = summarise([pool_of("0000", resolved=False), pool_of("0011", row=1)], [], 4)
    assert metrics["sampling/resolved_in_two_rounds"] == 1 / 2


@pytest.mark.parametrize(
    "n, verdicts, counts",
    [
        (4, "0001", False),  # one short
        (4, "0011", True),
        (4, "0001 1000", True),
        (4, "0001 0000 1111", False),  # the third round's are too late
        (4, "1111 1111 1111", True),  # enough right, whatever of the wrong
        (5, "0110 0000 0000", True),  # n//2 = 2
        (2, "0000 0100 0000", True),
        (1, "0000 0000", False),  # at least one, even where n//2 is 0
    ],
)
def test_right_in_two_rounds(n, verdicts, counts):
    """Fig. 5's other curve: nothing is said about wrong ones, about being resolved, or about later rounds."""
    pool = pool_of(verdicts, rounds=len(verdicts.split()), resolved=False)
    assert summarise([pool], [], n)["sampling/right_in_two_rounds"] == counts


def test_pools_without_tokens_give_the_same_metrics():
    """They are what ranks send each other; a metric that needed more than they hold would be wrong on every rank."""
    light = [pool.without_tokens() for pool in MIXED]
    groups = make_groups(MIXED, n=4, seed=0, step=0)
    assert summarise(light, groups, 4) == summarise(MIXED, groups, 4)
    assert [[s.correct for s in pool.samples] for pool in light] == [[s.correct for s in p.samples] for p in MIXED]
    assert all(not pool.prompt.text and not pool.prompt.tokens for pool in light)
    assert all(s.tokens == range(s.index + 1) for pool in light for s in pool.samples)  # a length, no list
    assert all(len(s.logprobs) == 1 and not s.text for pool in light for s in pool.samples)
    assert MIXED[0].prompt.text and MIXED[0].samples[1].text and MIXED[0].samples[1].tokens == [7, 7]  # copied


# ----------------------------------------------------------------------------------------------------------------
# Two facts that the paper doesn't state
#
# With p the chance of a right response and s = grad log pi of a response: E[s | right] = grad p / p, and
# E[s | wrong] = -grad p / (1 - p). What a response is kept for is its verdict alone, so a group's expected gradient
# (1/n) sum A_i s_i is a multiple of grad p. That multiple, over all that sampling may bring, is the prompt's weight.
# experiments/theory.py sums it up exactly; here it is held against the real functions. docs/method.md derives it.


def weight(group, p, n):
    """This group's share in the weight of its prompt. Plain REINFORCE has weight 1 at every p."""
    scores = [1 / p if s.correct else -1 / (1 - p) for s in group.samples]
    return sum(a * s for a, s in zip(group.advantages, scores, strict=True)) / n


def simulate(p, n_prompts=2000, *, n=4, switches=None, **options):
    """(pools, weight of each prompt) of the real functions, on prompts that are right with probability p."""
    pools = sample(make_prompts(n_prompts), coin(p), n=n, **options)
    groups = make_groups(pools, n=n, seed=0, step=1, **(switches or {}))
    weights = [weight(group, p, n) for group in groups]
    return pools, weights + [0.0] * (len(pools) - len(groups))  # a uniform pool adds nothing


@pytest.mark.parametrize("right", [20, 100, 500, 900])
def test_weight_of_a_balanced_group_with_an_infinite_budget(right):
    """Half of the group right whatever p is: hard and easy prompts get weight that plain REINFORCE denies them."""
    p = right / 1000
    group = make_groups([pool_of("1" * right + "0" * (1000 - right))], n=4, seed=0, step=0)[0]
    assert weight(group, p, 4) == pytest.approx(balance_limit(p))
    assert balance_limit(0.02) == pytest.approx(24.5, abs=0.05)

    def climbed(p):
        return math.log(p / (1 - p)) / 2 - p

    assert (climbed(p + 1e-6) - climbed(p - 1e-6)) / 2e-6 == pytest.approx(balance_limit(p), rel=1e-4)


@pytest.mark.parametrize("p", [0.02, 0.1, 0.4, 0.9])
def test_weight_of_balance_with_the_papers_budget(p):
    """32 responses rarely resolve a hard prompt, and its pool mean is noisy: the curve bends far below its limit."""
    _, weights = simulate(p)
    assert_mean(weights, exact_weight(p, exit_rule=exit_balance))


def test_how_far_the_papers_budget_bends_the_curve():
    """The figures in the docs: 7 instead of 24.5 at p = 0.02; and rounds enough bring the limit back."""
    assert exact_weight(0.02, exit_rule=exit_balance) == pytest.approx(7, abs=0.3)
    assert exact_weight(0.5, exit_rule=exit_balance) == pytest.approx(balance_limit(0.5), abs=0.1)
    curve = [exact_weight(0.1, exit_rule=exit_balance, round_size=size, max_rounds=4) for size in (4, 8, 32, 200)]
    assert curve == sorted(curve) and curve[-1] == pytest.approx(balance_limit(0.1), rel=0.02)


@pytest.mark.parametrize("p", [0.02, 0.2, 0.5])
def test_weight_of_grpo(p):
    """With the std GRPO's weight is nearly flat at n = 4: it is not what lifts hard prompts. Without, it is (n-1)/n."""
    one_round = {"exit_rule": exit_fixed, "round_size": 4, "max_rounds": 1}
    exact = math.sqrt(3) * (1 - 2 * p * (1 - p)) + 3 * p * (1 - p)  # E[std] / (p (1-p)), over 0 to 4 right of 4
    assert 1.6 < exact < 1.74
    _, with_std = simulate(p, 4000, switches={"baseline": "group", "normalize_std": True}, **one_round)
    assert_mean(with_std, exact)
    _, without = simulate(p, 4000, switches={"baseline": "group"}, **one_round)
    assert_mean(without, 3 / 4)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_weight_of_grpo_as_the_group_grows(p):
    """Only large groups climb 2 arcsin sqrt(p), whose slope is 1 / sqrt(p (1-p))."""
    one_round = {"exit_rule": exit_fixed, "n": 512, "round_size": 512, "max_rounds": 1}
    _, weights = simulate(p, 60, switches={"baseline": "group", "normalize_std": True}, **one_round)
    assert statistics.fmean(weights) == pytest.approx(1 / math.sqrt(p * (1 - p)), rel=0.02)


@pytest.mark.parametrize("exit_rule", [exit_pos, exit_balance])
def test_the_gradient_is_the_weight_times_grad_p(exit_rule):
    """The weights above rest on E[s | verdict]; here the scores are a softmax policy's, two of five answers right."""
    chances = dict(zip("abcde", (0.05, 0.1, 0.2, 0.3, 0.35), strict=True))
    p = chances["a"] + chances["b"]

    def respond(key, seed):
        return random.Random(seed).choices(list(chances), list(chances.values()))[0], 1

    pools = sample(make_prompts(2000, gold="ab"), respond, exit_rule=exit_rule)
    groups = make_groups(pools, n=4, seed=0, step=1)
    n_uniform = len(pools) - len(groups)
    expected = exact_weight(p, exit_rule=exit_rule)
    for answer, chance in chances.items():  # one logit after the other: d log pi(b) / d logit(a) = [a = b] - pi(a)
        grad_p = chance * ((answer in "ab") - p)
        gradients = [
            sum(a * ((s.text == answer) - chance) for a, s in zip(g.advantages, g.samples, strict=True)) / 4
            for g in groups
        ]
        assert_mean(gradients + [0.0] * n_uniform, expected * grad_p)


def test_pos_in_rounds_of_one_overstates_the_pass_rate():
    """Stopping at the first right response makes the pool mean 1/N, whose mean is -p ln p / (1-p), above p."""
    p = 0.2
    pools = sample(make_prompts(4000), coin(p), exit_rule=exit_pos, round_size=1, max_rounds=200)
    means = [pool.mean for pool in pools]
    assert_mean(means, -p * math.log(p) / (1 - p))  # 0.402, twice p
    assert_mean([pool.first_rounds(1)[0].correct for pool in pools], p)


@pytest.mark.parametrize("exit_rule, expected", [(exit_pos, 0.130), (exit_balance, 0.132)])
def test_stopping_biases_the_pool_mean_and_not_the_first_round(exit_rule, expected):
    """Logged as the reward, the pool mean would show progress where the policy stands still."""
    p = 0.1
    exact = sum(chance * r / (r + w) for (r, w), chance in final_pools(p, exit_rule=exit_rule).items())
    assert exact == pytest.approx(expected, abs=0.001)
    pools, _ = simulate(p, exit_rule=exit_rule)
    assert_mean([pool.mean for pool in pools], exact)
    assert_mean([s.correct for pool in pools for s in pool.first_rounds(1)], p)
    assert all(len(pool.first_rounds(1)) == 8 for pool in pools)
    metrics = summarise(pools, [], 4)
    assert metrics["reward/first_round"] == pytest.approx(p, abs=0.01)
    assert metrics["reward/pool"] == pytest.approx(exact, abs=0.01)


def test_larger_rounds_shrink_the_bias_and_balance_pulls_to_one_half():
    """Why the paper's rounds of 8 are fairly harmless, and on which side of p the pool mean lies."""

    def bias(p, **options):
        return sum(chance * r / (r + w) for (r, w), chance in final_pools(p, **options).items()) - p

    for rule in (exit_pos, exit_balance):
        sizes = [bias(0.1, exit_rule=rule, round_size=size, max_rounds=32 // size) for size in (1, 2, 4, 8, 16, 32)]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[-1] == pytest.approx(0, abs=1e-12)  # one round: no stopping, no bias
    assert bias(0.9, exit_rule=exit_balance) == pytest.approx(-bias(0.1, exit_rule=exit_balance))
    assert bias(0.5, exit_rule=exit_balance) == pytest.approx(0, abs=1e-12)
