"""Files that survive kills: whole or not there, held by one process at a time, cut back to a step."""

import fcntl
import hashlib
import json
import os
from pathlib import Path

from ada import UserError


class FileError(UserError):
    """A file that cannot be read or written, or that belongs to something else."""


def write_atomically(path: Path, text: str) -> None:
    """The file is the old one or the new one, whenever this process or the machine stops."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def append_lines(path: Path, lines: list[dict]) -> None:
    """JSON objects at the end of a file. Raises FileError (disk full, say)."""
    try:
        with path.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from error


def cut_log(path: Path, step: int) -> None:
    """Drop the lines of a JSONL log that come after `step`, and a half-written last one: they will be written again.

    Raises:
        FileError: the log could not be read or written; it is as it was.
    """
    if not path.exists():
        return
    try:
        kept = []
        for line in path.read_text().splitlines(keepends=True):
            if not line.endswith("\n") or json.loads(line)["step"] > step:
                break
            kept.append(line)
        write_atomically(path, "".join(kept))
    except (OSError, KeyError, ValueError) as error:
        raise FileError(f"could not cut {path} back to step {step}: {type(error).__name__}: {error}") from error


def hold_lock(path: Path):
    """A lock that lasts until this process ends, however it ends: keep what is returned. Raises FileError if taken."""
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FileError(f"{path.parent}: another process is at work here") from None
    return file


def refuse_other_options(path: Path, options: dict, advice: str) -> None:
    """Raise FileError, naming them, if `path` (JSON) holds other values: continuing would mix two experiments."""
    if not path.exists():
        return
    earlier = json.loads(path.read_text())
    differing = [
        f"{name} was {earlier.get(name)!r}, is {value!r}"
        for name, value in options.items()
        if value != earlier.get(name)
    ]
    if differing:
        raise FileError(
            f"{path.parent} was started with other options ({'; '.join(differing)}): {advice}, or delete the folder"
        )


def digest(content) -> str:
    """A short name for this and nothing else."""
    return hashlib.blake2b(repr(content).encode(errors="surrogatepass"), digest_size=8).hexdigest()
