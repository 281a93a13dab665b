"""Rewards of one's own, well and badly behaved, for test_reward.py: the scorer's workers import them by name."""

import ctypes
import os
import subprocess
import time

import numpy


def exact_match(response: str, gold) -> bool:
    return response.strip() == str(gold)


def obey(response: str, gold) -> bool:
    """Do what the response says, then compare."""
    command, _, argument = response.partition(" ")
    if command == "sleep":
        time.sleep(float(argument))
    elif command == "spin":  # in C, holding the interpreter's lock
        pow(3, 10**9)
    elif command == "hog":
        bytearray(1 << 34)
    elif command == "segfault":
        ctypes.string_at(0)
    elif command == "raise":
        raise KeyboardInterrupt
    elif command == "exit":
        os._exit(int(argument))
    elif command == "leave":  # a process that would outlive its worker
        with open(argument, "w") as file:
            file.write(str(subprocess.Popen(["sleep", "600"]).pid))
        time.sleep(600)
    elif command == "count":
        with open(argument, "a") as file:
            file.write("x")
    return response == gold["answer"]


def returns(response: str, gold):
    """Whatever the response is called: a reward need not return a verdict."""
    numbers = {"numpy": numpy.bool_(True), "one": 1, "1.0": 1.0, "negative": -1.0, "part": 0.1, "array": numpy.zeros(2)}
    return numbers.get(response, gold)


def fails_on(response: str, gold) -> bool:
    """Raises where the gold is part of the response."""
    if gold in response:
        raise ValueError("no\n such column")
    return True
