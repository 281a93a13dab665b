"""Reinforce-Ada: adaptive sampling, balanced downsampling, advantages (arXiv 2510.04996, Algorithm 1).

GRPO draws a fixed number n of responses per prompt. Where all n are correct, or all incorrect, every advantage is zero
and the prompt teaches nothing. Reinforce-Ada draws in rounds instead and stops a prompt once its pool holds enough
signal; then it keeps a balanced group of n and measures it against the mean of the whole pool:

    pools  = sample_adaptively(engine, scorer, prompts, config, exit_rule=exit_balance, step=1)
    groups = make_groups(pools, config, step=1)        # a Group of n responses with their advantages per mixed pool

Three things hold throughout this file:
  - Rewards are booleans: `correct` is the verifier's answer. There is no threshold anywhere.
  - Order never decides. An exit rule is asked only when a prompt's round is complete, and what is kept is drawn from
    responses sorted by order of submission. Otherwise short responses, which come back first, would be favoured.
  - Every random draw has a seed of its own, computed from what it is for (`seed_of`), never from a shared stream.
    So one rank or eight, resumed or not, the same prompt gets the same responses.

No torch and no vLLM in here: `Engine` and `Scorer` below say all that the sampler asks of ada/engine.py and
ada/reward.py, and the tests run it on scripted ones.
"""

import hashlib
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from ada import option

# ----------------------------------------------------------------------------------------------------------------
# Options and records


@dataclass
class SamplingConfig:
    """Options of sampling and grouping (Algorithm 1)."""

    sampler: str = option(
        "balance",
        "when a prompt may stop: grpo after one round, pos with one correct response, balance with half and half; or "
        "MODULE:FUNCTION, an exit rule or a whole sampler of your own, as in experiments/baselines.py",
    )
    group_size: int = option(4, "n: responses per prompt in the update", at_least=2)
    round_size: int = option(8, "responses per prompt and round (grpo draws group_size)", at_least=1)
    max_rounds: int = option(4, "rounds per prompt at most (grpo: one)", at_least=1)
    prompts_per_step: int = option(128, "prompts per iteration, over all ranks", at_least=1)
    baseline: Literal["global", "group"] = option("global", "mean that advantages are measured against: pool or group")
    normalize_std: bool = option(False, "divide advantages by the standard deviation, as GRPO does (Eq. 2)")
    keep_zero_variance: bool = option(False, "keep zero-variance groups: no gradient, but they count in the token mean")
    seed: int = option(0, "everything random derives from it", at_least=0)


@dataclass(slots=True)
class Prompt:
    """One problem of the data. `prompt_id` is unique in a batch, even where two problems have the same text."""

    prompt_id: int
    text: str  # after the chat template
    tokens: list[int]
    gold: object  # what the verifier compares with
    problem: str = ""  # before the chat template


@dataclass(slots=True)
class Sample:
    """One response to one prompt: made by the engine, given its verdict by the scorer, learnt from by the trainer."""

    prompt_id: int
    index: int  # order of submission within the prompt, from 0
    tokens: list[int]  # [T], the stop token included; emptied where only the numbers below are needed
    logprobs: list[float]  # [T], the engine's, nats, of each token at the sampling temperature; emptied likewise
    text: str
    truncated: bool  # cut by the length limit rather than ended by the model
    correct: bool = False  # set when the verdict comes in
    n_tokens: int | None = None  # T
    logprob_sum: float | None = None  # nats

    def __post_init__(self):
        if self.n_tokens is None:
            self.n_tokens, self.logprob_sum = len(self.tokens), sum(self.logprobs)


@dataclass(slots=True)
class Pool:
    """All responses to one prompt in one iteration: S_x of Algorithm 1."""

    prompt: Prompt
    samples: list[Sample] = field(default_factory=list)  # sorted by index
    rounds: int = 0  # completed ones
    resolved: bool = False  # True: the exit rule held; False: the rounds ran out
    unused: list[Sample] = field(default_factory=list)  # drawn for another purpose: they cost, but aren't learnt from

    @property
    def n_correct(self) -> int:
        return sum(sample.correct for sample in self.samples)

    @property
    def n_incorrect(self) -> int:
        return len(self.samples) - self.n_correct

    @property
    def mean(self) -> float:
        """Share of correct responses: the global baseline of Algorithm 1, line 3."""
        return self.n_correct / len(self.samples)

    @property
    def zero_variance(self) -> bool:
        """All correct or all incorrect: nothing to learn from."""
        return self.n_correct in (0, len(self.samples))


@dataclass(slots=True)
class Group:
    """What the update sees of one prompt: at most n responses, each with its advantage."""

    prompt: Prompt
    samples: list[Sample]
    advantages: list[float]


def by_prompt(item: Pool | Group) -> int:
    """The order of everything that is reported or shuffled: it must not depend on who was first."""
    return item.prompt.prompt_id


# ----------------------------------------------------------------------------------------------------------------
# Exit rules (section 3 of the paper): may this prompt stop?

ExitRule = Callable[[Pool, int], bool]


def exit_fixed(pool: Pool, n: int) -> bool:
    """GRPO: one round, whatever it brought."""
    return True


def exit_pos(pool: Pool, n: int) -> bool:
    """Reinforce-Ada-pos: at least one correct response.

    It asks nothing of the incorrect ones: a pool that is all correct resolves at once, and gives no group.
    """
    return pool.n_correct >= 1


def exit_balance(pool: Pool, n: int) -> bool:
    """Reinforce-Ada-balance: enough of both for a balanced group, n//2 correct and the other n - n//2 incorrect."""
    return pool.n_correct >= n // 2 and pool.n_incorrect >= n - n // 2


# ----------------------------------------------------------------------------------------------------------------
# Adaptive sampling (Algorithm 1, lines 1 and 2)


class Engine(Protocol):
    capacity: int  # responses generated side by side; more may be submitted, they queue

    def submit(self, key: tuple[int, int], tokens: list[int], seed: int) -> None: ...
    def poll(self) -> list[Sample]: ...  # one step of generation; what it finished, not yet graded


class Scorer(Protocol):
    def submit(self, key, response: str, gold) -> None: ...
    def poll(self, timeout: float | None) -> list[tuple]: ...  # (key, correct), in any order; None: wait for one


def seed_of(*parts) -> int:
    """A 63-bit seed from what a draw is for, e.g. seed_of("train", seed, step, prompt_id, index).

    Equal parts give equal seeds on every machine and in every process (Python's own hash() would not).
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1


def sample_adaptively(
    engine: Engine,
    scorer: Scorer,
    prompts: Iterable[Prompt],
    config: SamplingConfig,
    *,
    exit_rule: ExitRule,
    step: int,
    purpose: str = "train",
    progress: Callable[[int, Sample], None] | None = None,
) -> list[Pool]:
    """Draw rounds of `round_size` responses per prompt until `exit_rule` holds or `max_rounds` are spent.

    There is no barrier between prompts: each one's next round is submitted as soon as its own round is complete
    and graded, while the others' rounds are in flight beside it. The policy does not change meanwhile, so the
    pools are distributed as in Algorithm 1, whose rounds all prompts take in step; here no prompt holds up another.

    Args:
        prompts: any iterator. It is pulled only while the engine has room, so several ranks may share one queue.
        config: its group_size, round_size, max_rounds and seed.
        exit_rule: asked with (pool, n) after each complete round of a prompt, never in the middle of one.
        step, purpose: with the seed and the request's key, what the seed of each response is computed from.
        progress: called with (number of active prompts, sample) whenever a response has been graded.

    Returns:
        One pool per prompt, sorted by prompt_id.

    Raises:
        ValueError: two prompts have the same prompt_id.
    """
    prompts = iter(prompts)
    pools: dict[int, Pool] = {}
    current_round: dict[int, list[Sample]] = {}  # graded samples of each active prompt's unfinished round
    ungraded: dict[tuple[int, int], Sample] = {}
    n_in_flight = 0  # responses that the engine is still to return

    def submit_round(pool: Pool) -> None:
        nonlocal n_in_flight
        prompt, n_drawn = pool.prompt, len(pool.samples)
        current_round[prompt.prompt_id] = []
        for index in range(n_drawn, n_drawn + config.round_size):
            key = (prompt.prompt_id, index)
            engine.submit(key, prompt.tokens, seed_of(purpose, config.seed, step, *key))
        n_in_flight += config.round_size

    def finish_round(pool: Pool) -> None:
        pool.samples += sorted(current_round.pop(pool.prompt.prompt_id), key=lambda sample: sample.index)
        pool.rounds += 1
        pool.resolved = exit_rule(pool, config.group_size)
        if not pool.resolved and pool.rounds < config.max_rounds:
            submit_round(pool)

    while True:
        # New prompts, as long as the engine has room for them.
        while n_in_flight < engine.capacity and (prompt := next(prompts, None)) is not None:
            if prompt.prompt_id in pools:
                raise ValueError(f"prompt {prompt.prompt_id} occurs twice in a batch")
            pools[prompt.prompt_id] = Pool(prompt)
            submit_round(pools[prompt.prompt_id])
        if not n_in_flight and not ungraded:
            break

        # One step of the engine; what it finished goes to the graders, which are other processes.
        for sample in engine.poll() if n_in_flight else []:
            n_in_flight -= 1
            key = (sample.prompt_id, sample.index)
            ungraded[key] = sample
            scorer.submit(key, sample.text, pools[sample.prompt_id].prompt.gold)

        # Verdicts, in any order. Wait for them only when there is nothing to generate.
        for key, correct in scorer.poll(timeout=0 if n_in_flight else None):
            sample = ungraded.pop(key)
            sample.correct = correct
            current_round[sample.prompt_id].append(sample)
            if progress:
                progress(len(current_round), sample)
            if len(current_round[sample.prompt_id]) == config.round_size:
                finish_round(pools[sample.prompt_id])

    return sorted(pools.values(), key=by_prompt)


def adaptive(exit_rule: ExitRule) -> Callable[..., list[Pool]]:
    """The sampler with this exit rule. A sampler is what --sampler names: it draws one iteration's pools.

    It gets the whole batch on every rank, and returns the pools of those prompts that this rank took from the queue.
    `train_prompts` are all prompts of the data, for samplers that draw others than the batch's.
    """

    def sampler(engine, scorer, prompts, config, *, step, ranks, train_prompts=(), progress=None) -> list[Pool]:
        queue = ranks.share(prompts, f"train/{step}")
        return sample_adaptively(engine, scorer, queue, config, exit_rule=exit_rule, step=step, progress=progress)

    return sampler


def grpo(engine, scorer, prompts, config: SamplingConfig, **context) -> list[Pool]:
    """The baseline: one round of n, and no more."""
    one_round = replace(config, round_size=config.group_size)
    return adaptive(exit_fixed)(engine, scorer, prompts, one_round, **context)


SAMPLERS = {"grpo": grpo, "pos": adaptive(exit_pos), "balance": adaptive(exit_balance)}

# ----------------------------------------------------------------------------------------------------------------
# Groups (Algorithm 1, line 3)


def downsample(pool: Pool, n: int, rng: random.Random) -> list[Sample]:
    """n samples of the pool: n//2 correct and n - n//2 incorrect, where one side is short filled from the other.

    Which ones of a side is up to `rng`, not to the order of arrival. Sorted by index; all of a pool of n or fewer.

    >>> pool = Pool(None, [Sample(0, i, [], [], "", False, correct=i < 1) for i in range(8)])   # 1 correct of 8
    >>> [sample.correct for sample in downsample(pool, 4, random.Random(0))]
    [True, False, False, False]
    """
    correct = [sample for sample in pool.samples if sample.correct]
    incorrect = [sample for sample in pool.samples if not sample.correct]
    n_correct = min(len(correct), max(n // 2, n - len(incorrect)))
    n_incorrect = min(len(incorrect), n - n_correct)
    return sorted(rng.sample(correct, n_correct) + rng.sample(incorrect, n_incorrect), key=lambda sample: sample.index)


def advantages(
    group: list[Sample], pool: Pool, *, baseline: str = "global", normalize_std: bool = False
) -> list[float]:
    """A_i = r_i - mean, with r in {0, 1} (Algorithm 1, line 3).

    `baseline`: "global" takes the mean of the whole pool, "group" that of the kept responses (GRPO, Eq. 2).
    `normalize_std` divides by the standard deviation of the same responses, as GRPO does. The paper leaves it
    out: over a pool with 1 correct response in 512 it multiplies the advantage by 22.6.

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


def make_groups(pools: list[Pool], config: SamplingConfig, *, step: int) -> list[Group]:
    """The batch of the update: a balanced group of n per pool.

    A zero-variance pool gives no group unless `keep_zero_variance`. Its advantages are all zero, so it adds nothing to
    the gradient, yet its tokens would count in the token mean of Eq. 3 (the paper's code counts them). Leaving it out
    makes the effective step larger the more such pools there are.
    """
    groups = []
    for pool in pools:
        if pool.zero_variance and not config.keep_zero_variance:
            continue
        rng = random.Random(seed_of("downsample", config.seed, step, pool.prompt.prompt_id))
        kept = downsample(pool, config.group_size, rng)
        own = advantages(kept, pool, baseline=config.baseline, normalize_std=config.normalize_std)
        groups.append(Group(pool.prompt, kept, own))
    return groups
