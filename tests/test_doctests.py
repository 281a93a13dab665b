"""The examples in the docstrings: a reader tries them first, and they rot unless something runs them."""

import doctest
import importlib
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parents[1] / "ada").glob("*.py"))
WITH_EXAMPLES = [path.stem for path in FILES if ">>> " in path.read_text()]


def test_the_files_are_found():
    """An empty list would pass everything."""
    assert {"data", "eval", "reward", "sampler", "toy"} <= set(WITH_EXAMPLES)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_of(name):
    """A wrong example teaches the wrong thing."""
    result = doctest.testmod(importlib.import_module(f"ada.{name}"))
    assert result.attempted > 0 and result.failed == 0
