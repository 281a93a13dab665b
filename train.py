"""Train a language model with Reinforce-Ada (arXiv 2510.04996).

    torchrun train.py                                                       # the embedded toy, a few minutes on a CPU
    torchrun train.py --config configs/toy.yaml --sampler pos --seed 1      # options: YAML first, command line on top
    torchrun --nproc_per_node=8 train.py --config configs/paper.yaml --model Qwen/Qwen2.5-Math-1.5B
    python train.py --steps 3                                               # one rank needs no launcher

The same command again continues from the newest checkpoint in out/RUN. The loop is train(), just below; after it read
ada/sampler.py. How this differs from GRPO as it is usually written:

  - Responses are drawn in rounds, until a prompt's pool holds enough signal; a balanced group of it is kept.
  - A = r - mean of the whole pool. No division by the standard deviation: over a large pool it can be tiny.
  - A prompt whose pool has zero variance gives no group, so its tokens don't count in the loss either.
  - The loss is a mean over all tokens of the batch; there is no mean per response, so long ones aren't favoured.
  - Each token is weighted by the ratio of the trainer's probability to the engine's, at most 2.
  - No KL term and no reference model, no value function, no dual clip; generation is never asynchronous (off-policy).
"""

from ada import option, run_command  # first: it sets the number of threads, which torch reads on import

# isort: split
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch.distributed as dist
from transformers.utils import logging as transformers_logging

import toy
from ada.data import DataConfig, batch, describe, load_prompts, load_tokenizer
from ada.engine import Engine
from ada.eval import evaluate
from ada.reward import Scorer
from ada.sampler import SAMPLERS, SamplingConfig, adaptive, by_prompt, make_groups
from ada.support.metrics import Clock, SamplingBar, grading_failures, memory_in_use, summarise, without_tokens
from ada.support.options import OptionError, find_function, parse_options
from ada.support.ranks import init_ranks
from ada.support.run import Run
from ada.trainer import Trainer, TrainerConfig


def train(config: "Config") -> None:
    """Set up, then iterate: sample, group, update, sync; now and then evaluate and save."""
    ranks = init_ranks()
    sampler = find_sampler(config.sampler)
    tokenizer, train_prompts, eval_prompts = load(config, ranks)
    run = Run(config, ranks, data=train_prompts + eval_prompts)
    scorer = Scorer(config.graders, reward=config.reward)  # starts beside the engine
    engine = Engine(config.model, config, max_prompt_tokens=config.max_prompt_tokens, dtype=ranks.compute_dtype)
    engine.sleep()  # until the trainer has taken its memory
    trainer = Trainer(config.model, ranks, config)
    scorer.wait_until_ready()
    start = run.resume(trainer)
    engine.sync(trainer.named_weights())
    run.print(f"training in {run.path} on {ranks.world_size} x {ranks.device.type}; the first prompt is")
    run.print(repr(train_prompts[0].text))
    for remark in config.remarks():
        run.print(f"note: {remark}")
    if start == 0:
        run.log({"step": 0, **evaluate(engine, scorer, eval_prompts, ranks, config.eval_k, config.seed, step=0)})

    for step in run.steps(start):
        clock = Clock()

        # ---- sample: each prompt in rounds until its pool holds enough signal; every rank has pools of its own
        prompts = batch(train_prompts, step=step - 1, size=config.prompts_per_step, seed=config.seed)
        with SamplingBar("sampling", ranks) as progress:
            context = dict(step=step, ranks=ranks, train_prompts=train_prompts, progress=progress)
            my_pools = sampler(engine, scorer, prompts, config, **context)
        clock.lap("time/sampling")

        # ---- group: n responses of each mixed pool, with their advantages; from here every rank knows all groups
        my_groups = make_groups(my_pools, config, step=step)
        groups = ranks.gather(my_groups, by_prompt)
        pools = ranks.gather([without_tokens(pool) for pool in my_pools], by_prompt)
        clock.lap("time/gather")

        # ---- update, with the memory that the sleeping engine leaves
        engine.sleep()
        memory = memory_in_use(ranks.device, "asleep")
        updated = trainer.update(groups, step=step)
        memory |= memory_in_use(ranks.device, "update")
        clock.lap("time/update")

        # ---- sync: the engine wakes up with the new weights
        engine.sync(trainer.named_weights())
        clock.lap("time/sync")

        # ---- log, evaluate, save
        metrics = {"step": step, **summarise(pools, groups, config.group_size), **updated, **clock.seconds, **memory}
        metrics |= grading_failures(scorer, ranks)
        if step % config.eval_every == 0 or step == config.steps:
            metrics |= evaluate(engine, scorer, eval_prompts, ranks, config.eval_k, config.seed, step=step)
        run.log_samples(step, my_pools, my_groups, prompts[: config.log_prompts])
        run.log(metrics)
        stop = run.should_stop()
        if step % config.save_every == 0 or step == config.steps or stop:
            run.save(trainer, step, tokenizer)
        if stop:
            run.print(f"stopped after step {step}; the same command continues")
            break
    else:  # not stopped early
        run.report()
    run.close()
    scorer.close()
    engine.close()
    dist.destroy_process_group()


# ----------------------------------------------------------------------------------------------------------------
# Options: those of data, engine, sampling and update stand beside their code; these are the run's


@dataclass
class Config(TrainerConfig, DataConfig):
    """Every option. The defaults train the toy; configs/ has others."""

    # model and data
    model: str = option("out/toy-demo/model", "Hugging Face folder or name; out/toy-* is built on first use")
    train_data: str = option("out/toy-demo/train.jsonl", "JSONL, JSON or parquet file, or Hugging Face data set")
    eval_data: str = option("out/toy-demo/test.jsonl", "held-out prompts, likewise; an empty string: no evaluation")
    reward: str = option(
        "math", "math: math-verify on the last box; or MODULE:FUNCTION, given the response and its row of the data"
    )
    graders: int = option(1, "grading processes per rank", at_least=1)

    # how long, and what is kept
    steps: int = option(80, "iterations", at_least=1)
    eval_every: int = option(10, "steps between evaluations; also one before the first step and at the end", at_least=1)
    eval_k: int = option(16, "responses per held-out prompt", at_least=1)
    save_every: int = option(20, "steps between checkpoints; there is one at the end", at_least=1)
    keep_checkpoints: int = option(2, "newest ones to keep; 0 keeps all", at_least=0)
    log_prompts: int = option(2, "prompts per step whose responses go to samples.jsonl", at_least=0)
    out: str = option("out", "folder of all runs")
    name: str = option("", "this run's folder in it; by default CONFIG-SAMPLER-seedSEED, without a config MODEL-...")
    wandb: bool = option(False, "log to Weights & Biases, too, if it is installed")
    config: str = option("", "YAML file of options")

    # What may differ when a run is continued: how long, where and how it runs and is watched, not what it learns.
    may_change: ClassVar = set(
        "steps save_every keep_checkpoints log_prompts wandb config out max_concurrent gpu_memory_share graders "
        "micro_batch_tokens activation_checkpointing cpu_offload".split()
    )

    def __post_init__(self):
        what = Path(self.config).stem or ("toy" if toy.is_toy(self.model) else Path(self.model).name)
        self.name = self.name or f"{what}-{self.sampler.rpartition(':')[2]}-seed{self.seed}"

    def check(self) -> None:
        """Raise OptionError on options that don't go together."""
        find_sampler(self.sampler)
        most = self.round_size * self.max_rounds
        if self.sampler != "grpo" and self.group_size > most:
            raise OptionError(
                f"--group_size {self.group_size}: --max_rounds {self.max_rounds} of --round_size {self.round_size} "
                f"give only {most} responses"
            )

    def remarks(self) -> Iterator[str]:
        """What is allowed, but perhaps not meant."""
        usual = SamplingConfig()
        if self.sampler == "grpo" and (self.round_size, self.max_rounds) != (usual.round_size, usual.max_rounds):
            yield f"--sampler grpo draws --group_size {self.group_size} once; --round_size, --max_rounds have no effect"
        if self.lr > 1e-4 and not toy.is_toy(self.model):
            yield f"--lr {self.lr} is the toy's order of magnitude; the paper trains language models with 1e-6"


# ----------------------------------------------------------------------------------------------------------------
# Parts


def find_sampler(name: str):
    """By name, or MODULE:FUNCTION: a sampler, or an exit rule, which has two parameters. Raises OptionError."""
    function = find_function("--sampler", name, SAMPLERS)
    return adaptive(function) if len(inspect.signature(function).parameters) == 2 else function


def load(config: Config, ranks):
    """Tokenizer, training and held-out prompts; rank 0 prints how many prompts were dropped and why."""
    for path in (config.model, config.train_data, config.eval_data):
        toy.build_if_missing(path)
    tokenizer = load_tokenizer(config.model)
    loaded = []
    for source in filter(None, (config.train_data, config.eval_data)):
        prompts, counts = load_prompts(source, tokenizer, config, whole_rows=config.reward != "math")
        if ranks.rank == 0:
            print(f"{source}: {describe(counts)}")
        loaded.append(prompts)
    train_prompts, eval_prompts = [*loaded, []][:2]
    batch(train_prompts, step=0, size=config.prompts_per_step, seed=config.seed)  # refuses too few prompts
    return tokenizer, train_prompts, eval_prompts


def main() -> None:
    transformers_logging.disable_progress_bar()
    run_command(lambda: train(parse_options(Config, sys.argv[1:])))


if __name__ == "__main__":
    main()
