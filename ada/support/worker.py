"""The process that grades: python -m ada.support.worker REWARD TIME_LIMIT_SEC MEMORY_LIMIT_BYTES, started by reward.py.

Its standard input is a socket: questions come in, [gold, answer] as JSON, and verdicts go out: "true", "false",
"timeout", "memory", "crash", or what a reward of the user's has raised or returned instead of a verdict.

It imports sympy once, and then forks the children that grade: a dead one is replaced in 5 ms instead of 1 s.
"""

import contextlib
import json
import numbers
import os
import pkgutil
import resource
import signal
import socket
import sys

from ada import one_line
from answers import is_right

MAX_MESSAGE_BYTES = 200_000  # a response with its gold; it must fit into a socket's buffer
_OUT_OF_MEMORY = 77  # exit status
_WARM_UP = [
    r"\frac{1}{2}\sqrt{x}",
    r"x^{2}-3y_{1}",
    r"2\pi n!",
    r"4.5\times 10^{-3}",
    r"-\sin(2t)e^{-t}",
    "f(x)=2(x+1)",
]


def _load(reward: str):
    if reward == "math":
        for latex in _WARM_UP:  # imports sympy, and builds the parser's tables once for all children
            is_right(latex, latex + "+0.5")
        return is_right
    sys.path.insert(0, os.getcwd())
    return pkgutil.resolve_name(reward)


def _verdict(reward, answer: str, gold) -> str:
    """What the scorer is told: true, false, or what is wrong with a reward of the user's."""
    try:
        correct = reward(answer, gold)
    except MemoryError:
        os._exit(_OUT_OF_MEMORY)
    except Exception as error:
        return f"raised {type(error).__name__}: {one_line(error)}"
    number = isinstance(correct, numbers.Number) or type(correct).__name__ in ("bool", "bool_")  # numpy's are no Number
    return str(bool(correct)).lower() if number and correct in (0, 1) else f"returned {correct!r:.200}"


def _serve(connection: socket.socket, reward, time_limit_sec: float, memory_limit_bytes: int) -> None:
    """Grade what comes until the scorer hangs up. The alarm has no handler: the kernel ends the process, even in C."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ConnectionError):  # the scorer was killed, with verdicts unread
        while message := connection.recv(2 * MAX_MESSAGE_BYTES):
            gold, answer = json.loads(message)
            signal.setitimer(signal.ITIMER_REAL, time_limit_sec)
            verdict = _verdict(reward, answer, gold)
            signal.setitimer(signal.ITIMER_REAL, 0)
            _send(connection, verdict)


def _send(connection: socket.socket, verdict: str) -> None:
    with contextlib.suppress(ConnectionError):  # the scorer is gone: the next read says so
        connection.send(verdict.encode(errors="replace")[:1000])


def work(reward: str, time_limit_sec: float, memory_limit_bytes: int) -> None:
    """Let a child grade; when it dies say why, and fork the next. Messages are read whole or not at all: it reads on.

    Forking is safe here: this process has one thread and nothing of the trainer's. It ends the child, and what that may
    have started, when the trainer ends it or is gone.
    """
    trainer = os.getppid()
    connection = socket.socket(fileno=os.dup(0))
    try:
        function = _load(reward)
    except Exception as error:  # whatever a module of the user's does
        return _send(connection, f"{type(error).__name__}: {one_line(error)}")
    _send(connection, "ready")
    watched = [signal.SIGCHLD, signal.SIGTERM]
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    while True:
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)  # a group of its own, with what it may start
            signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
            _serve(connection, function, time_limit_sec, memory_limit_bytes)
            os._exit(0)
        ended = closed = None
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
            return None
        _send(connection, {-signal.SIGALRM: "timeout", _OUT_OF_MEMORY: "memory"}.get(code, "crash"))


if __name__ == "__main__":
    work(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
