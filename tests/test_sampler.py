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

from ada.sampler import (
    SAMPLERS,
    Pool,
    Prompt,
    Sample,
    SamplingConfig,
    adaptive,
    advantages,
    downsample,
    exit_balance,
    exit_fixed,
    exit_pos,
    make_groups,
    sample_adaptively,
    seed_of,
)
from ada.support.metrics import first_rounds, summarise, without_tokens
from ada.support.ranks import Ranks
from experiments.theory import exact_weight, final_pools

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
        return [Sample(*key, [key[1]] * n, [-0.5] * n, text, truncated=n >= 20) for key, text, n in done]


class FakeScorer:
    """Right is what is in the gold, a set of texts. With an rng it hands verdicts out late and in any order."""

    def __init__(self, rng=None):
        self.rng = rng
        self.failures = Counter()
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


class FakeStore:
    """The one call of a torch.distributed store that the queue needs."""

    def __init__(self):
        self.counts = Counter()

    def add(self, name, amount):
        self.counts[name] += amount
        return self.counts[name]


def fake_ranks(store=None, rank=0, world_size=1):
    return Ranks(rank, world_size, None, store or FakeStore())


def coin(p):
    """A policy that is right with probability p, on one token. Seeds are 63 bits, evenly spread."""
    return lambda key, seed: ("right" if seed < p * 2**63 else "wrong", 1)


def make_prompts(n, gold=("right",)):
    return [Prompt(i, f"question {i}", [i], set(gold)) for i in range(n)]


def sample(prompts, respond=None, *, engine=None, scorer=None, exit_rule=exit_balance, step=1, **options):
    """sample_adaptively with the paper's settings, unless told otherwise."""
    others = {name: options.pop(name) for name in ("purpose", "progress") if name in options}
    engine, scorer, config = engine or FakeEngine(respond), scorer or FakeScorer(), SamplingConfig(**options)
    return sample_adaptively(engine, scorer, prompts, config, exit_rule=exit_rule, step=step, **others)


def groups_of(pools, *, step=0, **options):
    """make_groups, likewise."""
    return make_groups(pools, SamplingConfig(**options), step=step)


def pool_of(verdicts, *, prompt_id=0, rounds=1, resolved=True):
    """A pool from a string such as "1100 0000": 1 is right, spaces don't count. Sample i has i + 1 tokens."""
    verdicts = verdicts.replace(" ", "")
    samples = [
        Sample(prompt_id, i, [7] * (i + 1), [-0.1] * (i + 1), f"text {i}", truncated=i == 0, correct=verdict == "1")
        for i, verdict in enumerate(verdicts)
    ]
    return Pool(Prompt(prompt_id, "question", [1, 2], "gold"), samples, rounds, resolved)


def mean_and_error(values):
    """Mean and its standard error."""
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def assert_mean(values, expected):
    mean, error = mean_and_error(values)
    assert abs(mean - expected) < 4 * error, f"{mean:.4f} is not {expected:.4f}; standard error {error:.4f}"


# ----------------------------------------------------------------------------------------------------------------
# Exit rules and downsampling


def test_every_pool_up_to_32_of_either():
    """Off by one in a rule, and prompts stop with a lopsided group or draw for nothing.

    A group must be as near to balanced as its pool allows (of an odd n the larger half wrong), no larger than n, and
    have no response twice. Rule and downsampling must agree on what balanced means.
    """
    rng = random.Random(0)
    for right in range(33):
        for wrong in range(33):
            pool = pool_of("1" * right + "0" * wrong)
            for n in range(1, 33):
                for rule, on_counts in RULES.items():
                    assert rule(pool, n) == on_counts(right, wrong, n), (rule.__name__, right, wrong, n)
                kept = downsample(pool, n, rng)
                size, n_right = min(n, right + wrong), sum(s.correct for s in kept)
                possible = range(max(0, size - wrong), min(right, size) + 1)
                assert n_right == min(possible, key=lambda k: abs(k - n // 2)), (right, wrong, n)
                indices = [s.index for s in kept]
                assert len(indices) == size and indices == sorted(set(indices))
                assert all(pool.samples[s.index] is s for s in kept)
                assert exit_balance(pool, n) == (n_right == n // 2 and size - n_right == n - n // 2)


@pytest.mark.parametrize(
    "n, right, wrong, may_stop",
    [(4, 2, 2, True), (4, 1, 3, False), (4, 3, 1, False), (5, 2, 3, True), (5, 3, 2, False), (5, 1, 9, False)],
)
def test_exit_balance_at_its_edges(n, right, wrong, may_stop):
    """RULES could share a mistake with the code; these cases are written down one by one."""
    assert exit_balance(pool_of("1" * right + "0" * wrong), n) is may_stop


def test_each_response_of_a_side_has_the_same_chance():
    """Keeping the first ones of a side would drop what later rounds drew."""
    pool, draws = pool_of("1000 1001 0000 0010"), 4000  # 4 right, 12 wrong
    times_kept = Counter(s.index for i in range(draws) for s in downsample(pool, 4, random.Random(i)))
    for s in pool.samples:
        chance = 2 / 4 if s.correct else 2 / 12
        error = math.sqrt(chance * (1 - chance) / draws)
        assert abs(times_kept[s.index] / draws - chance) < 4 * error, s.index


def test_what_is_kept_depends_on_seed_step_and_prompt_alone():
    """A shared stream would make it depend on which other prompts the rank has, and on resuming."""
    verdicts = "1010" * 8
    [alone] = groups_of([pool_of(verdicts, prompt_id=5)], step=3)
    assert groups_of([pool_of(verdicts, prompt_id=i) for i in range(8)], step=3)[5] == alone

    def indices(prompt_id=5, **where):
        [one] = groups_of([pool_of(verdicts, prompt_id=prompt_id)], **({"step": 3} | where))
        return tuple(s.index for s in one.samples)

    assert len({indices(), indices(prompt_id=6), indices(step=4), indices(seed=1)}) == 4


# ----------------------------------------------------------------------------------------------------------------
# Adaptive sampling


def by_the_book(prompts, p, *, exit_rule, group_size, round_size, max_rounds, seed, step):
    """Algorithm 1 prompt by prompt, without an engine: prompt_id -> (verdicts, resolved)."""
    pools = {}
    for prompt in prompts:
        verdicts, resolved = [], False
        while not resolved and len(verdicts) < round_size * max_rounds:
            for index in range(len(verdicts), len(verdicts) + round_size):
                verdicts.append(seed_of("train", seed, step, prompt.prompt_id, index) < p * 2**63)
            resolved = RULES[exit_rule](sum(verdicts), len(verdicts) - sum(verdicts), group_size)
        pools[prompt.prompt_id] = (verdicts, resolved)
    return pools


class Spy:
    """An exit rule that notes what it is asked."""

    def __init__(self, rule):
        self.rule, self.asked = rule, []

    def __call__(self, pool, n):
        self.asked.append((pool.prompt.prompt_id, pool.rounds, [s.index for s in pool.samples]))
        return self.rule(pool, n)


@given(
    rng=st.randoms(use_true_random=True),  # of the order of arrival, grading and prompts
    n_prompts=st.integers(0, 6),
    capacity=st.integers(1, 40),
    p=st.sampled_from([0.0, 0.15, 0.5, 1.0]),
    options=st.fixed_dictionaries(
        {
            "exit_rule": st.sampled_from(list(RULES)),
            "group_size": st.integers(1, 9),
            "round_size": st.integers(1, 9),
            "max_rounds": st.integers(1, 4),
            "seed": st.integers(0, 3),
            "step": st.integers(0, 3),
        }
    ),
)
@settings(max_examples=200, deadline=None)
def test_order_never_decides(rng, n_prompts, capacity, p, options):
    """Whatever order responses, verdicts and prompts come in, the pools are those of Algorithm 1, in order.

    And a rule is asked once a round, never in the middle of one: a prompt could stop on its short responses.
    """
    spy = Spy(options["exit_rule"])
    prompts = rng.sample(make_prompts(n_prompts), n_prompts)
    engine = FakeEngine(coin(p), capacity=capacity, steps=lambda key: rng.randint(1, 9))
    pools = sample(iter(prompts), engine=engine, scorer=FakeScorer(rng), **(options | {"exit_rule": spy}))

    assert [pool.prompt.prompt_id for pool in pools] == list(range(n_prompts))
    book = by_the_book(prompts, p, **options)
    for pool in pools:
        verdicts, resolved = book[pool.prompt.prompt_id]
        assert [s.correct for s in pool.samples] == verdicts
        assert [s.index for s in pool.samples] == list(range(len(verdicts)))
        assert pool.resolved == resolved and pool.rounds == len(verdicts) // options["round_size"]
    assert pools == sample(make_prompts(n_prompts), coin(p), **options)  # texts, tokens, log-probs: everything
    assert not engine.in_flight

    once_a_round = [(pool.prompt.prompt_id, t) for pool in pools for t in range(1, pool.rounds + 1)]
    assert sorted((prompt_id, t) for prompt_id, t, _ in spy.asked) == once_a_round
    for _, t, indices in spy.asked:
        assert indices == list(range(t * options["round_size"]))  # the whole round, in order of submission


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
    slow = {0: 100}
    engine = FakeEngine(coin(0), steps=lambda key: slow.get(key[0], 1))
    order = []
    sample(make_prompts(2), engine=engine, progress=lambda active, s: order.append(s.prompt_id))
    assert order == [1] * 32 + [0] * 32


def test_progress_sees_every_graded_response():
    """The bar of a long sampling phase is the only sign of life; its count of active prompts has to end at one."""
    seen = []
    pools = sample(make_prompts(5), coin(0.3), progress=lambda active, s: seen.append((active, s)))
    assert sorted((s.prompt_id, s.index) for _, s in seen) == [
        (s.prompt_id, s.index) for pool in pools for s in pool.samples
    ]
    assert (seen[0][0], seen[-1][0]) == (5, 1)


def test_equal_text_stays_two_prompts():
    """Keyed by text, two prompts would share a pool and one of them be graded against the other's gold."""
    twins = [Prompt(0, "same", [1], {"right"}), Prompt(1, "same", [1], {"something else"})]
    pools = sample(twins, coin(1), exit_rule=exit_pos)
    assert [(pool.n_correct, pool.n_incorrect) for pool in pools] == [(8, 0), (0, 32)]


def test_a_duplicate_prompt_is_refused():
    """Its responses would overwrite the other one's."""
    with pytest.raises(ValueError, match="prompt 1 occurs twice"):
        sample([*make_prompts(3), make_prompts(2)[1]], coin(0.3))


def test_short_responses_are_not_favoured():
    """Half of the responses are short and come back first; half of what is kept must be short, not nearly all.

    Keeping the first to arrive, and asking a rule before the round is in, both fail this.
    """

    def respond(key, seed):
        return coin(0.4)(key, seed)[0], random.Random(seed).choice([1, 19])

    pools = sample(make_prompts(600), respond)
    assert_mean([len(s.tokens) == 1 for pool in pools for s in pool.samples], 0.5)
    groups = groups_of(pools, step=1)
    assert_mean([len(s.tokens) == 1 for g in groups for s in g.samples], 0.5)


# ----------------------------------------------------------------------------------------------------------------
# Groups and advantages


def test_a_zero_variance_pool_gives_no_group():
    """Its advantages are all zero; in the update it would only dilute the token mean."""
    pools = [pool_of(verdicts * 4, prompt_id=i) for i, verdicts in enumerate(("00", "01", "11"))]
    assert [group.prompt.prompt_id for group in groups_of(pools)] == [1]
    kept = groups_of(pools, keep_zero_variance=True)
    assert [group.prompt.prompt_id for group in kept] == [0, 1, 2]
    assert all(len(group.samples) == 4 and group.advantages == [0.0] * 4 for group in (kept[0], kept[2]))
    # one dissenter among many is what adaptive sampling is looking for
    assert [pool_of(v).zero_variance for v in ("1", "0", "111", "000", "110", "00000001")] == [True] * 4 + [False] * 2


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


@pytest.mark.parametrize(
    "options, largest", [({}, 0.75), ({"baseline": "group"}, 0.5), ({"normalize_std": True}, ROOT_3)]
)
def test_make_groups_passes_the_switches_on(options, largest):
    """--baseline and --normalize_std would silently do nothing."""
    [group] = groups_of([pool_of("11000000")], **options)
    assert max(group.advantages) == pytest.approx(largest, rel=1e-4)


def test_an_unknown_baseline_is_refused():
    """Falling back to some baseline would train something else than was asked for."""
    with pytest.raises(KeyError):
        advantages(pool_of("10").samples, pool_of("10"), baseline="globl")


# ----------------------------------------------------------------------------------------------------------------
# Seeds, ranks, and what --sampler names


def test_seeds_differ_wherever_any_part_does():
    """Equal seeds give equal responses: rounds that repeat the last one, evaluation on training samples."""
    parts = [
        (purpose, seed, step, prompt_id, index)
        for purpose in ("train", "eval", "prepare", "downsample")
        for seed in range(4)
        for step in (0, 1, 2, 11, 12)
        for prompt_id in (0, 1, 2, 11, 12, 21)
        for index in range(32)
    ]
    seeds = {seed_of(*part) for part in parts}
    assert len(seeds) == len(parts)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of("train", 1, 23) != seed_of("train", 12, 3)  # as they would be, were the parts just strung together


def test_seeds_are_the_same_in_every_process():
    """Python's hash() differs from process to process: ranks would disagree, and a resumed run draw anew."""
    code = "from ada.sampler import seed_of; print(seed_of('train', 0, 1, 2, 3))"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
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
        for (prompt_id, index), tokens, seed in engine.requests:
            assert tokens == [prompt_id]
            assert seed == seed_of(purpose, 7, 9, prompt_id, index)
        assert len({seed for *_, seed in engine.requests}) == len(engine.requests)


def draw(name, config, ranks):
    sampler = SAMPLERS[name] if name in SAMPLERS else adaptive(name)
    context = dict(step=1, ranks=ranks, train_prompts=[], progress=None)
    return sampler(FakeEngine(coin(0.3), capacity=40), FakeScorer(), make_prompts(20), config, **context)


@pytest.mark.parametrize("name, rule", [("pos", exit_pos), ("balance", exit_balance), (RULES[exit_pos], None)])
def test_two_ranks_draw_what_one_rank_draws(name, rule):
    """Results would depend on the number of GPUs. And a bare rule of one's own is a sampler, once in `adaptive`."""
    if rule is None:
        name = rule = lambda pool, n: pool.n_correct >= 3
    config, store = SamplingConfig(), FakeStore()
    together = sample(make_prompts(20), coin(0.3), exit_rule=rule)
    assert draw(name, config, fake_ranks()) == together
    for _ in range(7):  # another rank has taken these
        store.add("train/1", 1)
    assert draw(name, config, fake_ranks(store)) == together[7:]


def test_grpo_is_one_round_of_the_group():
    """The first responses of what the others draw, whatever the rounds are; and the config stays what it was."""
    config = SamplingConfig(group_size=6, round_size=8, max_rounds=4)
    pools = draw("grpo", config, fake_ranks())
    assert {(len(pool.samples), pool.rounds, pool.resolved) for pool in pools} == {(6, 1, True)}
    others = draw("balance", config, fake_ranks())
    assert [pool.samples for pool in pools] == [pool.samples[:6] for pool in others]
    assert config == SamplingConfig(group_size=6, round_size=8, max_rounds=4)


@given(n_prompts=st.integers(0, 12), turns=st.lists(st.booleans(), max_size=30))
@settings(deadline=None)
def test_a_shared_queue_gives_each_prompt_to_one_rank(n_prompts, turns):
    """A prompt taken twice would be trained on twice; one taken by nobody would be missing without a word."""
    prompts, store = make_prompts(n_prompts), FakeStore()
    queues = [fake_ranks(store, rank, 2).share(prompts, "train/1") for rank in range(2)]
    taken = [next(queues[turn], None) for turn in [*turns, *[0, 1] * n_prompts]]
    assert [prompt.prompt_id for prompt in taken if prompt] == list(range(n_prompts))
    assert list(fake_ranks(store).share(prompts, "train/2")) == prompts  # another step begins at the beginning


# ----------------------------------------------------------------------------------------------------------------
# Metrics

MIXED = [
    pool_of("1100", prompt_id=0, rounds=1, resolved=True),
    pool_of("0000 0011", prompt_id=1, rounds=2, resolved=True),
    pool_of("0000 0000 0001", prompt_id=2, rounds=3, resolved=False),
    pool_of("1111 1111 1110", prompt_id=3, rounds=3, resolved=False),
    pool_of("0000 0000 0000", prompt_id=4, rounds=3, resolved=False),
]


def test_summarise_balance_by_hand():
    """Scripts, plots and the reader rely on these keys, and each metric has a near twin it could be mistaken for."""
    assert summarise(MIXED, groups_of(MIXED), 4) == pytest.approx(
        {
            "reward/first_round": 6 / 20,  # 2 + 0 + 0 + 4 + 0 right of 5 times 4
            "reward/pool": (2 / 4 + 2 / 8 + 1 / 12 + 11 / 12 + 0) / 5,  # prompts weigh the same, whatever they drew
            "reward/kept": (2 + 2 + 1 + 3) / 16,
            "sampling/samples": 4 + 8 + 12 + 12 + 12,
            "sampling/tokens": 10 + 36 + 78 + 78 + 78,  # 1 + 2 + ... per pool
            "sampling/uniform_at_n": 4 / 5,  # all but the first
            "sampling/uniform_after": 1 / 5,  # the last
            "sampling/unresolved_no_right": 2 / 5,  # prompts 2 and 4
            "sampling/unresolved_no_wrong": 1 / 5,  # prompt 3
            "sampling/right_in_two_rounds": 3 / 5,  # 0, 1 and 3; prompt 2's one comes in the third round
            "sampling/resolved_in_two_rounds": 2 / 5,
            "response/length": 2.5,  # 1, 2, 3 and 4 tokens in each first round
            "response/truncated": 1 / 4,
        }
    )


def test_what_was_drawn_for_another_purpose_counts_as_cost_alone():
    """Two-stage's pilot: it is paid for, but no reward, no share of uniform prompts may come from it."""
    pool, pilot = pool_of("1100"), pool_of("1111").samples
    without = summarise([pool], groups_of([pool]), 4)
    pool.unused = pilot
    metrics = summarise([pool], groups_of([pool]), 4)
    assert metrics == without | {"sampling/samples": 8, "sampling/tokens": 20}


POS = [
    pool_of("1111", prompt_id=0),
    pool_of("0001", prompt_id=1),
    pool_of("0000 1000", prompt_id=2, rounds=2),
    pool_of("0000 0000 0000", prompt_id=3, rounds=3, resolved=False),
]
GRPO = [pool_of(verdicts, prompt_id=i) for i, verdicts in enumerate(["1111", "0001", "0011", "0000"])]


@pytest.mark.parametrize(
    "pools, n, expected",
    [
        # pos lacks only right ones: an all-right pool is resolved, of zero variance, and gives no group
        (POS, 2, {"sampling/unresolved_no_right": 1 / 4, "sampling/unresolved_no_wrong": 0, "reward/kept": 2 / 4}),
        (
            POS,
            2,
            {"sampling/resolved_in_two_rounds": 3 / 4, "sampling/uniform_after": 2 / 4, "sampling/uniform_at_n": 1},
        ),
        # grpo: what would have been uniform is, nothing is unresolved, all three rewards are of use
        (GRPO, 4, {"sampling/uniform_at_n": 2 / 4, "sampling/uniform_after": 2 / 4, "reward/kept": 3 / 8}),
        (GRPO, 4, {"sampling/unresolved_no_right": 0, "sampling/unresolved_no_wrong": 0}),
        (GRPO, 4, {"reward/first_round": 7 / 16, "reward/pool": 7 / 16}),
        # an iteration without any group must be logged, not end the run
        ([pool_of("0000"), pool_of("1111")], 4, {"reward/kept": None, "sampling/uniform_after": 1}),
        # running out of rounds early is not resolving early
        ([pool_of("0000", resolved=False), pool_of("0011")], 4, {"sampling/resolved_in_two_rounds": 1 / 2}),
    ],
)
def test_summarise_other_samplers(pools, n, expected):
    metrics = summarise(pools, groups_of(pools, group_size=n), n)
    assert {key: metrics[key] for key in expected} == expected


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
    light = [without_tokens(pool) for pool in MIXED]
    groups = groups_of(MIXED)
    assert summarise(light, groups, 4) == summarise(MIXED, groups, 4)
    assert [[s.correct for s in pool.samples] for pool in light] == [[s.correct for s in p.samples] for p in MIXED]
    assert all(not pool.prompt.text and not pool.prompt.tokens for pool in light)
    for s in (s for pool in light for s in pool.samples):
        assert (s.n_tokens, s.logprob_sum) == (s.index + 1, pytest.approx(-0.1 * (s.index + 1)))
        assert not s.tokens and not s.logprobs and not s.text
    assert MIXED[0].prompt.text and MIXED[0].samples[1].text and MIXED[0].samples[1].tokens == [7, 7]  # copied


# ----------------------------------------------------------------------------------------------------------------
# Two facts that the paper doesn't state
#
# With p the chance of a right response and s = grad log pi of a response: E[s | right] = grad p / p, and
# E[s | wrong] = -grad p / (1 - p). What a response is kept for is its verdict alone, so a group's expected gradient
# (1/n) sum A_i s_i is a multiple of grad p. That multiple, over all that sampling may bring, is the prompt's weight.
# experiments/theory.py sums it up exactly (test_theory.py holds the sums against the real functions), docs/method.md
# derives it; here is what the derivation rests on.


@pytest.mark.parametrize("exit_rule", [exit_pos, exit_balance])
def test_the_gradient_is_the_weight_times_grad_p(exit_rule):
    """The weights above rest on E[s | verdict]; here the scores are a softmax policy's, two of five answers right."""
    chances = dict(zip("abcde", (0.05, 0.1, 0.2, 0.3, 0.35), strict=True))
    p = chances["a"] + chances["b"]

    def respond(key, seed):
        return random.Random(seed).choices(list(chances), list(chances.values()))[0], 1

    pools = sample(make_prompts(2000, gold="ab"), respond, exit_rule=exit_rule)
    groups = groups_of(pools, step=1)
    expected = exact_weight(p, exit_rule=exit_rule)
    for answer, chance in chances.items():  # one logit after the other: d log pi(b) / d logit(a) = [a = b] - pi(a)
        grad_p = chance * ((answer in "ab") - p)
        gradients = [
            sum(a * ((s.text == answer) - chance) for a, s in zip(g.advantages, g.samples, strict=True)) / 4
            for g in groups
        ]
        assert_mean(gradients + [0.0] * (len(pools) - len(groups)), expected * grad_p)


@pytest.mark.parametrize("exit_rule, expected", [(exit_pos, 0.130), (exit_balance, 0.132)])
def test_stopping_biases_the_pool_mean_and_not_the_first_round(exit_rule, expected):
    """Logged as the reward, the pool mean would show progress where the policy stands still."""
    p = 0.1
    exact = sum(chance * r / (r + w) for (r, w), chance in final_pools(p, exit_rule=exit_rule).items())
    assert exact == pytest.approx(expected, abs=0.001)
    pools = sample(make_prompts(2000), coin(p), exit_rule=exit_rule)
    assert_mean([pool.mean for pool in pools], exact)
    assert_mean([s.correct for pool in pools for s in first_rounds(pool, 1)], p)
    assert all(len(first_rounds(pool, 1)) == 8 for pool in pools)
    metrics = summarise(pools, [], 4)
    assert metrics["reward/first_round"] == pytest.approx(p, abs=0.01)
    assert metrics["reward/pool"] == pytest.approx(exact, abs=0.01)
