"""Running out of memory loses at most one micro-batch; every other error leaves no half window."""

import logging
import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from gradaccum.errors import NotEquivalentError
from tests.reference import FLOAT32, FLOAT64, relative_error
from tests.torch.train_step.test_train_step import (
    OPTIMIZERS,
    assert_same_updates,
    batches,
    by_hand,
    left_as_it_was,
    network,
    plain_loss,
    step_of,
)

OUT = "CUDA out of memory (simulated)"


class Backward(torch.autograd.Function):
    """Identity that runs out of memory in the backward pass above a number of rows."""

    @staticmethod
    def forward(ctx, x, limit):
        ctx.limit = limit
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if len(grad) > ctx.limit:
            raise torch.OutOfMemoryError(OUT)
        return grad, None


class Statistics(nn.Module):
    """Buffers that every pass moves, as a BatchNorm's: one in place, one by assignment."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(5, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        self.count = self.count + 1


class Fragile(nn.Module):
    """Layers with dropout and buffers that move, which fit up to a number of rows."""

    def __init__(self, forward_limit=99, backward_limit=99, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 6, dtype=torch.float64)
        self.statistics = Statistics()
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(6, 3, dtype=torch.float64)
        self.forward_limit, self.backward_limit = forward_limit, backward_limit
        self.sizes = []

    def forward(self, x):
        self.sizes.append(len(x))
        self.statistics(x)
        x = self.dropout(torch.tanh(self.first(x)))
        if len(x) > self.forward_limit:
            raise torch.OutOfMemoryError(OUT)
        return self.last(Backward.apply(x, self.backward_limit))


class Second(Fragile):
    """Runs out of memory in the second micro-batch's backward pass only: what came before it is kept."""

    def forward(self, x):
        self.backward_limit = 2 if len(self.sizes) == 1 else 99
        return super().forward(x)


class Picky(Fragile):
    """Fails for a reason of its own in the second micro-batch."""

    def forward(self, x):
        outputs = super().forward(x)
        if len(self.sizes) == 2:
            raise ZeroDivisionError("the user's own")
        return outputs


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("size", [6, 13, "auto"])
@pytest.mark.parametrize("limits", [(4, 99), (99, 4), (1, 99), (99, 1), (6, 3)], ids=str)
def test_the_update_is_exact_when_micro_batches_do_not_fit(optimizer, size, limits):
    keywords = {"loss_fn": nn.CrossEntropyLoss(), "micro_batch_size": size, "batch_norm": "micro", "verify": False}
    step = assert_same_updates(Fragile(*limits), batches(), make=optimizer, reference=Fragile(), **keywords)
    assert step.micro_batch_size <= min(limits)


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


@pytest.mark.parametrize("limit", [1, 2, 5])
@pytest.mark.parametrize("size", [6, 13])
def test_what_arrived_before_memory_ran_out_counts_as_much_where_the_loss_tells_its_weight(size, limit):
    class_weights = torch.tensor([1.0, 3.0, 0.2], dtype=torch.float64)

    def mean(model, x, y):
        return nn.functional.cross_entropy(model(x), y, weight=class_weights)

    def mean_and_weight(model, x, y):
        return mean(model, x, y), float(class_weights[y].sum())

    keywords = {"compute_loss": mean_and_weight, "micro_batch_size": size, "batch_norm": "micro", "verify": False}
    assert_same_updates(Fragile(backward_limit=limit), batches(), mean, reference=Fragile(), **keywords)


@pytest.mark.parametrize(
    ("make", "limits", "rows", "size", "fits"),
    [(Fragile, (3, 99), 12, 6, 3), (Fragile, (99, 3), 12, 6, 3), (Second, (99, 99), 13, 5, 2)],
    ids=["a forward pass", "a backward pass", "the second backward pass"],
)
def test_random_numbers_and_buffers_are_as_if_the_micro_batch_that_failed_never_was(
    make, limits, rows, size, fits, caplog
):
    outcomes = []
    for model, micro in ((make(*limits, dropout=0.5), size), (Fragile(dropout=0.5), fits)):
        torch.manual_seed(7)
        loss = step_of(model, micro_batch_size=micro, batch_norm="micro")(*batches(rows, count=1)[0])
        outcomes.append((loss, torch.get_rng_state(), *model.state_dict().values()))
        # it began once more, and no more than once
        assert make is not Second or micro == fits or sum(model.sizes) == 13 + sum(model.sizes[:2])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    assert make is not Second or "starting the batch again in micro-batches of at most 2 rows" in caplog.text


class Draws(Fragile):
    """Draws masks from some generator from a pass on, and runs out of memory in one."""

    def __init__(self, source, begins, fails="never"):
        super().__init__()
        self.source, self.begins, self.fails = source, begins, fails
        self.own = torch.Generator().manual_seed(1)
        self.python, self.numpy = random.Random(2), np.random.default_rng(3)
        self.masks = []
        random.seed(4)
        np.random.seed(5)  # noqa: NPY002  # the global generator, as older models draw from it

    def mask(self, x):
        drawn = {
            "Python": lambda: [random.random() for _ in x],
            "NumPy": lambda: np.random.rand(len(x)),  # noqa: NPY002
            "a torch.Generator": lambda: torch.rand(len(x), generator=self.own),
            "a random.Random": lambda: [self.python.random() for _ in x],
            "a NumPy Generator": lambda: self.numpy.random(len(x)),
        }[self.source]()
        self.masks.append(2.0 * (torch.as_tensor(drawn) < 0.5).double()[:, None])
        return self.masks[-1]

    def forward(self, x):
        failing = self.fails if len(self.sizes) == 3 else "never"
        self.forward_limit, self.backward_limit = (3 if failing == where else 99 for where in ("forward", "backward"))
        return super().forward(x * self.mask(x) if len(self.sizes) >= self.begins else x)

    def states(self):
        numpy = np.random.get_state()[1].tolist()  # noqa: NPY002
        own = self.own.get_state().tolist()
        return [own, random.getstate(), self.python.getstate(), numpy, self.numpy.bit_generator.state]


@pytest.mark.parametrize(("fails", "begins"), [("backward", 0), ("backward", 2), ("forward", 0), ("forward", 2)])
@pytest.mark.parametrize("source", ["Python", "NumPy", "a torch.Generator", "a random.Random", "a NumPy Generator"])
def test_masks_of_any_generator_are_not_mixed_with_others(source, fails, begins):
    data = batches(12, count=2)
    model = Draws(source, begins, fails)
    step = step_of(model, micro_batch_size=6, batch_norm="micro")
    for batch in data:
        step(*batch)
    drawn, sizes = model.states(), [3, 3, 3, 3]
    assert model.sizes[-4:] == sizes

    reference = Draws(source, begins)
    inner = OPTIMIZERS["sgd"](reference.parameters())
    if begins:  # not from the first update on: another draw, and still a single one
        kept = model.masks[-4:]
        reference.mask = lambda x: kept.pop(0)
    for (x, y), of_update in zip(data, ([6, 6], sizes)):
        inner.zero_grad()
        for rows, targets in zip(x.split(of_update), y.split(of_update)):
            (plain_loss(reference, rows, targets) * len(rows) / 12).backward()
        inner.step()
    assert relative_error(model.parameters(), reference.parameters()) <= FLOAT64
    assert begins or drawn == reference.states()


class Whitened(Fragile):
    """With a BatchNorm in front of what runs out of memory in one pass."""

    def __init__(self, fails=None):
        super().__init__()
        self.norm = nn.BatchNorm1d(6, dtype=torch.float64)
        self.fails = fails

    def forward(self, x):
        self.sizes.append(len(x))
        self.backward_limit = 3 if len(self.sizes) - 1 == self.fails else 99
        x = self.last(torch.tanh(self.norm(Backward.apply(self.first(x), self.backward_limit))))
        return x


@pytest.mark.filterwarnings("ignore:BatchNorm normalises")
@pytest.mark.parametrize("choice", ["micro", "warn", "pooled", "frozen"])
def test_statistics_of_a_failed_backward_pass_are_not_mixed_with_others(choice, caplog):
    failing, fits, batch = Whitened(fails=1), Whitened(), batches(12, count=1)[0]
    for model, size in ((failing, 6), (fits, 3)):
        step_of(model, micro_batch_size=size, batch_norm=choice)(*batch)
    assert failing.sizes == [6, 6, 3, 3, 3, 3]
    assert relative_error(failing.state_dict().values(), fits.state_dict().values()) <= FLOAT64
    assert "6 rows: starting the batch again in micro-batches of at most 3 rows" in caplog.text


class StartsLate(nn.Module):
    """A layer whose buffer stands still until it is told to move."""

    def __init__(self, size, how):
        super().__init__()
        self.inner = network()
        self.register_buffer("codes", torch.zeros(size, dtype=torch.float64))
        self.how, self.moves = how, False

    def forward(self, x):
        if self.moves:
            if self.how == "assigned":
                self.codes = self.codes + 1
            else:
                (self.codes.data if self.how == "data" else self.codes).add_(x.detach().mean())
        return self.inner(x)


class Stops(torch.optim.SGD):
    fails = False

    def step(self, closure=None):
        if self.fails:
            raise ZeroDivisionError("the user's own")
        return super().step(closure)


@pytest.mark.parametrize("how", ["in place", "data", "assigned"])
@pytest.mark.parametrize("size", [3, (1 << 20) // 8 + 1], ids=["small", "large"])
def test_a_buffer_that_first_moves_in_a_failing_update_is_put_back(size, how, caplog):
    model = StartsLate(size, how)
    optimizer = Stops(model.parameters(), lr=0.1)
    step = step_of(model, optimizer, micro_batch_size=4)
    for batch in (*batches(), *batches()[: how == "in place"]):  # so that the next window looks, or doesn't
        step(*batch)
    model.moves = optimizer.fails = True
    batch = batches()[0]
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
    class Fits(StartsLate):
        passes, most = 0, 4

        def forward(self, x):
            self.passes += 1
            self.moves = self.passes >= first and self.most < 4
            y = super().forward(torch.ones_like(x))
            if len(x) > self.most and self.passes >= 3:
                raise torch.OutOfMemoryError("no memory")
            return y + 0 * self.inner(x)

    model, batch = Fits(3, how), rows(12)
    step = step_of(model, micro_batch_size=4)
    for _ in range(3):
        step(*batch)
    assert not model.codes.any()
    model.passes, model.most = 0, 2
    step(*batch)
    assert model.codes.tolist() == pytest.approx([1.0] * 3)  # all over again, and each micro-batch moves it by 1


def test_gradients_of_parameters_that_no_optimizer_has_add_up_from_update_to_update_and_not_from_failed_ones():
    model, reference = Picky(), Fragile()

    def token_mean(model, x, y):
        return plain_loss(model, x, y), 10 * len(x)

    optimizer, plain = (torch.optim.SGD(one.first.parameters(), lr=0.1) for one in (model, reference))
    step = step_of(model, optimizer, compute_loss=token_mean, micro_batch_size=4, batch_norm="micro")
    for batch in batches():
        model.sizes.clear()
        with pytest.raises(ZeroDivisionError, match="the user's own"):
            step(*batch)
        step(*batch)
        plain.zero_grad()
        plain_loss(reference, *batch).backward()
        plain.step()
    found, expected = ([p.grad for p in one.last.parameters()] for one in (model, reference))
    assert relative_error(found, expected) <= FLOAT64


def test_the_size_that_failed_is_remembered_and_told_once(caplog):
    model = Fragile(4)
    step = step_of(model, micro_batch_size=12, batch_norm="micro")
    with caplog.at_level(logging.INFO, logger="gradaccum"):
        for batch in batches(12):
            step(*batch)
    told = [record.message for record in caplog.records if "Out of memory" in record.message]
    assert len(told) == 2  # 12 -> 6 -> 3
    assert "3" in told[-1]
    assert step.micro_batch_size == 3
    assert max(model.sizes[-8:]) == 3


def test_the_size_that_failed_is_remembered_for_its_shape_only():
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


AROUND = {
    "clipping": {"clip_grad_norm": 0.1},
    "a scaler": {"scaler": 2.0**10},
    "a scaler and clipping": {"scaler": 2.0**10, "clip_grad_norm": 0.1},
    "wider sums": {"accumulate_dtype": torch.float64},
    "the noise scale": {"noise_scale": True},
    "sums": {"reduction": "sum", "loss_fn": nn.CrossEntropyLoss(reduction="sum")},
    "several optimizers": {
        "optimizer": lambda m: [OPTIMIZERS["sgd"](m.first.parameters()), OPTIMIZERS["adam"](m.last.parameters())]
    },
    "lbfgs": {"optimizer": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=4)},
}


@pytest.mark.parametrize("limits", [(4, 99), (99, 4)], ids=["forward", "backward"])
@pytest.mark.parametrize("around", AROUND)
def test_running_out_of_memory_goes_with_everything_around_it(around, limits):
    outcomes, wide = [], around == "wider sums"
    dtype = torch.float32 if wide else torch.float64
    for model in (Fragile().to(dtype), Fragile(*limits).to(dtype)):
        keywords = {"optimizer": "sgd", **AROUND[around]}
        if "scaler" in keywords:
            keywords["scaler"] = torch.amp.GradScaler("cpu", init_scale=keywords["scaler"])
        if not isinstance(keywords["optimizer"], str):
            keywords["optimizer"] = keywords["optimizer"](model)
        step = step_of(model, micro_batch_size=13, batch_norm="micro", **keywords)
        losses = [step(x, y) for x, y in batches(dtype=dtype)]
        outcomes.append([*model.parameters(), *losses, *([step.grad_norm] if step.grad_norm is not None else [])])
    assert relative_error(outcomes[1], outcomes[0]) <= (FLOAT32 if wide else FLOAT64)


@pytest.mark.parametrize("limits", [(0, 99), (99, 0)], ids=["forward", "backward"])
def test_at_one_row_the_error_is_told_and_everything_is_as_it_was(limits):
    model, batch = Fragile(*limits, dropout=0.5), batches(count=1)[0]
    optimizer = OPTIMIZERS["adam"](model.parameters())
    step = step_of(model, optimizer, micro_batch_size=4, batch_norm="micro")
    with left_as_it_was(model, torch.OutOfMemoryError, "one row"):
        step(*batch)
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    assert step.updates == 0
    model.forward_limit = model.backward_limit = 99
    assert step(*batch).isfinite()


class Normalised(nn.Sequential):
    """Fits up to a number of rows, and can't take a single one while it trains."""

    limit = 99

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        self.double()
        self.sizes = []

    def forward(self, x):
        self.sizes.append(len(x))
        if len(x) > self.limit:
            raise torch.OutOfMemoryError(OUT)
        return super().forward(x)


def normalised(size, choice):
    model = Normalised()
    return model, step_of(model, micro_batch_size=size, batch_norm=choice)


def rows(count):
    return torch.randn(count, 5, dtype=torch.float64), torch.randint(3, (count,))


@pytest.mark.parametrize("choice", ["micro", "pooled"])
@pytest.mark.parametrize(("size", "count"), [(1, 4), (2, 3), (4, 1)])
def test_a_row_that_batch_norm_would_meet_alone_is_an_error_that_says_what_to_do(size, count, choice):
    model, step = normalised(size, choice)
    batch = rows(count)
    with left_as_it_was(model, ValueError, r'one row by itself: Expected more than 1.*Use batch_norm="exact"'):
        step(*batch)
    step(*rows(6)) if size == 2 else model.eval()
    assert step(*rows(count) if size != 2 else rows(2)).isfinite()  # in eval mode one row is no different


@pytest.mark.parametrize("choice", ["micro", "pooled"])
@pytest.mark.parametrize("size", [3, 4, 5, 8, "auto"])
def test_out_of_memory_leaves_batch_norm_no_single_row(size, choice):
    model, step = normalised(size, choice)
    model.limit = 2
    expected, reference = normalised(2, choice)
    for count in (12, 6, 20):
        torch.manual_seed(count)
        x, y = rows(count)
        step(x, y)
        reference(x, y)
    assert relative_error(list(model.parameters()), list(expected.parameters())) <= FLOAT64
    assert relative_error([model[1].running_var], [expected[1].running_var]) <= FLOAT64


@pytest.mark.parametrize(("limit", "count"), [(1, 8), (2, 3), (2, 9), (1, 3), (0, 8)])
@pytest.mark.parametrize("size", [3, 8, "auto"])
def test_where_batch_norm_needs_more_rows_than_fit_it_is_out_of_memory(size, limit, count):
    model, step = normalised(size, "pooled")
    model.limit, batch = limit, rows(count)
    message = r"of ([23] rows|one row|more than one row):(.|\n)*No update was made"
    with left_as_it_was(model, torch.OutOfMemoryError, message):
        step(*batch)
    model.limit = 99
    assert step(*rows(8)).isfinite()


def test_any_other_error_leaves_no_half_window():
    model, reference, batch = Picky(dropout=0.5), Fragile(), batches(count=1)[0]
    step = step_of(model, micro_batch_size=4, batch_norm="micro")
    with left_as_it_was(model, ZeroDivisionError, "the user's own"):
        step(*batch)
    assert all(p.grad is None for p in model.parameters())
    model.dropout.p = 0.0
    step(*batch)
    by_hand(reference, [batch])
    assert relative_error(model.parameters(), reference.parameters()) <= FLOAT64


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
