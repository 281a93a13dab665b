"""What only a GPU can tell of an update, in one command of a few minutes: its speed, its memory and its precision.

    python -m bench.gpu             # one GPU of 80 GB or more; vLLM isn't needed
    python -m bench.gpu --tiny      # the same code on a CPU with a tiny model: its figures mean nothing

The model has the sizes of Qwen2.5-1.5B and random weights; responses have 512 to 2,048 tokens. Measured are tokens per
second and MFU (6 FLOPs per weight and token, attention included, recomputation not); log-probs in bf16 against the same
weights in fp32; the peak memory of a forward and backward above the level before, against the plain way: autocast, all
logits, log_softmax. It wants torch 2.11 and transformers 5.17, or newer. What the engine holds of a GPU, awake and
asleep, and a step by phase, is printed by bench/step.py, where vLLM is installed.
"""

import sys
import tempfile
import time

import torch
from transformers import AutoModelForCausalLM

from ada import run_command
from ada.support.ranks import init_ranks
from ada.trainer import Trainer, TrainerConfig, collate, sequences_of
from bench.common import machine, plain_logprobs, random_groups, random_model

QWEN = dict(hidden=1536, layers=28, vocabulary=151_936, intermediate_size=8960, num_attention_heads=12)
SIZES = {  # by whether it is tiny: the model, and its groups
    False: (QWEN | dict(num_key_value_heads=2), dict(n_groups=8, n_prompt=256, lengths=(512, 2048))),
    True: (dict(hidden=128, layers=2, vocabulary=270), dict(n_groups=4, n_prompt=8, lengths=(8, 32))),
}
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}  # bf16, dense


def seconds_of(function) -> float:
    start = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_gib(function) -> float:
    """Most that torch has allocated while it runs, above the level before."""
    if not torch.cuda.is_available():
        function()
        return float("nan")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        function()
    except torch.cuda.OutOfMemoryError:
        return float("inf")
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def flops_of_update(model, sequences: list) -> float:
    """Forward and backward, without what is computed twice: body, head (response tokens only), causal attention."""
    n_head = model.config.vocab_size * model.config.hidden_size
    n_body = sum(weight.numel() for weight in model.parameters()) - n_head  # tied
    n_tokens = sum(len(sequence.tokens) for sequence in sequences)
    n_response = sum(len(sequence.engine_logprobs) for sequence in sequences)
    pairs = sum(len(sequence.tokens) ** 2 for sequence in sequences)
    attention = 6 * model.config.num_hidden_layers * model.config.hidden_size * pairs
    return 6 * n_body * n_tokens + 6 * n_head * n_response + attention


def main() -> None:
    tiny = "--tiny" in sys.argv
    if not (tiny or torch.cuda.is_available()):
        sys.exit("no GPU here; --tiny runs the same code on a CPU")
    model_sizes, group_sizes = SIZES[tiny]
    ranks = init_ranks()
    print(machine(), flush=True)
    folder = random_model(tempfile.mkdtemp(), device=ranks.device.type, **model_sizes)
    trainer = Trainer(folder, ranks, TrainerConfig(lr=1e-6, activation_checkpointing=True))
    groups = random_groups(vocabulary=model_sizes["vocabulary"], **group_sizes)
    sequences = sequences_of(groups)

    trainer.update(groups, step=0)  # warms up
    seconds = min(seconds_of(lambda: trainer.update(groups, step=1)) for _ in range(3))
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peak_flops = next((flops for name, flops in PEAK_FLOPS.items() if name in gpu), float("nan"))
    n_tokens, mfu = sum(len(s.tokens) for s in sequences), flops_of_update(trainer.lm, sequences) / seconds / peak_flops
    print(f"update: {n_tokens:,} tokens in {seconds:.2f} s, {n_tokens / seconds:,.0f} tok/s, MFU {mfu:.1%}", flush=True)

    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(ranks.device).train()
    plain.load_state_dict({name: weight.float() for name, weight in trainer.named_weights()})  # rounded to bf16
    two = collate(sequences[:2], ranks.device)
    with torch.no_grad():
        difference_N = (trainer.policy(two.tokens_BT, two.is_response_BT)[0] - plain_logprobs(plain, two)).abs()
    print(f"log-probs, {ranks.compute_dtype} against fp32: mean {difference_N.mean():.1e}, max {difference_N.max():.1e}")

    plain.gradient_checkpointing_enable({"use_reentrant": False})
    micro = trainer._micro_batches(groups)[0][0]
    ours_gib = peak_gib(lambda: trainer.policy(micro.tokens_BT, micro.is_response_BT)[0].mean().backward())
    trainer.optimizer.zero_grad()
    plain_gib = peak_gib(lambda: plain_logprobs(plain, micro, ranks.compute_dtype).mean().backward())
    print(f"peak of forward and backward, {micro.tokens_BT.numel():,} tokens: {ours_gib:.1f} GiB, plain {plain_gib:.1f}")
    print(f"ours / plain: {ours_gib / plain_gib:.2f}x")


if __name__ == "__main__":
    run_command(main)
