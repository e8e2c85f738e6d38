"""One word says what is to be done about BatchNorm, for the optimizer, for TrainStep and for chunked."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gradaccum.torch import TrainStep, chunked, optim
from tests.fuzz.problem import Faulty
from tests.reference import FLOAT64, relative_error
from tests.torch.optimizer.loops import train
from tests.torch.train_step.steps import assert_same_updates

pytestmark = pytest.mark.usefixtures("float64")

SIZES = [5, 5, 3, 1]
ROWS = sum(SIZES)
NAMED = r"'1' \(BatchNorm2d\).*batch_norm=\"exact\""


def network(**options):
    torch.manual_seed(2)
    bn = nn.BatchNorm2d(3, **options)
    if options.get("affine", True):
        nn.init.uniform_(bn.weight, 0.5, 1.5)
    return nn.Sequential(nn.Conv2d(2, 3, 3, bias=False), bn, nn.ReLU(), nn.Flatten(), nn.Linear(3 * 9, 4))


def batch(rows=ROWS, seed=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 2, 5, 5, generator=generator) * torch.linspace(0.2, 3, rows)[:, None, None, None]
    return x + torch.linspace(-2, 2, rows)[:, None, None, None], torch.randint(4, (rows,), generator=generator)


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr, momentum=0.9)


def cross_entropy(model, x, y):
    return F.cross_entropy(model(x), y)


def step_of(model, choice, *, lr=0.1, size=5, **options):
    options = options if "compute_loss" in options else {"loss_fn": nn.CrossEntropyLoss(), **options}
    return TrainStep(model, sgd(model, lr), micro_batch_size=size, batch_norm=choice, **options)


def micro_batched(model, x, y, sizes):
    """The plain loop's gradients: each micro-batch normalised by itself."""
    for rows, targets in zip(x.split(sizes), y.split(sizes), strict=True):
        (cross_entropy(model, rows, targets) * (len(rows) / len(x))).backward()


def test_pooled_statistics_have_the_rows_of_micro_batches_that_weigh_nothing():
    model, plain, (x, y) = network(), network(), batch(6)
    y[2:4] = -100
    plain(x)
    options = {"compute_loss": cross_entropy, "weight": lambda x, y: (y != -100).sum(), "verify": False}
    step_of(model, "pooled", size=2, **options)(x, y)
    assert relative_error(model.buffers(), plain.buffers()) <= FLOAT64


def recomputed(model, x, y):
    return F.cross_entropy(checkpoint(model, x, use_reentrant=False), y)


def called_twice(model, x, y):
    return F.cross_entropy(model(x) + model(2 * x + 1), y)


@pytest.mark.parametrize("loss", [recomputed, called_twice])
def test_pooled_statistics_move_once_per_call_and_not_in_recomputations(loss):
    model, whole, (x, y) = network(), network(), batch()
    loss(whole, x, y)
    step_of(model, "pooled", compute_loss=loss)(x, y)
    assert relative_error(model.buffers(), whole.buffers()) <= FLOAT64


def test_a_call_that_fails_moves_no_pooled_statistics():
    model, left = network(), [5, 5]
    before = [buffer.clone() for buffer in model.buffers()]
    model[4].register_forward_pre_hook(lambda *_: left.pop() and None)
    with pytest.raises(IndexError):
        chunked(model, 5, batch_norm="pooled", verify=False)(batch()[0])
    assert all(map(torch.equal, before, model.buffers()))


EXACT = [{}, {"offload": True}, {"verify": False}]


@pytest.mark.parametrize("options", EXACT, ids=str)
def test_exact_updates_are_the_large_batchs(options, caplog):
    batches = [batch(n, seed=n) for n in (14, 14, 9, 3)]
    given = {"loss_fn": nn.CrossEntropyLoss(), "micro_batch_size": 5, "batch_norm": "exact", **options}
    assert_same_updates(network(), batches, cross_entropy, tolerance=1e-11, **given)
    assert "could not be proven" not in caplog.text


WORDS = [("micro", 0.1), ("frozen", 0.1), *(("pooled", momentum) for momentum in (0.1, 0.7, 1.0, None))]


@pytest.mark.parametrize("way", ["TrainStep", 0, 1, 9])
@pytest.mark.parametrize(("choice", "momentum"), WORDS)
def test_each_word_normalises_and_moves_statistics_as_it_says(choice, momentum, way):
    """`way`: TrainStep, or so many micro-batches that `chunked` keeps."""
    model = network(momentum=momentum)
    with torch.no_grad():
        model(batch(seed=9)[0])
    whole, plain = copy.deepcopy(model), copy.deepcopy(model)
    step, small = step_of(model, choice, lr=0.0), chunked(model, 5, batch_norm=choice, keep=way if way in (1, 9) else 0)
    if choice == "frozen":
        plain.eval()
    for window in range(3):
        x, y = batch(seed=window)
        model.zero_grad()
        plain.zero_grad()
        if way == "TrainStep":
            step(x, y)
        else:
            F.cross_entropy(small(x), y).backward()
        micro_batched(plain, x, y, [5, 5, 4])
        whole(x)
        assert relative_error([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()]) <= FLOAT64
        assert relative_error(model.buffers(), (whole if choice == "pooled" else plain).buffers()) <= FLOAT64
    if way != "TrainStep":
        with torch.no_grad():
            small(x), whole(x), [plain(rows) for rows in x.split(5)]
        assert relative_error(model.buffers(), (whole if choice == "pooled" else plain).buffers()) <= FLOAT64
    assert model[1].momentum == momentum
    assert model[1].training


def is_silent(*calls):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in calls:
            call()


@pytest.mark.parametrize("way", ["TrainStep", "chunked"])
def test_it_warns_once_names_the_modules_and_moves_statistics_as_it_does_without_a_word(way):
    model, plain, (x, y) = network(), network(), batch()
    step, small = step_of(model, "warn"), chunked(model, 5)
    call = (lambda: step(x, y)) if way == "TrainStep" else lambda: small(x).sum().backward()
    with pytest.warns(UserWarning, match=f"not the large batch's: {NAMED}") as caught:
        call()
    assert [warning.filename for warning in caught] == [__file__]
    if way == "TrainStep":
        micro_batched(plain, x, y, [5, 5, 4])
    else:  # once
        plain(x)
    assert relative_error(model.buffers(), plain.buffers()) <= FLOAT64
    one = step_of(network(), "warn", size=100)  # one micro-batch is the large batch
    is_silent(call, lambda: one(x, y))


@pytest.mark.parametrize("choice", ["warn", "micro", "pooled", "frozen", "exact"])
def test_models_without_batch_norm_are_exact_whatever_the_word(choice):
    model = nn.Sequential(nn.Flatten(), nn.Linear(50, 4))
    is_silent(lambda: assert_same_updates(model, [batch()], cross_entropy, micro_batch_size=5, batch_norm=choice))


def running_out(most, where):
    fault = Faulty()
    fault.most[where] = most
    return fault


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("choice", ["micro", "pooled", "exact"])
def test_running_out_of_memory_leaves_no_trace_in_the_statistics(choice, where):
    model, whole = network().append(running_out(3, where)), network()
    step_of(model, choice)(*batch())
    if choice == "micro":
        micro_batched(whole, *batch(), [2] * 7)  # as if 5 rows had never been tried
    else:
        whole(batch()[0])
    assert relative_error(model.buffers(), whole.buffers()) <= 1e-11


def test_out_of_memory_at_the_smallest_size_says_what_to_do():
    model = nn.Sequential(running_out(0, "forward"), *network())
    step = step_of(model, "exact", size=2, verify=False)
    too_much = "(?s)micro-batch of one row: no memory.*Make the model's activations"
    with pytest.raises(torch.OutOfMemoryError, match=too_much):
        step(*batch())


def test_an_unknown_word_and_frozen_without_running_statistics_are_refused():
    with pytest.raises(ValueError, match="`batch_norm` must be one of .* Received: batch_norm='sync'"):
        step_of(network(), "sync")
    with pytest.raises(ValueError, match=r"these layers keep none: '1' \(BatchNorm2d\)"):
        step_of(network(track_running_stats=False), "frozen")(*batch())


def test_the_optimizer_names_the_modules_once():
    def wrap(steps, model):
        optim.Optimizer(sgd(network()), steps, model=model)

    with pytest.warns(UserWarning, match=NAMED) as caught:
        optim.Optimizer(sgd(network()), 4, model=network())
    assert [warning.filename for warning in caught] == [__file__]
    is_silent(lambda: wrap(1, network()), lambda: wrap(4, network().eval()), lambda: wrap(4, nn.Linear(2, 2)))


@pytest.mark.parametrize(("late", "named"), [(1, 1), (2, 2), (3, 4), (5, 8)])
@pytest.mark.parametrize("evaluates", [True, False], ids=["in eval mode before", "put into the model"])
@pytest.mark.parametrize("way", ["wrapper", "TrainStep"])
def test_layers_that_come_late_are_named_at_once_or_in_the_next_watched_window(way, evaluates, late, named):
    model = network()
    if evaluates:
        model[1].eval()
    else:
        layer, model[1] = model[1], nn.Identity()
    step = step_of(model, "warn") if way == "TrainStep" else optim.Optimizer(sgd(model), len(SIZES), model=model)
    for window in range(1, named + 1):
        if window == late:
            model[1] = model[1].train() if evaluates else layer
        warned = window == (named if way == "wrapper" else late)  # a TrainStep sees what changes in the model
        with pytest.warns(UserWarning, match=NAMED) if warned else warnings.catch_warnings():
            if not warned:
                warnings.simplefilter("error")
            if way == "TrainStep":
                step(*batch())
            else:
                train(model, step, zip(*(t.split(SIZES) for t in batch()), strict=True), loss=cross_entropy)
