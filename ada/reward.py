r"""The grader: is a response right? It answers from processes that can be killed.

RL finds every hole in a grader, and one answer that hangs it stops the run. So answers are compared in worker processes
(support/worker.py; answers/compare.py has the rules), which the kernel ends after 5 seconds or at 1 GiB. That answer is
then wrong, and nothing else is lost.

    scorer.submit(key, response, gold) -> [socket] -> worker's child: reward(answer, gold)?
    scorer.poll() -> [(key, correct)]  <- [socket] <- "true", "false"; from the worker, if the child died: "timeout"..

A worker is a program of its own: a fork of the trainer would inherit its threads and its GPU.
"""

import collections
import functools
import json
import math
import os
import re
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

from ada import UserError
from ada.support.worker import MAX_MESSAGE_BYTES
from answers import GoldError, last_boxed, read_gold, too_long

__all__ = ["GoldError", "RewardError", "Scorer", "grade", "last_boxed", "read_gold"]

IN_FLIGHT = 16  # answers that wait in a worker's socket: about 50 ms of work, as long as an engine step
FAILURES = ("timeout", "memory", "crash", "too_long")  # why an answer was wrong without having been compared
REMEMBERED = 100_000  # verdicts kept, oldest forgotten first
ALWAYS_RAISES = 100  # a reward that has raised so often, and graded nothing, is broken: the run stops


class RewardError(UserError):
    """There is no such reward, or it does not load, returns something else than a verdict, or always raises."""


# One core each, no GPU memory, and nothing of what vLLM preloads.
WORKER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "LD_PRELOAD": ""}


class _Worker:
    """A worker process, the socket to it, and the questions it has been sent and not answered, oldest first."""

    def __init__(self, arguments: list[str]):
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_MESSAGE_BYTES)
        package = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ada.support.worker", *arguments],
            stdin=theirs,
            env={**os.environ, "PYTHONPATH": path, **WORKER_ENVIRONMENT},
            start_new_session=True,  # Ctrl-C is for the trainer, which then closes the workers
        )
        theirs.close()
        self.ready = False
        self.asked: collections.deque = collections.deque()

    def close(self) -> None:
        self.socket.close()
        self.process.terminate()
        self.process.wait()


class Scorer:
    r"""Grades responses in worker processes while the caller does something else.

    reward: "math", or "module:function" with function(response, gold) -> bool, gold being what the data set's row has.
    An answer that takes more than time_limit_sec or memory_limit_bytes, or crashes, is wrong, now and whenever it comes
    again; `failures` counts such responses by cause: "timeout", "memory", "crash", "too_long".
    Equal (gold, answer) pairs are graded once. Use it from any thread, but from one at a time.

    >>> with Scorer() as scorer:
    ...     scorer.submit(key="a", response=r"\boxed{\frac12}", gold="0.5")
    ...     scorer.poll(timeout=60)
    [('a', True)]
    """

    def __init__(self, workers: int = 1, *, reward: str = "math", time_limit_sec=5.0, memory_limit_bytes=1 << 30):
        if reward != "math" and not re.fullmatch(r"[\w.]+:\w+", reward):
            raise RewardError(f"--reward {reward}: must be math or MODULE:FUNCTION")
        self.failures: collections.Counter = collections.Counter()
        self._reward = reward
        self._arguments = [reward, str(time_limit_sec), str(memory_limit_bytes)]
        self._workers = [_Worker(self._arguments) for _ in range(workers)]
        self._done: list = []  # (key, correct) for the next poll
        self._queue: collections.deque = collections.deque()  # (gold as JSON, answer) pairs that no worker has yet
        self._waiting: dict = {}  # pair -> the keys that wait for its verdict
        self._verdicts: dict = {}  # pair -> "true", "false" or the cause of a failure
        self._failed_answers: dict = {}  # answer -> cause: what ended a worker isn't tried again, whatever the gold
        self._raised = 0  # how often the reward has raised; minus infinity once it has graded something

    def wait_until_ready(self) -> None:
        """Until every worker has imported what it needs, about a second. Raises RewardError if one cannot."""
        while not all(worker.ready for worker in self._workers):
            self._receive(math.inf)

    def submit(self, key, response: str, gold) -> None:
        """Have a response graded; key (any object) comes back from poll with the verdict. Takes microseconds."""
        answer = last_boxed(response) if self._reward == "math" else response
        if answer is None:
            self._done.append((key, False))
            return
        pair = (json.dumps(gold), answer)
        if pair in self._verdicts:
            self._hand_out([key], self._verdicts[pair])
        elif pair in self._waiting:
            self._waiting[pair].append(key)
        else:
            self._waiting[pair] = [key]
            self._queue.append(pair)
            self._send()

    def poll(self, timeout: float | None = 0.0) -> list:
        """(key, correct) of what has been graded since the last poll.

        timeout: seconds to wait for at least one; 0 doesn't wait, None waits as long as it takes. Nothing submitted,
        nothing waited for. Raises RewardError if the reward does not load, always raises, or returns no verdict.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            self._receive(0.0 if self._done or not self._waiting else left)
            if self._done or not self._waiting or left <= 0:
                done, self._done = self._done, []
                return done

    def close(self) -> None:
        """End the workers. What hasn't been graded is forgotten."""
        for worker in self._workers:
            worker.close()
        self._workers = []

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        self.close()

    def _send(self) -> None:
        """Give the workers what they have room for."""
        while self._queue:
            worker = min(self._workers, key=lambda worker: len(worker.asked))
            if len(worker.asked) >= IN_FLIGHT:
                return
            pair = gold, answer = self._queue[0]
            message = f"[{gold},{json.dumps(answer)}]".encode()
            if cause := self._failed_answers.get(answer):
                self._finish(pair, cause)
            elif len(message) > MAX_MESSAGE_BYTES or (self._reward == "math" and too_long(answer)):
                self._finish(pair, "too_long")
            else:
                try:
                    worker.socket.send(message)
                except (BlockingIOError, ConnectionError):  # its buffer is full, or it has died: _receive will see
                    return
                worker.asked.append(pair)
            self._queue.popleft()

    def _receive(self, timeout: float) -> None:
        """Take in what the workers have sent, waiting up to timeout seconds for something, and send them more."""
        workers = {worker.socket.fileno(): worker for worker in self._workers}
        sockets = select.poll()
        for number in workers:
            sockets.register(number, select.POLLIN)
        for number, _ in sockets.poll(None if timeout == math.inf else timeout * 1000):
            worker = workers[number]
            try:
                while message := worker.socket.recv(1024).decode(errors="replace"):
                    if not worker.ready and message != "ready":
                        raise RewardError(f"--reward {self._reward}: {message}")
                    if worker.ready:
                        self._finish(worker.asked.popleft(), message)
                    worker.ready = True
                self._replace(worker)
            except BlockingIOError:
                pass
            except ConnectionError:
                self._replace(worker)
        self._send()

    def _replace(self, worker: _Worker) -> None:
        """A worker has gone itself (killed from outside): the answer it was on is wrong, the others are asked again."""
        worker.close()
        if not worker.ready:
            raise RewardError(f"--reward {self._reward}: a worker could not start")
        if worker.asked:
            self._finish(worker.asked.popleft(), "crash")
        self._queue.extendleft(reversed(worker.asked))
        self._workers[self._workers.index(worker)] = _Worker(self._arguments)

    def _finish(self, pair: tuple, verdict: str) -> None:
        """Hand out a verdict and remember it."""
        if verdict.startswith("returned"):
            raise RewardError(f"--reward {self._reward}: {verdict}; it must return True or False")
        if verdict.startswith("raised"):
            self._raised += 1
            if self._raised == ALWAYS_RAISES:
                raise RewardError(f"--reward {self._reward}: {verdict}, as on every answer so far")
            verdict = "crash"
        if verdict in ("true", "false"):
            self._raised = -math.inf
        else:
            self._failed_answers[pair[1]] = verdict
        self._verdicts[pair] = verdict
        for memory in (self._verdicts, self._failed_answers):
            if len(memory) > REMEMBERED:
                del memory[next(iter(memory))]
        self._hand_out(self._waiting.pop(pair), verdict)

    def _hand_out(self, keys: list, verdict: str) -> None:
        self._done += [(key, verdict == "true") for key in keys]
        if verdict in FAILURES:
            self.failures[verdict] += len(keys)


def grade(response: str, gold) -> bool:
    r"""Is the response's last \boxed{} the gold answer? In bounded time and memory; for tests and small uses.

    >>> grade(r"Half of it, so \boxed{50\%}.", "1/2"), grade("It is 42.", 42)
    (True, False)
    """
    scorer = _small_scorer()
    scorer.submit(None, response, gold)
    return scorer.poll(None)[0][1]


@functools.cache
def _small_scorer() -> Scorer:
    return Scorer()
