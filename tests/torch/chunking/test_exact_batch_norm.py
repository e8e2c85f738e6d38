"""batch_norm="exact": outputs, gradients and running statistics of the large batch."""

import copy
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradaccum.torch import TrainStep, chunked
from tests.reference import FLOAT32, relative_error, torch_updates
from tests.torch.chunking.problems import assert_exact, frozen, gradients

ROWS = 22
EXACT = 1e-11


class Block(nn.Module):
    """The basic block of a residual network, with its in-place operations."""

    def __init__(self, inward, outward, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inward, outward, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outward)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outward, outward, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outward)
        self.downsample = None
        if stride != 1 or inward != outward:
            self.downsample = nn.Sequential(nn.Conv2d(inward, outward, 1, stride, bias=False), nn.BatchNorm2d(outward))

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


def residual_network():
    """ResNet-18's shape: a stem, four stages of two blocks, 20 BatchNorm layers; narrow."""
    stem = [nn.Conv2d(3, 3, 7, 2, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    widths, blocks = [3, 3, 6, 12, 24], []
    for stage in range(4):
        blocks += [Block(widths[stage], widths[stage + 1], 1 if stage == 0 else 2)]
        blocks += [Block(widths[stage + 1], widths[stage + 1], 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(24, 5))


def with_random_affine_parts(module):
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias)
    return module


def assert_large_batchs(module, loss, *inputs, size=5, **options):
    return assert_exact(
        module, lambda m, *own: loss(m(*own)), *inputs, size=size, tolerance=EXACT, batch_norm="exact", **options
    )


def cross_entropy(outputs):
    return F.cross_entropy(outputs, torch.arange(len(outputs)) % outputs.shape[1])


@pytest.mark.parametrize(
    ("size", "offload"),
    [
        (1, False),
        (5, True),
        *(pytest.param(size, False, marks=pytest.mark.slow) for size in (5, 8, 21)),
        *(pytest.param(size, True, marks=pytest.mark.slow) for size in (1, 8, 21)),
    ],
)
def test_a_residual_network_is_the_large_batchs(size, offload):
    torch.manual_seed(1)
    x = torch.randn(ROWS, 3, 32, 32, requires_grad=True)
    assert_large_batchs(
        residual_network(), cross_entropy, x, size=size, offload=offload, verify=size == 8 and not offload
    )


@pytest.mark.parametrize("make", [torch.optim.Adam, lambda parameters: torch.optim.SGD(parameters, 0.05, 0.9)])
def test_updates_of_a_residual_network_are_the_large_batchs(make):
    batches = [(torch.randn(rows, 3, 32, 32),) for rows in (ROWS, ROWS, 13)]
    torch.manual_seed(1)
    whole = residual_network()
    small = copy.deepcopy(whole)
    chunks = chunked(small, 6, batch_norm="exact", verify=False)
    torch_updates(whole, make(whole.parameters()), batches, lambda model, x: cross_entropy(model(x)))
    torch_updates(small, make(small.parameters()), batches, lambda model, x: cross_entropy(chunks(x)))
    assert relative_error(small.parameters(), whole.parameters()) <= EXACT
    assert relative_error(small.buffers(), whole.buffers()) <= EXACT


def sequential(**options):
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6, **options), nn.Tanh(), nn.Linear(6, 3))


class NormAct(nn.BatchNorm1d):
    """A BatchNorm with a forward of its own, as libraries of image models have."""

    def forward(self, x):
        self.num_batches_tracked.add_(1)
        x = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        return F.relu(x, inplace=True)


class Parts(nn.Module):
    """A linear layer and a BatchNorm, which `run` calls as it likes."""

    def __init__(self, run):
        super().__init__()
        self.run, self.linear, self.bn, self.out = run, nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.other, self.unused = sequential(), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.run(self, x)


def detached(m, x):
    y = m.bn(m.linear(x))
    with torch.no_grad():
        target = y.tanh() * 2
    return m.out(y) * target[:, :1]


def two_heads(m, x):
    y = m.bn(m.linear(x))
    return m.out(y), m.other(y), m.unused(y)


def partly_frozen(which):
    module = nn.Sequential(sequential(), nn.BatchNorm1d(3), nn.Linear(3, 3))
    module[0][3].bias = None  # a BatchNorm takes its gradient away
    parts = {"first": module[0], "all": module, "affine": module[0][1].weight}
    return frozen(module, parts[which]) if which in parts else module


def in_eval_mode():
    module = partly_frozen("none")
    module[0][1].eval()
    return module


def own_forwards():
    module = nn.Sequential(nn.Linear(4, 6), NormAct(6), nn.Linear(6, 6), NormAct(6), nn.Linear(6, 3))
    module[0].bias = module[2].bias = None
    return module


def first(outputs):
    return cross_entropy(outputs[0])


POSITIONS, VOLUMES = (ROWS, 4, 3), (ROWS, 4, 2, 3, 2)
CASES = {  # what is chunked, how often, the loss, the shape of its input; whether that gets a gradient
    "plain": (sequential, 3),
    "a cumulative mean": (lambda: sequential(momentum=None), 3),
    "no affine part": (lambda: sequential(affine=False), 3),
    "no running statistics": (lambda: sequential(track_running_stats=False), 3),
    "another eps": (lambda: sequential(eps=1e-2), 3),
    "positions": (
        lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(12, 3)),
        1,
        cross_entropy,
        POSITIONS,
    ),
    "volumes": (lambda: nn.Sequential(nn.BatchNorm3d(4), nn.Flatten(), nn.Linear(48, 3)), 1, cross_entropy, VOLUMES),
    "a loss across rows": (sequential, 1, lambda y: (y @ y.T).logsumexp((0, 1))),
    "a layer called twice": (lambda: Parts(lambda m, x: m.bn(m.linear(m.bn(m.linear(x)).tanh()))), 2),
    "two layers on one value": (lambda: Parts(lambda m, x: m.bn(y := m.linear(x)) * m.unused(y)), 2),
    "forwards of their own": (own_forwards, 2),
    "no_grad around a part": (lambda: Parts(detached), 1),
    "unused outputs": (lambda: with_random_affine_parts(Parts(two_heads)), 1, first),
    "frozen first layers": (lambda: partly_frozen("first"), 1, cross_entropy, (ROWS, 4), False),
    "all frozen": (lambda: partly_frozen("all"), 1),
    "a BatchNorm in eval mode": (in_eval_mode, 1, cross_entropy, (ROWS, 4), False),
    "a frozen affine part": (lambda: partly_frozen("affine"), 1, cross_entropy, (ROWS, 4), False),
}


@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_batch_norm_in_every_place(name, keep):
    make, passes, loss, shape, grad = (*CASES[name], *(cross_entropy, (ROWS, 4), True)[len(CASES[name]) - 2 :])
    assert_large_batchs(make(), loss, torch.randn(shape, requires_grad=grad), passes=passes, keep=keep)


@pytest.mark.parametrize("offset", [0, 300])
def test_in_float32_it_rounds_no_more_than_the_large_batch_does(offset):
    module, x = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)), torch.randn(ROWS, 4) + offset
    small = chunked(copy.deepcopy(module).float(), 5, batch_norm="exact")
    whole = copy.deepcopy(module).float()
    for m in (module, whole, small):
        cross_entropy(m(x.to(next(m.parameters()).dtype))).backward()
    error, rounding = (relative_error(gradients(m), gradients(module)) for m in (small, whole))
    assert error <= max(2 * rounding, FLOAT32)


class Dense(nn.Module):
    """Values that cross several layers, a list, a tuple, two BatchNorms in a row, one at the input, one at the end."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.BatchNorm1d(n) for n in (4, 4, 8, 3))
        with_random_affine_parts(self)
        self.first.requires_grad_(False)  # another BatchNorm takes its gradients away, and zeros compare badly
        self.wide, self.out = nn.Linear(4, 8), nn.Linear(20, 3, bias=False)
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x, *, mask):
        features = [x]
        y = self.second(self.first(x))
        features.append(y * self.scale)
        a, b = self.wide(y).chunk(2, dim=1)
        z = self.third(torch.cat([a * b, y.tanh() * mask[:, None]], 1))
        features += [z, y]
        return {"out": self.last(self.out(torch.cat(features, dim=1))), "features": (y, [z.sum(1)])}


def test_values_that_cross_layers_in_any_nesting():
    mask = (torch.rand(ROWS) > 0.3).double()

    def loss(module, x):
        out = module(x, mask=mask)
        first, (second,) = out["features"]
        return out["out"].exp().std() + first.square().prod(1).std() + second.exp().mean()

    assert_exact(Dense(), loss, torch.randn(ROWS, 4, requires_grad=True), tolerance=EXACT, batch_norm="exact")


def test_buffers_that_the_code_between_layers_moves_go_where_the_large_batch_takes_them():
    class Averages(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)
            self.register_buffer("average", torch.zeros(4))

        def forward(self, x):
            y = self.linear(self.bn(x)).tanh()
            self.average.mul_(0.9).add_(0.1 * y.detach().mean(0))
            return y

    assert_large_batchs(Averages(), lambda y: y.logsumexp((0, 1)), torch.randn(20, 4), verify=False)


def test_modules_without_batch_norm_inside_may_do_anything():
    class Anything(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4, bias=False)
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, x):
            self.calls += 1
            with torch.no_grad():
                factor = 2.0 if x.sum() > -1e9 else 3.0
            return self.linear(x) * factor + x[: x.shape[0]]

    module = nn.Sequential(Anything(), nn.BatchNorm1d(4), Anything())
    small = assert_large_batchs(module, cross_entropy, torch.randn(ROWS, 4))
    assert small.get_submodule("0").calls == 1


def test_a_coin_is_tossed_once_per_forward_pass():
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

        def forward(self, x):
            y = self.linear(self.bn(x))
            return x if random.random() < 0.5 else y + x

    module = Skips()
    for seed in range(4):
        small = chunked(copy.deepcopy(module), 5, batch_norm="exact")
        whole, x = copy.deepcopy(module), torch.randn(ROWS, 4)
        found = []
        for m in (whole, small):
            random.seed(seed)
            found.append(m(x))
        assert relative_error(found[1:], found[:1]) <= EXACT


def test_dropout_is_replayed():
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))
    small, x = chunked(module, 5, batch_norm="exact"), torch.randn(ROWS, 4, requires_grad=True)

    def value(x):
        torch.manual_seed(0)
        return small(x).square().sum()

    (slope,) = torch.autograd.grad(value(x), x)
    step = 1e-6 * torch.randn_like(x)
    with torch.no_grad():
        measured = (value(x + step) - value(x - step)) / 2
    assert abs(measured - (slope * step).sum()) <= 1e-7 * abs(measured)


def test_without_gradients_the_statistics_still_move():
    module, x = sequential(), torch.randn(ROWS, 4)
    small = chunked(copy.deepcopy(module), 5, batch_norm="exact")
    with torch.no_grad():
        assert relative_error([small(x)], [module(x)]) <= EXACT
    assert relative_error(small.buffers(), module.buffers()) <= EXACT
    module.eval()
    small.eval()
    assert relative_error([small(x)], [module(x)]) <= EXACT


class Peeks(nn.Module):
    def __init__(self, peek):
        super().__init__()
        self.peek, self.bn, self.linear = peek, nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x):
        x = self.bn(x)
        if self.peek(x):
            x = x * 2
        return self.linear(x)


@pytest.mark.parametrize("peek", [lambda x: x.sum() > 0, lambda x: len(x) > 3, lambda x: int(x[0, 0])])
def test_what_cannot_be_cut_is_an_error_that_names_the_line(peek):
    with pytest.raises(
        ValueError, match=r'(?s)Peeks can\'t be cut at its BatchNorm.*test_exact_batch_norm.py", line \d+'
    ):
        chunked(Peeks(peek), 5, batch_norm="exact")(torch.randn(ROWS, 4))


def test_edits_in_place_across_a_layer_are_an_error_that_names_the_line():
    class Edits(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.bn = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x):
            y = self.linear(x)
            z = self.bn(y.tanh())
            y.relu_()
            return y + z

    with pytest.raises(ValueError, match=r"edited in place across a BatchNorm layer.*test_exact_batch_norm.py"):
        chunked(Edits(), 5, batch_norm="exact")(torch.randn(ROWS, 4))


def test_autocast_stays_on_in_the_recomputation():
    torch.set_default_dtype(torch.float32)
    module, x, seen = sequential(), torch.randn(ROWS, 4), []
    small = chunked(copy.deepcopy(module), 5, batch_norm="exact")
    small.get_submodule("3").register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    for m in (module, small):
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(m(x).float())
        loss.backward()
    assert set(seen) == {torch.bfloat16}
    assert relative_error(gradients(small), gradients(module)) <= 0.05


def test_activations_inside_segments_are_not_kept():
    """What is kept per row: what each BatchNorm normalises, nothing else."""
    module = nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.Linear(6, 64), nn.Tanh()
    )
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        chunked(module, 5, batch_norm="exact")(torch.randn(ROWS, 4))
    per_row = {t.data_ptr(): t.numel() for t in kept if t.dim() == 2 and t.shape[0] in (4, 5)}  # not parameters
    assert sum(per_row.values()) == ROWS * (4 + 6)


@pytest.mark.parametrize("verify", [True, False])
def test_with_a_head_in_tiles_the_update_is_the_large_batchs_and_proven(verify, caplog):
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 5))
    model, x, y = copy.deepcopy(whole), torch.randn(ROWS, 4), torch.randint(5, (ROWS,))
    torch_updates(whole, torch.optim.SGD(whole.parameters(), 0.1), [(x, y)], lambda m, x, y: F.cross_entropy(m(x), y))
    optimizer, options = torch.optim.SGD(model.parameters(), 0.1), {"batch_norm": "exact", "verify": verify}
    TrainStep(model, optimizer, loss_fn=nn.CrossEntropyLoss(), micro_batch_size=4, head=model[3], **options)(x, y)
    assert relative_error(model.parameters(), whole.parameters()) <= EXACT
    assert "could not be proven" not in caplog.text


def test_out_of_memory_at_the_smallest_size_says_what_to_do():
    class NoRoom(nn.Linear):
        def forward(self, x):
            raise torch.OutOfMemoryError("no room")

    model = nn.Sequential(NoRoom(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 5))
    options = {"batch_norm": "exact", "verify": False, "head": model[2], "loss_fn": nn.CrossEntropyLoss()}
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), micro_batch_size=2, **options)
    with pytest.raises(
        torch.OutOfMemoryError, match="(?s)micro-batch of one row: no room.*Make the model's activations"
    ):
        step(torch.randn(ROWS, 4), torch.randint(5, (ROWS,)))
