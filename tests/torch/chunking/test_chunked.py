"""A chunked module gives the large batch's outputs and gradients, whatever the loss looks across."""

import copy
import io
import random
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gradaccum.errors import NotEquivalentError
from gradaccum.torch import TrainStep, chunked
from tests.reference import FLOAT32, FLOAT64, relative_error
from tests.torch.chunking.problems import assert_exact, encoder, frozen, gradients, loss_of, seeded
from tests.torch.problems import Does, Held

ROWS, SIZES = 23, [4, 4, 4, 4, 4, 3]
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def dice(outputs):
    p, targets = outputs.softmax(1)[:, 0], torch.linspace(0, 1, ROWS)
    return 1 - 2 * (p * targets).sum() / (p.sum() + targets.sum())


def two_heads(m, x):
    y = m.body(x).tanh()
    return {"one": m.one(y), "other": [(m.other(y), y)], "index": y.argmax(1), "name": "n", "none": None}


def of_one_head(m, x):
    out = m(x)
    assert (out["name"], out["none"], out["index"].dtype, type(out["other"][0])) == ("n", None, torch.int64, tuple)
    return out["one"].std(), out["index"]


def tied():
    module = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
    module[2].weight = module[0].weight
    return module


def averages(m, x):
    y = m.linear(x)
    outputs = torch.stack([y, y.tanh() + m.center], 1)
    if m.training:
        m.calls += 1
        m.center = m.center * 0.9 + 0.1 * y.detach().mean(0)
    return outputs


def with_buffers():
    buffers = {"calls": torch.tensor(0), "center": torch.zeros(3), "mask": torch.tensor([0.0, -torch.inf, 1 / 3])}
    return Does(averages, linear=nn.Linear(5, 3), **buffers)


def penalty(m, x):
    (slope,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean() + slope.std()


def of_a_recurrence(m, x, h, c):
    out, (h, c) = m(x, (h, c))
    return out.std() + h.square().mean().sqrt() + c.prod(0).logsumexp((0, 1))


def inner_loop(around):
    """A step of an inner loop, differentiated through, as meta-learning and hypernetworks have it."""

    def loss(m, x):
        called = around(m)
        own = dict(called.named_parameters())
        first = torch.autograd.grad(loss_of(functional_call(called, own, (x,))), list(own.values()), create_graph=True)
        derived = {name: p - 0.1 * step for (name, p), step in zip(own.items(), first, strict=True)}
        return loss_of(functional_call(called, derived, (x,)))

    return loss


def of_others(m, x, weight):
    """With other buffers, and with parameters that are not the module's."""
    other = {"weight": weight, "bias": torch.linspace(0, 1, 3), "shift": torch.linspace(1, 3, 3)}
    return loss_of(functional_call(m, other, (x,)))


def shifted():
    run = lambda m, x: (F.linear(x, m.weight, m.bias) + m.shift).tanh()  # noqa: E731
    return Does(run, weight=nn.Parameter(torch.ones(3, 5)), bias=nn.Parameter(torch.ones(3)), shift=torch.ones(3))


def std(m, *inputs):
    return m(*inputs).std()


def spectral(of):
    return lambda: nn.Sequential(of(nn.Linear(5, 3)), nn.Tanh())


HEADS = {"body": (5, 6), "one": (6, 3), "other": (6, 2), "unused": (2, 2)}
ROWS_SECOND = {"batch_dims": (0, (1, 1)), "out_dims": (0, (1, 1))}
CASES = {  # what is chunked, the loss, the shapes of its inputs, options
    "dice in float32": (encoder, lambda m, x: dice(m(x)), None, {"tolerance": FLOAT32}),
    "inside of a checkpoint": (encoder, lambda m, x: checkpoint(m, x, use_reentrant=False).std(), None, {}),
    "a gradient penalty": (encoder, penalty, None, {}),
    "unused outputs": (
        lambda: Does(two_heads, **{name: nn.Linear(*sizes) for name, sizes in HEADS.items()}),
        of_one_head, None, {},
    ),
    "tied parameters": (tied, std, None, {}),
    "a frozen layer": (lambda: frozen(module := encoder(), module[0]), std, None, {}),
    "inputs alone": (lambda: frozen(encoder()), std, None, {}),
    "inside of another": (lambda: nn.Sequential(chunked(encoder(), 2, keep=1), nn.Linear(4, 4)), std, None, {}),
    "arrays": (
        lambda: Does(lambda m, x, factor: m.linear(x) * torch.from_numpy(factor)[:, None], linear=nn.Linear(5, 3)),
        lambda m, x: m(x, np.linspace(0, 1, ROWS)).std(), None, {},
    ),
    "rows second": (
        lambda: nn.LSTM(5, 3, num_layers=2), of_a_recurrence, [(6, ROWS, 5), (2, ROWS, 3), (2, ROWS, 3)],
        {"batch_dims": 1},
    ),
    "rows second in some": (
        lambda: nn.LSTM(5, 3, batch_first=True), of_a_recurrence, [(ROWS, 6, 5), (1, ROWS, 3), (1, ROWS, 3)],
        ROWS_SECOND,
    ),
    "sparse gradients": (
        lambda: nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 3)),
        lambda m, x: m((x[:, 0].detach() * 3).long() % 10).std(), None, {},
    ),
    "parameters derived from the module's own": (encoder, inner_loop(lambda m: m), None, {}),
    "parameters derived from its parent's": (
        encoder, inner_loop(lambda m: nn.Sequential(m, nn.BatchNorm1d(4).eval())), None, {},
    ),
    "parameters and buffers of others": (shifted, of_others, [(ROWS, 5), (3, 5)], {}),
    # These move buffers, once per forward pass.
    "moving averages": (with_buffers, std, None, {}),
    "power iterations": (spectral(nn.utils.parametrizations.spectral_norm), std, None, {}),
    "power iterations in hooks": (spectral(nn.utils.spectral_norm), std, None, {}),
}  # fmt: skip


@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.spectral_norm.*deprecated:FutureWarning")
def test_any_loss_has_the_large_batchs_gradients_of_parameters_and_inputs(name, keep):
    make, loss, shapes, options = CASES[name]
    if "float32" in name:
        torch.set_default_dtype(torch.float32)
    inputs = [torch.randn(shape, requires_grad="unused" not in name) for shape in shapes or [(ROWS, 5)]]
    assert_exact(make(), loss, *inputs, keep=keep, **options)


def first_of_all(m, batch, *others):
    """Of a container with any number of tensors, the first one; what else it is called with counts as well."""
    first = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return m.layers(first) * (1 + len(batch) + len(others))


CONTAINERS = {
    "dict": lambda a, b: [{"x": a}],
    "list": lambda a, b: [[a]],
    "tuple": lambda a, b: [(a,)],
    "list, ()": lambda a, b: [[a, b], ()],
    "list, {}": lambda a, b: [[a, b], {}],
    "dict, []": lambda a, b: [{"x": a, "y": b}, []],
    "list, tensor": lambda a, b: [[a], b],
    "dict, None, number": lambda a, b: [{"x": a}, None, 2.0],
}


@pytest.mark.parametrize("options", [{}, {"keep": 1}, {"batch_norm": "exact"}], ids=str)
@pytest.mark.parametrize("nest", CONTAINERS.values(), ids=CONTAINERS)
def test_containers_with_as_many_tensors_as_there_are_arguments_stay_containers(nest, options):
    norm = nn.BatchNorm1d(5) if "batch_norm" in options else nn.Identity()
    module = Does(first_of_all, layers=nn.Sequential(norm, nn.Linear(5, 3)))
    loss = lambda m, a, b: ((outputs := m(*nest(a, b))).std(), outputs)  # noqa: E731
    assert_exact(module, loss, *torch.randn(2, ROWS, 5), verify=False, **options)


def noise(m, x):
    """Draws from every generator there is."""
    factor = random.random() + np.random.rand()  # noqa: NPY002
    return m.dropout(m.linear(x) * factor) + torch.randn(6)


def noisy(otherwise=None):
    """For some rows only, if there is another way."""
    run = lambda m, x: noise(m, x) if otherwise is None or x[0, 0] > 0 else otherwise(m, x)  # noqa: E731
    return Does(run, linear=nn.Linear(5, 6), dropout=nn.Dropout(0.4))


def in_a_checkpoint(use_reentrant):
    def run(m, x):
        again = lambda y: F.dropout(m.second(y.tanh()), 0.2)  # noqa: E731
        return checkpoint(again, m.first(x), use_reentrant=use_reentrant)

    return Does(run, first=nn.Linear(5, 8), second=nn.Linear(8, 3))


FICKLE, RARE = lambda m, x: m.dropout(m.linear(x)), lambda m, x: m.linear(x)
DRAWS = {  # the module, and which of its micro-batches draw; None: all, from its first row on
    "every generator": (noisy, None),
    **{f"dropout, others in {n}": (lambda: noisy(FICKLE), n) for n in ((0, 3), (2, 3), ())},
    **{f"none, all in {n}": (lambda: noisy(RARE), n) for n in ((0, 3), (2, 3))},
    "a checkpoint": (lambda: in_a_checkpoint(False), None),
    "a reentrant checkpoint": (lambda: in_a_checkpoint(True), None),
}


@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("name", [*DRAWS, pytest.param("dropout on a GPU", marks=GPU)])
def test_random_numbers_are_replayed_and_the_recomputation_draws_none(name, keep):
    make, drawing = DRAWS.get(name, (lambda: nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5)).cuda(), None))
    module, x = make(), torch.randn(ROWS, 5)
    x[::4, 0] = torch.tensor([1.0 if drawing is None or index in drawing else -1.0 for index in range(6)])
    x = x.to(next(module.parameters()).device)
    small = chunked(copy.deepcopy(module), 4, keep=keep, verify=drawing is None)
    outputs, drawn = [], []
    for forward in (lambda x: torch.cat([module(rows) for rows in x.split(SIZES)]), small):
        seeded()
        outputs.append(forward(x))
        outputs[-1].std().backward()
        numbers = torch.rand(2, device=x.device).tolist()
        drawn.append([*numbers, random.random(), np.random.rand()])  # noqa: NPY002
    assert torch.equal(*outputs) or x.is_cuda
    assert drawn[0] == drawn[1]
    assert relative_error(gradients(small), gradients(module)) <= (1e-11 if x.is_cuda else FLOAT64)


PASSES = {  # the mode, how many micro-batches are kept, how many of the six run again; None: there is no gradient
    **{f"{keep} kept": ("train", keep, again) for keep, again in [(0, 6), (1, 5), (4, 2), (6, 0), (99, 0)]},
    "eval": ("eval", 0, 6),
    **{mode: (mode, 0, None) for mode in ("no_grad", "inference", "frozen")},
}


@pytest.mark.parametrize(("mode", "keep", "again"), PASSES.values(), ids=PASSES)
def test_each_micro_batch_runs_once_and_again_in_backward_if_it_is_not_kept(mode, keep, again):
    calls, module, x = [], encoder(), torch.randn(ROWS, 5)
    expected = module(x)
    module.register_forward_hook(lambda *_: calls.append(1))
    small = chunked(module, 4, keep=keep, verify=False).train(mode != "eval").requires_grad_(mode != "frozen")
    with {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(mode, torch.enable_grad)():
        actual = small(x)
    assert relative_error([actual], [expected]) <= FLOAT64
    assert (len(calls), actual.requires_grad) == (6, again is not None)
    if again is not None:
        actual.std().backward()
        assert len(calls) == 6 + again


AUTOCAST = {  # options, device, dtype, the largest error of gradients
    **{f"{keep} kept": ({"keep": keep}, "cpu", torch.bfloat16, 0.02) for keep in (0, 1)},
    "exact BatchNorm": ({"batch_norm": "exact"}, "cpu", torch.bfloat16, 0.05),
}


@pytest.mark.parametrize("name", [*AUTOCAST, pytest.param("float16 on a GPU", marks=GPU)])
def test_autocast_is_the_same_in_both_passes(name):
    options, device, dtype, tolerance = AUTOCAST.get(name, ({}, "cuda", torch.float16, 0.02))
    torch.set_default_dtype(torch.float32)
    exact = "batch_norm" in options
    norm = nn.BatchNorm1d(8) if exact else nn.LayerNorm(8)
    module = nn.Sequential(nn.Linear(5, 8, bias=not exact), norm, nn.Tanh(), nn.Linear(8, 4)).to(device)
    x, seen = torch.randn(ROWS, 5, device=device), []
    module[0].register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    reference = copy.deepcopy(module)
    small = chunked(module, 4, verify=False, **options)
    with torch.autocast(device, dtype):
        expected, actual = reference(x), small(x)
        assert actual.dtype == dtype
        assert torch.equal(actual, expected) or exact or device == "cuda"
        # A half-precision copy of a weight made by the first pass would hide the weight from this one.
        losses = [
            out.float().std() + m[3](torch.ones(1, 8, device=device)).float().sum()
            for out, m in [(actual, module), (expected, reference)]
        ]
    for loss in losses:
        loss.backward()  # outside of autocast
    assert set(seen) == {dtype}
    assert all(p.grad is not None for p in small.parameters())
    assert relative_error(gradients(small), gradients(reference)) <= tolerance


def test_bfloat16_gradients_are_summed_in_float32():
    torch.set_default_dtype(torch.float32)
    module = nn.Linear(3, 2, bias=False).bfloat16()
    chunked(module, 1)(torch.ones(512, 3, dtype=torch.bfloat16)).sum().backward()
    assert module.weight.grad.dtype == torch.bfloat16
    assert torch.equal(module.weight.grad, torch.full((2, 3), 512.0, dtype=torch.bfloat16))  # in bfloat16: 256


def test_autograd_grad_of_some_makes_these_gradients_alone():
    module, theta = encoder(), torch.ones(5, requires_grad=True)
    x = torch.randn(ROWS, 5, requires_grad=True)
    plus = Does(lambda m, x, shift: m.layers(x + shift), layers=module)
    wanted = [module[0].weight, x]
    expected = torch.autograd.grad(plus(x, theta * 2).std(), wanted)
    actual = torch.autograd.grad(chunked(plus, 4, batch_dims=(0, None))(x, theta * 2).std(), wanted)
    assert relative_error(actual, expected) <= FLOAT64
    assert all(p.grad is None for p in (*module.parameters(), theta, x))


@pytest.mark.parametrize("options", [{"keep": 1}, {"batch_norm": "exact"}], ids=str)
def test_backward_twice_and_freed_memory(options):
    module, x = nn.Sequential(nn.Linear(5, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh()), torch.randn(ROWS, 5)
    module.train("batch_norm" in options)
    small = chunked(copy.deepcopy(module), 4, **options)
    for m in (module, small):
        loss = m(x).logsumexp((0, 1))
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert relative_error(gradients(small), gradients(module)) <= (FLOAT64 if "keep" in options else 10 * FLOAT64)


# It is its module in every respect but forward.


class Named(nn.Sequential):
    width = 3


LOOKS = {
    "names": lambda m: [name for name, _ in m.named_parameters()],
    "parameters": lambda m: [*map(id, m.parameters())],
    "keys": lambda m: [*m.state_dict()],
    "keys in a parent": lambda m: [*nn.ModuleDict({"tower": m, "head": nn.Linear(3, 1)}).state_dict()],
    "attributes": lambda m: (m.width, setattr(m, "width", 5), m.width, delattr(m, "width"), m.width),
    "submodules": lambda m: (m.get_submodule("0"), m[0], [*m], len(m), m[1] in m),
    "modes": lambda m: [(m.train(mode).training, m[1].training) for mode in (False, True)],
    "modes in a parent": lambda m: [
        (nn.Sequential(m).train(mode)[0].training, m[1].training) for mode in (False, True)
    ],
    "conversion": lambda m: (m.float()[0].weight.dtype, copy.deepcopy(m).half()[0].weight.dtype, m[0].weight.dtype),
    "truth": lambda m: (bool(m), bool(Named())),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_it_is_its_module_in_every_respect_but_forward(look):
    module = Named(nn.Linear(5, 3), nn.BatchNorm1d(3))
    small = chunked(module, 4)
    assert (look(small), small.training) == (look(module), module.training)


def test_attributes_of_its_own_and_those_that_its_module_lacks():
    small, plain = chunked(nn.Sequential(nn.Linear(5, 3)), 4), chunked(nn.Linear(4, 3), 2)
    small.micro_batch_size, names = 3, nn.ModuleDict({"first": nn.Linear(4, 3)})
    assert (small.micro_batch_size, hasattr(small.module, "micro_batch_size"), bool(plain)) == (3, False, True)
    assert [*chunked(names, 2)] == ["first"]
    assert chunked(names, 2)["first"] is names["first"]
    with pytest.raises(AttributeError, match="nothing"):
        small.nothing  # noqa: B018
    for look, message in ((lambda m: m[0], "not subscriptable"), (list, "not iterable"), (len, r"has no len")):
        with pytest.raises(TypeError, match=f"'Linear'.*{message}"):
            look(plain)


def test_copies_pickles_and_state_dicts_are_those_of_a_module():
    stored, original = io.BytesIO(), chunked(encoder(), 4)
    torch.save(original, stored)
    stored.seek(0)
    loaded, other = torch.load(stored, weights_only=False), copy.deepcopy(original)
    assert "micro_batch_size=4" in repr(loaded)
    for one in (other, loaded):
        one(torch.randn(9, 5)).sum().backward()
        assert one.module[0].weight.grad is not None
        assert next(one.module.parameters()) is next(one.parameters()) is not next(original.parameters())
    parent, plain = nn.ModuleDict({"tower": original}), nn.ModuleDict({"tower": encoder()})
    parent.load_state_dict(plain.state_dict())
    assert relative_error(parent.parameters(), plain.parameters()) == 0
    original.load_state_dict(other.state_dict())
    assert relative_error(original.parameters(), other.parameters()) == 0
    with pytest.raises(RuntimeError, match="Missing key"):
        parent.load_state_dict({})


SAVED_BY_0_1 = Path(__file__).parents[1] / "data" / "chunked_0_1.pt"
"""`nn.ModuleDict(plain=chunked(linear, norm, linear; 2, keep=1, "pooled"), exact=chunked(linear, norm; 3, "exact"))`,
after a forward pass over 8 rows of 3 numbers."""


def test_a_chunked_model_saved_by_version_0_1_loads_and_works():
    model = torch.load(SAVED_BY_0_1, weights_only=False)
    assert all(isinstance(part, chunked) for part in model.values())
    assert (model["plain"].micro_batch_size, model["plain"].keep) == (2, 1)
    model.eval()
    whole, x = copy.deepcopy(model), torch.randn(8, 3, dtype=torch.float32)
    model["exact"](model["plain"](x)).logsumexp((0, 1)).backward()
    whole["exact"].module(whole["plain"].module(x)).logsumexp((0, 1)).backward()
    assert relative_error(gradients(model), gradients(whole)) <= FLOAT32
    model.train()
    assert model["exact"](model["plain"](x)).shape == (8, 2)
    assert next(iter(model.state_dict())) == "plain.0.weight"


# Memory.


def live_bytes(module, x):
    held = Held(x, *module.parameters())
    with held.saved():
        module(x).std().backward()
    return held.most


def test_activation_memory_does_not_grow_with_the_batch():
    module = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    inside = [live_bytes(chunked(module, 16), torch.randn(rows, 5)) - rows * 8 * 4 for rows in (64, 1024)]
    assert inside[1] <= inside[0]
    assert live_bytes(module, torch.randn(1024, 5)) > 15 * live_bytes(chunked(module, 16), torch.randn(1024, 5))


def each_row(layer):
    return Does(lambda m, x: torch.cat([m.layer(row[None]) for row in x]), layer=layer)


@pytest.mark.parametrize("trunk", [lambda layer: chunked(layer, 1), lambda layer: chunked(layer, 2), each_row])
def test_a_proof_around_it_assigns_no_random_numbers_to_rows_where_they_are_drawn_for_a_few_at_a_time(trunk, caplog):
    """It passes with dropout, without a word, and still sees a loss that micro-batches change."""
    model = nn.Sequential(trunk(nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.3), nn.Tanh())), nn.Linear(6, 2)).double()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    step = TrainStep(model, sgd, loss_fn=nn.MSELoss(), micro_batch_size=4)
    for rows in (2, 8, 8, 5, 9, 8, 8, 8):
        step(torch.randn(rows, 5).double(), torch.randn(rows, 2).double())
    assert caplog.messages == []
    wrong = TrainStep(model, sgd, loss_fn=lambda p, y: (p - y).mean(0).square().sum(), micro_batch_size=4)
    with pytest.raises(NotEquivalentError):
        wrong(torch.randn(8, 5).double(), torch.randn(8, 2).double())


def test_the_contrastive_example_follows_the_large_batch_where_naive_accumulation_does_not(tmp_path, capsys):
    pytest.importorskip("sklearn")
    main = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "contrastive.py"))["main"]
    picture = tmp_path / "picture.png"
    runs = main(["--quick", "--out", str(picture)])
    large, chunks, naive = (runs[kind] for kind in ("large batch", "chunked", "naive"))
    assert chunks.losses == pytest.approx(large.losses, rel=1e-10)
    assert (chunks.gradient - large.gradient).norm() <= 1e-12 * large.gradient.norm()
    way = (large.path[-1] - large.path[0]).norm()
    assert (chunks.path[-1] - large.path[-1]).norm() <= 1e-8 * way
    assert (naive.gradient - large.gradient).norm() > 1e-2 * large.gradient.norm()
    assert (naive.path[-1] - large.path[-1]).norm() > 1e-2 * way
    assert abs(naive.losses[-1] - large.losses[-1]) > 0.1
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "naive" in capsys.readouterr().out


def test_parameters_that_the_first_call_makes_are_warned_of(caplog):
    def run(m, x):
        if m.scale is None:
            m.scale = nn.Parameter(torch.ones(5))
        return x * m.scale

    small = chunked(nn.Sequential(nn.Linear(5, 5), Does(run, scale=None)), 4)
    for first in (True, False):
        caplog.clear()
        small(torch.randn(ROWS, 5)).std().backward()
        assert ("has made parameters in its forward pass" in caplog.text) == first
        assert (small[1].scale.grad is None) == first
