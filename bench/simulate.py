"""Sampling at the paper's size on simulated engines: GRPO, synchronous rounds, ours, and the lower bound.

    python bench/simulate.py            # a quarter of a minute, no GPU, no model

512 prompts, n = 4, as many as 32 responses each, on 1 to 64 ranks of 512 slots (bench/simulated.py says what a rank is
and where the pass rates come from). `sample_adaptively` is the real one: the engine under it routes prompts to ranks,
and decides when a response is done. Four tables:

  1. seconds of GRPO, and over them: synchronous rounds, ours with fixed shares of the prompts and with the shared
     queue, and the lower bound of ours (its tokens at the rate of full engines, at least its longest response alone)
  2. round size x number of rounds, at most 32 responses each: time over GRPO's, responses
  3. what pulling prompts ahead would bring: until 1, 2, 4 times the slots are running or waiting
  4. the paper's seconds per step, fitted, with our sampler in place of synchronous rounds
"""

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from ada.sampler import Pool, Prompt, Sample, exit_balance, exit_fixed, exit_pos, sample_adaptively, seed_of
from bench import simulated
from bench.simulated import Engine, Grader

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
    responses: int
    bound: float  # seconds


def ours(rates, n_ranks, rule=exit_balance, *, round_size=8, max_rounds=4, queue=True, **engine_options) -> Phase:
    """The real sampler over all ranks; without the shared queue, once for each rank and its fixed share of prompts."""
    prompts = [Prompt(row, "", [], None) for row in range(PROMPTS)]
    shares = [prompts] if queue else [prompts[rank::n_ranks] for rank in range(n_ranks)]
    engines, n_responses = [], 0
    for share in shares:
        engines.append(Engine(rates, n_ranks // len(shares), **engine_options))
        options = dict(exit_rule=rule, n=N, round_size=round_size, max_rounds=max_rounds, seed=0, step=1)
        pools = sample_adaptively(engines[-1], Grader(), iter(share), **options)
        n_responses += sum(len(pool.samples) for pool in pools)
    bound = statistics.fmean(engine.lower_bound for engine in engines)
    return Phase(max(engine.now for engine in engines), n_responses, bound)


def grpo(rates, n_ranks, **engine_options) -> Phase:
    return ours(rates, n_ranks, exit_fixed, round_size=N, max_rounds=1, **engine_options)


def synchronous(rates, n_ranks, rule=exit_balance, *, round_size=8, max_rounds=4, **engine_options) -> Phase:
    """The same responses in rounds: each is dealt to the ranks anew, and lasts until its slowest response is there."""
    engine = Engine(rates, n_ranks, **engine_options)
    pools = {row: Pool(Prompt(row, "", [], None)) for row in range(PROMPTS)}
    for _ in range(max_rounds):
        active = [pool for pool in pools.values() if not pool.resolved]
        for pool in active:
            row, drawn = pool.prompt.row, len(pool.samples)
            for index in range(drawn, drawn + round_size):
                engine.submit((row, index), [], seed_of("train", 0, 1, row, index))
        missing = len(active) * round_size
        while missing:
            for (row, index), tokens, logprobs, text, truncated in engine.poll():
                pools[row].samples.append(Sample(row, index, tokens, logprobs, text, truncated, text == "right"))
                missing -= 1
        for pool in active:
            pool.resolved = rule(pool, N)
        engine.start_together()
    return Phase(engine.now, sum(len(pool.samples) for pool in pools.values()), engine.lower_bound)


# ----------------------------------------------------------------------------------------------------------------
# Tables


def print_row(*cells) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def print_head(*cells) -> None:
    print()
    print_row(*cells)
    print_row(*["---"] * len(cells))


def table_of_makespans() -> None:
    print_head("pass rates", "ranks", "GRPO", "rounds", "fixed shares", "ours", "bound", "ours / rounds")
    for mix in MIXES:
        rates = pass_rates(mix)
        for n in (1, 2, 4, 8, 16, 64):
            base, rounds, adaptive = grpo(rates, n), synchronous(rates, n), ours(rates, n)
            ways = [rounds.seconds, ours(rates, n, queue=False).seconds, adaptive.seconds, adaptive.bound]
            over_grpo = [f"{seconds / base.seconds:.2f}x" for seconds in ways]
            print_row(mix, n, f"{base.seconds:.1f} s", *over_grpo, f"{adaptive.seconds / rounds.seconds:.2f}")


def table_of_shapes() -> None:
    print_head("pass rates", "ranks", *(f"{size} x {count}" for size, count in SHAPES))
    for mix in MIXES:
        rates = pass_rates(mix)
        for n in (1, 8, 64):
            base = grpo(rates, n).seconds
            phases = [ours(rates, n, round_size=size, max_rounds=count) for size, count in SHAPES]
            print_row(mix, n, *(f"{phase.seconds / base:.2f}x, {phase.responses:,}" for phase in phases))


def table_of_look_ahead() -> None:
    print_head("pass rates", "ranks", *(f"look ahead {a}" for a in (1, 2, 4)))
    for mix in MIXES:
        for n in (1, 2, 8):
            print_row(mix, n, *(f"{ours(pass_rates(mix), n, look_ahead=a).seconds:.0f} s" for a in (1, 2, 4)))


def against_the_paper() -> None:
    """Fit GRPO, pos and balance in synchronous rounds to Table 2, then replace the rounds by our sampler.

    A step is a * (sampling, simulated, over GRPO's) + b. GRPO and balance give a and b; pos chooses the engine's slots.
    """
    half_way = [pass_rates("before RL")[::2], pass_rates("after RL")[::2]]
    rates = [rate for half in half_way for rate in half]

    def ratio(way, slots, *arguments, **options) -> float:
        return way(rates, 8, *arguments, slots=slots, **options).seconds / grpo(rates, 8, slots=slots).seconds

    print_head("model", "slots", "", "GRPO", "pos", "balance", "balance 16 x 2", "balance / GRPO")
    for model, (grpo_sec, pos_sec, balance_sec) in PAPER.items():

        def fit(slots: int) -> tuple[float, float, float]:
            a = (balance_sec - grpo_sec) / (ratio(synchronous, slots) - 1)  # noqa: B023
            return a, grpo_sec - a, a * ratio(synchronous, slots, exit_pos) + grpo_sec - a  # noqa: B023

        slots = min((32, 64, 128, 256, 512), key=lambda slots: abs(fit(slots)[2] - pos_sec))  # noqa: B023
        a, b, pos_fitted = fit(slots)
        wide = dict(round_size=16, max_rounds=2)
        print_row(model, slots, "paper", grpo_sec, pos_sec, balance_sec, "", f"{balance_sec / grpo_sec:.2f}x")
        for name, way in {"rounds, fitted": synchronous, "ours": ours}.items():
            pos, balance, balance_wide = (
                a * seconds + b
                for seconds in (ratio(way, slots, exit_pos), ratio(way, slots), ratio(way, slots, **wide))
            )
            cells = [f"{seconds:.0f}" for seconds in (pos, balance, balance_wide)]
            print_row(model, slots, name, grpo_sec, *cells, f"{balance / grpo_sec:.2f}x")
        print(f"sampling is {a / grpo_sec:.0%} of GRPO's step")


if __name__ == "__main__":
    for table in (table_of_makespans, table_of_shapes, table_of_look_ahead, against_the_paper):
        table()
