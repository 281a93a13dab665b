"""Peak memory and time of an update, against the plain way to write it.

    python -m bench.update               # CPU, one thread, two minutes; wants 10 GiB of memory
    python -m bench.update --tiny        # the same code on smaller models: its figures mean nothing

Memory: one update of a model with Qwen2.5's vocabulary of 151,936. The plain way has the model return logits
[B, T, V], takes log_softmax of all of them and picks the targets; all else is the same. Each way runs in a fresh
process; what counts is the highest resident memory during the update above the level before it.

Time: forward and backward of a model whose head makes a fifth of the FLOPs, against transformers' own forward with
labels, and backward, on the same micro-batches with the same padding. "with old log-probs" adds the pass without
gradient that an iteration of several updates needs, here for all sequences. The ways take turns; what counts is CPU
seconds: with one thread those of the clock, but for other work on the machine. The ratios are printed last.
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
from bench.common import machine, plain_logprobs, random_groups, random_model, resident_mib

from bench.common import print_medians, print_ratio, take_turns  # isort: skip

CONFIG = TrainerConfig(lr=1e-3, micro_batch_tokens=4096)
FULL = dict(
    memory=(dict(vocabulary=151_936, hidden=256, layers=2), dict(n_groups=2, n_prompt=128, lengths=(384, 384))),
    time=(dict(vocabulary=6656, hidden=384, layers=6), dict(n_groups=4, n_prompt=64, lengths=(64, 256))),
)
TINY_MODEL = dict(vocabulary=20_000, hidden=64, layers=2)
TINY = {what: (TINY_MODEL, dict(n_groups=2, n_prompt=16, lengths=(32, 64))) for what in FULL}


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


def compare_peaks(folder: str, groups: list[Group]) -> float:
    """Peak of ours over that of the plain way."""
    peaks = {}
    for way in ("plain", "ours"):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
            peaks[way] = fresh.submit(peak_mib, way, folder, groups).result()
        print(f"peak of an update, {way:>5}: {peaks[way]:,.0f} MiB", flush=True)
    return peaks["ours"] / peaks["plain"]


def compare_times(folder: str, groups: list[Group]) -> None:
    trainer = Trainer(folder, init_ranks(), CONFIG)
    bare = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    micro_batches, n_tokens = trainer._micro_batches(groups)
    n_padded = sum(batch.tokens_BT.numel() for batch in micro_batches)
    print(f"{n_padded:,} tokens, {n_tokens:,} of them in responses, {len(micro_batches)} micro-batches", flush=True)

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
    sizes = TINY if "--tiny" in sys.argv else FULL
    print(machine())
    with tempfile.TemporaryDirectory() as root:
        cases = {
            what: (random_model(f"{root}/{what}", **model), random_groups(vocabulary=model["vocabulary"], **groups))
            for what, (model, groups) in sizes.items()
        }
        memory = compare_peaks(*cases["memory"])
        compare_times(*cases["time"])
        print(f"ours / plain: {memory:.2f}x in memory")


if __name__ == "__main__":
    run_command(main)
