import gc

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def few_to_collect():
    """Tests that collect garbage need not look at what the imports have left."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def leave_torch_as_found():
    dtype = torch.get_default_dtype()
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(dtype)


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
