"""Sampling at the paper's size on simulated engines: seconds of GRPO, of synchronous rounds, and of other rounds.

    python -m bench.simulate            # half a minute, no GPU, no model
    python -m bench.simulate 32         # fewer prompts

512 prompts, n = 4, at most 32 responses each, on 1 to 64 ranks of 512 slots. `sample_adaptively` is the real one, on
each rank, over a fixed share of the prompts. A decoding step takes STEP_SEC and SEQUENCE_SEC more for each running
response, which gets one token; submitting and a prompt's prefill, once per prompt and rank, hold all of them up. The
constants are of the order of a 1.5 B model on an 80 GB GPU; what counts is ratios. Lengths are lognormal, cut at
MAX_TOKENS. Grading takes no time. Whether a response is correct, and its length, follow from its seed alone, so all
ways to sample see the same responses. The machine does not matter: the same figures come out everywhere.
"""

import heapq
import math
import random
import statistics
import sys
from collections import deque
from dataclasses import dataclass

from ada.sampler import Pool, Prompt, Sample, SamplingConfig, by_prompt, exit_balance, exit_fixed, sample_adaptively
from bench.common import synchronous_rounds

SLOTS = 512
STEP_SEC, SEQUENCE_SEC, PREFILL_SEC, SUBMIT_SEC = 7e-3, 15e-6, 5e-3, 1e-4
MEDIAN_TOKENS, SIGMA, MAX_TOKENS = 600, 0.6, 2048
MIXES = ("before RL", "after RL", "hard")
SHAPES = ((4, 8), (8, 4), (16, 2), (32, 1))  # round size, rounds


def pass_rates(mix: str, n_prompts: int, seed: int = 0) -> list[float]:
    """Of each prompt. Two Beta distributions that agree with Fig. 2 of the paper, and its hard prompts.

    "before RL": pass@1 0.265 and pass@256 0.813, kept where 1 of 16 was correct. "after RL": 35.3% of groups all
    correct at n = 4, 10.2% at n = 256. "hard": evenly from 0 to 1/8.
    """
    rng = random.Random(seed)

    def draw() -> float:
        if mix == "hard":
            return rng.uniform(0, 1 / 8)
        if mix == "after RL":
            return rng.betavariate(0.34, 0.30)
        while True:
            p = rng.betavariate(0.26, 0.72)
            if rng.random() < 1 - (1 - p) ** 16:
                return p

    return [draw() for _ in range(n_prompts)]


class Engine:
    """One rank's engine: a continuous-time version of "a step gives every running response a token"."""

    def __init__(self, rates: list[float], slots: int = SLOTS):
        self.rates, self.capacity = rates, slots
        self.time, self.step = 0.0, 0.0  # seconds; decoding steps done by then
        self.running: list = []  # heap of (step at which it is complete, key, sample)
        self.waiting: deque = deque()  # samples to be
        self.prefilled: set[int] = set()

    def submit(self, key, tokens, seed) -> None:
        # Two uniform numbers from the 63 bits: is it correct, and which quantile of the lengths?
        correct, quantile = (seed & 0x7FFFFFFF) / 2**31, ((seed >> 31) + 0.5) / 2**32
        length = round(MEDIAN_TOKENS * math.exp(SIGMA * statistics.NormalDist().inv_cdf(quantile)))
        n_tokens, text = max(1, min(MAX_TOKENS, length)), "right" if correct < self.rates[key[0]] else "wrong"
        self.waiting.append(Sample(*key, [], [], text, n_tokens == MAX_TOKENS, n_tokens=n_tokens, logprob_sum=0.0))
        self.time += SUBMIT_SEC
        self._admit()

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.capacity:
            sample = self.waiting.popleft()
            if sample.prompt_id not in self.prefilled:
                self.prefilled.add(sample.prompt_id)
                self.time += PREFILL_SEC
            heapq.heappush(
                self.running, (self.step + sample.n_tokens, (sample.prompt_id, sample.index), sample)
            )

    def poll(self) -> list[Sample]:
        """On to the next response that is complete, whatever else is generated meanwhile."""
        step = self.running[0][0]
        self.time += (step - self.step) * (STEP_SEC + SEQUENCE_SEC * len(self.running))
        self.step, done = step, []
        while self.running and self.running[0][0] <= step:
            done.append(heapq.heappop(self.running)[-1])
        self._admit()
        return done


class Grader:
    """Says at once what the simulated engine made up."""

    def __init__(self):
        self.verdicts = []

    def submit(self, key, response, gold) -> None:
        self.verdicts.append((key, response == "right"))

    def poll(self, timeout) -> list:
        verdicts, self.verdicts = self.verdicts, []
        return verdicts


@dataclass
class Phase:
    seconds: float
    pools: list[Pool]


def ours(rates, n_ranks, rule=exit_balance, *, shape=(8, 4), slots=SLOTS) -> Phase:
    """The real sampler on every rank, without a barrier between prompts or ranks."""
    prompts, engines = make_prompts(rates), [Engine(rates, slots) for _ in range(n_ranks)]
    options = dict(config=SamplingConfig(round_size=shape[0], max_rounds=shape[1]), exit_rule=rule, step=1)
    pools = [
        sample_adaptively(engine, Grader(), prompts[rank::n_ranks], **options) for rank, engine in enumerate(engines)
    ]
    return Phase(max(engine.time for engine in engines), sorted(sum(pools, []), key=by_prompt))


def rounds(rates, n_ranks, rule=exit_balance, *, shape=(8, 4), slots=SLOTS) -> Phase:
    """The same responses in synchronous rounds: each lasts until the slowest response of all ranks is there."""
    engines = [Engine(rates, slots) for _ in range(n_ranks)]

    def barrier() -> None:
        slowest = max(engine.time for engine in engines)
        for engine in engines:
            engine.time = slowest

    options = dict(config=SamplingConfig(round_size=shape[0], max_rounds=shape[1]), exit_rule=rule, step=1)
    pools = synchronous_rounds(engines, Grader(), make_prompts(rates), barrier=barrier, **options)
    return Phase(engines[0].time, pools)


def make_prompts(rates: list[float]) -> list[Prompt]:
    return [Prompt(prompt_id, "", [], None) for prompt_id in range(len(rates))]


def print_row(*cells) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def main() -> None:
    n_prompts = int(sys.argv[1]) if sys.argv[1:] else 512
    print_row("pass rates", "ranks", "GRPO", "synchronous 8 x 4", *(f"{size} x {count}" for size, count in SHAPES))
    print_row(*["---"] * (4 + len(SHAPES)))
    ratios = []
    for mix in MIXES:
        rates = pass_rates(mix, n_prompts)
        for n_ranks in (1, 2, 4, 8, 16, 64):
            grpo = ours(rates, n_ranks, exit_fixed, shape=(4, 1)).seconds
            synchronous = rounds(rates, n_ranks).seconds
            phases = {shape: ours(rates, n_ranks, shape=shape) for shape in SHAPES}
            over_grpo = [f"{seconds / grpo:.2f}x" for seconds in (synchronous, *(p.seconds for p in phases.values()))]
            print_row(mix, n_ranks, f"{grpo:.1f} s", *over_grpo)
            ratios.append(phases[8, 4].seconds / synchronous)
        responses = [f"{sum(len(pool.samples) for pool in phase.pools):,}" for phase in phases.values()]
        print_row(mix, "responses", f"{4 * n_prompts:,}", responses[1], *responses)
    print(f"ours / synchronous rounds, both 8 x 4: {min(ratios):.2f}x to {max(ratios):.2f}x")


if __name__ == "__main__":
    main()
