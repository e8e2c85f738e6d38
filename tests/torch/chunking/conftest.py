import pytest
import torch


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)  # which the conftest above sets back
