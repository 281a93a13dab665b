"""A training step of GRPO, pos and balance by phase: seconds, sizes, memory.

    python -m bench.step           # the toy; one minute on a CPU
    python -m bench.step --model out/random-512x10 --reward bench.common:lucky --prompts_per_step 8 \\
        --max_response_tokens 256 --turns 3                       # a random model of 32 M parameters; 5 minutes
    python -m bench.step --prompts_per_step 8 --turns 1           # the smallest

It takes train.py's options. A step is that of train.py: sample, group, update, sync, by the same calls. The samplers
take turns on the same prompts and from the same weights (the learning rate is 0, all else is done), so their steps
differ in what they sample and in the size of the batch that comes of it. Medians; the ratios are printed last.
"""

import sys
from dataclasses import replace

import torch.distributed as dist

from ada import run_command
from ada.sampler import SAMPLERS, make_groups
from ada.support.metrics import Clock, memory_in_use, summarise
from ada.support.options import parse_options
from bench.common import BenchConfig, print_medians, print_ratio, set_up, take_turns

SHOWN = ("time/", "memory/", "engine/logprob_gap", "sampling/samples", "sampling/tokens", "update/tokens")


def one_step(sampler: str, step: int, config, prompts, ranks, engine, scorer, trainer) -> dict[str, float]:
    """The metrics that train.py logs of such a step."""
    clock = Clock()
    own_queue = replace(ranks, store=dist.HashStore())  # the step's queue is good for one pass
    pools = SAMPLERS[sampler](engine, scorer, prompts, config, step=step, ranks=own_queue)
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
    return {**clock.seconds, **summarise(pools, groups, config.group_size), **updated, **memory}


def main() -> None:
    config = replace(parse_options(BenchConfig, sys.argv[1:]), lr=0.0)
    batches, *parts = set_up(config)

    def way(name: str):
        def measure(turn: int) -> dict[str, float]:
            record = one_step(name, turn, config, batches[turn], *parts)
            print(f"turn {turn}, {name}: {record['time/step']:.2f} s", flush=True)
            shown = {key: value for key, value in record.items() if key.startswith(SHOWN)}
            return shown | {"sync / step": record["time/sync"] / record["time/step"]}

        return measure

    records = take_turns({name: way(name) for name in SAMPLERS}, config.turns)
    print_medians(records)
    for name in ("pos", "balance"):
        print_ratio(records, name, "grpo", "time/step", "sampling/samples")


if __name__ == "__main__":
    run_command(main)
