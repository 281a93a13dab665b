"""What the scripts of this folder share: options and set-up, models, groups, the plain alternatives, ratios."""

import os
import platform
import random
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

import toy
from ada import option
from ada.data import batch
from ada.engine import Engine
from ada.reward import Scorer
from ada.sampler import Group, Pool, Prompt, Sample, seed_of
from ada.support.ranks import Ranks, init_ranks
from ada.trainer import Trainer
from answers import is_right
from train import Config, load

logging.disable_progress_bar()


@dataclass
class BenchConfig(Config):
    """Every option of train.py, and how often to measure. A --model out/random-HIDDENxLAYERS is built on first use."""

    turns: int = option(5, "measurements of each way; they take turns", at_least=1)


def set_up(config: BenchConfig) -> tuple[list[list[Prompt]], Ranks, Engine, Scorer, Trainer]:
    """What train.py sets up, by the same calls, and the prompts of each turn."""
    build_if_missing(config.model)
    ranks = init_ranks()
    batches = batches_of(load(replace(config, eval_data=""), ranks)[1], config)
    scorer = Scorer(config.graders, reward=config.reward)
    engine = Engine(config.model, config, max_prompt_tokens=config.max_prompt_tokens, dtype=ranks.compute_dtype)
    engine.sleep()
    trainer = Trainer(config.model, ranks, config)
    scorer.wait_until_ready()
    engine.sync(trainer.named_weights())
    print(machine(), flush=True)
    return batches, ranks, engine, scorer, trainer


def batches_of(prompts: list[Prompt], config: BenchConfig) -> list[list[Prompt]]:
    size, seed = config.prompts_per_step, config.seed
    return [batch(prompts, step=turn, size=size, seed=seed) for turn in range(config.turns + 1)]


def machine() -> str:
    """Processor, cores, GPU, torch and date, for the first line of a script's output."""
    cpu = re.search("model name.*: (.*)", Path("/proc/cpuinfo").read_text())
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu[1] if cpu else platform.machine()
    return f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} used; torch {torch.__version__}; {date.today()}"


def resident_mib(field: str) -> float:
    """VmRSS, this process's resident memory now, or VmHWM, the most it has been."""
    return int(re.search(rf"{field}:\s*(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


def build_if_missing(folder: str) -> None:
    """An untrained Qwen2 in a folder named random-HIDDENxLAYERS or random-HIDDENxLAYERSxVOCABULARY.

    512x10 has 32 M parameters. The next-token distribution is nearly flat, and one token in 270, the size of the toy's
    vocabulary, ends a response: lengths are geometric with a mean of 270, up to the limit.
    """
    kind, _, shape = Path(folder).name.partition("-")
    if kind == "random" and not Path(folder).exists():
        random_model(folder, **dict(zip(("hidden", "layers", "vocabulary"), map(int, shape.split("x")), strict=False)))


def random_model(folder: str, *, hidden: int, layers: int, vocabulary: int = 270, device: str = "cpu", **sizes) -> str:
    """A Hugging Face folder with an untrained Qwen2 and the toy's tokenizer; `sizes` overrides other sizes."""
    tokenizer = toy.make_tokenizer()
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    sizes = dict(vocab_size=vocabulary, hidden_size=hidden, intermediate_size=hidden * 8 // 3) | sizes
    sizes = dict(num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64, num_hidden_layers=layers) | sizes
    config = Qwen2Config(**sizes, **ids, max_position_embeddings=4096, tie_word_embeddings=True)
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2ForCausalLM(config)
    stop = [tokenizer.eos_token_id, *range(vocabulary - vocabulary // 270 + 1, vocabulary)]
    model.generation_config = GenerationConfig(**{**ids, "eos_token_id": stop})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def random_groups(n_groups: int, *, vocabulary: int, n_prompt: int, lengths: tuple[int, int]) -> list[Group]:
    """Groups of 4 random responses, two of them correct, each of a length between the two `lengths`."""
    rng, groups = random.Random(0), []
    for prompt_id in range(n_groups):
        sizes = [n_prompt, *(rng.randint(*lengths) for _ in range(4))]
        prompt, *responses = (rng.choices(range(vocabulary), k=size) for size in sizes)
        samples = [Sample(prompt_id, i, tokens, [-9.0] * len(tokens), "", False) for i, tokens in enumerate(responses)]
        groups.append(Group(Prompt(prompt_id, "", prompt, ""), samples, [0.5, -0.5, 0.5, -0.5]))
    return groups


def lucky(response: str, row: dict) -> bool:
    """A reward for untrained models: correct by chance, as often as the toy's base model was on this row.

    The verdict depends on the response alone. It takes the time of comparing two fractions with math-verify.
    """
    number = seed_of(response)
    is_right(rf"\frac{{{number % 997}}}{{{number % 13 + 2}}}", rf"\frac{{{number % 991}}}{{{number % 11 + 2}}}")
    return number < row["right_of_16"] / 16 * 2**63


def synchronous_rounds(engines, scorer, prompts, config, *, exit_rule, step, barrier=lambda: None) -> list[Pool]:
    """Algorithm 1 to the letter: every prompt waits for the slowest response of the round, then for the graders.

    Each round is dealt to the engines anew; `barrier` is called at its end.
    """
    pools = {prompt.prompt_id: Pool(prompt) for prompt in prompts}
    for _ in range(config.max_rounds):
        active = [pool for pool in pools.values() if not pool.resolved]
        for i, pool in enumerate(active):
            for index in range(len(pool.samples), len(pool.samples) + config.round_size):
                key = (pool.prompt.prompt_id, index)
                engines[i % len(engines)].submit(key, pool.prompt.tokens, seed_of("train", config.seed, step, *key))
        samples = {}
        for i, engine in enumerate(engines):
            n_expected = len(samples) + len(active[i :: len(engines)]) * config.round_size
            while len(samples) < n_expected:
                samples |= {(sample.prompt_id, sample.index): sample for sample in engine.poll()}
        for key, sample in samples.items():
            scorer.submit(key, sample.text, pools[key[0]].prompt.gold)
        verdicts = {}
        while len(verdicts) < len(samples):
            verdicts |= dict(scorer.poll(None))
        for key in sorted(samples):
            samples[key].correct = verdicts[key]
            pools[key[0]].samples.append(samples[key])
        for pool in active:
            pool.rounds += 1
            pool.resolved = exit_rule(pool, config.group_size)
        barrier()
    return [pools[prompt_id] for prompt_id in sorted(pools)]


def plain_logprobs(model, tokens_BT: Tensor, is_response_BT: Tensor) -> Tensor:
    """Of the response tokens, [N], by way of all logits."""
    logprobs_BTV = model(tokens_BT, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    return logprobs_BTV.gather(-1, tokens_BT[:, 1:, None])[..., 0][is_response_BT[:, 1:]]


Records = dict[str, list[dict[str, float]]]  # of each way, in each turn


def take_turns(ways: dict[str, Callable], turns: int, *, before=lambda: None, after_turn=lambda turn: None) -> Records:
    """What each way returned in each turn after a warm-up, or if nothing, its seconds; `before` isn't measured."""
    records = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, way in ways.items():
            before()
            start, cpu_start = time.perf_counter(), time.process_time()
            measured = way(turn)
            seconds = {"seconds": time.perf_counter() - start, "CPU seconds": time.process_time() - cpu_start}
            if turn:
                records[name].append(measured or seconds)
        after_turn(turn)
    return records


def print_medians(records: Records) -> None:
    print("\n| | " + " | ".join(records) + " |\n" + "| --- " * (len(records) + 1) + "|")
    for key in next(iter(records.values()))[0]:
        medians = [statistics.median(record[key] for record in turns) for turns in records.values()]
        print(f"| {key} | {' | '.join(f'{value:.3g}' if value < 100 else f'{value:,.0f}' for value in medians)} |")


def print_ratio(records: Records, name: str, plain: str, *keys: str) -> None:
    """The median over the turns of one way's figure over another's in the same turn."""
    pairs = list(zip(records[name], records[plain], strict=True))
    ratios = [f"{statistics.median(a[key] / b[key] for a, b in pairs):#.3g}x in {key}" for key in keys]
    print(f"{name} / {plain}: {', '.join(ratios)}")
