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
