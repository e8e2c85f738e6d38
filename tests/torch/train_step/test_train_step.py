"""One call of TrainStep makes the update of one ordinary step on the whole batch."""

import copy
import dataclasses
import functools
import pickle
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gradaccum import NotEquivalentError, WindowError
from gradaccum.torch import check_equivalence, chunked
from tests.reference import relative_error
from tests.torch.problems import SAM
from tests.torch.train_step.problems import OPTIMIZERS, Experts, Of, Sharp, batches, network, plain_loss
from tests.torch.train_step.steps import assert_same_updates, left_as_it_was, same, step_of

LOSS = nn.CrossEntropyLoss()


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("size", [1, 2, 4, 5, 13, 64, "auto"])
def test_micro_batches_of_any_size_make_the_large_batchs_update(size, make):
    step = assert_same_updates(network(), make=make, loss_fn=LOSS, micro_batch_size=size)
    assert size == "auto" or step.micro_batch_size == size


# Batches as users have them are split by rows; what every micro-batch shares is left alone.


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclasses.dataclass(frozen=True)
class Sample:
    x: Tensor
    y: Tensor
    source: str
    extra: Any = None


def columns(model, x, y, options):
    return plain_loss(model, x.T + options["shift"].mean(0), y)


SHIFT = {"shift": torch.linspace(-1, 1, 10, dtype=torch.float64).reshape(2, 5)}
BATCHES = {
    "a tuple": (lambda x, y: (x, y), plain_loss),
    "a named tuple": (lambda x, y: (Pair(x, y),), lambda m, pair: plain_loss(m, pair.x, pair.y)),
    "a dataclass": (lambda x, y: (Sample(x, y, "train"),), lambda m, sample: plain_loss(m, sample.x, sample.y)),
    "a dict and a list": (lambda x, y: ({"x": x, "y": [y, 3]},), lambda m, one: plain_loss(m, one["x"], one["y"][0])),
    "no tensors beside": (lambda x, y: ([x, None, "name", y],), lambda m, one: plain_loss(m, one[0], one[3])),
    "a nested tuple": (lambda x, y: ((x, (y,)),), lambda m, batch: plain_loss(m, batch[0], batch[1][0])),
    "true and false": (lambda x, y: (x, y > 0), lambda m, x, y: F.mse_loss(m(x)[:, 0], y.to(x.dtype))),
    "an array": (lambda x, y: (x.numpy(), y), lambda m, x, y: plain_loss(m, torch.as_tensor(np.asarray(x)), y)),
    "rows in columns": (lambda x, y: (x.T.contiguous(), y, SHIFT), columns, (1, 0, None)),
    "rows in columns, by path": (lambda x, y: (x.T.contiguous(), y, SHIFT), columns, (1, 0, {"shift": None})),
}  # fmt: skip


@pytest.mark.parametrize(("make", "loss", "dims"), [(*case, 0)[:3] for case in BATCHES.values()], ids=BATCHES)
def test_batches_of_any_kind_are_split_by_rows_and_left_as_they_were(make, loss, dims):
    data = [make(*batch) for batch in batches()]
    before, parts = pickle.dumps(data), [[*map(id, parts_of(batch[0]))] for batch in data]
    assert_same_updates(network(), data, loss, batch_dims=dims)
    assert pickle.dumps(data) == before
    assert [[*map(id, parts_of(batch[0]))] for batch in data] == parts


def parts_of(batch):
    return batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else [batch]


# What surrounds a training step works as in the three lines that it replaces.


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(context, loss):
        return loss.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient.mul_(0.5)


def halved_by_a_hook(loss):
    loss = loss * 1.0
    loss.register_hook(lambda gradient: gradient.mul_(0.5) and None)
    return loss


def edited(halved, reduction, verify):
    """A gradient that is edited where it begins is no other pass's."""

    def loss(model, x, y):
        return halved(F.cross_entropy(model(x), y, reduction=reduction))

    return {"loss": loss, "reduction": reduction, "verify": verify}


def with_squares(halved, model, x, y):
    outputs = model(x)
    return {"squares": outputs.square().mean(), "classes": halved(F.cross_entropy(outputs, y))}


def by_rows(losses):
    return lambda model, x, y: {name: (loss, len(x)) for name, loss in losses(model, x, y).items()}


def evaluating(kind):
    return {"make": functools.partial(kind, lr=0.1), "evaluated": True, "loss_fn": LOSS}


PROGRAMS = {
    "parameters that some rows or none use": lambda: {"model": Experts(), "loss_fn": LOSS, "micro_batch_size": 1},
    "LBFGS, line search": lambda: {  # whose iterations amplify the rounding
        "make": functools.partial(torch.optim.LBFGS, lr=0.5, max_iter=5, line_search_fn="strong_wolfe"),
        "loss_fn": LOSS, "tolerance": 1e-9,
    },
    "the gradient of one of two losses edited by a hook": lambda: {
        "terms": by_rows(functools.partial(with_squares, lambda loss: (loss + loss.detach()) / 2)),
        "compute_loss": functools.partial(with_squares, halved_by_a_hook),
        "weight": lambda x, y: dict.fromkeys(("classes", "squares"), len(x)), "verify": False,
    },
    "an optional closure, twice": lambda: evaluating(Sharp),
    "a closure after a move": lambda: evaluating(SAM),
    **{
        f"a gradient edited by {name}, {reduction}, verify={verify}": functools.partial(edited, how, reduction, verify)
        for name, how in (("a function", Halved.apply), ("a hook", halved_by_a_hook))
        for reduction in ("mean", "sum") for verify in (True, False)
    },
}  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_it_makes_the_large_batchs_update_with(program):
    assert_same_updates(**{"model": network(), **program()})


def test_an_optimizer_that_evaluates_its_closure_once_costs_no_second_window():
    class Once(torch.optim.SGD):
        def step(self, closure=None):
            loss = closure() if closure is not None else None
            super().step()
            return loss

    model, passes = network(), []
    model.register_forward_hook(lambda *_: passes.append(1))
    step = step_of(model, Once(model.parameters(), lr=0.1), micro_batch_size=5)
    for batch in batches(count=2):
        step(*batch)
    assert len(passes) == 2 * 3


def by_name(model, x, y):
    return {"mean": (F.mse_loss(model(x), y), len(x)), "nothing": (0.0 * model(x).sum(), len(x))}


@pytest.mark.parametrize("loss", [{"loss_fn": nn.MSELoss()}, {"compute_loss": by_name}], ids=["one", "by name"])
def test_half_precision_gradients_may_be_summed_in_float32(loss):
    torch.manual_seed(0)
    x, y = torch.randn(256, 8), 3.0 + torch.randn(256, 1)  # gradients of one sign, whose sum dwarfs each
    errors = []
    for dtype in (None, torch.float32):
        model = nn.Linear(8, 1, dtype=torch.bfloat16)
        nn.init.constant_(model.weight, 0.1)
        nn.init.zeros_(model.bias)
        exact = copy.deepcopy(model).float()
        F.mse_loss(exact(x), y).backward()
        options = {"micro_batch_size": 1, "accumulate_dtype": dtype, **loss}
        step_of(model, torch.optim.SGD(model.parameters(), lr=0.0), **options)(x.bfloat16(), y.bfloat16())
        assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())
        errors.append(relative_error([p.grad for p in model.parameters()], [p.grad for p in exact.parameters()]))
    assert errors[1] < 0.01
    assert errors[1] < 0.5 * errors[0]


@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")  # torch, of that Python alone
def test_a_compiled_model_is_compiled_at_most_twice():
    compiled = 0

    def backend(graph, inputs):
        nonlocal compiled
        compiled += 1
        return graph.forward

    torch._dynamo.reset()
    model = torch.compile(network(), backend=backend, dynamic=False)
    assert_same_updates(model, reference=network(), loss_fn=LOSS)
    assert compiled == 2


def test_exact_statistics_behind_a_checkpoint_are_no_warning(caplog):
    inside = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double()
    model = Of(lambda model, x: checkpoint(model.inside, x, use_reentrant=False), inside=inside)
    step_of(model, micro_batch_size=3, batch_norm="exact", verify=True)(*batches()[0])
    assert inside[1].num_batches_tracked == 1
    assert not caplog.records


def test_an_embedding_that_counts_indices_is_refused_whatever_the_rows():
    def counting(entries):
        embedding = nn.Embedding(entries, 6, scale_grad_by_freq=True)
        return Of(lambda model, x: model.out(model.embedding(x).mean(1)), embedding=embedding, out=nn.Linear(6, 3))

    x, y, model = torch.randint(50_000, (64, 4)), torch.randint(3, (64,)), counting(50_000)
    step = step_of(model, micro_batch_size=16, verify=True)
    for run in (lambda: step(x, y), lambda: chunked(model, 16)(x)):
        with pytest.raises(NotEquivalentError, match="'embedding' .*scale_grad_by_freq=True"):
            run()
    found = check_equivalence(counting(5), (x % 5, y), loss_fn=F.cross_entropy)
    assert [cause.where for cause in found.causes] == ["embedding"]
    model.embedding.requires_grad_(False)
    step(x, y)


def test_at_the_prompt_a_step_says_what_it_is_and_shows_what_is_public():
    step = step_of(network(), micro_batch_size=16)
    assert repr(step) == "TrainStep(Sequential, SGD, micro_batch_size=16, updates=0)"
    assert [name for name in dir(step) if not name.startswith("_")] == [
        "backward", "compiled", "grad_norm", "load_state_dict", "losses", "micro_batch_size", "model", "noise_scale",
        "state_dict", "updates",
    ]  # fmt: skip


def test_its_state_is_its_counter_and_the_sizes_it_found(tmp_path):
    step, again = (step_of(network(), verify=True) for _ in range(2))
    for batch in batches(32, count=3):
        step(*batch)
    torch.save(step.state_dict(), tmp_path / "step.pt")
    again.load_state_dict(torch.load(tmp_path / "step.pt", weights_only=True))
    for updates in (3, 4):
        assert (again.updates, again.micro_batch_size) == (updates, step.micro_batch_size)
        again(*batches(32)[0])


def test_it_is_copied_with_its_model_and_pickled_by_its_state_alone():
    model = network()
    step, batch = step_of(model, micro_batch_size=4), batches()[0]
    twin = copy.deepcopy(step)
    assert step(*batch) == twin(*batch)
    assert same(model.state_dict(), twin.model.state_dict())
    with pytest.raises(TypeError, match=r"can't be pickled: it holds .* Save the state_dict\(\)"):
        pickle.dumps(step)
    for state in ({}, None, {"updates": 1}):
        with pytest.raises(ValueError, match="This is no state of a TrainStep: 'updates' and 'sizes' must be in it"):
            step.load_state_dict(state)
    assert step.updates == 1


# `TrainStep.backward`: the finished gradient for a loop that clips, logs and steps by itself.


def test_gradients_that_are_there_are_refused_and_nothing_is_left_where_nothing_weighs_anything_or_rows_are_mixed():
    model, (x, y) = network(), batches()[0]
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    step = step_of(model, optimizer, micro_batch_size=4, verify=True)
    assert not step.backward(x, y).requires_grad
    with pytest.raises(WindowError, match=r"optimizer.zero_grad\(\)"):
        step.backward(x, y)
    optimizer.zero_grad(set_to_none=False)
    step.backward(x, y)
    optimizer.zero_grad()
    assert step.backward(x, torch.full_like(y, -100)).isnan()
    assert step.updates == 0
    assert all(p.grad is None for p in model.parameters())
    mixed = step_of(model, optimizer, compute_loss=lambda model, x, y: model(x).std(), micro_batch_size=4, verify=True)
    with left_as_it_was(model, NotEquivalentError, None, optimizer):
        mixed.backward(x, y)
    assert all(p.grad is None for p in model.parameters())
    assert not mixed.proving


def test_a_loss_can_tell_passes_that_only_prove_something():
    seen, model = [], network()  # a hook's list: what the loss itself records is put back
    model.register_forward_hook(lambda module, inputs, output: seen.append((step.proving, len(output))))
    step = step_of(model, compute_loss=plain_loss, micro_batch_size=5, verify=True)
    step.backward(*batches()[0])
    assert [size for proving, size in seen if not proving] == [5, 4, 4]
    assert any(proving for proving, _ in seen)
