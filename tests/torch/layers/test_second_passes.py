"""Second passes leave nothing behind."""

import random
import resource
import shutil
import signal

import numpy as np
import pytest
import torch
from torch import nn

from tests.reference import FLOAT64, relative_error
from tests.torch.layers.problems import (
    Network,
    as_it_is,
    assert_same_updates,
    batches,
    build,
    doing,
    network,
    unchanged,
)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # read by torch.compile
@pytest.mark.parametrize("between", [as_it_is, lambda _, x: torch.tanh(x)])
def test_compiled_blocks_make_the_large_batchs_update(between):
    model = network(between=lambda x: between(None, x))
    torch.compiler.reset()
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    assert_same_updates(model, batches(count=2), size=3)


def counts(layer, x):
    layer.calls = getattr(layer, "calls", 0) + 1
    return x


def test_second_passes_move_no_attributes():
    model = doing(counts)
    model.forward = lambda ids: Network.forward(model, counts(model, ids))  # as wrappers of models do
    build(model)(*batches()[0])
    assert [module.calls for module in (model, *model.layers)] == [-(-len(batches()[0][0]) // 3)] * 4


def test_a_folder_without_room_is_an_error_that_names_it_and_nothing_is_updated(tmp_path):
    model = network()
    step = build(model, blocks="layers", update="in_backward", offload=tmp_path, verify=False)
    limits, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8, limits[1]))
        full = rf"could not be written to the folder of\s+offload='{tmp_path}'"
        with unchanged(model), pytest.raises(OSError, match=full):
            step(*batches()[0])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    shutil.rmtree(tmp_path)
    with unchanged(model), pytest.raises(OSError, match="it is gone"):
        step(*batches()[0])
    tmp_path.mkdir()
    torch.manual_seed(0)
    assert step(*batches()[0]).isfinite()


def drawn():
    return random.random() + np.random.rand()  # noqa: NPY002  # the global one, which is replayed


@pytest.mark.parametrize("begins", [0, 2])
def test_what_blocks_draw_from_python_and_numpy_is_replayed_also_where_they_begin_with_it_later(begins):
    updated = []
    for blocks in (None, "layers"):
        model = doing(lambda layer, x: x * drawn() if len(losses) >= begins else x)  # noqa: B023  # as of now
        torch.manual_seed(0)
        for p in model.layers.parameters():
            nn.init.normal_(p, std=0.3)
        step, losses = build(model, blocks=blocks, verify=False), []
        random.seed(3)
        np.random.seed(4)  # noqa: NPY002  # as above
        for batch in batches():
            losses.append(step(*batch))
        updated.append([*model.parameters(), *losses, torch.tensor(drawn(), dtype=torch.float64)])
    assert relative_error(*updated) <= FLOAT64
