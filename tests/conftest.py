"""What several test files share."""

import os
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
