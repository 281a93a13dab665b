"""What the scripts of this folder share: the machine in one line, and random models of a chosen size."""

import platform
import statistics
from datetime import date
from pathlib import Path


def machine() -> str:
    """Processor, cores, GPU, torch and date, for the first line of a script's output."""
    import torch

    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    else:
        lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
        name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
        name += f", {len([line for line in lines if line.startswith('processor')])} cores, no GPU"
    return f"{name}; torch {torch.__version__}, {torch.get_num_threads()} thread(s); {date.today()}"


def spread(values: list[float]) -> str:
    """Median and range.

    >>> spread([3.0, 1.0, 2.0])
    '2.00 (1.00 to 3.00)'
    """
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def status_mib(field: str) -> float:
    """VmRSS, this process's resident memory now, or VmHWM, the most it has been."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def random_model(
    folder: str, *, hidden: int, layers: int, vocabulary: int = 270, n_stop: int = 1, device: str = "cpu", **sizes
) -> str:
    """A Hugging Face folder with an untrained Qwen2 and the toy's tokenizer: the folder.

    512 x 10 has 32 M parameters. Its next-token distribution is nearly flat, so with `n_stop` tokens that end a
    response it ends with a chance of n_stop / vocabulary at each token: lengths are geometric, up to the limit.
    `sizes` overrides any other size of the config; `device` is where the weights are drawn.
    """
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    from ada.toy import make_tokenizer

    tokenizer = make_tokenizer()
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    usual = dict(
        intermediate_size=hidden * 8 // 3,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    vocabulary = max(vocabulary, len(tokenizer))
    config = Qwen2Config(vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, **ids, **(usual | sizes))
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2ForCausalLM(config)
    stop = [tokenizer.eos_token_id, *range(vocabulary - n_stop + 1, vocabulary)]
    model.generation_config = GenerationConfig(**{**ids, "eos_token_id": stop})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def lucky(response: str, row: dict) -> bool:
    """A reward for untrained models: right by chance, as often as the toy's base model was on this row.

    The verdict depends on the response alone. It takes the time of comparing two fractions with math-verify.
    """
    from ada.answers import is_right
    from ada.sampler import seed_of

    number = seed_of(response)
    is_right(rf"\frac{{{number % 997}}}{{{number % 13 + 2}}}", rf"\frac{{{number % 991}}}{{{number % 11 + 2}}}")
    return number < row["right_of_16"] / 16 * 2**63
