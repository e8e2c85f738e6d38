"""Chunked modules under DistributedDataParallel and FSDP2, on two processes; and compiled."""

import copy
import tempfile

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from gradaccum.torch import chunked
from tests.reference import FLOAT64, relative_error
from tests.torch.distributed import chunked_cases as cases
from tests.torch.distributed.chunked_cases import encoder, gradients


def test_gradients_under_ddp_are_the_mean_over_ranks(ranks):
    ranks.run(cases.gradients_are_the_mean_over_ranks)


def test_sharded_parameters_get_the_mean_over_ranks(ranks):
    ranks.run(cases.sharded_parameters_get_the_mean_over_ranks)


def test_exact_batch_norm_spans_the_ranks(ranks):
    ranks.run(cases.exact_batch_norm_spans_the_ranks)


def test_wrapping_the_other_way_round_is_an_error():
    with tempfile.TemporaryDirectory() as folder:
        distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        try:
            with pytest.raises(ValueError, match=r"DistributedDataParallel\(chunked\(encoder, \.\.\.\)\)"):
                chunked(DistributedDataParallel(encoder()), 4)
        finally:
            distributed.destroy_process_group()


@pytest.mark.parametrize("inside", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_compiled(inside, float64):
    whole, x = encoder(), torch.randn(23, 5)
    module = copy.deepcopy(whole)
    torch._dynamo.reset()
    if inside:
        small = chunked(torch.compile(module, backend="eager"), 4)
    else:
        small = torch.compile(chunked(module, 4), backend="eager")
    for m in (whole, small):
        for _ in range(2):
            m(x).std().backward()
    assert relative_error(gradients(module), gradients(whole)) <= FLOAT64
    torch._dynamo.reset()
