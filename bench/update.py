"""Peak memory and time of an update, against the plain way to write it.

    python bench/update_memory.py               # CPU, one thread, two minutes; wants 10 GiB of memory

Memory: one update of a model with Qwen2.5's vocabulary of 151,936. The plain way has the model return logits
[B, T, V], takes log_softmax of all of them and picks the targets. Each way runs in a fresh process; what counts is the
highest resident memory during the update above the level before it. Both have the same weights, rows, micro-batch,
objective and optimiser, whose state exists before.

Time: forward and backward of a model whose head makes a fifth of the FLOPs, against transformers' own forward with
labels, and backward, on the same micro-batches with the same padding. "old log-probs" adds the pass without gradient
that an iteration of several updates needs, here for all rows. The ways take turns, and the ratio is the median over
the turns, of CPU seconds: with one thread those of the clock, but for other work on the machine.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1]))

from ada.sampler import Group, Prompt, Sample
from ada.trainer import Ranks, Tally, Trainer, clipped_objective, collate, importance_weights, rows_of

VOCABULARY = 151_936
GOALS = {"memory": 0.25, "time": 1.15, "time with old log-probs": 1.5}
OPTIONS = dict(lr=1e-3, micro_batch_tokens=4096)
logging.disable_progress_bar()


def make_model(folder: str, *, vocabulary: int, hidden: int, layers: int) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def make_groups(n_groups: int, *, vocabulary: int, n_prompt: int, shortest: int, longest: int) -> list[Group]:
    """Groups of 4 random responses, of a length drawn between `shortest` and `longest`."""
    rng = random.Random(0)

    def draw(length: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(length)]

    groups = []
    for row in range(n_groups):
        responses = [draw(rng.randint(shortest, longest)) for _ in range(4)]
        samples = [Sample(row, i, tokens, [-9.0] * len(tokens), "", False) for i, tokens in enumerate(responses)]
        groups.append(Group(Prompt(row, "", draw(n_prompt), ""), samples, [0.5, -0.5, 0.5, -0.5]))
    return groups


def make_trainer(folder: str) -> Trainer:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    return Trainer(folder, Ranks(0, 1, torch.device("cpu"), store), **OPTIONS)


# ----------------------------------------------------------------------------------------------------------------
# Memory


def status_mib(field: str) -> float:
    """VmRSS, resident now, or VmHWM, the most since the mark was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def peak_mib(way: str, folder: str) -> float:
    """Highest resident memory of one update above the level before, in this process."""
    groups = make_groups(2, vocabulary=VOCABULARY, n_prompt=128, shortest=384, longest=384)  # 8 x 512 = 4,096 tokens
    if way == "ours":
        trainer = make_trainer(folder)
        update = lambda: trainer.update(groups, seed=0, step=1)  # noqa: E731
    else:
        update = plain_update(folder, groups)
    before = status_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the mark starts again from here
    update()
    return status_mib("VmHWM") - before


def plain_update(folder: str, groups: list[Group]):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIONS["lr"])
    for weight in model.parameters():
        moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[weight] = {"step": torch.zeros(()), **moments}
    batch = collate(rows_of(groups), torch.device("cpu"))

    def update() -> None:
        logits_BTV = model(batch.tokens_BT, use_cache=False).logits[:, :-1]
        logprobs_BT = logits_BTV.log_softmax(-1).gather(-1, batch.tokens_BT[:, 1:, None])[..., 0]
        logprobs_N = logprobs_BT[batch.is_response_BT[:, 1:]]
        old_N = logprobs_N.detach()
        objective_N, _, _ = clipped_objective(logprobs_N, old_N, batch.advantages_N, eps_low=0.2, eps_high=0.28)
        weights_N = importance_weights(old_N, batch.engine_logprobs_N, 2.0)
        del logits_BTV, logprobs_BT
        (-(weights_N * objective_N).sum() / len(logprobs_N)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return update


# ----------------------------------------------------------------------------------------------------------------
# Time


def compare_times(folder: str, *, vocabulary: int, turns: int = 5) -> dict[str, float]:
    """Median over the turns of time / time of transformers, for one update and with old log-probs."""
    trainer = make_trainer(folder)
    bare = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    head, total = bare.lm_head.weight.numel(), sum(weight.numel() for weight in bare.parameters())  # tied
    groups = make_groups(4, vocabulary=vocabulary, n_prompt=64, shortest=64, longest=256)
    micro_batches, n_tokens = trainer._plan(groups)
    n_padded = sum(batch.tokens_BT.numel() for batch in micro_batches)
    print(f"head {head / total:.1%} of the FLOPs; {n_padded:,} tokens, {n_tokens:,} of them in responses, ", end="")
    print(f"{len(micro_batches)} micro-batches", flush=True)

    def transformers() -> None:
        for batch in micro_batches:
            labels_BT = batch.tokens_BT.where(batch.is_response_BT, -100)
            bare(batch.tokens_BT, labels=labels_BT, use_cache=False).loss.backward()

    def one_update() -> None:
        trainer._backward(micro_batches, n_tokens, Tally(torch.device("cpu")))

    def with_old_logprobs() -> None:
        trainer._remember_old_logprobs(micro_batches)
        one_update()
        for batch in micro_batches:
            batch.old_logprobs_N = None

    ways = {"transformers": transformers, "one update": one_update, "with old log-probs": with_old_logprobs}
    seconds = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, way in ways.items():
            start = time.process_time()
            way()
            if turn:  # the first warms up
                seconds[name].append(time.process_time() - start)
            trainer.optimizer.zero_grad()
            bare.zero_grad()
    for name, values in seconds.items():
        print(f"{name:>20}: median {statistics.median(values):.3f} s, {min(values):.3f} to {max(values):.3f}")

    def ratio(name: str) -> float:
        return statistics.median(
            ours / theirs for ours, theirs in zip(seconds[name], seconds["transformers"], strict=True)
        )

    return {"time": ratio("one update"), "time with old log-probs": ratio("with old log-probs")}


# ----------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peak", nargs=2, metavar=("WAY", "FOLDER"), help=argparse.SUPPRESS)  # in the fresh processes
    arguments = parser.parse_args()
    if arguments.peak:
        print(peak_mib(*arguments.peak))
        return

    print(f"{platform.machine()}, CPU, {torch.get_num_threads()} thread, torch {torch.__version__}, {date.today()}")
    ratios = {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder, vocabulary=VOCABULARY, hidden=256, layers=2)
        peaks = {}
        for way in ("plain", "ours"):
            command = [sys.executable, __file__, "--peak", way, folder]
            peaks[way] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            print(f"peak of an update, {way:>5}: {peaks[way]:,.0f} MiB", flush=True)
        ratios["memory"] = peaks["ours"] / peaks["plain"]
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = 6656
        make_model(folder, vocabulary=vocabulary, hidden=384, layers=6)
        ratios |= compare_times(folder, vocabulary=vocabulary)
    for name, goal in GOALS.items():
        print(f"{name:>24}: {ratios[name]:.2f}x (goal: at most {goal}x)")


if __name__ == "__main__":
    main()
