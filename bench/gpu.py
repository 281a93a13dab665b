"""What only a GPU can tell of an update, in one command of a few minutes: its speed, its precision and its memory.

    python -m bench.gpu             # one GPU of 80 GB or more; vLLM isn't needed
    python -m bench.gpu --tiny      # the same code on a CPU with a tiny model: its figures mean nothing

The model has the sizes of Qwen2.5-1.5B and random weights. Measured are tokens per second and MFU (6 FLOPs per weight
and token, without attention and recomputation); log-probs in bf16 against the same weights in fp32; peak memory of a
forward and backward above the level before, against the plain way: autocast, all logits, log_softmax. torch 2.11 and
transformers 5.17 will do. What the engine holds of a GPU, asleep beside the update, is printed by bench/step.py.
"""

import sys
import tempfile
import time

import torch
from transformers import AutoModelForCausalLM

from ada import UserError, run_command
from ada.support.ranks import init_ranks
from ada.trainer import Trainer, TrainerConfig, collate, sequences_of
from bench.common import machine, plain_logprobs, random_groups, random_model

QWEN = dict(hidden=1536, layers=28, vocabulary=151_936, intermediate_size=8960, num_attention_heads=12)
SIZES = {  # by whether it is tiny: the model, and its groups
    False: (QWEN | dict(num_key_value_heads=2), dict(n_groups=8, n_prompt=256, lengths=(512, 2048))),
    True: (dict(hidden=128, layers=2, vocabulary=270), dict(n_groups=4, n_prompt=8, lengths=(8, 32))),
}
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}  # bf16, dense


def measure(function) -> tuple[float, float]:
    """Seconds, and GiB that torch has allocated at most while it runs, above the level before."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated() if on_gpu else 0, time.perf_counter()
    try:
        function()
    except torch.cuda.OutOfMemoryError:
        return float("nan"), float("inf")
    if on_gpu:
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else float("nan")
    return time.perf_counter() - start, peak / 2**30


def main() -> None:
    tiny = "--tiny" in sys.argv
    if not (tiny or torch.cuda.is_available()):
        raise UserError("no GPU here; --tiny runs the same code on a CPU")
    model_sizes, group_sizes = SIZES[tiny]
    ranks = init_ranks()
    print(machine(), flush=True)
    folder = random_model(tempfile.mkdtemp(), device=ranks.device.type, **model_sizes)
    trainer = Trainer(folder, ranks, TrainerConfig(lr=1e-6, activation_checkpointing=True))
    groups = random_groups(vocabulary=model_sizes["vocabulary"], **group_sizes)
    sequences = sequences_of(groups)

    trainer.update(groups, step=0)  # warms up
    seconds = min(measure(lambda: trainer.update(groups, step=1))[0] for _ in range(3))
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peak_flops = next((flops for name, flops in PEAK_FLOPS.items() if name in gpu), float("nan"))
    n_tokens = sum(len(sequence.tokens) for sequence in sequences)
    mfu = 6 * trainer.lm.num_parameters() * n_tokens / seconds / peak_flops
    print(f"update: {n_tokens:,} tokens in {seconds:.2f} s, {n_tokens / seconds:,.0f} tok/s, MFU {mfu:.1%}", flush=True)

    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(ranks.device).train()
    plain.load_state_dict({name: weight.float() for name, weight in trainer.named_weights()})  # rounded to bf16
    two = collate(sequences[:2], ranks.device)
    inputs = two.tokens_BT, two.is_response_BT
    with torch.no_grad():
        difference_N = (trainer.policy(*inputs)[0] - plain_logprobs(plain, *inputs)).abs()
    print(f"log-probs against fp32: mean {difference_N.mean():.1e}, max {difference_N.max():.1e} nats")

    plain.gradient_checkpointing_enable({"use_reentrant": False})
    micro = trainer._micro_batches(groups)[0][0]
    inputs = micro.tokens_BT, micro.is_response_BT
    _, ours_gib = measure(lambda: trainer.policy(*inputs)[0].mean().backward())
    trainer.optimizer.zero_grad()
    with torch.autocast(ranks.device.type, dtype=ranks.compute_dtype, enabled=ranks.device.type == "cuda"):
        _, plain_gib = measure(lambda: plain_logprobs(plain, *inputs).mean().backward())
    print(f"forward and backward of {micro.tokens_BT.numel():,} tokens: {ours_gib:.1f} GiB, plain {plain_gib:.1f}")
    print(f"ours / plain: {ours_gib / plain_gib:.2f}x in memory")


if __name__ == "__main__":
    run_command(main)
