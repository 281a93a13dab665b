"""A discrete-event engine: the interface of ada/engine.py, simulated ranks behind it, no model and no GPU.

An engine has slots. A decoding step takes STEP_SEC and SEQUENCE_SEC more for each running response, which gets one
token; submitting and a prompt's prefill, once per prompt and rank, hold all of them up. The constants are of the order
of a 1.5 B model on an 80 GB GPU; what counts is ratios. Lengths are lognormal, cut at MOST_TOKENS. Grading takes no
time. Whether a response is right, and its length, follow from its seed alone, so all ways to sample see the same ones.
"""

import heapq
import itertools
import math
import random
import statistics
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ada.sampler import Pool

SLOTS = 512
STEP_SEC, SEQUENCE_SEC, PREFILL_SEC, SUBMIT_SEC = 7e-3, 15e-6, 5e-3, 1e-4
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


class Engine:
    """One rank's engine: a continuous-time version of "a step gives every running response a token".

    wait_until: called with the time of the next event before it happens, so that ranks can share a queue of prompts.
    """

    def __init__(self, rates: list[float], *, slots: int = SLOTS, wait_until: Callable[[float], None] | None = None):
        self.rates, self.capacity, self.wait_until = rates, slots, wait_until
        self.time, self.step = 0.0, 0.0  # seconds; decoding steps done by then
        self.running: list = []  # heap of (step at which it is complete, key, n_tokens, text)
        self.waiting: deque = deque()  # (key, n_tokens, text)
        self.prefilled: set[int] = set()

    def submit(self, key, tokens, seed) -> None:
        # Two uniform numbers from the 63 bits: is it right, and which quantile of the lengths?
        right, quantile = (seed & 0x7FFFFFFF) / 2**31, ((seed >> 31) + 0.5) / 2**32
        length = MEDIAN_TOKENS * math.exp(SIGMA * NORMAL.inv_cdf(quantile))
        n_tokens = max(1, min(MOST_TOKENS, round(length)))
        self.waiting.append((key, n_tokens, "right" if right < self.rates[key[0]] else "wrong"))
        self.time += SUBMIT_SEC
        self._admit()

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.capacity:
            key, n_tokens, text = self.waiting.popleft()
            if key[0] not in self.prefilled:
                self.prefilled.add(key[0])
                self.time += PREFILL_SEC
            heapq.heappush(self.running, (self.step + n_tokens, key, n_tokens, text))

    def poll(self) -> list:
        """On to the next response that is complete, whatever else is generated meanwhile."""
        step = self.running[0][0]
        next_time = self.time + (step - self.step) * (STEP_SEC + SEQUENCE_SEC * len(self.running))
        if self.wait_until:
            self.wait_until(next_time)
        self.step, self.time = step, next_time
        done = []
        while self.running and self.running[0][0] <= step:
            done.append(heapq.heappop(self.running)[1:])
        self._admit()
        return [(key, range(n), (), text, n == MOST_TOKENS) for key, n, text in done]


class Grader:
    """Says at once what the simulated engine made up."""

    def __init__(self):
        self.verdicts = []

    def submit(self, key, response, gold) -> None:
        self.verdicts.append((key, response == "right"))

    def poll(self, timeout) -> list:
        verdicts, self.verdicts = self.verdicts, []
        return verdicts


class Turns:
    """Runs functions in threads, one at a time: always the one whose next event is the earliest."""

    def __init__(self):
        self.waiting: list = []  # heap of (time, tie-break, lock)
        self.numbers = itertools.count()

    def wait_until(self, time: float) -> None:
        mine = self._queue_up(time)
        self._next()
        mine.acquire()

    def run(self, functions: list[Callable]) -> list:
        """What each returned."""

        def one(function: Callable, start: threading.Semaphore):
            start.acquire()
            try:
                return function()
            finally:
                self._next()

        with ThreadPoolExecutor(len(functions)) as threads:
            results = [threads.submit(one, function, self._queue_up(0.0)) for function in functions]
            self._next()
        return [result.result() for result in results]

    def _queue_up(self, time: float) -> threading.Semaphore:
        lock = threading.Semaphore(0)
        heapq.heappush(self.waiting, (time, next(self.numbers), lock))
        return lock

    def _next(self) -> None:
        if self.waiting:
            heapq.heappop(self.waiting)[2].release()


def lower_bound(pools: list[Pool], n_ranks: int, slots: int) -> float:
    """Seconds: all tokens of the pools at the rate of full engines, but at least the longest response on its own."""
    lengths = [len(sample.tokens) for pool in pools for sample in pool.samples]
    work = sum(lengths) / (n_ranks * slots) * (STEP_SEC + SEQUENCE_SEC * slots)
    return max(work, max(lengths) * (STEP_SEC + SEQUENCE_SEC))
