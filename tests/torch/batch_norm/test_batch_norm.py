"""One word says what is to be done about BatchNorm, for the optimizer, for TrainStep and for chunked."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gradaccum.torch import TrainStep, chunked, optim
from gradaccum.torch.batch_norm import BatchNormPolicy
from tests.reference import FLOAT64, relative_error, torch_updates

SIZES = [5, 5, 3, 1]
ROWS = sum(SIZES)


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)  # which conftest sets back


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


def running(model):
    return [buffer.clone() for buffer in model.buffers()]


def gradients(model):
    return [p.grad for p in model.parameters() if p.requires_grad]


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def cross_entropy(model, x, y):
    return F.cross_entropy(model(x), y)


# pooled


def test_pooled_statistics_have_the_rows_of_micro_batches_that_weigh_nothing():
    model, plain = network(), network()
    step = TrainStep(
        model,
        sgd(model),
        compute_loss=cross_entropy,
        weight=lambda x, y: (y != -100).sum(),
        micro_batch_size=2,
        batch_norm="pooled",
        verify=False,
    )
    x, y = batch(6)
    y[2:4] = -100
    plain(x)
    step(x, y)
    assert relative_error(running(model), running(plain)) <= FLOAT64


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_a_layer_moves_once_per_call_a_repeated_micro_batch_counts_once_and_a_failed_window_not_at_all(
    passes, repeated
):
    whole, pooled, x = network(), network(), batch()[0]
    statistics, before = BatchNormPolicy("pooled", pooled), running(pooled)

    def window(fails):
        with statistics.window():
            for rows in ([x] if repeated else []) + [*x.split(SIZES)]:
                with statistics.micro_batch():
                    for place in range(passes):
                        pooled(rows * (1 + place) + place)
                if len(rows) < len(x):  # as if memory had run out in its backward pass
                    statistics.commit()
            if fails:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        window(True)
    assert all(torch.equal(a, b) for a, b in zip(before, pooled.buffers(), strict=True))
    window(False)
    for place in range(passes):
        whole(x * (1 + place) + place)
    assert relative_error(pooled.buffers(), whole.buffers()) <= FLOAT64


def test_recomputation_by_gradient_checkpointing_moves_nothing():
    model, whole = network(), network()
    x, y = batch()
    whole(x)

    def compute_loss(model, x, y):
        return F.cross_entropy(checkpoint(model, x, use_reentrant=False), y)

    TrainStep(model, sgd(model), compute_loss=compute_loss, micro_batch_size=5, batch_norm="pooled")(x, y)
    assert relative_error(model.buffers(), whole.buffers()) <= FLOAT64


# TrainStep


def one_step(choice, size=5, **options):
    model = network(**options)
    step = TrainStep(model, sgd(model), loss_fn=nn.CrossEntropyLoss(), micro_batch_size=size, batch_norm=choice)
    return model, step


def micro_batched(model, x, y, sizes):
    """The plain loop's gradients: each micro-batch normalised by itself."""
    for rows, targets in zip(x.split(sizes), y.split(sizes), strict=True):
        (F.cross_entropy(model(rows), targets) * (len(rows) / len(x))).backward()
    return model


@pytest.mark.parametrize("offload", [False, True])
def test_exact_updates_are_the_large_batchs(offload):
    model = network()
    options = {"micro_batch_size": 5, "batch_norm": "exact", "offload": offload}
    step = TrainStep(model, sgd(model), loss_fn=nn.CrossEntropyLoss(), **options)
    whole = copy.deepcopy(model)
    batches = [batch(n, seed=n) for n in (14, 14, 9, 3)]
    expected = torch_updates(whole, sgd(whole), batches, cross_entropy)
    actual = [step(*b).item() for b in batches]
    assert actual == pytest.approx(expected, rel=1e-11)
    assert relative_error(model.parameters(), whole.parameters()) <= 1e-11
    assert relative_error(model.buffers(), whole.buffers()) <= 1e-11


WORDS = [("micro", 0.1), ("frozen", 0.1), *(("pooled", momentum) for momentum in (0.1, 0.7, 1.0, None))]


@pytest.mark.parametrize("way", ["TrainStep", 0, 1, 9])
@pytest.mark.parametrize(("choice", "momentum"), WORDS)
def test_each_word_normalises_and_moves_statistics_as_it_says(choice, momentum, way):
    """`way`: TrainStep, or so many micro-batches that `chunked` keeps."""
    model = network(momentum=momentum)
    with torch.no_grad():
        model(batch(seed=9)[0])
    whole, plain = copy.deepcopy(model), copy.deepcopy(model)
    optimizer, options = torch.optim.SGD(model.parameters(), 0.0), {"loss_fn": nn.CrossEntropyLoss()}
    step = TrainStep(model, optimizer, micro_batch_size=5, batch_norm=choice, **options)
    small = chunked(model, 5, batch_norm=choice, keep=0 if way == "TrainStep" else way)
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
        assert relative_error(gradients(model), gradients(plain)) <= FLOAT64
        assert relative_error(model.buffers(), (whole if choice == "pooled" else plain).buffers()) <= FLOAT64
    if way != "TrainStep":
        with torch.no_grad():
            small(x), whole(x), [plain(rows) for rows in x.split(5)]
        assert relative_error(model.buffers(), (whole if choice == "pooled" else plain).buffers()) <= FLOAT64
    assert model[1].momentum == momentum
    assert model[1].training


@pytest.mark.parametrize("way", ["TrainStep", "chunked"])
def test_it_warns_once_names_the_modules_and_moves_statistics_as_it_does_without_a_word(way):
    model, step = one_step("warn")
    plain, call = copy.deepcopy(model), step if way == "TrainStep" else lambda x, y: small(x).sum().backward()
    small = chunked(model, 5)
    with pytest.warns(UserWarning, match=r"not the large batch's: '1' \(BatchNorm2d\).*batch_norm=\"exact\"") as caught:
        call(*batch())
    assert len(caught) == 1
    assert caught[0].filename == __file__
    if way == "TrainStep":
        micro_batched(plain, *batch(), [5, 5, 4])
    else:  # once
        plain(batch()[0])
    assert relative_error(model.buffers(), plain.buffers()) <= FLOAT64
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(*batch())
        one_step("warn", size=100)[1](*batch())  # one micro-batch is the large batch


@pytest.mark.parametrize("choice", ["warn", "micro", "pooled", "frozen", "exact"])
def test_models_without_batch_norm_are_exact_whatever_the_word(choice):
    model = nn.Sequential(nn.Flatten(), nn.Linear(50, 4))
    whole = copy.deepcopy(model)
    torch_updates(whole, sgd(whole), [batch()], cross_entropy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TrainStep(model, sgd(model), loss_fn=nn.CrossEntropyLoss(), micro_batch_size=5, batch_norm=choice)(*batch())
    assert relative_error(model.parameters(), whole.parameters()) <= FLOAT64


class RunsOut(nn.Module):
    """Out of memory, forward or backward, on more rows than `most`."""

    def __init__(self, most, backward):
        super().__init__()
        self.most, self.backward_too = most, backward

    def forward(self, x):
        def fail(*_):
            raise torch.OutOfMemoryError("for the test")

        if len(x) > self.most and torch.is_grad_enabled():
            if not self.backward_too:
                fail()
            x = x * 1
            x.register_hook(fail)
        return x


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("choice", ["micro", "pooled", "exact"])
def test_running_out_of_memory_leaves_no_trace_in_the_statistics(choice, backward):
    model = network()
    model.append(RunsOut(3, backward))
    whole = copy.deepcopy(model)[:-1]
    step = TrainStep(model, sgd(model), loss_fn=nn.CrossEntropyLoss(), micro_batch_size=5, batch_norm=choice)
    step(*batch())
    if choice == "micro":
        micro_batched(whole, *batch(), [2] * 7)  # as if 5 rows had never been tried
    else:
        whole(batch()[0])
    assert relative_error(model.buffers(), whole.buffers()) <= 1e-11


def test_an_unknown_word_and_frozen_without_running_statistics_are_refused():
    with pytest.raises(ValueError, match="`batch_norm` must be one of .* Received: batch_norm='sync'"):
        one_step("sync")
    with pytest.raises(ValueError, match=r"these layers keep none: '1' \(BatchNorm2d\)"):
        one_step("frozen", track_running_stats=False)[1](*batch())


# The optimizer


def test_the_optimizer_names_the_modules_once():
    with pytest.warns(UserWarning, match=r"'1' \(BatchNorm2d\).*batch_norm=\"exact\"") as caught:
        optim.Optimizer(sgd(network()), 4, model=network())
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optim.Optimizer(sgd(network()), 1, model=network())
        optim.Optimizer(sgd(network()), 4, model=network().eval())
        optim.Optimizer(sgd(network()), 4, model=nn.Linear(2, 2))
