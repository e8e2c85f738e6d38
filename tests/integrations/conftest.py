import pytest
import torch


@pytest.fixture(autouse=True)
def leave_torch_as_found():
    dtype = torch.get_default_dtype()
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(dtype)


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
