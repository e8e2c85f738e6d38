"""The first update proves itself: what would make it wrong is refused by name, and nothing that is right is."""

import contextlib
import logging
import random
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradaccum
from gradaccum.on_torch.adapter.kinds import BatchKinds, rows_to_prove
from gradaccum.on_torch.batch import Batch
from gradaccum.torch import TrainStep, check_equivalence
from tests.torch.equivalence import problems
from tests.torch.equivalence.problems import CE, of, token_mean
from tests.torch.problems import MIXING, Does

ROWS = 24


def net(*middle):
    torch.manual_seed(0)
    return problems.net(*middle)


def data(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, 6, generator=generator), torch.randint(4, (ROWS,), generator=generator)


X, Y = XY = data()
TARGETS = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(2))
IGNORED = torch.where(torch.arange(ROWS) % 3 == 0, -100, Y)


def train_step(model, **keywords):
    loss = {} if "compute_loss" in keywords else {"loss_fn": CE}
    make = keywords.pop("optimizer", lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return TrainStep(model, make(model), **{"micro_batch_size": 8, **loss, **keywords})


def update(model, batch=XY, **keywords):
    train_step(model, **keywords)(*batch)


def refusal():
    return pytest.raises(gradaccum.NotEquivalentError)


def refused(*arguments, **keywords):
    with refusal() as raised:
        update(*arguments, **keywords)
    return str(raised.value)


@pytest.fixture
def unnamed(monkeypatch):
    """Refused without a search for the cause, which takes twenty times as long."""

    def none(*_, **__):
        raise RuntimeError("not searched for")

    for name, module in sys.modules.items():
        if name.startswith("gradaccum.torch.proof") and hasattr(module, "certify"):
            monkeypatch.setattr(module, "certify", none)


def counted_rows(model):
    calls = []
    model.register_forward_pre_hook(lambda _, args: calls.append(len(args[0])))
    return calls


# What is refused.


def summed(outputs, targets):
    return (outputs - targets).square().sum()


def root(outputs, targets):
    return F.mse_loss(outputs, targets).sqrt()


def relative(outputs, targets):
    return (loss := F.mse_loss(outputs, targets)) / loss.detach()


def ignored_at_random(seed):
    x, y = data(seed)
    generator = torch.Generator().manual_seed(seed)
    return x, y.masked_fill(
        torch.rand(ROWS, generator=generator) < 0.05 + 0.9 * torch.rand((), generator=generator), -100
    )


def fits(h):
    if len(h) > 8:
        raise torch.OutOfMemoryError("CUDA out of memory.")
    return h


def lbfgs(model):
    return torch.optim.LBFGS(model.parameters(), max_iter=2)


def several(model):
    return [torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.Adam(model[2].parameters())]


def with_hook(layer):
    layer.register_forward_hook(lambda module, args, output: output * 2)
    return layer


def parametrized(layer):
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Softplus())
    return layer


class Centre(nn.Module):
    def __init__(self):
        super().__init__()
        self.centre = torch.zeros(4)

    def forward(self, outputs, targets):
        self.centre = 0.9 * self.centre + 0.1 * outputs.detach().mean(0)
        return (outputs - self.centre - targets).square().mean()


def normed():
    return net(nn.GroupNorm(2, 8), MIXING["normalised by a function"])


OFTEN = ("centred", "summed up", "the largest kept", "normalised by a function")
XT, XI, EXACT, OF_TOKENS = (X, TARGETS), (X, IGNORED), {"batch_norm": "exact"}, {"compute_loss": token_mean}
NUMBERED, HALF = torch.arange(ROWS), {"compute_loss": token_mean, "autocast": torch.bfloat16}
ONE_PART = X, torch.where(NUMBERED < 2, Y, -100)
FEW_IGNORED = torch.where((NUMBERED[:, None] % 2 == 0) & (torch.arange(40) == 0), -100, Y[:, None])
LEAVES = "verify=False leaves this proof out"
REFUSED = {  # model, batch, keywords; what the message says, where the cause is searched for
    "a sum": (net, XT, {"loss_fn": summed}),
    "a sum of less than 1e-7": (net, XT, {"loss_fn": lambda *o: 1e-11 * summed(*o)}),
    "a loss divided by its own value": (net, XT, {"loss_fn": relative}),
    "a sum that draws random numbers": (net, XT, {"loss_fn": lambda o, t: summed(o + 0.1 * torch.randn_like(o), t)}),
    "the root of a mean": (net, XT, {"loss_fn": root}),
    "the root of a mean with LBFGS": (net, XT, {"loss_fn": root, "optimizer": lbfgs}),
    "the root of a mean with several optimizers": (net, XT, {"loss_fn": root, "optimizer": several}),
    "the root of a mean where memory is short": (lambda: net(fits), XT, {"loss_fn": root}),
    "rows compared with each other": (net, XT, {"loss_fn": lambda o, t: (o @ o.T - t @ t.T).square().mean()}),
    "a permutation of the rows": (
        lambda: net().eval(), XT, {"loss_fn": lambda o, t: F.mse_loss(o, t + t[torch.randperm(len(t))])},
    ),
    "a permutation of the rows in place": (
        net, (X, Y.clone()), {"compute_loss": lambda model, x, y: CE(model(x), y.copy_(y.flip(0)))},
    ),
    **{f"a mean over targets that are not ignored, {n}": (net, ignored_at_random(n), OF_TOKENS) for n in range(20)},
    "every part but one is 0 / 0, and that one is exact": (net, ONE_PART, OF_TOKENS),
    "little that is ignored, under autocast": (
        lambda: nn.Sequential(nn.Linear(6, 160), nn.Unflatten(1, (4, 40))), (X, FEW_IGNORED), HALF,
    ),
    "a row for another number of rows": (
        lambda: net(lambda h: F.relu(h - (0.5 if len(h) > 6 else 0.4))), XY, {},
    ),
    **{
        f"{name} behind batch_norm={choice!r}": (
            lambda function=function: net(nn.BatchNorm1d(8), function), XY, {"batch_norm": choice},
        )
        for name, function in MIXING.items() for choice in ("exact", "micro")
    },
    "a mean whose weight is in the message": (
        net, XI, OF_TOKENS, "weight=lambda x, y: (y != -100).sum()", LEAVES,
    ),
    "a function's BatchNorm": (normed, XY, {}, "'3' (Does) mixes rows"),
    "a function's BatchNorm beside exact ones": (normed, XY, EXACT, "'3' (Does) mixes rows"),
    "a hook on a BatchNorm": (lambda: net(with_hook(nn.BatchNorm1d(8))), XY, EXACT, "'2' (BatchNorm1d) has hooks"),
    "a parametrized BatchNorm": (lambda: net(parametrized(nn.BatchNorm1d(8))), XY, EXACT, "'2'"),
    "an attribute that moves and decides the gradient": (
        net, XT, {"loss_fn": Centre()}, "'loss' moves its buffers (centre)", "later micro-batches see other values",
    ),
    "a loss without its weight": (
        net, XY, {"compute_loss": lambda m, x, y: {"one": CE(m(x), y)}}, "The loss term 'one' comes without its weight",
    ),
}  # fmt: skip
RARE = {f"{name} behind batch_norm='{word}'" for name in MIXING for word in ("exact", "micro")}
RARE -= {f"{name} behind batch_norm='exact'" for name in OFTEN}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in RARE else name for name in REFUSED]
)
def test_refused_is(name, request, caplog):
    make, batch, keywords, *parts = REFUSED[name]
    if not parts:
        request.getfixturevalue("unnamed")
    errors = (gradaccum.NotEquivalentError, *[TypeError, ValueError] * bool(parts))
    with pytest.raises(errors) as raised:
        update(make(), batch, **keywords)
    assert all(part in str(raised.value) for part in parts)
    assert "could not be proven" not in caplog.text  # what is an error of the update is that error alone


def test_an_attribute_that_counts_and_decides_nothing_is_a_warning_that_names_it(caplog):
    counting = Does(lambda m, x: setattr(m, "calls", m.calls + 1) or x, calls=0)
    norm = nn.InstanceNorm1d(2, track_running_stats=True)  # whose buffers are means over rows
    update(net(nn.Unflatten(1, (2, 4)), norm, nn.Flatten(), counting))
    (record,) = [record for record in caplog.records if "once per micro-batch" in record.message]
    assert record.levelno == logging.WARNING
    assert "not once per update: '5.calls'. Where" in record.message


# Nothing that is right is refused.


def converged():
    """A model in which the gradients of the rows cancel but for rounding."""
    model = nn.Sequential(nn.Linear(6, 1))
    solution = torch.linalg.lstsq(torch.cat([X[:16], torch.ones(16, 1)], 1), TARGETS[:16, :1]).solution
    model[0].weight.data, model[0].bias.data = solution[:6].T.clone(), solution[6].clone()
    return model


def near_a_kink():
    """A sign that rounding decides at these parameters alone, as kernels for other sizes may."""
    model = net(lambda h: F.relu(h - 1.0 + (1e-5 if len(h) > 6 else -1e-5)))
    with torch.no_grad():
        model[0].weight[3], model[0].bias[3] = 0.0, 1.0
    return model


BATCH_NORM = "warn", "micro", "pooled", "frozen", "exact"
SCALER = torch.amp.GradScaler("cpu")
RIGHT = {  # with what stands in the table of check_equivalence, through TrainStep as well
    "noise": (net, XT, {"loss_fn": lambda o, t: F.mse_loss(o + torch.randn_like(o), t)}),
    "losses of less than 1e-7": (net, XT, {"loss_fn": lambda o, t: 1e-10 * F.mse_loss(o, t)}),
    "losses that cancel": (net, (X, X + 1), {"compute_loss": lambda m, a, b: (m(a) - m(a + 1e-2 * b)).mean()}),
    "bfloat16": (lambda: net(nn.Tanh()).bfloat16(), (X.bfloat16(), Y), {}),
    "autocast": (lambda: net(nn.Dropout(0.2)), XY, {"autocast": torch.bfloat16}),
    "gradients that cancel": (converged, (X[:16], TARGETS[:16, :1]), {"loss_fn": nn.MSELoss()}),
    "rows that are not split": (net, XT, {"loss_fn": root, "micro_batch_size": 24}),
    "clipping": (net, XY, {"clip_grad_norm": 1e-3}),
    "a GradScaler": (net, XY, {"scaler": SCALER, "clip_grad_norm": 1.0}),
    "rows edited in place": (net, (X.clone(), Y), {"compute_loss": lambda m, x, y: CE(m(x.mul_(2)), y)}),
    "a sign that rounding decides": (near_a_kink, XY, {}),
    "rows that only fit in eights": (lambda: net(fits), XY, {}),
    "LBFGS": (net, XT, {"loss_fn": nn.MSELoss(), "optimizer": lbfgs}),
    "several optimizers": (net, XT, {"loss_fn": nn.MSELoss(), "optimizer": several}),
    **{f"batch_norm={choice!r}": (None, XY, {"batch_norm": choice}) for choice in BATCH_NORM},
}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.filterwarnings("ignore:BatchNorm normalises")
def test_there_is_no_false_alarm_for(name, caplog):
    make, batch, keywords = RIGHT[name]
    untracked = keywords.get("batch_norm") not in ("frozen", "exact")
    last = nn.BatchNorm1d(8, track_running_stats=not untracked)
    model = net(nn.BatchNorm1d(8), nn.Dropout(0.5), last) if make is None else make()
    before = [module.training for module in model.modules()]
    update(model, batch, **keywords)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [module.training for module in model.modules()] == before
    assert (last.running_mean is None) == untracked


def critic(model, real, fake):
    return (model(fake) - model(real)).mean()


FAKES = [(0.0, torch.float32), (1e-5, torch.float32), (1e-8, torch.float64)]


@pytest.mark.parametrize(("scale", "dtype"), FAKES)
def test_terms_that_cancel_each_other_are_no_reason_to_refuse(scale, dtype):
    """For a critic of fakes that are the real rows in another order, or the same, and a little."""
    real = X.to(dtype)
    others, same = real.roll(5, 0) + scale * real.flip(0), real + scale * real.flip(0)
    for seed in range(3):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)).to(dtype)
        for fake in (others, same) if scale else (others,):
            update(model, (real, fake), compute_loss=critic)
    assert check_equivalence(model, (real, others), compute_loss=critic).ok


SIGNS = torch.where(torch.arange(16) % 8 < 4, 1.0, -1.0)[:, None]


def product(outputs, targets):
    return (outputs * targets).mean()


def in_float16(loss=product):
    """Rows whose scaled gradients cancel each other all together, and overflow in parts of the batch."""
    torch.manual_seed(0)
    model, scaler = nn.Linear(6, 1), torch.amp.GradScaler("cpu", init_scale=2.0**16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainStep(model, optimizer, loss_fn=loss, micro_batch_size=4, scaler=scaler, autocast=torch.float16)


def test_an_overflow_of_scaled_micro_batches_is_no_difference():
    step = in_float16()
    found = [(step(X[:16], 14 * SIGNS), step.updates, step.update.scaler.get_scale())[1:] for _ in range(4)]
    assert found == [(0, 2.0**15), (0, 2.0**14), (1, 2.0**14), (2, 2.0**14)]


def test_a_repeated_proof_of_a_batch_that_is_not_finite_is_put_off_to_the_next_batch():
    wrong = []
    step = in_float16(lambda *batch: product(*batch).exp() if wrong else product(*batch))
    step(X[:16], SIGNS)
    step(X[:16] * float("inf"), SIGNS)
    assert step.updates == 1
    wrong.append(True)
    with pytest.raises(gradaccum.NotEquivalentError):
        step(X[:16], SIGNS)


BESIDE_A_SCALER = [
    (lambda *batch: product(*batch).tanh(), 14, "differ"),
    # Without a negative target the root's derivative is infinite.
    (lambda outputs, targets: (outputs * (targets < 0)).square().mean().sqrt(), 1, "relative error inf"),
]


@pytest.mark.parametrize(("loss", "scale", "message"), BESIDE_A_SCALER)
def test_beside_a_grad_scaler_what_no_scale_makes_right_in_micro_batches_is_a_difference(loss, scale, message):
    with pytest.raises(gradaccum.NotEquivalentError, match=message):
        in_float16(loss)(X[:16], scale * SIGNS)


def guarded(model, x, y, added=0.0):
    """A mean over targets that are not ignored, and 0 where all are."""
    return F.cross_entropy(model(x), y, reduction="sum") / ((y != -100).sum() + added).clamp(min=1)


def counted(x, y):
    return (y != -100).sum()


WEIGHED = {
    "weight=": lambda added: {"compute_loss": lambda *batch: guarded(*batch, added), "weight": counted},
    "loss and weight": lambda added: {"compute_loss": lambda m, *batch: (guarded(m, *batch, added), counted(*batch))},
    "by name": lambda added: {"compute_loss": lambda m, *batch: {"a": (guarded(m, *batch, added), counted(*batch))}},
}


@pytest.mark.parametrize("how", WEIGHED)
def test_batches_that_weigh_nothing_make_no_update_and_leave_the_proof_to_the_next(how, unnamed):
    nothing = torch.full_like(Y, -100)
    for added in (0.0, 1.0):  # in micro-batches, adding 1 to the divisor counts more than once
        step = train_step(net(), **WEIGHED[how](added))
        assert all(step(X, nothing).isnan() for _ in range(9))
        with refusal() if added else contextlib.nullcontext():
            step(X, IGNORED)
        assert step(X, nothing).isnan()
        assert step.updates == (not added)
    with pytest.raises(ValueError, match="total weight of this batch is 0, so no update is made with it"):
        check_equivalence(net(), (X, nothing), **WEIGHED[how](0.0))


# When, and at what price.


def moving(m, h):
    m.calls += 1
    m.log.append(len(h))
    m.seen = m.seen + h.detach().sum(0)
    with torch.no_grad():
        m.mean += h.mean(0)
        m.frozen += 1
    m.latest = h
    return h * torch.rand(h.shape, generator=m.generator)


def left_behind(verify):
    """What an update leaves in a model, in gradients, and in generators."""
    frozen, generator = nn.Parameter(torch.zeros(8), requires_grad=False), torch.Generator().manual_seed(1)
    own = {"mean": torch.zeros(8), "frozen": frozen, "calls": 0, "log": [], "generator": generator}
    moves, other = Does(moving, **own), nn.Parameter(torch.ones(3))
    moves.seen, moves.latest = torch.zeros(8), torch.zeros(3)
    model = net(moves, nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Dropout(0.5).eval())
    other.grad = torch.ones(3)
    torch.manual_seed(2)
    random.seed(2)
    train_step(model, batch_norm="micro", verify=verify).backward(*XY)
    tensors = [
        *model.parameters(),
        *model.buffers(),
        moves.seen,
        moves.latest,
        *(p.grad for p in model.parameters()),
        other.grad,
    ]
    numbers = [moves.calls, moves.log, [module.training for module in model.modules()], random.getstate()]
    states = [torch.get_rng_state(), generator.get_state()]
    return [None if t is None else t.detach() for t in [*tensors, *states]], numbers


def test_a_proof_leaves_everything_as_an_update_without_it_does():
    (tensors, numbers), (expected, others) = left_behind(True), left_behind(False)
    torch.testing.assert_close(tensors, expected, rtol=0, atol=0)
    assert numbers == others


def test_hooks_that_a_model_registers_in_its_first_pass_are_there_once():
    def recording(m, x):  # as models of transformers do for output_hidden_states=True
        if not m.handles:
            m.handles.append(m.inner.register_forward_hook(lambda *call: m.seen.append(call[2])))
        m.seen = []
        outputs = m.outer(torch.tanh(m.inner(x)))
        assert len(m.seen) == 1
        return outputs

    model = Does(recording, inner=nn.Linear(6, 5), outer=nn.Linear(5, 4), handles=[], seen=[])
    update(model, compute_loss=lambda model, x, y: CE(model(x), y) + sum(x.abs().mean() for x in model.seen))
    assert len(model.inner._forward_hooks) == len(model.handles) == 1


def sizes_of(model, **keywords):
    """How many rows each pass of an update has."""
    step, calls = train_step(model, **keywords), counted_rows(model)

    def update_of(*batch, times=1):
        for _ in range(times):
            calls.clear()
            step(*batch)
        return list(calls)

    return update_of


def test_it_is_repeated_in_another_mode_and_for_another_structure_and_only_then():
    model, sizes = (model := net()), sizes_of(model, compute_loss=lambda model, x, *y: F.cross_entropy(model(x), y[0]))

    def passes(*batch):
        return sum(sizes(*batch)) - ROWS

    proven = passes(*XY)
    assert proven > passes(*XY) > 0  # the second batch is proven, too, with fewer rows
    sizes(*XY, times=2)
    assert passes(X * 2, Y.flip(0)) == 0
    assert passes(*XY, torch.ones(ROWS)) == proven
    assert passes(*XY, torch.ones(ROWS)) == 0
    sizes(*XY, times=2)
    assert passes(*XY, torch.rand(ROWS)) == proven  # weights, perhaps, that were the same for all rows before
    model.eval()
    assert passes(*XY) == proven
    model.train()
    assert passes(*XY) == passes(*XY, torch.rand(ROWS)) == 0
    model[2].eval()
    assert passes(*XY) == proven
    assert passes(*XY) == 0


def test_a_repetition_looks_at_fewer_rows_and_splits_them_in_the_other_way():
    sizes = sizes_of(net())
    seen = [sizes(*XY)[:-3] for _ in range(4)]
    assert [sum(rows) for rows in seen] == [2 * 16, 2 * 8, 0, 2 * 8]
    assert seen[1:] == [[8, 5, 3], [], [8, 3, 5]]


def test_what_a_repetition_sees_is_compared_in_all_ways_before_anything_is_said(unnamed):
    model = net(switch := of(lambda h: h))
    step, calls = train_step(model), counted_rows(model)
    step(*XY)
    switch.run = lambda m, h: h - h.mean(0)
    calls.clear()
    with pytest.raises(gradaccum.NotEquivalentError, match="Found on 8 rows"):
        step(*XY)
    assert calls[:3] == [8, 5, 3]
    ways = [2, 2, 4, 4, 2, 2, 3, 5, 5, 3]
    assert ways in [calls[place : place + len(ways)] for place in range(len(calls))]


def test_it_is_repeated_at_batches_2_4_8_and_every_1024():
    sizes = sizes_of(nn.Linear(6, 4), micro_batch_size=12)
    proven = [count for count in range(1, 3073) if len(sizes(*XY)) > 2]
    assert proven == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3072]


def with_one(row, value):
    targets = torch.rand(64, 3, generator=torch.Generator().manual_seed(4))
    targets[row, 1] = value
    return targets


def mask_of(row, dtype):
    mask = torch.ones(64, 3, dtype=dtype)
    mask[row, 1:] = 0
    return mask


def distance(reduce):
    return lambda model, x, y: reduce((model(x) - 0.5).square(), y)


def weighted(error, y):
    return (error * y).sum() / y.sum()


MANY = torch.randn(64, 6, generator=torch.Generator().manual_seed(5))
ONE_OF_MANY = {
    "a number below 0": lambda row: (with_one(row, -1.0), lambda error, y: error[y >= 0].mean()),
    "a zero": lambda row: (with_one(row, 0.0), lambda error, y: error[y != 0].mean()),
    "a large number": lambda row: (with_one(row, 9999.0), lambda error, y: error[y != 9999].mean()),
    "a small number": lambda row: (with_one(row, -7777.0), lambda error, y: error[y != -7777].mean()),
    "a mask": lambda row: (mask_of(row, torch.bool), lambda error, y: error[y].mean()),
    "a mask of float32": lambda row: (mask_of(row, torch.float32), weighted),
    "a mask of float64": lambda row: (mask_of(row, torch.float64), weighted),
}


@pytest.mark.parametrize("row", [5, 20, 40])
@pytest.mark.parametrize("name", ONE_OF_MANY)
def test_one_row_of_many_in_which_something_is_left_out_is_among_those_that_are_proven(name, row, unnamed):
    target, reduce = ONE_OF_MANY[name](row)
    refused(nn.Linear(6, 3), (MANY, target), compute_loss=distance(reduce), micro_batch_size=16)


def of_the_fourth_class(outputs, targets):
    fourth = targets == 3
    values = F.cross_entropy(outputs, targets, reduction="none")
    return (values * torch.where(fourth, 2 / (1 + fourth.sum()), 1.0)).mean()


def test_of_a_rare_class_in_the_middle_two_rows_are_among_those_that_are_proven(unnamed):
    targets = torch.tensor([0, 1, 2, 4, 5, 6, 7, 0] * 8)
    targets[[20, 41]] = 3
    step = train_step(nn.Linear(6, 8), loss_fn=of_the_fourth_class)
    with pytest.raises(gradaccum.NotEquivalentError):  # one of the two ways to cut has them apart
        for _ in range(2):
            step(MANY, targets)


def ignoring(index):
    return lambda model, x, y: F.cross_entropy(model(x), y, ignore_index=index)


TOKENS = torch.randint(4, (ROWS, 10), generator=torch.Generator().manual_seed(3))
PADDED = torch.where((NUMBERED[:, None] == 12) & (torch.arange(10) > 4), 255, TOKENS)
LATER = {  # the loss, the targets of the first batches, and those of a later one
    "the usual index": (token_mean, Y, IGNORED),
    "an index below the classes": (ignoring(0), Y.clamp(min=1), Y),
    "an index above the classes": (ignoring(255), Y, torch.where(NUMBERED % 3 == 0, 255, Y)),
    "padding of one row": (ignoring(255), TOKENS, PADDED),
    "missing numbers": (
        lambda model, x, y: (model(x) - y)[~y.isnan()].square().mean(),
        TARGETS,
        torch.where(NUMBERED[:, None] == 12, float("nan"), TARGETS),
    ),
    **{
        f"{name} in one row of many": (distance(reduce), torch.ones_like(target), target)
        for name, make in ONE_OF_MANY.items()
        for target, reduce in [make(5)]
        if name != "a large number"
    },
}


@pytest.mark.parametrize("name", LATER)
def test_it_is_repeated_where_targets_are_left_out_for_the_first_time_by(name, unnamed):
    loss, first, then = LATER[name]
    many, tokens = len(then) > ROWS, nn.Sequential(nn.Linear(6, 40), nn.Unflatten(1, (4, 10)))
    x, model = (MANY, nn.Linear(6, 3)) if many else (X, tokens if first is TOKENS else net())
    step = train_step(model, compute_loss=loss, micro_batch_size=16 if many else 8)
    for _ in range(8):
        step(x, first)
    for _ in range(2):
        with pytest.raises(gradaccum.NotEquivalentError):
            step(x, then)
        step(x, first)


class OnADevice(torch.Tensor):
    """What an accelerator's tensor is to those who must not wait for it."""

    is_cpu = False


def test_on_accelerators_what_differs_among_rows_is_read_one_batch_later(monkeypatch):
    later = []

    class Event:
        def record(self):
            later.append(self)

        def query(self):
            return True

    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda like, device, pin_memory: empty_like(like, device=device))
    monkeypatch.setattr(torch.cuda, "Event", Event)

    def batch(*targets):
        return Batch((torch.zeros(8, 2).as_subclass(OnADevice), torch.tensor([*targets]).as_subclass(OnADevice)))

    kinds = BatchKinds()
    assert kinds.is_new(batch(0, 1, 2, 1, 0, 1, 2, 1), [True])
    kinds.add()
    later.clear()
    with torch.no_grad():
        found = [kinds.is_new(batch(0, 1, 2, 1, 0, 1, 2, last), [True]) for last in (1, 1, -100, -100)]
    assert found == [False, False, False, True]
    assert len(later) > 2


def test_pairs_of_rows_that_leave_their_margin_later_are_refused_when_they_do(unnamed):
    """A hinge over pairs is linear, and so a mean over rows, as long as all pairs are inside of its margin."""

    def pairwise(model, x, y):
        a, b = (0.2 * model(x)).split(2, 1)
        return F.relu(1 - a.sum(1)[:, None] + b.sum(1)[None]).mean()

    step = train_step(net(), compute_loss=pairwise, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.5))
    with pytest.raises(gradaccum.NotEquivalentError):
        for _ in range(65):
            step(*XY)
    assert step.updates in (1, 3, 7, 15, 31)


@pytest.mark.parametrize("rows", [17, 30, 60])
def test_what_begins_above_the_rows_of_the_first_proof_is_refused_by_the_second(rows, unnamed):
    step = train_step(net(lambda h: h * (2 if len(h) >= rows else 1)), micro_batch_size=60)
    batch = X.repeat(5, 1), Y.repeat(5)
    step(*batch)
    with pytest.raises(gradaccum.NotEquivalentError):
        step(*batch)


def test_it_looks_at_few_rows():
    sizes = sizes_of(net())(X.repeat(8, 1), Y.repeat(8))
    assert (max(sizes), sum(sizes)) == (16, 2 * 16 + 8 * ROWS)
    assert max(sizes_of(net(), micro_batch_size=2)(*XY)) == 8
    assert sizes_of(net(), loss_fn=root, verify=False)(X, TARGETS) == [8, 8, 8]


def test_what_cannot_be_evaluated_is_said_once(caplog):
    model = net(lambda h: h.reshape(2, 12, 8).flatten(0, 1))  # of 24 rows, and no others
    with pytest.raises(RuntimeError, match="shape"):
        update(model, micro_batch_size="auto")
    assert not caplog.records  # the error says it
    model = net(lambda h: h.reshape(3, 8, 8).flatten(0, 1) if len(h) == 24 else h.reshape(-1, 12, 8)[:, 0])
    sizes_of(model, micro_batch_size=24)(X.repeat(2, 1), Y.repeat(2), times=4)
    (record,) = [record for record in caplog.records if "could not be proven" in record.message]
    assert "16 rows of this batch can't be evaluated" in record.message


def prompted(model, x, y, prompt):
    return CE(model(x + prompt), y)


def test_the_proof_leaves_gradients_of_the_batch_alone_and_proves_with_them(caplog):
    def batch():
        return X.clone().requires_grad_(), Y, torch.full((6,), 0.1, requires_grad=True)

    expected, found = batch(), batch()
    prompted(net(), *expected).backward()
    update(net(), found, compute_loss=prompted, batch_dims=(0, 0, None))
    for place in (0, 2):
        assert torch.allclose(found[place].grad, expected[place].grad, rtol=1e-5, atol=1e-7)
    assert "could not be proven" not in caplog.text
    refused(net(), batch(), compute_loss=lambda *batch: prompted(*batch).sqrt(), batch_dims=(0, 0, None))


# Cut by classes alone, equal shares of these masks came into each part; of rare rows two were looked at, one in each.
MASKS = [
    *(((16,), 0.5, seed, None) for seed in (17, 42)),
    *(((64,), 0.08, seed, lambda x, y, mask: int(mask.any())) for seed in (2, 25)),
    *(((32, 4), 0.05, seed, lambda x, y, mask: int(mask.any())) for seed in (1, 2)),
]


def masked(model, x, y, mask):
    losses = F.cross_entropy(model(x).movedim(-1, 1), y, reduction="none")
    return (losses * mask).sum() / mask.sum().clamp(min=1)


@pytest.mark.parametrize(("shape", "share", "seed", "weight"), MASKS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bool])
def test_a_mean_over_a_mask_is_refused_at_once(shape, share, seed, weight, dtype, unnamed):
    generator = problems.seeded(seed)
    x = torch.randn(*shape, 5, dtype=torch.float64, generator=generator)
    y, mask = torch.randint(3, shape, generator=generator), torch.rand(shape, generator=generator) < share
    model = nn.Linear(5, 3, dtype=torch.float64)
    refused(model, (x, y, mask.to(dtype)), compute_loss=masked, weight=weight, micro_batch_size=shape[0] // 4)


WRONG = {
    "rows": lambda counted: len(counted),
    "one more": lambda counted: counted.sum() + 1,
    "one if any counts": lambda counted: int(counted.any()),
    "rows if any counts": lambda counted: int(counted.any()) * len(counted),
}


# Of 20 rows in micro-batches of 3, parts had such weights in the same proportions as the right ones in many draws.
@pytest.mark.parametrize("kind", ["mask", "rare mask", "missing labels", "padding"])
def test_frequent_wrong_weights_of_a_mean_over_what_counts_are_refused_and_the_right_one_is_not(kind, unnamed):
    silent = []
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        x, y = torch.randn(2, 20, 3, dtype=torch.float64, generator=generator)
        extra = torch.rand(20, generator=generator) < (0.35 if kind == "rare mask" else 0.5)
        if kind == "missing labels":
            extra = torch.where(extra, torch.randint(3, (20,), generator=generator), -100)
        elif kind == "padding":
            extra = (torch.arange(6) < torch.randint(1, 7, (20, 1), generator=generator)).double()

        def counted(extra):
            return extra.sum(1) if kind == "padding" else (extra >= 0 if kind == "missing labels" else extra).double()

        def mean(model, x, y, extra):
            return (counted(extra) * (model(x) - y).square().sum(1)).sum() / counted(extra).sum()

        for name, weigh in {"right": torch.Tensor.sum, **WRONG}.items():
            model = nn.Linear(3, 3, dtype=torch.float64)
            step = TrainStep(
                model,
                torch.optim.SGD(model.parameters()),
                compute_loss=mean,
                weight=lambda x, y, extra, weigh=weigh: weigh(counted(extra)),
                micro_batch_size=3,
            )
            try:
                step(x, y, extra)
            except gradaccum.NotEquivalentError:
                assert name != "right", seed
            else:
                silent += [(name, seed)] if name != "right" else []
    assert not silent


@pytest.mark.parametrize("convert", [np.asarray, torch.tensor, lambda values: torch.tensor(values).bfloat16()])
def test_of_40_rows_those_with_a_missing_label_are_among_the_few_that_are_proven(convert):
    labels = [1.0] * 40
    for row in (7, 19, 31):
        labels[row] = -100.0
    batch = Batch((torch.zeros(40, 3), convert(labels)))
    assert {7, 19, 31} <= {*rows_to_prove(batch, 8)}
