"""What the sampler itself costs: `sample_adaptively` and `make_groups` on an engine and graders that take no time.

    python bench/overhead.py            # a minute; no model, no GPU

512 prompts that draw 32 responses each, then up to 31,250 prompts: a million responses. Microseconds per response are
CPU time of everything but the fake engine itself (whose own cost is measured alone and taken off; it is printed).
Memory is the peak above the responses' own tokens and log-probs, by the kernel's count of resident pages in a fresh
process; the responses share one list of tokens, so that there is nothing of theirs to take off.
"""

import os
import statistics
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from ada.sampler import Prompt, exit_balance, make_groups, sample_adaptively

ROUND_SIZE, MAX_ROUNDS, N = 8, 4, 4
GOALS = {"us": 20, "growth": 1.25, "bytes": 1024}
TOKENS, LOGPROBS = [7] * 10, [-0.5] * 10


class FreeEngine:
    """Everything that was submitted comes back at the next poll, at most `capacity` of it."""

    capacity = 512

    def __init__(self):
        self.waiting = deque()

    def submit(self, key, tokens, seed) -> None:
        self.waiting.append((key, TOKENS, LOGPROBS, "text", False))

    def poll(self) -> list:
        return [self.waiting.popleft() for _ in range(min(self.capacity, len(self.waiting)))]

    def abort(self, keys) -> None:
        assert not keys, "no prompt stops before its last round"


class FreeScorer:
    """Only response 9 of a prompt is right, so that no prompt stops early and each gives a group."""

    def __init__(self):
        self.done = []

    def submit(self, key, response, gold) -> None:
        self.done.append((key, key[1] == 9))

    def poll(self, timeout) -> list:
        done, self.done = self.done, []
        return done


def sampler_seconds(n_prompts: int) -> float:
    """CPU seconds for sampling and grouping, fakes included."""
    prompts = [Prompt(row, "", [], None) for row in range(n_prompts)]
    options = dict(exit_rule=exit_balance, n=N, round_size=ROUND_SIZE, max_rounds=MAX_ROUNDS, seed=0, step=1)
    start = time.process_time()
    pools = sample_adaptively(FreeEngine(), FreeScorer(), iter(prompts), **options)
    groups = make_groups(pools, n=N, seed=0, step=1)
    seconds = time.process_time() - start
    assert len(groups) == n_prompts and all(len(pool.samples) == 32 for pool in pools)
    return seconds


def fakes_seconds(n_responses: int) -> float:
    engine, scorer = FreeEngine(), FreeScorer()
    start = time.process_time()
    for i in range(n_responses):
        engine.submit((0, i), [], 0)
    while done := engine.poll():
        for key, *_ in done:
            scorer.submit(key, "text", None)
        scorer.poll(0)
    return time.process_time() - start


def resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def peak_bytes_per_response(n_prompts: int) -> float:
    before = resident_bytes("VmRSS")
    sampler_seconds(n_prompts)
    return (resident_bytes("VmHWM") - before) / (n_prompts * 32)


def main() -> None:
    if sys.argv[1:]:
        print(peak_bytes_per_response(int(sys.argv[1])))
        return
    per_response = {}
    for n_prompts in (512, 4096, 31250):
        turns = 5 if n_prompts == 512 else 3
        fakes = statistics.median(fakes_seconds(n_prompts * 32) for _ in range(turns))
        sampler = statistics.median(sampler_seconds(n_prompts) for _ in range(turns)) - fakes
        per_response[n_prompts] = 1e6 * sampler / (n_prompts * 32)
        command = [sys.executable, __file__, str(n_prompts)]
        n_bytes = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(
            f"{n_prompts * 32:>9,} responses: {per_response[n_prompts]:.1f} us each "
            f"(the fakes took {1e6 * fakes / (n_prompts * 32):.1f}), {n_bytes:,.0f} bytes each",
            flush=True,
        )
    print(f"us per response at 512 prompts x 32: {per_response[512]:.1f} (goal: under {GOALS['us']})")
    print(f"bytes per response at 10^6: {n_bytes:,.0f} (goal: under {GOALS['bytes']:,})")
    print(f"time per response, 10^6 / 16,384: {per_response[31250] / per_response[512]:.2f}x")


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
