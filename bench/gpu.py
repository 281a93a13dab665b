"""What only a GPU can tell, in one command under 8 minutes: speed and memory of an update, and of the sleeping engine.

    python bench/gpu.py             # one GPU of 80 GB or more; without vLLM installed, the update alone
    python bench/gpu.py --tiny      # the same code on a CPU with a tiny model: its figures mean nothing

The model has the sizes of Qwen2.5-1.5B and random weights; responses have up to 2,048 tokens. Measured are

  update   tokens per second and MFU (6 FLOPs per weight and token, attention included, recomputation not); peak memory
           above the level before, against the plain way: autocast, all logits, log_softmax; log-probs in bf16 against
           the same weights in fp32
  engine   (with vLLM) what anybody holds of the GPU before and after sleeping and waking, seconds of a sync, the gap
           between the engine's and the trainer's log-probs, and a full step of balance by phase

It wants torch 2.11 and transformers 5.17, or newer.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import importlib.util
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from transformers import AutoModelForCausalLM

from ada.sampler import Prompt
from ada.trainer import MicroBatch, Trainer, collate, init_ranks, rows_of
from bench.common import machine, random_model
from bench.update_memory import make_groups

QWEN = dict(hidden=1536, layers=28, vocabulary=151_936, intermediate_size=8960, num_attention_heads=12)
SIZES = {  # n_stop: responses end by chance after some 700 tokens
    False: dict(model=QWEN | dict(num_key_value_heads=2, n_stop=217), groups=8, prompts=64, n_prompt=256, longest=2048),
    True: dict(model=dict(hidden=128, layers=2), groups=4, prompts=4, n_prompt=8, longest=32),
}
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}  # bf16, dense


def used_gib() -> float:
    """What anybody holds of the GPU; torch's own counters do not see the engine's share."""
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def timed(function) -> float:
    start = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_gib(function) -> float:
    """Most that torch has allocated while it runs, above the level before."""
    if not torch.cuda.is_available():
        function()
        return 0.0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        function()
    except torch.cuda.OutOfMemoryError:
        return float("inf")
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def flops_of_update(trainer: Trainer, groups: list) -> float:
    """Forward and backward, without what is computed twice: body, head (response tokens only), causal attention."""
    config = trainer.lm.config
    rows = rows_of(groups)
    n_head = config.vocab_size * config.hidden_size
    n_body = sum(weight.numel() for weight in trainer.lm.parameters()) - n_head  # tied
    n_tokens, n_response = sum(len(row.tokens) for row in rows), sum(len(row.engine_logprobs) for row in rows)
    attention = sum(6 * config.num_hidden_layers * config.hidden_size * len(row.tokens) ** 2 for row in rows)
    return 6 * n_body * n_tokens + 6 * n_head * n_response + attention


def measure_update(trainer: Trainer, groups: list) -> None:
    n_tokens = sum(len(row.tokens) for row in rows_of(groups))
    trainer.update(groups, seed=0, step=0)  # warms up
    seconds = min(timed(lambda: trainer.update(groups, seed=0, step=1)) for _ in range(3))
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peak = next((flops for gpu, flops in PEAK_FLOPS.items() if gpu in name), None)
    mfu = f"{flops_of_update(trainer, groups) / seconds / peak:.1%}" if peak else "unknown"
    print(f"update: {n_tokens:,} tokens in {seconds:.2f} s, {n_tokens / seconds:,.0f} tok/s, MFU {mfu}", flush=True)


def plain_logprobs(model, batch: MicroBatch, precision: torch.dtype) -> torch.Tensor:
    """[N], by way of all logits."""
    with torch.autocast(batch.tokens_BT.device.type, dtype=precision, enabled=precision != torch.float32):
        logits_BTV = model(batch.tokens_BT, use_cache=False).logits[:, :-1]
    logprobs_BTV = logits_BTV.float().log_softmax(-1)
    return logprobs_BTV.gather(-1, batch.tokens_BT[:, 1:, None])[..., 0][batch.is_response_BT[:, 1:]]


def compare_with_plain(trainer: Trainer, folder: str, groups: list) -> None:
    """Memory of one micro-batch, and log-probs of two rows, by ours and by the plain way with fp32 weights."""
    device, precision = trainer.ranks.device, trainer.ranks.compute_dtype
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).train()
    plain.gradient_checkpointing_enable({"use_reentrant": False})
    batch = trainer._plan(groups)[0][0]
    ours_gib = peak_gib(lambda: trainer.policy(batch.tokens_BT, batch.is_response_BT)[0].mean().backward())
    trainer.optimizer.zero_grad()
    plain_gib = peak_gib(lambda: plain_logprobs(plain, batch, precision).mean().backward())
    plain.zero_grad()
    print(f"forward and backward of {batch.tokens_BT.numel():,} tokens: peak {ours_gib:.1f} GiB, plain {plain_gib:.1f}")

    batch = collate(rows_of(groups)[:2], device)
    plain.load_state_dict({name: weight.float() for name, weight in trainer.named_weights()})  # rounded to bf16
    with torch.no_grad():
        difference_N = trainer.policy(batch.tokens_BT, batch.is_response_BT)[0]
        difference_N = (difference_N - plain_logprobs(plain, batch, torch.float32)).abs()
    print(f"log-probs, {precision} against fp32: mean {difference_N.mean():.1e}, max {difference_N.max():.1e} nats")


def measure_engine(engine, trainer: Trainer, size: dict) -> None:
    """Sleep, wake, sync, and full steps of balance on prompts of random tokens, with verdicts of chance."""
    from ada.reward import Scorer
    from bench.step import PHASES, one_step

    print(f"GPU: asleep beside the trainer {used_gib():.1f} GiB", flush=True)
    seconds = timed(lambda: engine.sync(trainer.named_weights()))
    print(f"first sync {seconds:.2f} s; awake {used_gib():.1f} GiB", flush=True)
    rng = random.Random(0)
    prompts = [
        Prompt(row, "", [rng.randrange(6, 270) for _ in range(size["n_prompt"])], {"right_of_16": rng.randrange(17)})
        for row in range(size["prompts"])
    ]
    with Scorer(2, reward="bench.common:lucky") as scorer:
        for name in ("warm-up", "a step"):
            record = one_step("balance", engine, scorer, trainer, prompts, 1)
            phases = ", ".join(f"{phase} {record[phase]:.2f}" for phase in PHASES)
            print(f"{name}, seconds: {phases}; {record['responses']:,} responses, {record['tokens']:,} tokens")
            rate = record["tokens"] / record["sampling"]
            print(f"{rate:,.0f} tok/s; log-prob gap: mean {record['gap mean']:.1e}, max {record['gap max']:.1e} nats")
    engine.sleep()
    print(f"GPU: asleep again {used_gib():.1f} GiB; sync is {record['sync'] / record['step']:.1%} of a step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model; also on a CPU")
    parser.add_argument("--no_engine", action="store_true", help="the update alone, even if vLLM is installed")
    arguments = parser.parse_args()
    size = SIZES[arguments.tiny]
    if not (arguments.tiny or torch.cuda.is_available()):
        sys.exit("no GPU here; --tiny runs the same code on a CPU")

    start = time.perf_counter()
    ranks = init_ranks()
    print(f"{machine()}; GPU before anything {used_gib():.1f} GiB", flush=True)
    folder = random_model(tempfile.mkdtemp(), device=ranks.device.type, **size["model"])
    engine = None
    if importlib.util.find_spec("vllm") and not arguments.no_engine:
        from ada.engine import Engine

        options = dict(max_tokens=size["longest"], max_prompt_tokens=size["n_prompt"], memory_share=0.5, capacity=512)
        engine = Engine(folder, dtype=str(ranks.compute_dtype).removeprefix("torch."), **options)
        print(f"GPU: engine built {used_gib():.1f} GiB", flush=True)
        engine.sleep()
        print(f"GPU: asleep {used_gib():.1f} GiB", flush=True)
    trainer = Trainer(folder, ranks, lr=1e-6, activation_checkpointing=True)
    vocabulary = trainer.lm.config.vocab_size
    shapes = dict(vocabulary=vocabulary, n_prompt=size["n_prompt"], longest=size["longest"])
    groups = make_groups(size["groups"], shortest=size["longest"] // 4, **shapes)
    measure_update(trainer, groups)
    compare_with_plain(trainer, folder, groups)
    if engine:
        measure_engine(engine, trainer, size)
    print(f"{time.perf_counter() - start:.0f} s in all")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
