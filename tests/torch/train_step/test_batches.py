"""Batches as users have them are split by rows; what every micro-batch shares is left alone."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradaccum.torch import TrainStep
from tests.torch.train_step.test_train_step import OPTIMIZERS, assert_same_updates, network, step_of

ROWS = 11


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclasses.dataclass(frozen=True)
class Sample:
    x: Tensor
    y: Tensor
    source: str
    extra: Any = None


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(ROWS, 5, dtype=torch.float64), torch.randint(0, 3, (ROWS,))


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


@pytest.mark.parametrize(
    ("make", "compute"),
    [
        (lambda x, y: (x, y), loss),
        (lambda x, y: (Pair(x, y),), lambda model, pair: loss(model, pair.x, pair.y)),
        (lambda x, y: (Sample(x, y, "train"),), lambda model, sample: loss(model, sample.x, sample.y)),
        (lambda x, y: ({"x": x, "more": [y, None, "name", 3]},), lambda model, b: loss(model, b["x"], b["more"][0])),
        (lambda x, y: ((x, (y,)),), lambda model, b: loss(model, b[0], b[1][0])),
        (lambda x, y: (x.numpy(), y), lambda model, x, y: loss(model, torch.as_tensor(np.asarray(x)), y)),
    ],
    ids=["tuple", "named tuple", "dataclass", "dict and list", "nested tuple", "array"],
)
def test_nested_batches_are_split(make: Any, compute: Any) -> None:
    assert_same_updates(network(), [make(*data())], compute, compute_loss=compute, micro_batch_size=3)


def test_loss_fn_takes_the_pair_as_one_argument_too() -> None:
    model = network()
    step = TrainStep(model, OPTIMIZERS["sgd"](model.parameters()), loss_fn=nn.CrossEntropyLoss(), micro_batch_size=3)
    for batch in (data(), list(data())):
        assert step(batch).isfinite()


def test_batch_dims_say_where_the_rows_are() -> None:
    x, y = data()
    shared = torch.randn(2, 5, dtype=torch.float64)

    def compute(model: nn.Module, x: Tensor, y: Tensor, options: dict[str, Tensor]) -> Tensor:
        return loss(model, x.T + options["shift"].mean(0), y)

    for dims in ((1, 0, None), (1, 0, {"shift": None})):
        assert_same_updates(
            network(),
            [(x.T.contiguous(), y, {"shift": shared})],
            compute,
            compute_loss=compute,
            batch_dims=dims,
            micro_batch_size=3,
        )


def test_rows_that_do_not_match_are_listed_with_paths_and_shapes() -> None:
    model = network()
    step = TrainStep(model, OPTIMIZERS["sgd"](model.parameters()), compute_loss=loss, micro_batch_size=3)
    x, y = data()
    with pytest.raises(ValueError, match="same number of rows") as raised:
        step({"x": x, "y": y[:4]}, [torch.zeros(7)])
    for told in ("batch[0]['x']", "(11, 5)", "batch[0]['y']", "(4,)", "batch[1][0]", "(7,)", "batch_dims"):
        assert told in str(raised.value)


def test_batches_are_left_as_they_were() -> None:
    x, y = data()
    batch = {"x": x, "y": y}
    model = network()
    step = step_of(model, compute_loss=lambda model, b: loss(model, b["x"], b["y"]), micro_batch_size=3, verify=True)
    before = {name: value.clone() for name, value in batch.items()}
    step(batch)
    assert list(batch) == list(before)
    assert batch["x"] is x
    assert all(torch.equal(batch[name], before[name]) for name in batch)


def test_a_packed_sequence_is_refused_by_name() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 5), torch.randn(2, 5)])
    step = TrainStep(nn.Linear(5, 1), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), compute_loss=len)
    for batch in ((packed,), (packed, torch.zeros(2)), ({"x": packed, "y": torch.zeros(2)},)):
        with pytest.raises(ValueError, match="PackedSequence cannot be cut into rows.*pack them in the model"):
            step(*batch)


def test_an_empty_batch_is_refused() -> None:
    model = network()
    step = TrainStep(model, OPTIMIZERS["sgd"](model.parameters()), compute_loss=loss)
    with pytest.raises(ValueError, match="0 rows"):
        step(torch.zeros(0, 5, dtype=torch.float64), torch.zeros(0, dtype=torch.long))


def test_what_no_loss_can_take_is_refused_at_the_first_batch():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"the class CrossEntropyLoss. Call it: loss_fn=CrossEntropyLoss\(\)"):
        TrainStep(model, optimizer, loss_fn=nn.CrossEntropyLoss, micro_batch_size=2)
    step = TrainStep(model, optimizer, loss_fn=nn.CrossEntropyLoss(), micro_batch_size=2)
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    for batch in ((x.numpy(), y.numpy()), (x, y.numpy()), (x, y), (x.numpy(), y), (x, y.numpy())):  # later ones, too
        if all(isinstance(part, Tensor) for part in batch):
            assert step(batch).isfinite()
        else:
            with pytest.raises(TypeError, match=r"Received: a NumPy array.*Convert it: torch.from_numpy\(x\)"):
                step(*batch)
    in_a_dict = TrainStep(model, optimizer, compute_loss=lambda model, batch: model(batch["x"].float()).sum())
    with pytest.raises(TypeError, match=r"Received: a NumPy array.*no attribute 'float'"):
        in_a_dict({"x": x.numpy()})
