"""A training step of GRPO, pos and balance by phase: seconds, sizes, memory.

    python -m bench.step           # the toy; one minute on a CPU
    python -m bench.step --model out/random-512x10 --reward bench.common:lucky --prompts_per_step 8 \\
        --max_response_tokens 256 --turns 3                       # a random model of 32 M parameters; 5 minutes
    python -m bench.step --prompts_per_step 8 --turns 1           # the smallest

It takes train.py's options. A step is that of train.py: sample, group, update, sync, one after the other with the same
calls. The three samplers take turns on the same prompts and from the same weights (the learning rate is 0, all else is
done), so their steps differ in what they sample and in the size of the batch that comes of it. "waiting for graders"
is the part of sampling in which the engine had nothing to do but to wait for verdicts. The random model's responses
have 1 to 256 tokens, verdicts are drawn by chance at the pass rates of the toy, and each costs what math-verify costs;
the toy's graders have seen most answers before. Medians over the turns. The ratios are printed last.
"""

import sys
import time
from dataclasses import replace

import torch.distributed as dist

from ada import run_command
from ada.data import batch
from ada.reward import Scorer
from ada.sampler import SAMPLERS, make_groups
from ada.support.metrics import Clock, memory_in_use, summarise
from ada.support.options import parse_options
from bench.common import BenchConfig, median, print_ratio, set_up, take_turns

SIZES = {"sampling/samples": "responses", "sampling/tokens": "tokens", "update/tokens": "tokens in the update"}


class TimedScorer:
    """A scorer that counts the seconds in which the sampler had nothing to do but wait for it."""

    def __init__(self, scorer: Scorer):
        self.submit, self._poll, self.waited = scorer.submit, scorer.poll, 0.0

    def poll(self, timeout: float | None) -> list:
        start = time.perf_counter()
        verdicts = self._poll(timeout)
        if timeout is None:
            self.waited += time.perf_counter() - start
        return verdicts


def one_step(sampler: str, step: int, config, prompts, ranks, engine, scorer, trainer) -> dict[str, float]:
    """The metrics that train.py logs of such a step."""
    timed, clock = TimedScorer(scorer), Clock()
    own_queue = replace(ranks, store=dist.HashStore())  # the step's queue is good for one pass
    pools = SAMPLERS[sampler](engine, timed, prompts, config, step=step, ranks=own_queue)
    clock.lap("time/sampling")
    groups = make_groups(pools, config, step=step)
    clock.lap("time/group")
    engine.sleep()
    memory = memory_in_use(ranks.device, "asleep")
    updated = trainer.update(groups, step=step)
    memory |= memory_in_use(ranks.device, "update")
    clock.lap("time/update")
    engine.sync(trainer.named_weights())
    clock.lap("time/sync")
    waited = {"time/waiting for graders": timed.waited}
    return {**clock.seconds, **waited, **summarise(pools, groups, config.group_size), **updated, **memory}


def main() -> None:
    config = replace(parse_options(BenchConfig, sys.argv[1:]), lr=0.0)
    all_prompts, *parts = set_up(config)

    def way(name: str):
        def measure(turn: int) -> dict[str, float]:
            prompts = batch(all_prompts, step=turn, size=config.prompts_per_step, seed=config.seed)
            record = one_step(name, turn, config, prompts, *parts)
            print(f"turn {turn}, {name}: {record['time/step']:.2f} s", flush=True)
            return record

        return measure

    records = take_turns({name: way(name) for name in SAMPLERS}, config.turns)
    print("\n| | " + " | ".join(records) + " |\n" + "| --- " * (len(records) + 1) + "|")
    for key in records["balance"][0]:
        if key.startswith(("time/", "memory/", "engine/logprob_gap")) or key in SIZES:
            cells = [f"{median(records, name, key):,.{0 if key in SIZES else 3}f}" for name in records]
            print(f"| {SIZES.get(key, key)} | {' | '.join(cells)} |")
    for key in ("time/sync", "time/waiting for graders"):
        shares = [f"{name} {median(records, name, key) / median(records, name, 'time/step'):.1%}" for name in records]
        print(f"{key}, share of a step: {', '.join(shares)}")
    for name in ("pos", "balance"):
        print_ratio(records, name, "grpo", "time/step", "sampling/samples")


if __name__ == "__main__":
    run_command(main)
