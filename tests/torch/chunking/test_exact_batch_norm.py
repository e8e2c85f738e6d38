"""batch_norm="exact": outputs, gradients and running statistics of the large batch."""

import copy
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradaccum.torch import chunked
from tests.reference import FLOAT32, relative_error
from tests.torch.chunking.problems import assert_exact, frozen, gradients
from tests.torch.problems import Does

ROWS = 22
EXACT = 1e-11


def block(inward, outward, stride):
    """The basic block of a residual network, with its in-place operations."""

    def run(m, x):
        out = m.body(x)
        out += m.shortcut(x)
        return torch.relu_(out)

    first = nn.Conv2d(inward, outward, 3, stride, 1, bias=False), nn.BatchNorm2d(outward), nn.ReLU(inplace=True)
    second = nn.Conv2d(outward, outward, 3, 1, 1, bias=False), nn.BatchNorm2d(outward)
    projection = nn.Conv2d(inward, outward, 1, stride, bias=False), nn.BatchNorm2d(outward)
    shortcut = nn.Sequential(*projection) if (inward, stride) != (outward, 1) else nn.Sequential()
    return Does(run, body=nn.Sequential(*first, *second), shortcut=shortcut)


def residual_network():
    stem = [nn.Conv2d(3, 3, 7, 2, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, block(3, 6, 2), block(6, 6, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))


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


def parts(run, **others):
    """A linear layer and a BatchNorm, which `run` calls as it likes, and more."""
    return Does(run, linear=nn.Linear(4, 4, bias=False), bn=nn.BatchNorm1d(4), out=nn.Linear(4, 3), **others)


def detached(m, x):
    y = m.bn(m.linear(x))
    with torch.no_grad():
        target = y.tanh() * 2
    return m.out(y) * target[:, :1]


def two_heads(m, x):
    y = m.bn(m.linear(x))
    return m.out(y), m.other(y), m.unused(y)


def moves_a_buffer(m, x):
    y = m.linear(m.bn(x)).tanh()
    m.average.mul_(0.9).add_(0.1 * y.detach().mean(0))
    return y


def anything(m, x):
    """Without BatchNorm inside, a module is called as it is."""
    m.calls += 1
    with torch.no_grad():
        factor = 2.0 if x.sum() > -1e9 else 3.0
    return m.linear(x) * factor + x[: x.shape[0]]


def around(run):
    own = (Does(run, linear=nn.Linear(4, 4, bias=False), calls=torch.tensor(0)) for _ in range(2))
    return nn.Sequential(next(own), nn.BatchNorm1d(4), next(own))


def partly_frozen(which):
    module = nn.Sequential(sequential(), nn.BatchNorm1d(3), nn.Linear(3, 3))
    module[0][3].bias = None  # a BatchNorm takes its gradient away
    chosen = {"first": module[0], "all": module, "affine": module[0][1].weight}
    module[0][1].train(which != "eval")
    return frozen(module, chosen[which]) if which in chosen else module


def own_forwards():
    layers = [nn.Linear(4, 6, bias=False), NormAct(6), nn.Linear(6, 6, bias=False), NormAct(6), nn.Linear(6, 3)]
    return nn.Sequential(*layers)


def dense():
    """Values that cross several layers, a list, a tuple, two BatchNorms in a row, one at the input, one at the end."""
    norms = {name: nn.BatchNorm1d(n) for name, n in {"first": 4, "second": 4, "third": 8, "last": 3}.items()}
    others = {"wide": nn.Linear(4, 8), "out": nn.Linear(20, 3, bias=False), "scale": nn.Parameter(torch.rand(4))}
    module = with_random_affine_parts(Does(crossing, **norms, **others))
    module.first.requires_grad_(False)  # another BatchNorm takes its gradients away, and zeros compare badly
    return module


def crossing(m, x):
    features = [x]
    y = m.second(m.first(x))
    features.append(y * m.scale)
    a, b = m.wide(y).chunk(2, dim=1)
    z = m.third(torch.cat([a * b, y.tanh() * (x[:, :1] > -1)], 1))
    features += [z, y]
    return {"out": m.last(m.out(torch.cat(features, dim=1))), "features": (y, [z.sum(1)])}


def of_features(out):
    first, (second,) = out["features"]
    return out["out"].exp().std() + first.square().prod(1).std() + second.exp().mean()


def across(outputs):
    return outputs.logsumexp((0, 1))


POSITIONS, VOLUMES = (ROWS, 4, 3), (ROWS, 4, 2, 3, 2)
CASES = {  # what is chunked, how often, the loss, the shape of its input; whether that gets a gradient
    "a cumulative mean": (lambda: sequential(momentum=None), 3),
    "no affine part": (lambda: sequential(affine=False), 3),
    "no running statistics": (lambda: sequential(track_running_stats=False), 3),
    "another eps": (lambda: sequential(eps=1e-2), 3),
    "positions": (
        lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(12, 3)), 1, cross_entropy, POSITIONS
    ),
    "volumes": (lambda: nn.Sequential(nn.BatchNorm3d(4), nn.Flatten(), nn.Linear(48, 3)), 1, cross_entropy, VOLUMES),
    "a residual network": (residual_network, 1, cross_entropy, (ROWS, 3, 32, 32)),
    "a layer called twice": (lambda: parts(lambda m, x: m.bn(m.linear(m.bn(m.linear(x)).tanh()))), 2),
    "two layers on one value": (
        lambda: parts(lambda m, x: m.bn(y := m.linear(x)) * m.other(y), other=nn.BatchNorm1d(4)), 2,
    ),
    "forwards of their own": (own_forwards, 2),
    "no_grad around a part": (lambda: parts(detached), 1),
    "unused outputs": (
        lambda: with_random_affine_parts(parts(two_heads, other=sequential(), unused=nn.BatchNorm1d(4))),
        1, lambda outputs: cross_entropy(outputs[0]),
    ),
    "frozen first layers": (lambda: partly_frozen("first"), 1, cross_entropy, (ROWS, 4), False),
    "all frozen": (lambda: partly_frozen("all"), 1),
    "a BatchNorm in eval mode": (lambda: partly_frozen("eval"), 1, cross_entropy, (ROWS, 4), False),
    "a frozen affine part": (lambda: partly_frozen("affine"), 1, cross_entropy, (ROWS, 4), False),
    "values across layers": (dense, 1, of_features),
    "a buffer moved between layers": (lambda: parts(moves_a_buffer, average=torch.zeros(4)), 1, across, (20, 4), False),
    "code that looks at values, in modules": (lambda: around(anything), 2),
}  # fmt: skip


@pytest.mark.parametrize("options", [{"keep": 2, "size": 1}, {"offload": True, "size": 8}], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_batch_norm_in_every_place(name, options):
    make, passes, loss, shape, grad = (*CASES[name], *(cross_entropy, (ROWS, 4), True)[len(CASES[name]) - 2 :])
    x = torch.randn(shape, requires_grad=grad)
    assert_large_batchs(make(), loss, x, passes=passes, verify="moved" not in name, **options)


@pytest.mark.parametrize("offset", [0, 300])
def test_in_float32_it_rounds_no_more_than_the_large_batch_does(offset):
    module, x = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)), torch.randn(ROWS, 4) + offset
    small = chunked(copy.deepcopy(module).float(), 5, batch_norm="exact")
    whole = copy.deepcopy(module).float()
    for m in (module, whole, small):
        cross_entropy(m(x.to(next(m.parameters()).dtype))).backward()
    error, rounding = (relative_error(gradients(m), gradients(module)) for m in (small, whole))
    assert error <= max(2 * rounding, FLOAT32)


def test_a_coin_is_tossed_once_per_forward_pass():
    module = parts(lambda m, x: x if random.random() < 0.5 else m.linear(m.bn(x)) + x)
    for seed in range(4):
        whole, x, found = copy.deepcopy(module), torch.randn(ROWS, 4), []
        for m in (whole, chunked(copy.deepcopy(module), 5, batch_norm="exact")):
            random.seed(seed)
            found.append(m(x))
        assert relative_error(found[1:], found[:1]) <= EXACT


def test_dropout_is_replayed():
    """Of the outputs it is known what was kept."""
    module, x = with_random_affine_parts(nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5))), torch.randn(ROWS, 4)
    wanted = [x.requires_grad_(), *module.parameters()]
    outputs = chunked(module, 5, batch_norm="exact")(x)
    whole = module[0](x) * 2 * (outputs != 0)
    assert relative_error([outputs], [whole]) <= EXACT
    assert relative_error(*(torch.autograd.grad(y.exp().sum(), wanted) for y in (outputs, whole))) <= EXACT


def test_without_gradients_the_statistics_still_move():
    module, x = sequential(), torch.randn(ROWS, 4)
    small = chunked(copy.deepcopy(module), 5, batch_norm="exact")
    for training in (True, False):
        with torch.set_grad_enabled(not training):
            assert relative_error([small.train(training)(x)], [module.train(training)(x)]) <= EXACT
        assert relative_error(small.buffers(), module.buffers()) <= EXACT


def peeking(peek):
    return lambda m, x: m.out(y * 2 if peek(y := m.bn(x)) else y)


def edits(m, x):
    y = m.linear(x)
    z = m.bn(y.tanh())
    y.relu_()
    return y + z


CUT, EDITED = r"(?s)Does can\'t be cut at its BatchNorm", "(?s)edited in place across a BatchNorm layer"
UNCUT = {
    "a value": (peeking(lambda y: y.sum() > 0), CUT),
    "a size": (peeking(lambda y: len(y) > 3), CUT),
    "an int": (peeking(lambda y: int(y[0, 0])), CUT),
    "an edit in place": (edits, EDITED),
}


@pytest.mark.parametrize(("run", "message"), UNCUT.values(), ids=UNCUT)
def test_what_cannot_be_cut_is_an_error_that_names_the_line(run, message):
    with pytest.raises(ValueError, match=rf'{message}.*test_exact_batch_norm.py", line \d+'):
        chunked(parts(run), 5, batch_norm="exact")(torch.randn(ROWS, 4))


def test_activations_inside_segments_are_not_kept():
    """What is kept per row: what each BatchNorm normalises, nothing else."""
    inner = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.Linear(6, 64), nn.Tanh()]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        chunked(nn.Sequential(*inner), 5, batch_norm="exact")(torch.randn(ROWS, 4))
    per_row = {t.data_ptr(): t.numel() for t in kept if t.dim() == 2 and t.shape[0] in (4, 5)}  # not parameters
    assert sum(per_row.values()) == ROWS * (4 + 6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("offload", [False, True])
def test_on_a_gpu_activations_may_wait_in_host_memory(offload):
    layers = [nn.Conv2d(2, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3, bias=False)]
    module, peaks = nn.Sequential(*layers, nn.BatchNorm2d(4), nn.Flatten()).cuda(), []
    small = chunked(copy.deepcopy(module), 16, batch_norm="exact", offload=offload)
    x = torch.randn(512, 2, 12, 12, device="cuda")
    for m in (module, small):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        across(m(x)).backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert relative_error(gradients(small), gradients(module)) <= EXACT
    assert relative_error(small.buffers(), module.buffers()) <= EXACT
    assert not offload or peaks[1] < peaks[0] / 2
