"""Tiny random models, made-up groups, and functions run on several ranks: what the trainer's tests are built from."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from ada.sampler import Group, Prompt, Sample
from ada.support.ranks import Ranks
from ada.trainer import Trainer, TrainerConfig

logging.disable_progress_bar()
VOCABULARY = 266  # that of the toy's tokenizer
RANKS_TIMEOUT = 120  # sec


def make_model(folder: Path, *, family: str = "qwen2", tied: bool = True, seed: int = 0) -> str:
    """A Hugging Face folder with a random model, peaked enough for its entropies to differ from token to token."""
    config_class, model_class = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[family]
    config = config_class(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        for name, weight in model.named_parameters():
            if name.endswith("bias"):  # zero otherwise: rounding in the first update would be all there is
                torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    return str(folder)


def make_groups(n_groups: int, *, per_group: int = 4, longest: int = 20, seed: int = 0) -> list[Group]:
    """Groups with prompts of 2 to 9 tokens and responses of 1 to `longest`; every fourth response is truncated."""
    rng = random.Random(seed)

    def draw(length: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(length)]

    groups = []
    for i in range(n_groups):
        prompt = Prompt(i, f"problem {i}", draw(rng.randint(2, 9)), "42")
        samples = []
        for index in range(per_group):
            tokens = draw(rng.randint(1, longest))
            logprobs = [-rng.uniform(0.1, 9) for _ in tokens]
            samples.append(Sample(i, index, tokens, logprobs, "", truncated=index % 4 == 3))
        groups.append(Group(prompt, samples, [rng.choice([0.75, 0.5, -0.25, -0.5]) for _ in samples]))
    return groups


def make_trainer(folder: str, ranks: Ranks, **options) -> Trainer:
    return Trainer(
        folder, ranks, TrainerConfig(**{"lr": 1e-2, "warmup_steps": 4, "micro_batch_tokens": 4096, **options})
    )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of all of a tensor that may be sharded. Collective."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: whole(weight) for name, weight in trainer.lm.named_parameters()}


def gradients_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: whole(weight.grad) for name, weight in trainer.lm.named_parameters()}


def optimizer_state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    names = {weight: name for name, weight in trainer.lm.named_parameters()}
    return {
        f"{names[weight]}.{key}": whole(value)
        for weight, state in trainer.optimizer.state.items()
        for key, value in state.items()
    }


def distance(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest |actual - expected| / |expected| (Euclidean norms) of any tensor."""
    assert actual.keys() == expected.keys()
    return max(
        (((actual[name] - expected[name]).norm() / expected[name].norm()).item() for name in expected), default=0.0
    )


def equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in expected)


# ----------------------------------------------------------------------------------------------------------------
# Ranks


def join_ranks(rank: int, world_size: int, store: dist.Store) -> Ranks:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    return Ranks(rank, world_size, torch.device("cpu"), store)


def run_on_ranks(function: Callable, world_size: int, folder: Path, *arguments) -> list:
    """What function(ranks, *arguments) returned on each of `world_size` new processes.

    `function` is one of a module's top level; `folder` is an empty place for the processes to meet.

    Raises:
        torch.multiprocessing.ProcessRaisedException: with the traceback of the rank that failed first.
        TimeoutError: the ranks hang; they are killed.
    """
    folder.mkdir(parents=True)
    context = torch.multiprocessing.start_processes(
        _run_rank, (world_size, folder, function, arguments), nprocs=world_size, join=False, start_method="forkserver"
    )
    deadline = time.monotonic() + RANKS_TIMEOUT
    while not context.join(timeout=1):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"{function.__name__} on {world_size} ranks: not done in {RANKS_TIMEOUT} s")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _run_rank(rank: int, world_size: int, folder: Path, function: Callable, arguments: tuple) -> None:
    torch.set_num_threads(1)
    ranks = join_ranks(rank, world_size, dist.FileStore(str(folder / "store"), world_size))
    torch.save(function(ranks, *arguments), folder / f"{rank}.pt")
    dist.destroy_process_group()
