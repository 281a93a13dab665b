"""Reinforce-Ada: adaptive sampling, balanced downsampling, advantages (arXiv 2510.04996, Algorithm 1).

GRPO draws a fixed n responses per prompt. Where all n are right, or all wrong, every advantage is zero and
the prompt teaches nothing. Reinforce-Ada draws in rounds instead and stops a prompt once its pool holds enough
signal; then it keeps a balanced group of n and measures it against the mean of the whole pool:

    pools  = sample_adaptively(engine, scorer, prompts, exit_rule=exit_balance, n=4, round_size=8, max_rounds=4, ...)
    groups = make_groups(pools, n=4, ...)              # one Group of n responses and advantages per mixed pool

Three things hold throughout this file:
  - Rewards are booleans: `correct` is what the verifier said. There is no threshold anywhere.
  - Order never decides. A rule is asked only when a prompt's whole round is in, and what is kept is drawn from
    samples sorted by order of submission. Otherwise short responses, which come back first, would be favoured.
  - Every random draw has a seed of its own, computed from what it is for (`seed_of`), never from a shared
    stream. So one rank or eight, resumed or not, the same prompt gets the same responses.

No torch and no vLLM in here: `engine` and `scorer` are whatever offers submit and poll (ada/engine.py,
ada/reward.py, or the scripted ones in tests/test_sampler.py).
"""

import hashlib
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

# ----------------------------------------------------------------------------------------------------------------
# Records


@dataclass(slots=True)
class Prompt:
    """One row of the data. `row` is unique in a batch, even where two rows have the same text."""

    row: int
    text: str  # after the chat template
    tokens: list[int]
    gold: object  # what the verifier compares with
    problem: str = ""  # before the chat template


@dataclass(slots=True)
class Sample:
    """One response to one prompt, with its verdict."""

    row: int  # the prompt's
    index: int  # order of submission within the prompt, from 0
    tokens: list[int]  # [T], the stop token included
    logprobs: list[float]  # [T], the engine's, nats, of each token at the sampling temperature
    text: str
    truncated: bool  # cut by the length limit rather than ended by the model
    correct: bool = False  # False until the verifier has spoken


@dataclass(slots=True)
class Pool:
    """All responses of one prompt in one iteration: S_x of Algorithm 1."""

    prompt: Prompt
    samples: list[Sample] = field(default_factory=list)  # sorted by index
    rounds: int = 0  # completed ones
    resolved: bool = False  # did the exit rule hold, or did the rounds run out?
    pilot: list[Sample] = field(default_factory=list)  # of two-stage allocation: drawn, counted, not learnt from
    surplus: bool = False  # of passive filtering: the batch was full without it

    @property
    def n_correct(self) -> int:
        return sum(sample.correct for sample in self.samples)

    @property
    def n_wrong(self) -> int:
        return len(self.samples) - self.n_correct

    @property
    def mean(self) -> float:
        """Share of right responses: the global baseline of Algorithm 1, line 3."""
        return self.n_correct / len(self.samples)

    @property
    def uniform(self) -> bool:
        """All right or all wrong: nothing to learn from."""
        return self.n_correct in (0, len(self.samples))

    def first_rounds(self, count: int) -> list[Sample]:
        """The samples of the first `count` rounds, or of all if there were fewer.

        Those of the first were drawn before any exit rule was asked: they are independent, their mean is unbiased.
        """
        return self.samples[: count * len(self.samples) // self.rounds]

    def without_tokens(self) -> "Pool":
        """A copy for the metrics of other ranks: verdicts, lengths and summed log-probs, no tokens and no text."""

        def light(samples: list[Sample]) -> list[Sample]:
            return [replace(s, tokens=range(len(s.tokens)), logprobs=[sum(s.logprobs)], text="") for s in samples]

        prompt = replace(self.prompt, text="", tokens=[], problem="")
        return replace(self, prompt=prompt, samples=light(self.samples), pilot=light(self.pilot))


@dataclass(slots=True)
class Group:
    """What the update sees of one prompt: at most n responses, each with its advantage."""

    prompt: Prompt
    samples: list[Sample]
    advantages: list[float]


def by_row(item: Pool | Group) -> int:
    """The order of everything that is reported or shuffled: it must not depend on who was first."""
    return item.prompt.row


# ----------------------------------------------------------------------------------------------------------------
# Exit rules (section 3 of the paper): may this prompt stop?

ExitRule = Callable[[Pool, int], bool]


def exit_fixed(pool: Pool, n: int) -> bool:
    """GRPO: one round, whatever it brought."""
    return True


def exit_pos(pool: Pool, n: int) -> bool:
    """Reinforce-Ada-pos: at least one right response.

    It asks nothing of the wrong ones: a pool that is all right resolves at once, and gives no group.
    """
    return pool.n_correct >= 1


def exit_balance(pool: Pool, n: int) -> bool:
    """Reinforce-Ada-balance: enough of both kinds for a balanced group, n//2 right and the other n - n//2 wrong."""
    return pool.n_correct >= n // 2 and pool.n_wrong >= n - n // 2


# ----------------------------------------------------------------------------------------------------------------
# Adaptive sampling (Algorithm 1, lines 1 and 2)


def seed_of(*parts) -> int:
    """A 63-bit seed from what a draw is for, e.g. seed_of("train", seed, step, row, index).

    Equal parts give equal seeds on every machine and in every process (Python's own hash() would not).
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1


def sample_adaptively(
    engine,
    scorer,
    prompts: Iterable[Prompt],
    *,
    exit_rule: ExitRule,
    n: int,
    round_size: int,
    max_rounds: int,
    seed: int,
    step: int,
    purpose: str = "train",
    progress: Callable[[int, Sample], None] | None = None,
) -> list[Pool]:
    """Draw rounds of `round_size` responses per prompt until `exit_rule` holds or `max_rounds` are spent.

    There is no barrier between prompts: each one's next round is submitted as soon as its own round is complete
    and graded, while the others' rounds are in flight beside it. The policy does not change meanwhile, so the
    pools are distributed as in Algorithm 1, whose rounds all prompts take in step; here no prompt holds up another.

    Args:
        engine: `capacity`, `submit(key, tokens, seed)`, `poll() -> [(key, tokens, logprobs, text, truncated)]`.
        scorer: `submit(key, response, gold)`, `poll(timeout) -> [(key, correct)]`. A key is (row, index).
        prompts: any iterator. It is pulled only while the engine has room, so several ranks may share one queue.
        exit_rule: asked with (pool, n) after each complete round of a prompt, never in the middle of one.
        seed, step, purpose: what the seed of each response is computed from, beside its key.
        progress: called with (number of active prompts, sample) whenever a response has been graded.

    Returns:
        One pool per prompt, sorted by row.

    Raises:
        ValueError: if two prompts have the same row.
    """
    prompts = iter(prompts)
    pools: dict[int, Pool] = {}
    round_so_far: dict[int, list[Sample]] = {}  # graded samples of the current round; its keys are the active rows
    ungraded: dict[tuple[int, int], Sample] = {}
    n_in_flight = 0  # responses that the engine owes us

    def submit_round(pool: Pool) -> None:
        nonlocal n_in_flight
        row, drawn = pool.prompt.row, len(pool.samples)
        round_so_far[row] = []
        for index in range(drawn, drawn + round_size):
            engine.submit((row, index), pool.prompt.tokens, seed_of(purpose, seed, step, row, index))
        n_in_flight += round_size

    def finish_round(pool: Pool) -> None:
        pool.samples += sorted(round_so_far.pop(pool.prompt.row), key=lambda sample: sample.index)
        pool.rounds += 1
        pool.resolved = exit_rule(pool, n)
        if not pool.resolved and pool.rounds < max_rounds:
            submit_round(pool)

    while True:
        # New prompts, as long as the engine has room for them.
        while n_in_flight < engine.capacity and (prompt := next(prompts, None)) is not None:
            if prompt.row in pools:
                raise ValueError(f"row {prompt.row} occurs twice in a batch")
            pools[prompt.row] = Pool(prompt)
            submit_round(pools[prompt.row])
        if not n_in_flight and not ungraded:
            break

        # One step of the engine; what it finished goes to the graders, which are other processes.
        for (row, index), tokens, logprobs, text, truncated in engine.poll() if n_in_flight else []:
            n_in_flight -= 1
            ungraded[row, index] = Sample(row, index, tokens, logprobs, text, truncated)
            scorer.submit((row, index), text, pools[row].prompt.gold)

        # Verdicts, in any order. Wait for them only when there is nothing to generate.
        for key, correct in scorer.poll(timeout=0 if n_in_flight else None):
            sample = ungraded.pop(key)
            sample.correct = correct
            round_so_far[sample.row].append(sample)
            if progress:
                progress(len(round_so_far), sample)
            if len(round_so_far[sample.row]) == round_size:
                finish_round(pools[sample.row])

    return sorted(pools.values(), key=by_row)


# ----------------------------------------------------------------------------------------------------------------
# Groups (Algorithm 1, line 3)


def downsample(pool: Pool, n: int, rng: random.Random) -> list[Sample]:
    """n samples of the pool: n//2 right and n - n//2 wrong, where one side is short filled from the other.

    Which ones of a side is up to `rng`, not to the order of arrival. Sorted by index; all of a pool of n or fewer.

    >>> pool = Pool(None, [Sample(0, i, [], [], "", False, correct=i < 1) for i in range(8)])   # 1 right, 7 wrong
    >>> [sample.correct for sample in downsample(pool, 4, random.Random(0))]
    [True, False, False, False]
    """
    right = [sample for sample in pool.samples if sample.correct]
    wrong = [sample for sample in pool.samples if not sample.correct]
    n_right = min(len(right), max(n // 2, n - len(wrong)))
    n_wrong = min(len(wrong), n - n_right)
    return sorted(rng.sample(right, n_right) + rng.sample(wrong, n_wrong), key=lambda sample: sample.index)


def advantages(
    group: list[Sample], pool: Pool, *, baseline: str = "global", normalize_std: bool = False
) -> list[float]:
    """A_i = r_i - mean, with r in {0, 1} (Algorithm 1, line 3).

    `baseline`: "global" takes the mean of the whole pool, "group" that of the kept responses (GRPO, Eq. 2).
    `normalize_std` divides by the standard deviation of the same responses, as GRPO does. The paper leaves it
    out: over a pool with 1 right response in 512 it multiplies the advantage by 22.6.

    >>> pool = Pool(None, [Sample(0, i, [], [], "", False, correct=i < 2) for i in range(8)])   # mean 2/8
    >>> advantages(pool.samples[1:3], pool)
    [0.75, -0.25]
    >>> advantages(pool.samples[1:3], pool, baseline="group")
    [0.5, -0.5]
    """
    reference = {"global": pool.samples, "group": group}[baseline]
    mean = sum(sample.correct for sample in reference) / len(reference)
    std = math.sqrt(mean * (1 - mean))  # of 0/1 rewards
    scale = 1 / (std + 1e-6) if normalize_std else 1.0
    return [(sample.correct - mean) * scale for sample in group]


def make_groups(
    pools: list[Pool],
    *,
    n: int,
    seed: int,
    step: int,
    baseline: str = "global",
    normalize_std: bool = False,
    keep_uniform: bool = False,
) -> list[Group]:
    """The batch of the update: a balanced group of n per pool.

    A uniform pool gives no group unless `keep_uniform`. Its advantages are all zero, so it adds nothing to the
    gradient, yet its tokens would count in the token mean of Eq. 3 (the paper's code counts them). Leaving it
    out makes the effective step larger the more pools are uniform.
    """
    groups = []
    for pool in pools:
        if pool.surplus or (pool.uniform and not keep_uniform):
            continue
        rng = random.Random(seed_of("downsample", seed, step, pool.prompt.row))
        kept = downsample(pool, n, rng)
        groups.append(Group(pool.prompt, kept, advantages(kept, pool, baseline=baseline, normalize_std=normalize_std)))
    return groups


# ----------------------------------------------------------------------------------------------------------------
# Metrics


def summarise(pools: list[Pool], groups: list[Group], n: int) -> dict[str, float | None]:
    """What one iteration's sampling looked like. Pure; shares and means are over prompts unless said otherwise.

    The three rewards differ on purpose. `first_round` is the policy's: independent draws, no rule asked yet. (In
    small batches passive filtering biases it a little, drawing more prompts where many are uniform.)
    Stopping biases the mean of the `pool` (pos upwards, balance towards 1/2), and that of the `kept` responses
    sits near 1/2 in balance mode whatever the policy does.
    """

    def share(condition: Callable[[Pool], bool]) -> float:
        return sum(map(condition, pools)) / len(pools)

    def mean(values: list[float]) -> float | None:
        return sum(values) / len(values) if values else None  # no groups, nothing kept

    first_rounds = [sample for pool in pools for sample in pool.first_rounds(1)]
    drawn = [sample for pool in pools for sample in pool.pilot + pool.samples]
    return {
        "reward/first_round": mean([sample.correct for sample in first_rounds]),
        "reward/pool": mean([pool.mean for pool in pools]),
        "reward/kept": mean([sample.correct for group in groups for sample in group.samples]),
        "sampling/samples": len(drawn),
        "sampling/tokens": sum(len(sample.tokens) for sample in drawn),
        # what GRPO would have lost: the first n responses agree
        "sampling/uniform_at_n": share(lambda pool: len({sample.correct for sample in pool.samples[:n]}) == 1),
        "sampling/uniform_after": share(lambda pool: pool.uniform),
        # Fig. 5: prompts still active after the last round, by what they lacked
        "sampling/unresolved_no_right": share(lambda pool: not pool.resolved and pool.n_correct < max(1, n // 2)),
        "sampling/unresolved_no_wrong": share(lambda pool: not pool.resolved and pool.n_wrong < n - n // 2),
        # of right ones as many as balance wants, and whatever the rule wants, by then
        "sampling/right_in_two_rounds": share(
            lambda pool: sum(sample.correct for sample in pool.first_rounds(2)) >= max(1, n // 2)
        ),
        "sampling/resolved_in_two_rounds": share(lambda pool: pool.resolved and pool.rounds <= 2),
        "update/groups": len(groups),
        "response/length": mean([len(sample.tokens) for sample in first_rounds]),  # tok
        "response/truncated": mean([sample.truncated for sample in first_rounds]),
    }
