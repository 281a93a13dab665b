r"""The grader: is a response right? It answers from processes that can be killed.

RL finds every hole in a grader, and one answer that hangs it stops the run. So answers are compared (answers.py has the
rules) in worker processes which the kernel ends after 5 seconds or at 1 GiB; that answer is then wrong, nothing else is
lost. Workers are started afresh as `python -m ada.reward`: a fork of the trainer would inherit its threads and its GPU.

    scorer.submit(key, response, gold) -> [socket] -> worker -> forked child: same(gold, answer)?
    scorer.poll() -> [(key, correct)]  <- [socket] <- "true", "false"; from the worker, if the child died: "timeout"..
"""

import collections
import contextlib
import functools
import json
import os
import pkgutil
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from ada import UserError, one_line
from ada.support.answers import GoldError, is_right, last_boxed, read_gold, too_long

__all__ = ["GoldError", "RewardError", "Scorer", "grade", "last_boxed", "read_gold"]

MAX_MESSAGE_BYTES = 200_000  # a response with its gold; it must fit into a socket's buffer
IN_FLIGHT = 16  # answers that wait in a worker's socket: about 50 ms of work, as long as an engine step
FAILURES = ("timeout", "memory", "crash", "too_long")  # why an answer was wrong without having been compared
REMEMBERED = 100_000  # verdicts kept, oldest forgotten first


# ---- The worker: python -m ada.reward REWARD TIME_LIMIT_SEC MEMORY_LIMIT_BYTES, a socket as standard input -----------

_OUT_OF_MEMORY = 77  # exit status
_WARM_UP = [
    r"\frac{1}{2}\sqrt{x}",
    r"x^{2}-3y_{1}",
    r"2\pi n!",
    r"4.5\times 10^{-3}",
    r"-\sin(2t)e^{-t}",
    r"f(x)=2(x+1)",
]


def _load(reward: str):
    if reward == "math":
        for latex in _WARM_UP:  # imports sympy, and builds the parser's tables once for all children
            is_right(latex, latex + "+0.5")
        return is_right
    sys.path.insert(0, os.getcwd())
    return pkgutil.resolve_name(reward)


def _serve(connection: socket.socket, reward, time_limit_sec: float, memory_limit_bytes: int) -> None:
    """Grade what comes until the scorer hangs up. The alarm has no handler: the kernel ends the process, even in C."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while message := _receive(connection):
        gold, answer = json.loads(message)
        signal.setitimer(signal.ITIMER_REAL, time_limit_sec)
        try:
            correct = bool(reward(answer, gold))
        except MemoryError:
            os._exit(_OUT_OF_MEMORY)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(connection, b"true" if correct else b"false")


def _receive(connection: socket.socket) -> bytes:
    """The next message; empty once the scorer has hung up, or was killed with verdicts unread."""
    with contextlib.suppress(ConnectionError):
        return connection.recv(2 * MAX_MESSAGE_BYTES)
    return b""


def _send(connection: socket.socket, message: bytes) -> None:
    """To the scorer, if it is still there; if not, the next _receive says so."""
    with contextlib.suppress(ConnectionError):
        connection.send(message)


def _worker(reward: str, time_limit_sec: float, memory_limit_bytes: int) -> None:
    """Import once, then let a forked child grade; when one dies say why, and fork the next (5 ms instead of 1 s).

    A message is read whole or not at all, so the next child goes on where the last one died. Forking is safe here:
    this process has one thread and nothing of the trainer's. It ends the child when the trainer closes it or is gone.
    """
    trainer = os.getppid()
    connection = socket.socket(fileno=os.dup(0))
    try:
        function = _load(reward)
    except Exception as error:  # whatever a module of the user's does
        _send(connection, f"{type(error).__name__}: {one_line(error)}".encode()[:1000])
        return
    _send(connection, b"ready")
    watched = [signal.SIGCHLD, signal.SIGTERM]
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    while True:
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)  # what a reward may start is ended with it
            signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
            _serve(connection, function, time_limit_sec, memory_limit_bytes)
            os._exit(0)
        ended = None
        while not ended:
            event = signal.sigtimedwait(watched, 0.5)
            closed = os.getppid() != trainer or (event is not None and event.si_signo == signal.SIGTERM)
            if closed:
                os.kill(child, signal.SIGKILL)
            ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | (0 if closed else os.WNOHANG))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if closed or code == 0:
            return
        _send(connection, {-signal.SIGALRM: b"timeout", _OUT_OF_MEMORY: b"memory"}.get(code, b"crash"))


# ---- The scorer: what the trainer holds ------------------------------------------------------------------------------


class _Grader:
    """One worker process, the socket to it, and the questions it has been sent and not answered, oldest first."""

    def __init__(self, arguments: list[str]):
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_MESSAGE_BYTES)
        package = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ada.reward", *arguments],
            stdin=theirs,
            # one core each, and no GPU memory
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,  # Ctrl-C is for the trainer, which then closes the workers
        )
        theirs.close()
        self.ready = False
        self.asked: collections.deque = collections.deque()

    def close(self) -> None:
        self.socket.close()
        self.process.terminate()
        self.process.wait()


class RewardError(UserError):
    """There is no such reward, or the module with it does not load."""


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
        self._math = reward == "math"
        self._arguments = [reward, str(time_limit_sec), str(memory_limit_bytes)]
        self._graders = [_Grader(self._arguments) for _ in range(workers)]
        self._done: list = []  # (key, correct) to be handed out by the next poll
        self._queue: collections.deque = collections.deque()  # (gold as JSON, answer) pairs that no worker has yet
        self._waiting: dict = {}  # pair -> the keys that wait for its verdict
        self._verdicts: dict = {}  # pair -> "true", "false" or the cause of a failure
        self._killers: dict = {}  # answer -> cause: what ended a worker isn't tried again, whatever the gold

    def wait_until_ready(self) -> None:
        """Until every worker has imported what it needs, about a second. Raises RewardError if one cannot."""
        while not all(grader.ready for grader in self._graders):
            self._receive(None)

    def submit(self, key, response: str, gold) -> None:
        """Have a response graded; key (any object) comes back from poll with the verdict. Takes microseconds."""
        answer = last_boxed(response) if self._math else response
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
        nothing waited for. Raises RewardError if a worker cannot start.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._receive(0.0 if self._done or not self._waiting else left)
            if self._done or not self._waiting or (left is not None and left <= 0):
                done, self._done = self._done, []
                return done

    def close(self) -> None:
        """End the workers. What hasn't been graded is forgotten."""
        for grader in self._graders:
            grader.close()
        self._graders = []

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        self.close()

    def _send(self) -> None:
        while self._queue:
            grader = min(self._graders, key=lambda grader: len(grader.asked))
            if len(grader.asked) >= IN_FLIGHT:
                return
            pair = gold, answer = self._queue[0]
            message = f"[{gold},{json.dumps(answer)}]".encode()
            if cause := self._killers.get(answer):
                self._finish(pair, cause)
            elif len(message) > MAX_MESSAGE_BYTES or (self._math and too_long(answer)):
                self._finish(pair, "too_long")
            else:
                try:
                    grader.socket.send(message)
                except (BlockingIOError, ConnectionError):  # its buffer is full, or it has died: _receive will see
                    return
                grader.asked.append(pair)
            self._queue.popleft()

    def _receive(self, timeout: float | None) -> None:
        waiting_for = select.poll()
        graders = {grader.socket.fileno(): grader for grader in self._graders}
        for number in graders:
            waiting_for.register(number, select.POLLIN)
        for number, _ in waiting_for.poll(None if timeout is None else timeout * 1000):
            grader = graders[number]
            try:
                while message := grader.socket.recv(1024):
                    if message == b"ready":
                        grader.ready = True
                    elif not grader.ready:
                        raise RewardError(f"--reward {self._arguments[0]}: {message.decode(errors='replace')}")
                    else:
                        self._finish(grader.asked.popleft(), message.decode())
                self._replace(grader)
            except BlockingIOError:
                pass
            except ConnectionError:
                self._replace(grader)
        self._send()

    def _replace(self, grader: _Grader) -> None:
        """A worker has gone itself (killed from outside): the answer it was on is wrong, the others are asked again."""
        grader.close()
        if not grader.ready:
            raise RewardError(f"--reward {self._arguments[0]}: a grader could not start")
        if grader.asked:
            self._finish(grader.asked.popleft(), "crash")
        self._queue.extendleft(reversed(grader.asked))
        self._graders[self._graders.index(grader)] = _Grader(self._arguments)

    def _finish(self, pair: tuple, verdict: str) -> None:
        if verdict not in ("true", "false"):
            self._killers[pair[1]] = verdict
        self._verdicts[pair] = verdict
        for memory in (self._verdicts, self._killers):
            if len(memory) > REMEMBERED:
                del memory[next(iter(memory))]
        self._hand_out(self._waiting.pop(pair), verdict)

    def _hand_out(self, keys: list, verdict: str) -> None:
        self._done += [(key, verdict == "true") for key in keys]
        if verdict not in ("true", "false"):
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


if __name__ == "__main__":
    _worker(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
