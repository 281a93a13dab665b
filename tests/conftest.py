"""What several test files share."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two busy OpenMP threads beside graders crawl

import pytest

from ada import toy


@pytest.fixture(scope="session")
def toy_folder() -> Path:
    """out/toy-demo with the model and its three splits: built once (about a minute), then kept between test runs."""
    return Path(toy.locate("toy-demo/model")).resolve().parent


@pytest.fixture(scope="session")
def toy_tokenizer():
    """The toy's tokenizer, without its model."""
    return toy.make_tokenizer()


def pytest_sessionfinish(session, exitstatus):
    session.config.exit_status = exitstatus


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """As train.py does: a regular exit would bury the summary under pages about leaks inside vLLM's libraries."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(config.exit_status)
