"""Seconds per step of GRPO, pos and balance, by phase.

    python bench/step.py toy [--turns 5]        # one minute on a CPU
    python bench/step.py random --turns 3       # a random model of 32 M parameters; 5 minutes

A step is that of train.py: sample, group, update, sync, one after the other with the same calls. The three samplers
take turns on the same prompts and from the same weights (the learning rate is 0, all else is done), so their steps
differ in what they sample and in the size of the batch that comes of it. "grading wait" is the part of sampling in
which the engine had nothing to do but to wait for verdicts. The random model's responses have 1 to 256 tokens, right
and wrong are drawn by chance at the pass rates of the toy, and each verdict costs what math-verify costs; the toy's
graders have seen most answers before. Medians over the turns. Shares of a step and ratios are printed last.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from ada import toy
from ada.data import batch, load_prompts, load_tokenizer
from ada.engine import Engine
from ada.reward import Scorer
from ada.run import Clock
from ada.sampler import exit_balance, exit_fixed, exit_pos, make_groups, sample_adaptively, summarise
from ada.trainer import Trainer, init_ranks
from bench.common import machine, random_model

N = 4
SAMPLERS = {  # rule, round size, rounds
    "grpo": (exit_fixed, N, 1),
    "pos": (exit_pos, 8, 4),
    "balance": (exit_balance, 8, 4),
}
SETTINGS = {
    "toy": dict(n_prompts=128, max_tokens=32, reward="math"),
    "random": dict(n_prompts=8, max_tokens=256, reward="bench.common:lucky"),
}
PHASES = ("sampling", "grading wait", "group", "update", "sync", "step")


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


def one_step(
    name: str,
    engine: Engine,
    scorer: Scorer,
    trainer: Trainer,
    prompts: list,
    step: int,
    *,
    keep_uniform: bool = False,
) -> dict[str, float]:
    """Seconds of each phase, and what was sampled."""
    rule, round_size, max_rounds = SAMPLERS[name]
    timed, clock = TimedScorer(scorer), Clock()
    options = dict(exit_rule=rule, n=N, round_size=round_size, max_rounds=max_rounds, seed=0, step=step)
    pools = sample_adaptively(engine, timed, iter(prompts), **options)
    clock.lap("time/sampling")
    groups = make_groups(pools, n=N, seed=0, step=step, keep_uniform=keep_uniform)
    clock.lap("time/group")
    engine.sleep()
    updated = trainer.update(groups, seed=0, step=step)
    clock.lap("time/update")
    engine.sync(trainer.named_weights())
    clock.lap("time/sync")
    counts = summarise(pools, groups, N)
    seconds = {phase.removeprefix("time/"): value for phase, value in clock.seconds.items()}
    sizes = {"responses": counts["sampling/samples"], "tokens": counts["sampling/tokens"]}
    gaps = {f"gap {which}": updated[f"engine/logprob_gap_{which}"] for which in ("mean", "max")}
    return {**seconds, "grading wait": timed.waited, **sizes, "update tokens": updated["update/tokens"], **gaps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", choices=SETTINGS)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    n_prompts, max_tokens, reward = SETTINGS[arguments.setting].values()

    ranks = init_ranks()
    toy_model = toy.locate("toy-demo/model")
    folder = toy_model
    if arguments.setting == "random":
        folder = random_model(tempfile.mkdtemp(), hidden=512, layers=10)
    rows, _ = load_prompts(
        toy.locate("toy-demo/train"), load_tokenizer(folder), max_prompt_tokens=32, whole_rows=reward != "math"
    )
    engine, scorer = Engine(folder, max_tokens=max_tokens, max_prompt_tokens=32), Scorer(reward=reward)
    engine.sleep()
    trainer = Trainer(folder, ranks, lr=0.0)
    scorer.wait_until_ready()
    engine.sync(trainer.named_weights())
    print(machine())

    records = {name: [] for name in SAMPLERS}
    for turn in range(arguments.turns + 1):
        prompts = batch(rows, step=turn, size=n_prompts, seed=0)
        for name in SAMPLERS:
            record = one_step(name, engine, scorer, trainer, prompts, turn)
            if turn:  # the first warms up
                records[name].append(record)
            print(f"turn {turn}, {name}: {record['step']:.2f} s", flush=True)

    middle = {
        name: {key: statistics.median(record[key] for record in turns) for key in turns[0]}
        for name, turns in records.items()
    }
    print("\n| | " + " | ".join(SAMPLERS) + " |\n" + "| --- " * 4 + "|")
    for key in (*PHASES, "responses", "tokens", "update tokens"):
        cells = [f"{m[key]:.3f} s" if key in PHASES else f"{m[key]:,.0f}" for m in middle.values()]
        print(f"| {key} | {' | '.join(cells)} |")
    for key in ("sync", "grading wait"):
        print(f"{key}, share of a step: " + ", ".join(f"{name} {m[key] / m['step']:.1%}" for name, m in middle.items()))
    for name in ("pos", "balance"):
        ratios = [a["step"] / b["step"] for a, b in zip(records[name], records["grpo"], strict=True)]
        print(f"{name} / grpo, seconds per step: {statistics.median(ratios):.2f}x")
    sys.stdout.flush()
    scorer.close()
    os._exit(0)


if __name__ == "__main__":
    main()
