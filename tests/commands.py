"""The real commands in real processes, started warm.

A start of train.py is 15 s of imports and 2 s of work. So the processes here are forks of one that has imported all of
it (multiprocessing's fork server). What they run, print, leave behind and exit with is as on the command line; `cold`
is the command line itself.
"""

import json
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
TIMEOUT = 240  # sec
PRELOADED = [
    "train",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.qwen2",
    "transformers.models.qwen2.modeling_qwen2",
]
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets


@dataclass
class Done:
    """Of several ranks the first exit status that isn't 0, and all that they printed, one after the other."""

    returncode: int
    stdout: str
    stderr: str


class Command:
    """A script that runs, on one rank, or on several with the variables that torchrun would give them."""

    def __init__(self, script: str, *arguments, ranks: int = 1, environment: dict[str, str] | None = None):
        self.output = Path(tempfile.mkdtemp(prefix="command-"))
        address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(ranks)}
        self.processes = []
        for rank in range(ranks):
            place = {} if ranks == 1 else {**address, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            variables = {**place, **(environment or {})}
            call = (script, [str(argument) for argument in arguments], variables, self.output / str(rank))
            process = multiprocessing.get_context("forkserver").Process(target=_run, args=call)
            process.start()
            self.processes.append(process)

    def is_running(self) -> bool:
        return any(process.exitcode is None for process in self.processes)

    def signal(self, number: int) -> None:
        for process in self.processes:
            if process.exitcode is None:
                os.killpg(process.pid, number)

    def wait(self, timeout: float = TIMEOUT) -> Done:
        """Its end, once. Like torchrun, kills what is left 20 s after a rank has failed."""
        deadline = time.monotonic() + timeout
        while self.is_running() and time.monotonic() < deadline:
            next(process for process in self.processes if process.exitcode is None).join(0.05)
            if any(process.exitcode for process in self.processes):
                deadline = min(deadline, time.monotonic() + 20)
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.join()
        status = next((process.exitcode for process in self.processes if process.exitcode), 0)
        printed = ["".join(path.read_text() for path in sorted(self.output.glob(f"*.{n}"))) for n in ("out", "err")]
        shutil.rmtree(self.output)
        return Done(status, *printed)

    def kill_when(self, condition: Callable[[], bool]) -> bool:
        """SIGKILL to all of it at that moment. Returns whether there was something left to kill."""
        deadline = time.monotonic() + TIMEOUT
        while not condition() and self.is_running():
            assert time.monotonic() < deadline, "no progress"
            time.sleep(0.002)
        alive = self.is_running()
        self.signal(signal.SIGKILL)
        self.wait()
        return alive


def run(script: str, *arguments, **how) -> Done:
    return Command(script, *arguments, **how).wait()


def cold(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """`python ARGUMENTS` from the command line."""
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER} | (environment or {})
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT
    )


def torchrun(ranks: int) -> list[str]:
    """For `cold`."""
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def count_lines(folder: Path) -> int:
    """Of the journals and logs below a folder."""
    return sum(path.read_bytes().count(b"\n") for path in folder.rglob("*.jsonl"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _run(script: str, arguments: list[str], variables: dict[str, str], output: Path) -> None:
    os.setsid()  # one signal reaches it and what it starts
    for name in LAUNCHER:
        os.environ.pop(name, None)
    os.environ.update(variables)
    os.chdir(ROOT)
    for stream, ending in ((sys.stdout, ".out"), (sys.stderr, ".err")):
        os.dup2(os.open(output.with_suffix(ending), os.O_WRONLY | os.O_CREAT), stream.fileno())
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
