"""Running out of memory loses at most one micro-batch; every other error leaves no half window."""

import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from gradaccum.errors import NotEquivalentError
from gradaccum.on_torch.random_state import seed
from tests.fuzz.problem import Faulty
from tests.reference import FLOAT64, relative_error
from tests.torch.problems import GENERATORS, drawn
from tests.torch.train_step.problems import OPTIMIZERS, OUT, Fragile, Of, batches, network, plain_loss
from tests.torch.train_step.steps import assert_same_updates, by_hand, left_as_it_was, step_of


@pytest.mark.parametrize("limits", [(6, 99), (99, 6)], ids=["forward", "backward"])
def test_a_batch_that_was_to_fit_is_proven_before_it_is_split(limits):
    def across(model, x, y):
        outputs = model(x)
        return (outputs - outputs.mean(0)).square().sum(1).mean()

    keywords, data = {"micro_batch_size": 99, "batch_norm": "micro"}, batches(count=1)
    model = Fragile(*limits)
    with left_as_it_was(model, NotEquivalentError, "chunked"):
        step_of(model, compute_loss=across, verify=True, **keywords)(*data[0])
    assert_same_updates(Fragile(*limits), data, reference=Fragile(), **keywords)


# What a micro-batch that failed has drawn, moved and added is gone.


class Draws(Fragile):
    """Draws masks from some generator from a pass on, and runs out of memory in one."""

    def __init__(self, source, begins, fails="never"):
        super().__init__()
        self.source, self.begins, self.fails = source, begins, fails
        self.masks, self.own = [], GENERATORS.get(source, lambda: None)()
        seed(4)

    def mask(self, x):
        found = {
            "PyTorch": lambda: torch.rand(len(x)),
            "Python": lambda: torch.tensor([random.random() for _ in x]),
            "NumPy": lambda: torch.from_numpy(np.random.rand(len(x))),  # noqa: NPY002  # as older models draw
        }.get(self.source, lambda: drawn(self.own, len(x)))()
        self.masks.append(2.0 * (found < 0.5).double()[:, None])
        return self.masks[-1]

    def forward(self, x):
        failing = self.fails if len(self.sizes) == 3 else "never"
        self.fault.most = {where: 3 if failing == where else 99 for where in ("forward", "backward")}
        return super().forward(x * self.mask(x) if len(self.sizes) >= self.begins else x)


@pytest.mark.parametrize(("fails", "begins"), [("backward", 0), ("backward", 2), ("forward", 0), ("forward", 2)])
@pytest.mark.parametrize("source", ["PyTorch", "Python", "NumPy", *GENERATORS])
def test_masks_of_any_generator_are_not_mixed_with_others(source, fails, begins):
    data, model = batches(12, count=2), Draws(source, begins, fails)
    step = step_of(model, micro_batch_size=6, batch_norm="micro")
    for batch in data:
        step(*batch)
    after, sizes = model.mask(torch.ones(64)), [3, 3, 3, 3]
    assert model.sizes[-4:] == sizes
    reference = Draws(source, begins)
    if begins:  # not from the first update on: another draw, and still a single one
        kept = model.masks[-5:-1]
        reference.mask = lambda x: kept.pop(0)
    parts = iter(([6, 6], sizes))

    def in_parts(model, x, y):
        of_update = next(parts)
        split = zip(x.split(of_update), y.split(of_update))
        return sum(plain_loss(model, rows, targets) * len(rows) / 12 for rows, targets in split)

    by_hand(reference, data, in_parts)
    assert relative_error(model.parameters(), reference.parameters()) <= FLOAT64
    assert begins or torch.equal(after, reference.mask(torch.ones(64)))


def starts_late(size, how):
    """A network with a buffer that stands still until it is told to move."""

    def function(module, x):
        if module.moves and how == "assigned":
            module.codes = module.codes + 1
        elif module.moves:
            (module.codes.data if how == "data" else module.codes).add_(x.detach().mean())
        return module.inner(x)

    model = Of(function, inner=network(), codes=torch.zeros(size, dtype=torch.float64))
    model.moves = False
    return model


class Stops(torch.optim.SGD):
    fails = False

    def step(self, closure=None):
        if self.fails:
            raise ZeroDivisionError("the user's own")
        return super().step(closure)


@pytest.mark.parametrize("how", ["in place", "data", "assigned"])
@pytest.mark.parametrize("size", [3, (1 << 20) // 8 + 1], ids=["small", "large"])
def test_a_buffer_that_first_moves_in_a_failing_update_is_put_back(size, how, caplog):
    model, batch = starts_late(size, how), batches()[0]
    optimizer = Stops(model.parameters(), lr=0.1)
    step = step_of(model, optimizer, micro_batch_size=4)
    for _ in range(4 if how == "in place" else 3):  # so that the next window looks, or doesn't
        step(*batch)
    model.moves = optimizer.fails = True
    if size == 3 or how != "in place":
        with left_as_it_was(model, ZeroDivisionError):
            step(*batch)
    else:
        with pytest.raises(ZeroDivisionError):
            step(*batch)
        assert "too large to be copied in every window" in caplog.text
        assert "'codes'" in caplog.text
    caplog.clear()
    with left_as_it_was(model, ZeroDivisionError):
        step(*batch)  # by now it is known to move
    assert "moves for the first time" not in caplog.text


@pytest.mark.parametrize("how", ["in place", "data", "assigned"])
@pytest.mark.parametrize("first", [1, 2, 3], ids="moves first in micro-batch {}".format)
def test_a_buffer_that_first_moves_in_or_before_a_micro_batch_that_does_not_fit_moves_once(how, first):
    passes, most = 0, 4

    def limited(module, args):
        nonlocal passes
        passes += 1
        module.moves = passes >= first and most < 4
        return torch.ones_like(args[0])

    def fails(module, args, outputs):
        if len(outputs) > most and passes >= 3:
            raise torch.OutOfMemoryError(OUT)

    model, batch = starts_late(3, how), batches(12)[0]
    model.register_forward_pre_hook(limited)
    model.register_forward_hook(fails)
    step = step_of(model, micro_batch_size=4)
    for _ in range(3):
        step(*batch)
    assert not model.codes.any()
    passes, most = 0, 2
    step(*batch)
    assert model.codes.tolist() == pytest.approx([1.0] * 3)  # all over again, and each micro-batch moves it by 1


def test_a_table_that_no_optimizer_has_adds_sparse_and_dense_gradients_up():
    model, (x, y) = network(), batches()[0]
    table = nn.Embedding(9, 4, sparse=True).double()
    step = step_of(
        model,
        compute_loss=lambda model, x, y: (
            plain_loss(model, x, y) + (table(y) if whole is None else whole).square().mean()
        ),
        micro_batch_size=4,
    )
    expected = torch.zeros_like(table.weight)
    for whole in (None, table.weight, None):
        step(x, y)
        expected += torch.autograd.grad((table(y) if whole is None else whole).square().mean(), table.weight)[0]
    assert relative_error([table.weight.grad], [expected]) <= FLOAT64


def test_any_other_error_leaves_no_half_window_in_any_parameter():
    """Gradients of parameters that no optimizer has add up from update to update, and not from failed ones."""
    model, reference = Fragile(), Fragile()

    def token_mean(model, x, y):
        return plain_loss(model, x, y), 10 * len(x)

    def second_fails(*_):
        if len(model.sizes) == 2:
            raise ZeroDivisionError("the user's own")

    model.last.register_forward_hook(second_fails)
    optimizer, plain = (torch.optim.SGD(one.first.parameters(), lr=0.1) for one in (model, reference))
    step = step_of(model, optimizer, compute_loss=token_mean, micro_batch_size=4, batch_norm="micro")
    for batch in batches():
        model.sizes.clear()
        model.dropout.p = 0.5
        with left_as_it_was(model, ZeroDivisionError, "the user's own", optimizer):
            step(*batch)
        model.dropout.p = 0.0
        assert all(p.grad is None for p in model.first.parameters())
        step(*batch)
        plain.zero_grad()
        plain_loss(reference, *batch).backward()
        plain.step()
    assert relative_error(model.parameters(), reference.parameters()) <= FLOAT64
    found, expected = ([p.grad for p in one.last.parameters()] for one in (model, reference))
    assert relative_error(found, expected) <= FLOAT64


def test_the_size_that_failed_is_told_once_and_remembered_for_its_shape_only(caplog):
    class Long(nn.Linear):
        """Rows of eight columns and more take too much memory by fours."""

        def forward(self, x):
            seen.append(len(x))
            if x.shape[1] >= 8 and len(x) >= 4:
                raise torch.OutOfMemoryError(OUT)
            return super().forward(x.mean(1, keepdim=True))

    seen, step = [], step_of(Long(1, 3, dtype=torch.float64), micro_batch_size=6)
    for columns, sizes in ((2, [6, 6]), (8, [6, 3, 3, 3, 3]), (2, [6, 6]), (8, [3, 3, 3, 3])):
        seen.clear()
        step(torch.randn(12, columns, dtype=torch.float64), torch.zeros(12, dtype=torch.long))
        assert seen == sizes
        assert step.micro_batch_size == max(sizes[-1:])
    (told,) = [record.message for record in caplog.records]
    assert "Out of memory with a micro-batch of 6 rows" in told
    assert "at most 3 rows" in told


@pytest.mark.parametrize("limits", [(0, 99), (99, 0)], ids=["forward", "backward"])
def test_at_one_row_the_error_is_told_and_everything_is_as_it_was(limits):
    model, batch = Fragile(*limits, dropout=0.5), batches(count=1)[0]
    optimizer = OPTIMIZERS["adam"](model.parameters())
    step = step_of(model, optimizer, micro_batch_size=4, batch_norm="micro")
    with left_as_it_was(model, torch.OutOfMemoryError, "one row", optimizer):
        step(*batch)
    assert all(p.grad is None for p in model.parameters())
    assert step.updates == 0
    model.fault.calm()
    assert step(*batch).isfinite()


def normalised(limit=99):
    """Fits up to a number of rows, and can't take a single one while it trains."""
    torch.manual_seed(0)
    model = nn.Sequential(Faulty(), nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    model[0].most["forward"] = limit
    return model


@pytest.mark.parametrize("choice", ["micro", "pooled"])
@pytest.mark.parametrize(("size", "count"), [(1, 4), (2, 3), (4, 1)])
def test_a_row_that_batch_norm_would_meet_alone_is_an_error_that_says_what_to_do(size, count, choice):
    model, batch = normalised(), batches(count)[0]
    step = step_of(model, micro_batch_size=size, batch_norm=choice)
    with left_as_it_was(model, ValueError, r'one row by itself: Expected more than 1.*Use batch_norm="exact"'):
        step(*batch)
    model.train(size == 2)  # in eval mode one row is no different
    assert step(*(batches(6)[0] if size == 2 else batch)).isfinite()


@pytest.mark.parametrize("choice", ["micro", "pooled"])
@pytest.mark.parametrize("size", [3, 4, 5, 8, "auto"])
def test_out_of_memory_leaves_batch_norm_no_single_row(size, choice):
    models = normalised(limit=2), normalised()
    steps = [step_of(m, micro_batch_size=s, batch_norm=choice) for m, s in zip(models, (size, 2))]
    for count in (12, 6, 20):
        for step in steps:
            step(*batches(count)[0])
    assert relative_error(*(m.state_dict().values() for m in models)) <= FLOAT64


@pytest.mark.parametrize(("limit", "count"), [(1, 8), (2, 3), (2, 9), (1, 3), (0, 8)])
@pytest.mark.parametrize("size", [3, 8, "auto"])
def test_where_batch_norm_needs_more_rows_than_fit_it_is_out_of_memory(size, limit, count):
    model, batch = normalised(limit), batches(count)[0]
    step = step_of(model, micro_batch_size=size, batch_norm="pooled")
    message = r"of ([23] rows|one row|more than one row):(.|\n)*No update was made"
    with left_as_it_was(model, torch.OutOfMemoryError, message):
        step(*batch)
    model[0].calm()
    assert step(*batches(8)[0]).isfinite()


@pytest.mark.parametrize("size", [3, 8, "auto"])
def test_batch_norm_that_is_frozen_takes_a_single_row_where_no_more_fit(size):
    models = normalised(limit=1), normalised()
    for model, of_rows in zip(models, (size, 8)):
        step_of(model, micro_batch_size=of_rows, batch_norm="frozen")(*batches(8)[0])
    assert relative_error(*(m.state_dict().values() for m in models)) <= FLOAT64


def test_a_micro_batchs_graph_is_gone_before_the_next_begins():
    alive, before = weakref.WeakSet(), []

    def track(module, args, outputs):
        before.append(len(alive))
        outputs.grad_fn.metadata["token"] = token = type("Token", (), {})()
        alive.add(token)

    model = nn.Linear(5, 3, dtype=torch.float64)
    model.register_forward_hook(track)
    step_of(model, micro_batch_size=2)(*batches()[0])
    assert before == [0] * 7
    assert not alive
