"""Peak memory and time of an update, against the plain way to write it.

    python -m bench.update               # CPU, one thread, two minutes; wants 10 GiB of memory
    python -m bench.update --tiny        # the same code on smaller models: its figures mean nothing

Memory: one update of a model with Qwen2.5's vocabulary of 151,936. The plain way has the model return logits
[B, T, V], takes log_softmax of all of them and picks the targets. Each way runs in a fresh process; what counts is the
highest resident memory during the update above the level before it. Both have the same weights, sequences,
micro-batch, objective and optimiser, whose state exists before.

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
from transformers import AutoModelForCausalLM

from ada import run_command
from ada.sampler import Group
from ada.support.ranks import init_ranks
from ada.trainer import TokenMeans, Trainer, TrainerConfig, clipped_objective, collate, importance_weights, sequences_of
from bench.common import (
    machine,
    median,
    plain_logprobs,
    print_ratio,
    random_groups,
    random_model,
    resident_mib,
    take_turns,
)

CONFIG = TrainerConfig(lr=1e-3, micro_batch_tokens=4096)
FULL = dict(
    memory=(dict(vocabulary=151_936, hidden=256, layers=2), dict(n_groups=2, n_prompt=128, lengths=(384, 384))),
    time=(dict(vocabulary=6656, hidden=384, layers=6), dict(n_groups=4, n_prompt=64, lengths=(64, 256))),
)
TINY_MODEL = dict(vocabulary=20_000, hidden=64, layers=2)
TINY = {what: (TINY_MODEL, dict(n_groups=2, n_prompt=16, lengths=(32, 64))) for what in FULL}


def peak_mib(way: str, folder: str, groups: list[Group]) -> float:
    """Highest resident memory of one update above the level before, in this process."""
    if way == "ours":
        trainer = Trainer(folder, init_ranks(), CONFIG)
        update = lambda: trainer.update(groups, step=1)  # noqa: E731
    else:
        update = plain_update(folder, groups)
    before = resident_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the mark starts again from here
    update()
    return resident_mib("VmHWM") - before


def plain_update(folder: str, groups: list[Group]):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=CONFIG.lr)
    for weight in model.parameters():
        moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[weight] = {"step": torch.zeros(()), **moments}
    batch = collate(sequences_of(groups), torch.device("cpu"))

    def update() -> None:
        logprobs_N = plain_logprobs(model, batch)
        old_N = logprobs_N.detach()
        objective_N, _, _ = clipped_objective(logprobs_N, old_N, batch.advantages_N, clip_low=0.2, clip_high=0.28)
        weights_N = importance_weights(old_N - batch.engine_logprobs_N, 2.0)
        (-(weights_N * objective_N).sum() / len(logprobs_N)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return update


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
    for name in ways:
        print(f"{name:>20}: {median(records, name, 'CPU seconds'):.3f} CPU seconds")
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
