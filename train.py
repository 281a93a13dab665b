"""Train a language model with Reinforce-Ada (arXiv 2510.04996).

    torchrun train.py                                                       # the embedded toy, a few minutes on a CPU
    torchrun train.py --config configs/toy.yaml --sampler pos --seed 1      # options: YAML first, command line on top
    torchrun --nproc_per_node=8 train.py --config configs/qwen2.5-math-1.5b.yaml
    python train.py --steps 3                                               # one rank needs no launcher

The same command again continues from the newest checkpoint in out/RUN. Read the loop in train() first, then
ada/sampler.py. Left out on purpose: the KL term and the reference model, the value function, the dual clip,
asynchronous (off-policy) generation. The paper uses none of the first three.
"""

from ada import one_line, run_command, toy  # first: it sets the number of threads, which torch reads on import

# isort: split
import dataclasses
import pkgutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch.distributed as dist
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from ada.baselines import passive, two_stage
from ada.data import batch, describe, load_prompts, load_tokenizer, shared_queue
from ada.eval import evaluate
from ada.options import OptionError, parse_options
from ada.reward import Scorer
from ada.run import Clock, Run, SamplingBar, grading_failures, memory_in_use
from ada.sampler import (
    ExitRule,
    Prompt,
    by_row,
    exit_balance,
    exit_fixed,
    exit_pos,
    make_groups,
    sample_adaptively,
    summarise,
)
from ada.trainer import Ranks, Trainer, init_ranks

EXIT_RULES = {"grpo": exit_fixed, "pos": exit_pos, "balance": exit_balance}
BASELINES = ("passive", "two_stage")


def option(default, help: str):
    return field(default=default, metadata={"help": help})


@dataclass
class Config:
    """Every option. The defaults train the toy; configs/ has the paper's settings."""

    # model and data
    model: str = option("toy-demo/model", "Hugging Face folder or name; toy-demo/model is built on first use")
    train_data: str = option("toy-demo/train", "JSONL, JSON or parquet file, or Hugging Face data set")
    eval_data: str = option("toy-demo/test", "held-out prompts, the same forms; an empty string turns evaluation off")
    max_prompt_tokens: int = option(32, "longer prompts are dropped and counted")
    max_response_tokens: int = option(32, "longer responses are cut and marked truncated")

    # sampling (Algorithm 1)
    sampler: str = option(
        "balance",
        "when a prompt may stop: grpo after one round, pos with one right response, balance with half and half; "
        "passive and two_stage: see ada/baselines.py; or MODULE:FUNCTION, an exit rule of your own",
    )
    group_size: int = option(4, "n: responses per prompt in the update")
    round_size: int = option(8, "responses per prompt and round (grpo, passive: group_size; two_stage: the pilot's)")
    max_rounds: int = option(4, "rounds per prompt (grpo: 1; passive: waves of prompts; two_stage: on average)")
    prompts_per_step: int = option(128, "prompts per iteration, over all ranks")
    temperature: float = option(1.0, "of sampling, and of the log-probs in the update")
    baseline: Literal["global", "group"] = option("global", "mean that advantages are measured against: pool or group")
    normalize_std: bool = option(False, "divide advantages by the standard deviation, as GRPO does (Eq. 2)")
    keep_uniform: bool = option(False, "keep uniform groups: no gradient, but they count in the token mean")

    # update (Eq. 3)
    steps: int = option(80, "iterations")
    updates_per_step: int = option(1, "mini-batches, hence optimiser steps, per iteration")
    lr: float = option(5e-4, "learning rate, constant after the warm-up")
    warmup_steps: int = option(10, "iterations of linear warm-up")
    weight_decay: float = option(0.0, "of AdamW")
    max_grad_norm: float = option(1.0, "gradients are clipped to this global norm")
    eps_low: float = option(0.2, "clip of the ratio from below")
    eps_high: float = option(0.28, "clip of the ratio from above (clip-higher)")
    entropy_coef: float = option(0.0, "weight of the entropy bonus; the paper has 1e-4, its released script 0")
    importance_cap: float = option(2.0, "cap of the trainer/engine probability ratio that weights each token; 0 = off")
    drop_truncated: bool = option(False, "leave truncated responses out of the update")
    micro_batch_tokens: int = option(16384, "tokens, padding included, per forward")
    activation_checkpointing: bool = option(False, "recompute layers in the backward: less memory, more time")
    cpu_offload: bool = option(False, "weights and optimiser state in host memory; set OMP_NUM_THREADS, too")

    # engine and graders
    max_concurrent: int = option(
        256,
        "responses that one engine generates side by side; with several ranks keep it below a rank's share of a step",
    )
    gpu_memory_share: float = option(0.5, "of a GPU's memory, for vLLM's weights and KV cache")
    graders: int = option(1, "grading processes per rank")
    reward: str = option(
        "math", "math: math-verify on the last box; or MODULE:FUNCTION, given the response and its row"
    )

    # logging, evaluation, checkpoints
    eval_every: int = option(10, "steps between evaluations; there is one before the first step and one at the end")
    eval_k: int = option(16, "responses per held-out prompt")
    save_every: int = option(20, "steps between checkpoints; there is one at the end")
    keep_checkpoints: int = option(2, "newest ones to keep; 0 keeps all")
    log_prompts: int = option(2, "prompts per step whose responses go to samples.jsonl")
    seed: int = option(0, "everything random derives from it")
    out: str = option("out", "folder of all runs")
    name: str = option("", "this run's folder in it; by default CONFIG-SAMPLER-seedSEED, without a config MODEL-...")
    wandb: bool = option(False, "log to Weights & Biases, too, if it is installed")
    config: str = option("", "YAML file of options")

    def __post_init__(self):
        what = Path(self.config).stem or ("toy" if self.model.startswith("toy-") else Path(self.model).name)
        self.name = self.name or f"{what}-{self.sampler.rpartition(':')[2]}-seed{self.seed}"
        if self.sampler in ("grpo", "passive"):
            self.round_size = self.group_size
        if self.sampler == "grpo":
            self.max_rounds = 1

    def check(self) -> None:
        """Raise OptionError on a value that cannot be, naming the option."""
        for least, names in AT_LEAST.items():
            for name in names.split():
                if not getattr(self, name) >= least:
                    raise OptionError(f"--{name} {getattr(self, name)}: must be at least {least}")
        for name in ("temperature", "max_grad_norm", "gpu_memory_share"):
            if not getattr(self, name) > 0:
                raise OptionError(f"--{name} {getattr(self, name)}: must be above 0")
        for name in ("eps_low", "gpu_memory_share"):
            if not getattr(self, name) < 1:
                raise OptionError(f"--{name} {getattr(self, name)}: must be below 1")
        if self.sampler not in BASELINES:
            find_exit_rule(self.sampler)
        if self.sampler == "passive" and self.keep_uniform:
            raise OptionError("--keep_uniform: --sampler passive is about leaving them out")
        if self.sampler == "two_stage" and self.max_rounds < 2:
            raise OptionError(f"--max_rounds {self.max_rounds}: --sampler two_stage takes one for the pilot alone")
        if self.sampler == "two_stage" and self.round_size % self.group_size:
            raise OptionError(
                f"--round_size {self.round_size}: --sampler two_stage spends it in multiples of --group_size "
                f"{self.group_size}"
            )
        if self.group_size > self.round_size * self.max_rounds:
            raise OptionError(
                f"--group_size {self.group_size}: --max_rounds {self.max_rounds} of --round_size {self.round_size} "
                f"give only {self.round_size * self.max_rounds} responses"
            )


AT_LEAST = {
    2: "group_size",
    1: "max_prompt_tokens max_response_tokens round_size max_rounds prompts_per_step steps updates_per_step "
    "micro_batch_tokens max_concurrent graders eval_every eval_k save_every",
    0: "lr warmup_steps weight_decay eps_low eps_high entropy_coef importance_cap keep_checkpoints log_prompts seed",
}
# What may differ when a run is continued: how long, where and how it runs and is watched, not what it learns.
MAY_CHANGE = (
    *("steps", "save_every", "keep_checkpoints", "log_prompts", "wandb", "config", "out"),
    *("micro_batch_tokens", "activation_checkpointing", "cpu_offload", "max_concurrent", "gpu_memory_share", "graders"),
)


# ----------------------------------------------------------------------------------------------------------------
# The loop


def train(config: Config) -> None:
    """Set up, then iterate: sample, group, update, sync; now and then evaluate and save."""
    ranks = init_ranks()
    folder = toy.locate(config.model)
    tokenizer = load_tokenizer(folder)
    train_prompts = load(config.train_data, tokenizer, config, ranks)
    eval_prompts = load(config.eval_data, tokenizer, config, ranks) if config.eval_data else []
    batch(train_prompts, step=0, size=config.prompts_per_step, seed=config.seed)  # refuses too few prompts
    run = Run(
        Path(config.out) / config.name,
        dataclasses.asdict(config),
        ranks,
        may_change=MAY_CHANGE,
        keep=config.keep_checkpoints,
        wandb=config.wandb,
    )
    scorer = Scorer(config.graders, reward=config.reward)  # starts beside the engine
    engine = make_engine(config, folder, ranks)
    engine.sleep()  # until the trainer has taken its memory
    trainer = make_trainer(config, folder, ranks)
    scorer.wait_until_ready()
    start = run.resume(trainer)
    engine.sync(trainer.named_weights())
    run.say(f"training in {run.path} on {ranks.world_size} x {ranks.device.type}; the first prompt is")
    run.say(repr(train_prompts[0].text))

    exit_rule = None if config.sampler in BASELINES else find_exit_rule(config.sampler)

    def evaluate_at(step: int) -> dict[str, float]:
        with SamplingBar("evaluating", run.bars_off) as progress:
            return evaluate(
                engine, scorer, eval_prompts, ranks, k=config.eval_k, seed=config.seed, step=step, progress=progress
            )

    if start == 0:
        run.log({"step": 0, **evaluate_at(0)})

    for step in tqdm(
        range(start + 1, config.steps + 1), "training", initial=start, total=config.steps, disable=run.bars_off
    ):
        clock = Clock()

        # ---- sample: ranks take prompts from one queue, each as fast as it gets through them
        prompts = batch(train_prompts, step=step - 1, size=config.prompts_per_step, seed=config.seed)
        with SamplingBar("sampling", run.bars_off) as progress:
            settings = {
                "n": config.group_size,
                "round_size": config.round_size,
                "max_rounds": config.max_rounds,
                "seed": config.seed,
                "step": step,
                "progress": progress,
            }
            if config.sampler == "passive":
                my_pools = passive(engine, scorer, prompts, train_prompts, ranks, **settings)
            elif config.sampler == "two_stage":
                my_pools = two_stage(engine, scorer, prompts, ranks, **settings)
            else:
                queue = shared_queue(prompts, ranks.store, f"train/{step}")
                my_pools = sample_adaptively(engine, scorer, queue, exit_rule=exit_rule, **settings)
        clock.lap("time/sampling")

        # ---- group: n balanced responses from each mixed pool; after the gather every rank knows all groups
        my_groups = make_groups(
            my_pools,
            n=config.group_size,
            seed=config.seed,
            step=step,
            baseline=config.baseline,
            normalize_std=config.normalize_std,
            keep_uniform=config.keep_uniform,
        )
        groups = ranks.gather(my_groups, by_row)
        pools = ranks.gather([pool.without_tokens() for pool in my_pools], by_row)
        clock.lap("time/gather")

        # ---- update, with the memory that the sleeping engine leaves
        engine.sleep()
        memory = memory_in_use(ranks.device, "asleep")
        updated = trainer.update(groups, seed=config.seed, step=step, n_updates=config.updates_per_step)
        clock.lap("time/update")
        memory |= memory_in_use(ranks.device, "update")

        # ---- sync: the engine wakes up with the new weights
        engine.sync(trainer.named_weights())
        clock.lap("time/sync")

        # ---- log, evaluate, save
        metrics = {"step": step, **summarise(pools, groups, config.group_size), **updated, **clock.seconds, **memory}
        metrics |= grading_failures(scorer, ranks)
        if step % config.eval_every == 0 or step == config.steps:
            metrics |= evaluate_at(step)
        run.log_samples(step, my_pools, my_groups, {prompt.row for prompt in prompts[: config.log_prompts]})
        run.log(metrics)
        stop = run.should_stop()
        if step % config.save_every == 0 or step == config.steps or stop:
            run.save(trainer, step, tokenizer)
        if stop:
            run.say(f"stopped after step {step}; the same command continues")
            break
    else:
        run.report()
    run.close()
    scorer.close()
    engine.close()
    dist.destroy_process_group()


def load(source: str, tokenizer, config: Config, ranks: Ranks) -> list[Prompt]:
    """Prompts of a file or data set; rank 0 prints how many were dropped and why."""
    prompts, counts = load_prompts(
        toy.locate(source),
        tokenizer,
        max_prompt_tokens=config.max_prompt_tokens,
        whole_rows=config.reward != "math",
    )
    if ranks.rank == 0:
        print(f"{source}: {describe(counts)}")
    return prompts


def find_exit_rule(sampler: str) -> ExitRule:
    """By name, or MODULE:FUNCTION. Raises OptionError."""
    if sampler in EXIT_RULES:
        return EXIT_RULES[sampler]
    names = ", ".join([*EXIT_RULES, *BASELINES])
    if ":" not in sampler:
        raise OptionError(f"--sampler {sampler}: must be one of {names}, or MODULE:FUNCTION")
    try:
        exit_rule = pkgutil.resolve_name(sampler)
    except (ValueError, ImportError, AttributeError) as error:
        raise OptionError(f"--sampler {sampler}: {one_line(error)}") from error
    if not callable(exit_rule):
        raise OptionError(f"--sampler {sampler}: not a function")
    return exit_rule


def make_engine(config: Config, folder: str, ranks: Ranks):
    from ada.engine import Engine  # vLLM takes 10 s to import: only once options and data are known to be good

    return Engine(
        folder,
        max_tokens=config.max_response_tokens,
        max_prompt_tokens=config.max_prompt_tokens,
        temperature=config.temperature,
        capacity=config.max_concurrent,
        memory_share=config.gpu_memory_share,
        dtype=str(ranks.compute_dtype).removeprefix("torch."),
    )


def make_trainer(config: Config, folder: str, ranks: Ranks) -> Trainer:
    return Trainer(
        folder,
        ranks,
        lr=config.lr,
        warmup_steps=config.warmup_steps,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        eps_low=config.eps_low,
        eps_high=config.eps_high,
        entropy_coef=config.entropy_coef,
        importance_cap=config.importance_cap,
        temperature=config.temperature,
        micro_batch_tokens=config.micro_batch_tokens,
        drop_truncated=config.drop_truncated,
        activation_checkpointing=config.activation_checkpointing,
        cpu_offload=config.cpu_offload,
    )


def main() -> None:
    transformers_logging.disable_progress_bar()
    run_command(lambda: train(parse_options(Config, sys.argv[1:])))


if __name__ == "__main__":
    main()
