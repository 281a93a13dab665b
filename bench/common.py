"""What the scripts of this folder share: options and set-up, models, groups, the plain alternatives, ratios."""

import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

import toy
from ada import option
from ada.engine import Engine
from ada.reward import Scorer
from ada.sampler import ExitRule, Group, Pool, Prompt, Sample, SamplingConfig, seed_of
from ada.support.ranks import Ranks, init_ranks
from ada.trainer import MicroBatch, Trainer
from train import Config, load

logging.disable_progress_bar()


@dataclass
class BenchConfig(Config):
    """Every option of train.py, and how often to measure. A --model out/random-HIDDENxLAYERS is built on first use."""

    turns: int = option(5, "measurements of each way; they take turns", at_least=1)


def set_up(config: BenchConfig) -> tuple[list[Prompt], Ranks, Engine, Scorer, Trainer]:
    """What train.py sets up, by the same calls."""
    build_if_missing(config.model)
    ranks = init_ranks()
    _, prompts, _ = load(replace(config, eval_data=""), ranks)
    scorer = Scorer(config.graders, reward=config.reward)
    engine = Engine(config.model, config, max_prompt_tokens=config.max_prompt_tokens, dtype=ranks.compute_dtype)
    engine.sleep()
    trainer = Trainer(config.model, ranks, config)
    scorer.wait_until_ready()
    engine.sync(trainer.named_weights())
    print(machine(), flush=True)
    return prompts, ranks, engine, scorer, trainer


def machine() -> str:
    """Processor, cores, GPU, torch and date, for the first line of a script's output."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    else:
        lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
        name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
        name += f", {len([line for line in lines if line.startswith('processor')])} cores, no GPU"
    return f"{name}; torch {torch.__version__}, {torch.get_num_threads()} thread(s); {date.today()}"


def resident_mib(field: str) -> float:
    """VmRSS, this process's resident memory now, or VmHWM, the most it has been."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


# ----------------------------------------------------------------------------------------------------------------
# Models, groups and rewards made up


def build_if_missing(folder: str) -> None:
    """An untrained Qwen2 in a folder named random-HIDDENxLAYERS or random-HIDDENxLAYERSxVOCABULARY.

    512x10 has 32 M parameters. The next-token distribution is nearly flat, and one token in 270, the size of the toy's
    vocabulary, ends a response: lengths are geometric with a mean of 270, up to the limit.
    """
    kind, _, shape = Path(folder).name.partition("-")
    if kind == "random" and not Path(folder).exists():
        hidden, layers, *vocabulary = map(int, shape.split("x"))
        random_model(folder, hidden=hidden, layers=layers, vocabulary=vocabulary[0] if vocabulary else 270)


def random_model(folder: str, *, hidden: int, layers: int, vocabulary: int, device: str = "cpu", **sizes) -> str:
    """A Hugging Face folder with an untrained Qwen2 and the toy's tokenizer; `sizes` overrides other sizes."""
    tokenizer = toy.make_tokenizer()
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    usual = dict(
        intermediate_size=hidden * 8 // 3,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    config = Qwen2Config(vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, **ids, **(usual | sizes))
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
    rng = random.Random(0)

    def draw(length: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(length)]

    groups = []
    for prompt_id in range(n_groups):
        responses = [draw(rng.randint(*lengths)) for _ in range(4)]
        samples = [Sample(prompt_id, i, tokens, [-9.0] * len(tokens), "", False) for i, tokens in enumerate(responses)]
        groups.append(Group(Prompt(prompt_id, "", draw(n_prompt), ""), samples, [0.5, -0.5, 0.5, -0.5]))
    return groups


def lucky(response: str, row: dict) -> bool:
    """A reward for untrained models: correct by chance, as often as the toy's base model was on this row.

    The verdict depends on the response alone. It takes the time of comparing two fractions with math-verify.
    """
    from ada.support.answers import is_right

    number = seed_of(response)
    is_right(rf"\frac{{{number % 997}}}{{{number % 13 + 2}}}", rf"\frac{{{number % 991}}}{{{number % 11 + 2}}}")
    return number < row["right_of_16"] / 16 * 2**63


# ----------------------------------------------------------------------------------------------------------------
# The plain alternatives


def synchronous_rounds(
    engines: Sequence,
    scorer,
    prompts: list[Prompt],
    config: SamplingConfig,
    *,
    exit_rule: ExitRule,
    step: int,
    barrier: Callable[[], None] = lambda: None,
) -> list[Pool]:
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
        n_graded = 0
        while n_graded < len(samples):
            for key, correct in scorer.poll(None):
                samples[key].correct = correct
                n_graded += 1
        for key in sorted(samples):
            pools[key[0]].samples.append(samples[key])
        for pool in active:
            pool.rounds += 1
            pool.resolved = exit_rule(pool, config.group_size)
        barrier()
    return [pools[prompt_id] for prompt_id in sorted(pools)]


def plain_logprobs(model, batch: MicroBatch, precision: torch.dtype = torch.float32) -> Tensor:
    """[N], by way of all logits."""
    with torch.autocast(batch.tokens_BT.device.type, dtype=precision, enabled=precision != torch.float32):
        logits_BTV = model(batch.tokens_BT, use_cache=False).logits[:, :-1]
    logprobs_BTV = logits_BTV.float().log_softmax(-1)
    return logprobs_BTV.gather(-1, batch.tokens_BT[:, 1:, None])[..., 0][batch.is_response_BT[:, 1:]]


# ----------------------------------------------------------------------------------------------------------------
# Ratios

Records = dict[str, list[dict[str, float]]]  # of each way, in each turn


def take_turns(ways: dict[str, Callable], turns: int, after_turn: Callable = lambda turn: None) -> Records:
    """Call each way with the number of the turn, `turns` times after a warm-up; `after_turn` isn't measured.

    A way's record is what it returned, or if that is nothing, its seconds.
    """
    records = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, way in ways.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            measured = way(turn)
            seconds = {"seconds": time.perf_counter() - start, "CPU seconds": time.process_time() - cpu_start}
            if turn:
                records[name].append(measured or seconds)
        after_turn(turn)
    return records


def median(records: Records, name: str, key: str) -> float:
    return statistics.median(record[key] for record in records[name])


def print_ratio(records: Records, name: str, plain: str, *keys: str) -> None:
    """The median over the turns of one way's figure over another's in the same turn."""
    pairs = list(zip(records[name], records[plain], strict=True))
    ratios = [f"{statistics.median(a[key] / b[key] for a, b in pairs):#.3g}x in {key}" for key in keys]
    print(f"{name} / {plain}: {', '.join(ratios)}")
