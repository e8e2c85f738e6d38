"""Chunked models saved by version 0.1 load and work."""

import copy
from pathlib import Path

import torch

from gradaccum.torch import chunked
from tests.reference import FLOAT32, relative_error

SAVED_BY_0_1 = Path(__file__).parents[1] / "data" / "chunked_0_1.pt"
"""`nn.ModuleDict(plain=chunked(linear, norm, linear; 2, keep=1, "pooled"), exact=chunked(linear, norm; 3, "exact"))`,
after a forward pass over 8 rows of 3 numbers."""


def test_a_chunked_model_saved_by_version_0_1_loads_and_works():
    model = torch.load(SAVED_BY_0_1, weights_only=False)
    assert all(isinstance(part, chunked) for part in model.values())
    assert (model["plain"].micro_batch_size, model["plain"].keep) == (2, 1)
    model.eval()
    whole = copy.deepcopy(model)
    x = torch.randn(8, 3)
    model["exact"](model["plain"](x)).logsumexp((0, 1)).backward()
    whole["exact"].module(whole["plain"].module(x)).logsumexp((0, 1)).backward()
    assert relative_error([p.grad for p in model.parameters()], [p.grad for p in whole.parameters()]) <= FLOAT32
    model.train()
    assert model["exact"](model["plain"](x)).shape == (8, 2)
    assert next(iter(model.state_dict())) == "plain.0.weight"
