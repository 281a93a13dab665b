"""Reinforce-Ada (arXiv 2510.04996), one file per concern. Start with train.py and ada/sampler.py."""

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import field

# Both before torch is imported, which each command does after this. More OpenMP threads than free cores cost tenfold.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def option(default, help: str, **limits):
    """A dataclass field that is an option: its default, a line of help, and limits: at_least, above, below."""
    return field(default=default, metadata={"help": help, **limits})


class UserError(Exception):
    """Something that the user can put right. Commands print it as one line, without a traceback, and exit with 1."""


def one_line(error: Exception) -> str:
    """A library's message, however many lines it has, for use in a UserError."""
    return " ".join(str(error).split()) or type(error).__name__


def run_command(command: Callable[[], None]) -> None:
    """Run a command to its end and leave the process: with 0, after an error with 1. A UserError is one line."""
    code = 0
    try:
        command()
    except UserError as error:
        sys.stderr.write(f"[rank {os.environ.get('RANK', 0)}] error: {error}\n")  # at once: ranks may fail together
        code = 1
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        code = 130
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # All is written. A regular exit would print pages about leaks inside vLLM's libraries, and after an error it might
    # wait in their destructors for the other ranks.
    os._exit(code)
