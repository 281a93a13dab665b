"""The examples in the docstrings: a reader tries them first, and they rot unless something runs them."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [*ROOT.glob("*.py"), *ROOT.glob("ada/**/*.py"), *ROOT.glob("scripts/*.py"), *ROOT.glob("experiments/*.py")]
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES}
WITH_EXAMPLES = sorted(name for name, path in MODULES.items() if ">>> " in path.read_text())


def test_the_files_are_found():
    """An empty list would pass everything."""
    assert {"toy", "ada.data", "ada.eval", "ada.reward", "ada.sampler", "scripts.evaluate"} <= set(WITH_EXAMPLES)
    assert {"train", "ada.support.run"} <= MODULES.keys()


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_of(name):
    """A wrong example teaches the wrong thing."""
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0 and result.failed == 0
