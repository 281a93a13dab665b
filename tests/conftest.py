"""What several test files share."""

import multiprocessing
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two busy OpenMP threads beside graders crawl

import hypothesis
import pytest

hypothesis.settings.register_profile("the same every time", derandomize=True)  # a red run can be run again
hypothesis.settings.load_profile("the same every time")

WITH_ENGINES = {"test_train", "test_evaluate", "test_prepare", "test_restarts"}  # they start whole commands


def pytest_collection_finish(session):
    """What the processes of tiny.py and commands.py begin with; vLLM, 10 s, only if a test will want it."""
    import commands

    files = {item.path.stem for item in session.items}
    light = ["ada.trainer", "transformers.models.qwen2.modeling_qwen2"]
    multiprocessing.set_forkserver_preload(commands.PRELOADED if files & WITH_ENGINES else light)


@pytest.fixture(scope="session")
def toy_folder() -> Path:
    """out/toy-demo with the model and its three splits: built once (about a minute), then kept between test runs."""
    import toy  # here: half of the test files need no torch

    return toy.build("demo").resolve()


@pytest.fixture(scope="session")
def toy_tokenizer():
    """The toy's tokenizer, without its model."""
    import toy

    return toy.make_tokenizer()


@pytest.fixture(scope="module")
def ranks():
    """This process as the only rank."""
    import torch.distributed as dist
    from tiny import join_ranks

    yield join_ranks(0, 1, dist.HashStore())
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    from tiny import make_model

    return make_model(tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> str:
    """Another family, with a head of its own."""
    from tiny import make_model

    return make_model(tmp_path_factory.mktemp("llama"), family="llama", tied=False)


def pytest_sessionfinish(session, exitstatus):
    session.config.exit_status = exitstatus


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """As train.py does: a regular exit would bury the summary under pages about leaks inside vLLM's libraries."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(config.exit_status)
