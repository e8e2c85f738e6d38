"""What all suites have in common: less to collect, tests and garbage both."""

import gc
import os
import sys

import pytest
from _pytest.doctest import DoctestItem, DoctestModule


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path):
    """To find a module's examples it is imported and looked through, though most modules have none."""
    return [c for c in (yield) if not isinstance(c, DoctestModule) or ">>>" in file_path.read_text(encoding="utf-8")]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Keras' examples run on PyTorch and TensorFlow; on JAX each compiles for seconds."""
    if os.environ.get("KERAS_BACKEND") == "jax":
        for item in items:
            if isinstance(item, DoctestItem):
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    """What the imports have left is looked at once, and not by every collection of garbage that is to come."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def server_of_ranks():
    """Before the first test: see tests/torch/distributed/processes.py."""
    if "tests.torch.distributed.processes" in sys.modules:
        sys.modules["tests.torch.distributed.processes"].start_server()
