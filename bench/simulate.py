"""Sampling at the paper's size on simulated engines: GRPO, synchronous rounds, ours, and the lower bound.

    python bench/simulate.py            # half a minute, no GPU, no model

512 prompts, n = 4, as many as 32 responses each, on 1 to 64 ranks of 512 slots; bench/simulated.py says what an engine
is and where the pass rates come from. `sample_adaptively` is the real one, on each rank, over prompts from the ranks'
shared queue or from fixed shares. Three tables:

  1. seconds of GRPO, and over them: synchronous rounds; our sampler without a barrier, with fixed shares of the prompts
     and with the shared queue; the lower bound (the pools' tokens at the rate of full engines, at least their longest
     response alone)
  2. round size x number of rounds, at most 32 responses each: time over GRPO's, responses
  3. the paper's seconds per step, fitted, with our sampler in place of synchronous rounds
"""

import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from ada.sampler import Pool, Prompt, Sample, by_row, exit_balance, exit_fixed, exit_pos, sample_adaptively, seed_of
from bench import simulated
from bench.simulated import SLOTS, Engine, Grader, Turns, lower_bound

N, PROMPTS = 4, 512
MIXES = ("before RL", "after RL", "hard")
SHAPES = ((4, 8), (8, 4), (16, 2), (32, 1))  # round size, rounds
PAPER = {"1.5B": (102, 228, 290), "7B": (236, 333, 375)}  # Table 2: seconds per step of GRPO, pos, balance


def pass_rates(mix: str) -> list[float]:
    return simulated.pass_rates(mix, PROMPTS)


# ----------------------------------------------------------------------------------------------------------------
# Ways to sample; each returns a Phase


@dataclass
class Phase:
    seconds: float
    pools: list[Pool]
    bound: float  # seconds


def make_prompts() -> list[Prompt]:
    return [Prompt(row, "", [], None) for row in range(PROMPTS)]


def ours(rates, n_ranks, rule=exit_balance, *, round_size=8, max_rounds=4, queue=True, slots=SLOTS) -> Phase:
    """The real sampler on every rank; prompts from one queue, or a fixed share for each rank."""
    turns, prompts = Turns(), make_prompts()
    engines = [Engine(rates, slots=slots, wait_until=turns.wait_until) for _ in range(n_ranks)]
    common = iter(prompts)

    def from_queue(engine: Engine) -> Iterator[Prompt]:
        while True:
            turns.wait_until(engine.time)  # first come, first served
            if (prompt := next(common, None)) is None:
                return
            yield prompt

    def one_rank(rank: int) -> list[Pool]:
        shape = dict(n=N, round_size=round_size, max_rounds=max_rounds)
        mine = from_queue(engines[rank]) if queue else iter(prompts[rank::n_ranks])
        return sample_adaptively(engines[rank], Grader(), mine, exit_rule=rule, **shape, seed=0, step=1)

    results = turns.run([functools.partial(one_rank, rank) for rank in range(n_ranks)])
    pools = sorted((pool for pools in results for pool in pools), key=by_row)
    return Phase(max(engine.time for engine in engines), pools, lower_bound(pools, n_ranks, slots))


def grpo(rates, n_ranks, *, slots=SLOTS) -> Phase:
    return ours(rates, n_ranks, exit_fixed, round_size=N, max_rounds=1, slots=slots)


def synchronous(rates, n_ranks, rule=exit_balance, *, round_size=8, max_rounds=4, slots=SLOTS) -> Phase:
    """The same responses in rounds: each is dealt to the ranks anew, and lasts until its slowest response is there."""
    engines = [Engine(rates, slots=slots) for _ in range(n_ranks)]
    pools = {prompt.row: Pool(prompt) for prompt in make_prompts()}
    for _ in range(max_rounds):
        active = [pool for pool in pools.values() if not pool.resolved]
        for i, pool in enumerate(active):
            row, drawn = pool.prompt.row, len(pool.samples)
            for index in range(drawn, drawn + round_size):
                engines[i % n_ranks].submit((row, index), [], seed_of("train", 0, 1, row, index))
        for engine in engines:
            while engine.running:
                for (row, index), tokens, logprobs, text, truncated in engine.poll():
                    pools[row].samples.append(Sample(row, index, tokens, logprobs, text, truncated, text == "right"))
        for pool in active:
            pool.samples.sort(key=lambda sample: sample.index)
            pool.rounds += 1
            pool.resolved = rule(pool, N)
        slowest = max(engine.time for engine in engines)
        for engine in engines:
            engine.time = slowest
    return Phase(slowest, list(pools.values()), lower_bound(list(pools.values()), n_ranks, slots))


# ----------------------------------------------------------------------------------------------------------------
# Tables


def print_row(*cells) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def print_head(*cells) -> None:
    print()
    print_row(*cells)
    print_row(*["---"] * len(cells))


def table_of_makespans() -> None:
    columns = ("rounds", "ours, fixed shares", "ours", "bound", "ours / rounds")
    print_head("pass rates", "ranks", "GRPO", *columns)
    for mix in MIXES:
        rates = pass_rates(mix)
        for n in (1, 2, 4, 8, 16, 64):
            base, rounds, fixed, queue = (
                grpo(rates, n),
                synchronous(rates, n),
                ours(rates, n, queue=False),
                ours(rates, n),
            )
            ways = [rounds.seconds, fixed.seconds, queue.seconds, queue.bound]
            over_grpo = [f"{seconds / base.seconds:.2f}x" for seconds in ways]
            print_row(mix, n, f"{base.seconds:.1f} s", *over_grpo, f"{queue.seconds / rounds.seconds:.2f}")


def table_of_shapes() -> None:
    print_head("pass rates", "ranks", *(f"{size} x {count}" for size, count in SHAPES))
    for mix in MIXES:
        rates = pass_rates(mix)
        for n in (1, 8, 64):
            cells = []
            for size, count in SHAPES:
                phase = ours(rates, n, round_size=size, max_rounds=count)
                n_responses = sum(len(pool.samples) for pool in phase.pools)
                cells.append(f"{phase.seconds / grpo(rates, n).seconds:.2f}x, {n_responses:,}")
            print_row(mix, n, *cells)


def against_the_paper() -> None:
    """Fit GRPO, pos and balance in synchronous rounds to Table 2, then replace the rounds by our sampler.

    A step is a * (sampling, simulated, over GRPO's) + b. GRPO and balance give a and b; pos chooses the engine's slots.
    """
    half_way = [pass_rates("before RL")[::2], pass_rates("after RL")[::2]]
    rates = [rate for half in half_way for rate in half]

    def ratio(way, slots, *arguments, **options) -> float:
        return way(rates, 8, *arguments, slots=slots, **options).seconds / grpo(rates, 8, slots=slots).seconds

    head = ("GRPO", "pos", "balance", "pos / GRPO", "balance / GRPO")
    print_head("model", "slots fitted", "sampling in GRPO's step", "", *head)
    for model, (grpo_sec, pos_sec, balance_sec) in PAPER.items():
        fits = {}
        for slots in (32, 64, 128, 256, 512):
            a = (balance_sec - grpo_sec) / (ratio(synchronous, slots) - 1)
            fits[slots] = a, grpo_sec - a
        errors = {slots: abs(a * ratio(synchronous, slots, exit_pos) + b - pos_sec) for slots, (a, b) in fits.items()}
        slots = min(errors, key=errors.get)
        a, b = fits[slots]

        lines = {"paper": (pos_sec, balance_sec)}
        for name, way in {"rounds, fitted": synchronous, "ours": ours}.items():
            lines[name] = a * ratio(way, slots, exit_pos) + b, a * ratio(way, slots) + b
        for name, (pos, balance) in lines.items():
            seconds = (f"{x:.0f}" for x in (grpo_sec, pos, balance))
            ratios = (f"{x / grpo_sec:.2f}x" for x in (pos, balance))
            print_row(model, slots, f"{a / grpo_sec:.0%}", name, *seconds, *ratios)


if __name__ == "__main__":
    for table in (table_of_makespans, table_of_shapes, against_the_paper):
        table()
