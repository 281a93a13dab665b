"""A discrete-event engine: the interface of ada/engine.py, simulated ranks behind it, no model and no GPU.

An engine has slots. A decoding step takes STEP_SEC and SEQUENCE_SEC more for each running response, which gets one
token; a prompt's prefill, once per prompt and rank, holds all of them up. The constants are of the order of a 1.5 B
model on an 80 GB GPU; what counts is ratios. Lengths are lognormal, cut at MOST_TOKENS. Grading takes no time. Whether
a response is right, and its length, follow from its seed alone, so all ways to sample see the same responses.
"""

import heapq
import math
import random
import statistics
from collections import deque

SLOTS = 512
STEP_SEC, SEQUENCE_SEC, PREFILL_SEC = 7e-3, 15e-6, 5e-3
MEDIAN_TOKENS, SIGMA, MOST_TOKENS = 600, 0.6, 2048
NORMAL = statistics.NormalDist()


def pass_rates(mix: str, n_prompts: int, seed: int = 0) -> list[float]:
    """Of each prompt. Two Beta distributions that agree with Fig. 2 of the paper, and its hard prompts.

    "before RL": pass@1 0.265 and pass@256 0.813, kept where 1 of 16 was right. "after RL": 35.3% of groups all right at
    n = 4, 10.2% at n = 256. "hard": evenly from 0 to 1/8.
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


class Rank:
    """One engine: a continuous-time version of "every running response gets a token per step"."""

    def __init__(self, slots: int):
        self.slots = slots
        self.time, self.step = 0.0, 0.0  # seconds, decoding steps done by then
        self.running: list = []  # heap of (step at which it is complete, key, n_tokens, text)
        self.waiting: deque = deque()
        self.prefilled: set[int] = set()

    @property
    def in_flight(self) -> int:
        return len(self.running) + len(self.waiting)

    @property
    def next_time(self) -> float:
        """When the next response will be complete, if nothing is submitted before."""
        return self.time + (self.running[0][0] - self.step) * self.step_sec if self.running else math.inf

    @property
    def step_sec(self) -> float:
        return STEP_SEC + SEQUENCE_SEC * len(self.running)

    def advance(self, now: float) -> None:
        """Up to `now`; not at all while a prefill lasts longer than that."""
        if now > self.time:
            self.step += (now - self.time) / self.step_sec if self.running else 0.0
            self.time = now

    def admit(self) -> None:
        while self.waiting and len(self.running) < self.slots:
            key, n_tokens, text = self.waiting.popleft()
            if key[0] not in self.prefilled:
                self.prefilled.add(key[0])
                self.time += PREFILL_SEC
            heapq.heappush(self.running, (self.step + n_tokens, key, n_tokens, text))

    def finish(self) -> list:
        self.step, self.time = self.running[0][0], self.next_time
        done = []
        while self.running and self.running[0][0] <= self.step:
            done.append(heapq.heappop(self.running)[1:])
        self.admit()
        return done


class Engine:
    """Simulated ranks behind the interface of ada/engine.py. A prompt stays on the rank that took it: the freest.

    look_ahead: a rank takes prompts until this many times its slots are running or waiting; the real engine has 1.
    """

    def __init__(self, rates: list[float], n_ranks: int = 1, *, look_ahead: int = 1, slots: int = SLOTS):
        self.rates, self.look_ahead, self.slots = rates, look_ahead, slots
        self.ranks = [Rank(slots) for _ in range(n_ranks)]
        self.rank_of: dict[int, Rank] = {}
        self.now = 0.0
        self.n_tokens, self.longest = 0, 0

    @property
    def capacity(self) -> float:
        """Of the sampler's question "is there room for a prompt?": without limit, while some rank has."""
        return math.inf if min(r.in_flight for r in self.ranks) < self.look_ahead * self.slots else 0

    def submit(self, key, tokens, seed) -> None:
        # Two uniform numbers from the 63 bits: is it right, and which quantile of the lengths?
        right, quantile = (seed & 0x7FFFFFFF) / 2**31, ((seed >> 31) + 0.5) / 2**32
        length = MEDIAN_TOKENS * math.exp(SIGMA * NORMAL.inv_cdf(quantile))
        n_tokens = max(1, min(MOST_TOKENS, round(length)))
        text = "right" if right < self.rates[key[0]] else "wrong"
        if key[0] not in self.rank_of:
            self.rank_of[key[0]] = min(self.ranks, key=lambda rank: rank.in_flight)
        rank = self.rank_of[key[0]]
        rank.advance(self.now)
        rank.waiting.append((key, n_tokens, text))
        rank.admit()
        self.n_tokens += n_tokens
        self.longest = max(self.longest, n_tokens)

    def poll(self) -> list:
        rank = min(self.ranks, key=lambda rank: rank.next_time)
        self.now = max(self.now, rank.next_time)
        return [(key, range(n), (), text, n == MOST_TOKENS) for key, n, text in rank.finish()]

    def start_together(self) -> None:
        """All ranks are idle; the next prompts go to any of them."""
        self.rank_of.clear()

    @property
    def lower_bound(self) -> float:
        """Seconds: all tokens at the rate of full engines, but at least the longest response on its own."""
        full_step_sec = STEP_SEC + SEQUENCE_SEC * self.slots
        work = self.n_tokens / (len(self.ranks) * self.slots) * full_step_sec
        return max(work, self.longest * (STEP_SEC + SEQUENCE_SEC))


class Grader:
    """Says at once what the simulated engine made up."""

    def __init__(self):
        self.verdicts = []

    def submit(self, key, response, gold) -> None:
        self.verdicts.append((key, response == "right"))

    def poll(self, timeout) -> list:
        verdicts, self.verdicts = self.verdicts, []
        return verdicts
