"""One call of TrainStep makes the update of one ordinary step on the whole batch."""

import contextlib
import copy
import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradaccum.torch import TrainStep
from tests.reference import FLOAT32, FLOAT64, relative_error

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
}


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def batches(rows=13, count=3, dtype=torch.float64):
    torch.manual_seed(1)
    return [(torch.randn(rows, 5, dtype=dtype), torch.randint(0, 3, (rows,))) for _ in range(count)]


def plain_loss(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def by_hand(model, data, loss=plain_loss, make="sgd", evaluated=False):
    """Ordinary steps on whole batches, by closures, as any optimizer takes them, `evaluated` before; the losses."""
    optimizer, losses = OPTIMIZERS.get(make, make)(model.parameters()), []
    for batch in data:

        def closure(batch=batch):
            optimizer.zero_grad()
            value = loss(model, *batch)
            value.backward()
            return value

        if evaluated:
            closure()
        losses.append(optimizer.step(closure).detach())
    return losses


def step_of(model, optimizer="sgd", *, verify=False, **keywords):
    """A TrainStep with an optimizer of all parameters, or one by name, and cross entropy where no loss is given."""
    inner = OPTIMIZERS[optimizer](model.parameters()) if isinstance(optimizer, str) else optimizer
    loss = {} if "compute_loss" in keywords else {"loss_fn": nn.CrossEntropyLoss()}
    return TrainStep(model, inner, **{**loss, **keywords}, verify=verify)


@contextlib.contextmanager
def left_as_it_was(model, error, match=None):
    """What is raised inside leaves parameters, buffers and random numbers as they were."""
    before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with pytest.raises(error, match=match) as raised:
        yield raised
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert torch.equal(generator, torch.get_rng_state())


def assert_same_updates(
    model, data, loss=plain_loss, make="sgd", tolerance=FLOAT64, reference=None, buffers=False, **keywords
):
    """Train a copy by ordinary steps and the model by TrainStep: the same parameters and losses, maybe buffers."""
    reference = copy.deepcopy(model) if reference is None else reference
    expected = by_hand(reference, data, loss, make)
    own = {} if "loss_fn" in keywords else {"compute_loss": loss}
    step = TrainStep(model, OPTIMIZERS.get(make, make)(model.parameters()), **{**own, **keywords})
    losses = [step(*batch) for batch in data]
    assert not any(value.requires_grad or value.dim() for value in losses)
    assert relative_error(model.parameters(), reference.parameters()) <= tolerance
    assert relative_error([torch.stack(losses).double()], [torch.stack(expected).double()]) <= tolerance
    assert not buffers or relative_error(model.buffers(), reference.buffers()) <= tolerance
    assert step.updates == len(data)
    return step


def test_one_call_makes_the_large_batchs_update():
    for make in OPTIMIZERS:
        for size in (1, 2, 4, 5, 13, 64, "auto"):
            keywords = {"loss_fn": nn.CrossEntropyLoss(), "micro_batch_size": size}
            step = assert_same_updates(network(), batches(), make=make, **keywords)
            assert size == "auto" or step.micro_batch_size == size, make


def test_float32_is_exact_to_its_rounding():
    keywords = {"loss_fn": nn.CrossEntropyLoss(), "micro_batch_size": 3}
    data = batches(32, dtype=torch.float32)
    assert_same_updates(network(torch.float32), data, tolerance=FLOAT32, **keywords)


def test_at_the_prompt_a_step_says_what_it_is_and_shows_what_is_public():
    step = step_of(network(), micro_batch_size=16)
    assert repr(step) == "TrainStep(Sequential, SGD, micro_batch_size=16, updates=0)"
    assert [name for name in dir(step) if not name.startswith("_")] == [
        "backward", "grad_norm", "load_state_dict", "losses", "micro_batch_size", "model", "noise_scale", "state_dict",
        "updates",
    ]  # fmt: skip


def test_a_loss_without_its_keyword_and_a_batch_without_targets_are_told():
    model = network()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with pytest.raises(TypeError, match=r"by keyword: loss_fn=... .* Received: CrossEntropyLoss\(\) as the third"):
        TrainStep(model, optimizer, nn.CrossEntropyLoss())
    x, y = batches()[0]
    step = TrainStep(model, optimizer, loss_fn=nn.CrossEntropyLoss(), micro_batch_size=4)
    with pytest.raises(
        TypeError, match=r"The batch has no targets, .*'target'. Call step\(x, y\), or give compute_loss"
    ):
        step(x)
    with pytest.raises(ValueError, match="takes batches of \\(x, y\\). Received: 3 arguments"):
        step(x, y, y)


# Batches as users have them are split by rows; what every micro-batch shares is left alone.

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
    for batch in ((x.numpy(), y.numpy()), (x, y.numpy()), (x, y), (x.numpy(), y), (x, y.numpy())):  # later ones, too
        if all(isinstance(part, torch.Tensor) for part in batch):
            assert step(batch).isfinite()
        else:
            with pytest.raises(TypeError, match=r"Received: a NumPy array.*Pass torch.from_numpy\(x\)"):
                step(*batch)
    in_a_dict = TrainStep(model, optimizer, compute_loss=lambda model, batch: model(batch["x"].float()).sum())
    with pytest.raises(TypeError, match=r"Received: a NumPy array.*no attribute 'float'"):
        in_a_dict({"x": x.numpy()})


def test_an_optimizer_with_none_of_the_models_parameters_is_refused():
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    step = TrainStep(model, torch.optim.SGD(other.parameters(), lr=0.1), loss_fn=nn.CrossEntropyLoss())
    with pytest.raises(ValueError, match="None of the parameters of SGD is one of the model's"):
        step(torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))
