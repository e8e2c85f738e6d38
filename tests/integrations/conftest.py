import gc

import pytest
import torch

from tests.documents import PYTORCH, forked

PROGRAMS = forked(f"torch._dynamo {PYTORCH} accelerate transformers.trainer sentence_transformers")


@pytest.fixture(scope="session")
def fresh_process():
    """Runs a page in a process that has imported PyTorch and trainers and done nothing else: see `forked`."""
    return PROGRAMS


@pytest.fixture(autouse=True)
def leave_torch_as_found():
    dtype = torch.get_default_dtype()
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(dtype)


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)


@pytest.fixture(autouse=True, scope="module")
def few_to_collect():
    """Each training collects garbage: it need not look at what the imports have left."""
    gc.freeze()
    yield
    gc.unfreeze()
