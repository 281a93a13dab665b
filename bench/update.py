"""Peak memory and time of an update, against the plain way to write it.

    python -m bench.update               # CPU, one thread, two minutes; wants 10 GiB of memory
    python -m bench.update --tiny        # the same code on smaller models: its figures mean nothing

Memory: one update of a model with Qwen2.5's vocabulary of 151,936, in a fresh process. The plain way has the model
return logits [B, T, V] and takes log_softmax of all of them; all else is the same. What counts is the highest resident
memory during the update above the level before it.

Time: forward and backward of a model whose head makes a fifth of the FLOPs, against transformers' own forward with
labels, and backward, on the same micro-batches. "with old log-probs" adds the pass without gradient that several
updates need. The ways take turns, in CPU seconds. The ratios are printed last.
"""

import multiprocessing
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ada import run_command
from ada.sampler import Group
from ada.support.ranks import init_ranks
from ada.trainer import Policy, TokenMeans, Trainer, TrainerConfig
from bench.common import machine, plain_logprobs, print_medians, print_ratio, random_groups, random_model

from bench.common import resident_mib, take_turns  # isort: skip

CONFIG = TrainerConfig(lr=1e-3, micro_batch_tokens=4096)
MEMORY = (dict(vocabulary=151_936, hidden=256, layers=2), dict(n_groups=2, n_prompt=128, lengths=(384, 384)))
TIME = (dict(vocabulary=6656, hidden=384, layers=6), dict(n_groups=4, n_prompt=64, lengths=(64, 256)))
TINY = (dict(vocabulary=20_000, hidden=64, layers=2), dict(n_groups=2, n_prompt=16, lengths=(64, 64)))


def peak_mib(way: str, folder: str, groups: list[Group]) -> float:
    """Highest resident memory of one update above the level before, in this process."""
    if way == "plain":
        Policy.forward = plain_forward
    trainer = Trainer(folder, init_ranks(), CONFIG)
    before = resident_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the mark starts again from here
    trainer.update(groups, step=1)
    return resident_mib("VmHWM") - before


def plain_forward(policy: Policy, tokens_BT: Tensor, is_response_BT: Tensor) -> tuple[Tensor, Tensor]:
    logprobs_N = plain_logprobs(policy.lm, tokens_BT, is_response_BT)
    return logprobs_N, torch.zeros_like(logprobs_N)  # without entropies


def compare_peaks(folder: str, groups: list[Group]) -> None:
    peaks = {}
    for way in ("plain", "ours"):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
            peaks[way] = fresh.submit(peak_mib, way, folder, groups).result()
        print(f"peak of an update, {way:>5}: {peaks[way]:,.0f} MiB", flush=True)
    print(f"ours / plain: {peaks['ours'] / peaks['plain']:.2f}x in memory", flush=True)


def compare_times(folder: str, groups: list[Group]) -> None:
    trainer = Trainer(folder, init_ranks(), CONFIG)
    bare = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    micro_batches, n_tokens = trainer._micro_batches(groups)

    def transformers(turn: int) -> None:
        for batch in micro_batches:
            labels_BT = batch.tokens_BT.where(batch.is_response_BT, -100)
            bare(batch.tokens_BT, labels=labels_BT, use_cache=False).loss.backward()
        bare.zero_grad()

    def one_update(turn: int) -> None:
        trainer._backward(micro_batches, n_tokens, TokenMeans(torch.device("cpu")))
        trainer.optimizer.zero_grad()

    def with_old_logprobs(turn: int) -> None:
        trainer._remember_old_logprobs(micro_batches)
        one_update(turn)
        for batch in micro_batches:
            batch.old_logprobs_N = None

    ways = {"transformers": transformers, "one update": one_update, "with old log-probs": with_old_logprobs}
    records = take_turns(ways, turns=5)
    print_medians(records)
    for name in ("one update", "with old log-probs"):
        print_ratio(records, name, "transformers", "CPU seconds")


def main() -> None:
    print(machine())
    for compare, sizes in ((compare_peaks, MEMORY), (compare_times, TIME)):
        model, groups = TINY if "--tiny" in sys.argv else sizes
        with tempfile.TemporaryDirectory() as folder:
            compare(random_model(folder, **model), random_groups(vocabulary=model["vocabulary"], **groups))


if __name__ == "__main__":
    run_command(main)
