"""Batches as users have them are split by rows; what every micro-batch shares is left alone."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradaccum.torch import TrainStep
from tests.torch.train_step.test_train_step import assert_same_updates, network, plain_loss, step_of

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


def data():
    torch.manual_seed(1)
    return torch.randn(ROWS, 5, dtype=torch.float64), torch.randint(0, 3, (ROWS,))


def of(x, y):
    return lambda model, batch: plain_loss(model, x(batch), y(batch))


def of_array(model, x, y):
    return plain_loss(model, torch.as_tensor(np.asarray(x)), y)


NESTED = {
    "tuple": (lambda x, y: (x, y), plain_loss),
    "named tuple": (lambda x, y: (Pair(x, y),), of(lambda pair: pair.x, lambda pair: pair.y)),
    "dataclass": (lambda x, y: (Sample(x, y, "train"),), of(lambda sample: sample.x, lambda sample: sample.y)),
    "dict and list": (
        lambda x, y: ({"x": x, "more": [y, None, "name", 3]},),
        of(lambda batch: batch["x"], lambda batch: batch["more"][0]),
    ),
    "nested tuple": (lambda x, y: ((x, (y,)),), of(lambda batch: batch[0], lambda batch: batch[1][0])),
    "array": (lambda x, y: (x.numpy(), y), of_array),
}


@pytest.mark.parametrize("name", NESTED)
def test_nested_batches_are_split(name):
    make, loss = NESTED[name]
    assert_same_updates(network(), [make(*data())], loss, micro_batch_size=3)


def test_loss_fn_takes_the_pair_as_one_argument_too():
    step = step_of(network(), micro_batch_size=3, verify=True)
    for batch in (data(), list(data())):
        assert step(batch).isfinite()


@pytest.mark.parametrize("dims", [(1, 0, None), (1, 0, {"shift": None})])
def test_batch_dims_say_where_the_rows_are(dims):
    def loss(model, x, y, options):
        return plain_loss(model, x.T + options["shift"].mean(0), y)

    x, y = data()
    batch = x.T.contiguous(), y, {"shift": torch.randn(2, 5, dtype=torch.float64)}
    assert_same_updates(network(), [batch], loss, batch_dims=dims, micro_batch_size=3)


def test_rows_that_do_not_match_are_listed_with_paths_and_shapes():
    x, y = data()
    with pytest.raises(ValueError, match="same number of rows") as raised:
        step_of(network(), compute_loss=plain_loss, micro_batch_size=3)({"x": x, "y": y[:4]}, [torch.zeros(7)])
    for told in ("batch[0]['x']", "(11, 5)", "batch[0]['y']", "(4,)", "batch[1][0]", "(7,)", "batch_dims"):
        assert told in str(raised.value)


def test_batches_are_left_as_they_were():
    x, y = data()
    batch = {"x": x, "y": y}
    before = {name: value.clone() for name, value in batch.items()}
    step = step_of(network(), compute_loss=lambda model, b: plain_loss(model, **b), micro_batch_size=3, verify=True)
    step(batch)
    assert list(batch) == list(before)
    assert batch["x"] is x
    assert all(torch.equal(batch[name], before[name]) for name in batch)


def test_a_packed_sequence_is_refused_by_name():
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 5), torch.randn(2, 5)])
    step = TrainStep(nn.Linear(5, 1), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), compute_loss=len)
    for batch in ((packed,), (packed, torch.zeros(2)), ({"x": packed, "y": torch.zeros(2)},)):
        with pytest.raises(ValueError, match="PackedSequence cannot be cut into rows.*pack them in the model"):
            step(*batch)


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="0 rows"):
        step_of(network())(torch.zeros(0, 5, dtype=torch.float64), torch.zeros(0, dtype=torch.long))


def test_what_no_loss_can_take_is_refused_at_the_first_batch():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"the class CrossEntropyLoss. Call it: loss_fn=CrossEntropyLoss\(\)"):
        TrainStep(model, optimizer, loss_fn=nn.CrossEntropyLoss, micro_batch_size=2)
    step = TrainStep(model, optimizer, loss_fn=nn.CrossEntropyLoss(), micro_batch_size=2)
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    with pytest.raises(TypeError, match="Received: a NumPy array"):
        step(x.numpy(), y.numpy())
    assert step((x, y)).isfinite()
