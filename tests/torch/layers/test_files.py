"""Blocks that live in memory-mapped files: their parameters, and the optimizer's state for them."""

from __future__ import annotations

import copy
import gc
import io
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gradaccum.torch import TrainStep
from gradaccum.torch.layers.visits.files import in_file
from tests.reference import relative_error
from tests.torch.layers.test_blocks import OPTIMIZERS, Network, assert_same_updates, batches, loss_of, network


def build(model: Any, optimizer: Any, folder: Any, **options: Any) -> TrainStep:
    given = {"micro_batch_size": 3, "blocks": "layers", "update": "in_backward", "verify": False, **options}
    return TrainStep(model, optimizer, compute_loss=loss_of, blocks_on=folder, **given)


def of_blocks(model: Network, optimizer: Any) -> list[Tensor]:
    """The parameters of the blocks, and what the optimizer has for them."""
    own = list(model.layers.parameters())
    states = [value for p in own for value in optimizer.state[p].values() if isinstance(value, Tensor) and value.dim()]
    return [*own, *states]


def maps_of(folder: Path) -> list[range]:
    """The addresses at which this process has mapped files of a folder."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(folder) in line:
            start, end = line.split()[0].split("-")
            found.append(range(int(start, 16), int(end, 16)))
    return found


def test_with_blocks_in_files_the_update_is_the_large_batchs(tmp_path: Path) -> None:
    for make, update in (("sgd", "after_backward"), ("adam", "in_backward")):
        options = {"blocks": "layers", "blocks_on": str(tmp_path), "update": update}
        assert_same_updates(network(), batches(count=2), loss_of, OPTIMIZERS[make], 3, **options)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("update", ["in_backward", "after_backward"])
def test_parameters_and_state_of_the_blocks_are_in_the_folder_s_files_and_gone_with_them(
    tmp_path: Path, update: str
) -> None:
    model = network()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    step = build(model, optimizer, tmp_path, update=update)
    for batch in batches(count=2):
        step(*batch)
    mapped, found = maps_of(tmp_path), of_blocks(model, optimizer)
    assert len(found) == 3 * len(list(model.layers.parameters()))
    assert all(any(tensor.data_ptr() in one for one in mapped) for tensor in found)
    assert not any(in_file(p) for p in model.position.parameters())
    del model, optimizer, step, found
    gc.collect()
    assert maps_of(tmp_path) == []


def test_files_survive_saving_and_loading(tmp_path: Path) -> None:
    first, second, third = batches()
    kept, through = network(), network()
    optimizer = OPTIMIZERS["adam"](kept.parameters())
    step = build(kept, optimizer, tmp_path)
    step(*first)
    saved = io.BytesIO()
    torch.save([kept.state_dict(), optimizer.state_dict(), step.state_dict()], saved)
    step(*second)
    between = copy.deepcopy([kept.state_dict(), optimizer.state_dict()])
    step(*third)

    again = OPTIMIZERS["adam"](through.parameters())
    resumed = build(through, again, tmp_path)
    saved.seek(0)
    for target, state in zip((through, again, resumed), torch.load(saved), strict=True):
        target.load_state_dict(state)
    resumed(*second)
    assert all(map(in_file, of_blocks(through, again)))
    through.load_state_dict(between[0])  # into what has been trained
    again.load_state_dict(between[1])
    resumed(*third)
    assert all(map(in_file, of_blocks(through, again)))
    assert relative_error(of_blocks(through, again), of_blocks(kept, optimizer)) == 0.0


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As on a disk that is full."""
    limits, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.parametrize("update", ["in_backward", "after_backward"])
def test_a_folder_without_room_is_an_error_before_anything_is_updated(tmp_path: Path, update: str) -> None:
    model = network()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    words = rf"could not be put into the folder of blocks_on='{tmp_path}': .* are needed, and .* are free"
    with files_of_at_most(100), pytest.raises(OSError, match=f"A parameter of a block {words}"):
        build(model, optimizer, tmp_path, update=update)
    largest = max(p.nbytes for p in model.layers.parameters())
    with files_of_at_most(largest):
        step, before = build(model, optimizer, tmp_path, update=update), copy.deepcopy(model.state_dict())
        with pytest.raises(OSError, match=f"The optimizer's state {words}"):
            step(*batches()[0])
    assert relative_error(model.state_dict().values(), before.values()) == 0.0
    assert not optimizer.state
    assert step(*batches()[0]).isfinite()
    assert all(map(in_file, of_blocks(model, optimizer)))


def test_a_folder_that_nobody_can_write_to_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for where, error, words in (
        (
            tmp_path / "none",
            ValueError,
            r"`blocks_on` must be 'cpu' or a folder that exists. Received: blocks_on='.*/none'",
        ),
        (3, TypeError, "`blocks_on` must be 'cpu' or a folder. Received: blocks_on=3"),
    ):
        with pytest.raises(error, match=words):
            build(model, optimizer, where)

    def refuse(**_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("gradaccum.torch.layers.visits.files.tempfile.TemporaryFile", refuse)
    with pytest.raises(OSError, match=r"could not be put into the folder of .* \(\[Errno 13\] Permission denied\)"):
        build(model, optimizer, tmp_path)
