"""A chunked module gives the large batch's outputs and gradients, whatever the loss looks across."""

import copy
import dataclasses
import io
import random
import runpy
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gradaccum.torch import chunked
from tests.reference import FLOAT32, FLOAT64, relative_error
from tests.torch.chunking.problems import assert_exact, assert_same, contrastive, encoder, frozen, gradients, seeded

ROWS, SIZES = 23, [4, 4, 4, 4, 4, 3]


def dice(outputs, targets):
    p = outputs.softmax(1)[:, 0]
    return 1 - 2 * (p * targets).sum() / (p.sum() + targets.sum())


class TwoTowers(nn.Module):
    def __init__(self, wrap=lambda tower: tower):
        super().__init__()
        torch.manual_seed(1)
        self.images, self.texts = wrap(encoder()), wrap(encoder())
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, x, t):
        return contrastive(self.images(x), self.texts(t), self.temperature)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(1, 12), size=st.integers(1, 13), keep=st.integers(0, 5), seed=st.integers(0, 99))
def test_any_rows_in_any_sizes(rows, size, keep, seed):
    x, t = torch.randn(2, rows, 5, generator=torch.Generator().manual_seed(seed))
    whole, small = TwoTowers(), TwoTowers(lambda tower: chunked(tower, size, keep=keep, verify=False))
    for model in (whole, small):
        (model(x, t) + model.images(x).logsumexp((0, 1)) + model.texts(t).exp().sum()).backward()
    for one, other in zip(gradients(small), gradients(whole), strict=True):
        assert (one - other).abs().max() <= FLOAT64 * max(1.0, other.abs().max())  # one row's contrast has gradient 0


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.one, self.other = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, x):
        y = self.body(x).tanh()
        return {"one": self.one(y), "other": self.other(y), "features": y}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward, self.outward = nn.Linear(5, 5), nn.Linear(5, 5)
        self.outward.weight = self.inward.weight

    def forward(self, x):
        return self.outward(self.inward(x).tanh())


class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(5, 3)

    def forward(self, x, factor):
        return super().forward(x) * torch.from_numpy(factor)[:, None]


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("center", torch.zeros(3))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf, 1 / 3]))

    def forward(self, x):
        y = self.linear(x)
        outputs = torch.stack([y, y.tanh() + self.center], 1)
        if self.training:
            self.calls += 1
            self.center = self.center * 0.9 + 0.1 * y.detach().mean(0)
        return outputs


def penalty(m, x):
    (slope,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean() + slope.std()


def of_a_recurrence(m, x, h, c):
    out, (h, c) = m(x, (h, c))
    return out.std() + h.square().mean().sqrt() + c.prod(0).logsumexp((0, 1))


def std(m, *inputs):
    return m(*inputs).std()


def spectral(of):
    return lambda: nn.Sequential(of(nn.Linear(5, 3)), nn.Tanh())


ROWS_SECOND = {"batch_dims": (0, (1, 1)), "out_dims": (0, (1, 1))}
CASES = {  # what is chunked, the loss, the shapes of its inputs, options
    "dice": (encoder, lambda m, x: dice(m(x), torch.linspace(0, 1, ROWS)), None, {}),
    "triplet": (encoder, lambda m, x: F.triplet_margin_loss((y := m(x)).exp(), y.roll(1, 0), y.roll(2, 0)), None, {}),
    "batch statistics": (encoder, lambda m, x: ((y := m(x)).mean(0) / y.std(0)).sum() + y.std(0).prod(), None, {}),
    "all pairs": (encoder, lambda m, x: torch.logsumexp((y := m(x)) @ y.T, dim=(0, 1)), None, {}),
    "called twice": (encoder, lambda m, x: (m(x) @ m(x[:9].detach().cos()).T).logsumexp((0, 1)), None, {}),
    "inside of a checkpoint": (encoder, lambda m, x: checkpoint(m, x, use_reentrant=False).std(), None, {}),
    "a gradient penalty": (encoder, penalty, None, {}),
    "unused outputs": (TwoHeads, lambda m, x: m(x)["one"].std(), None, {}),
    "tied parameters": (Tied, std, None, {}),
    "a frozen layer": (lambda: frozen(module := encoder(), module[0]), std, None, {}),
    "inputs alone": (lambda: frozen(encoder()), std, None, {}),
    "inside of another": (lambda: nn.Sequential(chunked(encoder(), 2, keep=1), nn.Linear(4, 4)), std, None, {}),
    "arrays": (Scaled, lambda m, x: m(x, np.linspace(0, 1, ROWS)).std(), None, {}),
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
    # These move buffers, once per forward pass.
    "moving averages": (Buffers, std, None, {}),
    "power iterations": (spectral(nn.utils.parametrizations.spectral_norm), std, None, {}),
    "power iterations in hooks": (spectral(nn.utils.spectral_norm), std, None, {}),
}  # fmt: skip


@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.spectral_norm.*deprecated:FutureWarning")
def test_any_loss_has_the_large_batchs_gradients_of_parameters_and_inputs(name, keep):
    make, loss, shapes, options = CASES[name]
    first, *others = shapes or [(ROWS, 5)]
    inputs = [torch.randn(first, requires_grad=True), *map(torch.randn, others)]
    assert_exact(make(), loss, *inputs, keep=keep, **options)


def test_float32_gradients_are_the_large_batchs():
    torch.set_default_dtype(torch.float32)
    x, targets = torch.randn(ROWS, 5), torch.rand(ROWS).round()
    assert_exact(encoder(), lambda m, x: dice(m(x), targets), x, tolerance=FLOAT32)


@pytest.mark.parametrize("keep", [0, 2])
def test_buffers_stay_the_same_tensors_and_are_not_moved_by_the_recomputation(keep):
    small = chunked(Buffers(), 4, keep=keep)
    tensors = dict(small.named_buffers())
    loss = small(torch.randn(ROWS, 5)).std()
    after = [buffer.clone() for buffer in small.buffers()]
    loss.backward()
    assert all(tensors[name] is buffer for name, buffer in small.named_buffers())
    assert all(torch.equal(a, b) for a, b in zip(after, small.buffers(), strict=True))
    assert small.calls == 1


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass
class Result:
    pair: Pair
    extra: dict


class Nested(nn.Module):
    """Several inputs, shared ones, non-tensors; outputs in every nesting, some of them integers, names, None."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 3), nn.Linear(4, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, batch, scale, *, mask, table, power=1, name="x"):
        a, b = self.a(batch["a"]), self.b(batch["more"][0])
        a = torch.where(mask[:, None], a, 0.0) * scale + table.sum()
        return Result(
            Pair(a**power, b), {"index": a.argmax(1), "name": name, "none": None, "list": [a * b, (b.sum(1),)]}
        )


@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("grad", [False, True])
def test_outputs_in_any_nesting_with_shared_arguments(grad, keep):
    module = Nested()
    small = chunked(copy.deepcopy(module), 4, batch_dims={"table": None}, keep=keep)
    every = [torch.randn(shape).requires_grad_(grad) for shape in [(ROWS, 5), (ROWS, 4), (), (6, 2)]]
    mask, found = torch.rand(ROWS) > 0.3, []
    for m in (module, small):
        for x in every:
            x.grad = None
        out = m({"a": every[0], "more": [every[1]]}, every[2], mask=mask, table=every[3], power=2, name="n")
        assert (type(out), type(out.pair), type(out.extra["list"][1])) == (Result, Pair, tuple)
        assert (out.extra["name"], out.extra["none"], out.extra["index"].dtype) == ("n", None, torch.int64)
        # out.pair.second is not used: an output without a gradient
        loss = out.pair.first.std() + out.extra["list"][0].logsumexp((0, 1)) + out.extra["list"][1][0].var()
        loss.backward()
        found.append([loss.detach(), out.extra["index"], *gradients(m), *(x.grad for x in every)])
    assert_same(found[1], found[0])


class FirstOfAll(nn.Module):
    """Of a container with any number of tensors, the first one; what else it is called with counts as well."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, batch, *others):
        first = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
        return self.linear(first) * (1 + len(batch) + len(others))


@pytest.mark.parametrize("options", [{}, {"keep": 1}, {"batch_norm": "exact"}])
@pytest.mark.parametrize(
    "nest",
    [
        lambda a, b: [{"x": a}],
        lambda a, b: [[a]],
        lambda a, b: [(a,)],
        lambda a, b: [[a, b], ()],
        lambda a, b: [[a, b], {}],
        lambda a, b: [{"x": a, "y": b}, []],
        lambda a, b: [[a], b],
        lambda a, b: [{"x": a}, None, 2.0],
    ],
)
def test_containers_with_as_many_tensors_as_there_are_arguments_stay_containers(nest, options):
    module = FirstOfAll().double()
    if options.get("batch_norm"):
        module.linear = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    small = chunked(copy.deepcopy(module), 4, verify=False, **options)
    arguments, found = nest(*torch.randn(2, ROWS, 5).double()), []
    for m in (module, small):
        outputs = m(*arguments)
        outputs.std().backward()
        found.append([outputs.detach(), *gradients(m)])
    assert_same(found[1], found[0])


class Noisy(nn.Module):
    """Draws from every generator there is."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(5, 6), nn.Dropout(0.4)

    def forward(self, x):
        factor = random.random() + np.random.rand()  # noqa: NPY002
        return self.dropout(self.linear(x) * factor) + torch.randn(6)


class Fickle(Noisy):
    """Draws from Python's and NumPy's generators for some rows only."""

    def forward(self, x):
        return super().forward(x) if x[0, 0] > 0 else self.dropout(self.linear(x))


class Rare(Noisy):
    """Draws from any generator for some rows only."""

    def forward(self, x):
        return super().forward(x) if x[0, 0] > 0 else self.linear(x)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.first, self.second, self.use_reentrant = nn.Linear(5, 8), nn.Linear(8, 3), use_reentrant

    def forward(self, x):
        y = self.first(x)
        return checkpoint(lambda y: F.dropout(self.second(y.tanh()), 0.2), y, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize(
    ("make", "drawing"),
    [
        (Noisy, range(6)), (Fickle, [0, 3]), (Fickle, [2, 3]), (Fickle, []), (Rare, [0, 3]), (Rare, [2, 3]),
        (lambda: Checkpointed(False), []), (lambda: Checkpointed(True), []),
    ],
)  # fmt: skip
def test_random_numbers_are_replayed_and_the_recomputation_draws_none(make, drawing, keep):
    module, x = make(), torch.randn(ROWS, 5)
    x[::4, 0] = torch.tensor([1.0 if index in drawing else -1.0 for index in range(6)])
    small = chunked(copy.deepcopy(module), 4, keep=keep, verify=make not in (Fickle, Rare))  # these ask their first row
    outputs, drawn = [], []
    for forward in (lambda x: torch.cat([module(rows) for rows in x.split(SIZES)]), small):
        seeded()
        outputs.append(forward(x))
        outputs[-1].std().backward()
        drawn.append([*torch.rand(2).tolist(), random.random(), np.random.rand()])  # noqa: NPY002
    assert torch.equal(*outputs)
    assert drawn[0] == drawn[1]
    assert relative_error(gradients(small), gradients(module)) <= FLOAT64


@pytest.mark.parametrize(("keep", "passes"), [(0, 12), (1, 11), (4, 8), (6, 6), (99, 6)])
def test_micro_batches_that_are_kept_are_not_recomputed(keep, passes):
    calls, module = [], encoder()
    module.register_forward_hook(lambda *_: calls.append(1))
    chunked(module, 4, keep=keep, verify=False)(torch.randn(ROWS, 5)).std().backward()  # 6 micro-batches
    assert len(calls) == passes


@pytest.mark.parametrize("mode", ["no_grad", "inference", "eval", "frozen"])
def test_without_gradients_it_runs_each_micro_batch_once(mode):
    calls, module, x = [], encoder(), torch.randn(ROWS, 5)
    expected = module(x)
    module.register_forward_hook(lambda *_: calls.append(1))
    small = chunked(module, 4, verify=False).train(mode != "eval").requires_grad_(mode != "frozen")
    with {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(mode, torch.enable_grad)():
        actual = small(x)
    assert actual.requires_grad == (mode == "eval")
    assert len(calls) == 6
    assert relative_error([actual], [expected]) <= FLOAT64


@pytest.mark.parametrize("keep", [0, 1])
def test_autocast_is_the_same_in_both_passes(keep):
    torch.set_default_dtype(torch.float32)
    module, x = encoder(), torch.randn(ROWS, 5)
    seen = []
    module[0].register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    reference = copy.deepcopy(module)
    small = chunked(module, 4, keep=keep, verify=False)
    with torch.autocast("cpu", torch.bfloat16):
        expected = reference(x)
        actual = small(x)
        assert actual.dtype == torch.bfloat16
        assert torch.equal(actual, expected)
        # A half-precision copy of a weight made by the first pass would hide the weight from this one.
        losses = [
            out.float().std() + m[3](torch.ones(1, 8)).float().sum()
            for out, m in [(actual, module), (expected, reference)]
        ]
    for loss in losses:
        loss.backward()  # outside of autocast
    assert set(seen) == {torch.bfloat16}
    assert relative_error(gradients(small), gradients(reference)) <= 0.02
    assert all(p.grad is not None for p in small.parameters())


def test_bfloat16_gradients_are_summed_in_float32():
    torch.set_default_dtype(torch.float32)
    module = nn.Linear(3, 2, bias=False).bfloat16()
    x = torch.ones(512, 3, dtype=torch.bfloat16)
    chunked(module, 1)(x).sum().backward()
    assert module.weight.grad.dtype == torch.bfloat16
    assert torch.equal(module.weight.grad, torch.full((2, 3), 512.0, dtype=torch.bfloat16))  # in bfloat16: 256


def test_two_encoders_that_share_weights_get_their_gradients_once():
    x, t = torch.randn(2, ROWS, 5)
    found = []
    for wrap in (lambda m: m, lambda m: chunked(m, 4)):
        torch.manual_seed(5)
        shared, count = nn.Linear(5, 6), []
        one, other = nn.Sequential(shared, nn.Tanh(), nn.Linear(6, 4)), nn.Sequential(shared, nn.Linear(6, 4))
        shared.weight.register_post_accumulate_grad_hook(lambda p, count=count: count.append(1))
        contrastive(wrap(one)(x), wrap(other)(t), torch.tensor(0.3)).backward()
        assert len(count) == 1  # ready once, as DDP needs it
        found.append(gradients(one, other))
    assert relative_error(*found) <= FLOAT64


def test_autograd_grad_of_some_parameters_touches_no_grad_field():
    module, x = encoder(), torch.randn(ROWS, 5, requires_grad=True)
    wanted = [module[0].weight, x]
    expected = torch.autograd.grad(module(x).std(), wanted)
    actual = torch.autograd.grad(chunked(module, 4)(x).std(), wanted)
    assert relative_error(actual, expected) <= FLOAT64
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("options", [{"keep": 1}, {"batch_norm": "exact"}])
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


def test_parameters_and_state_dict_keys_are_the_modules_own(tmp_path):
    module = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    small = chunked(module, 4)
    assert [name for name, _ in small.named_parameters()] == [name for name, _ in module.named_parameters()]
    assert all(a is b for a, b in zip(small.parameters(), module.parameters(), strict=True))
    assert list(small.state_dict()) == list(module.state_dict())
    parent = nn.ModuleDict({"tower": small, "head": nn.Linear(3, 1)})
    plain = nn.ModuleDict({"tower": copy.deepcopy(module), "head": nn.Linear(3, 1)})
    assert list(parent.state_dict()) == list(plain.state_dict())
    parent.load_state_dict(plain.state_dict())
    small.load_state_dict(plain["tower"].state_dict())
    assert relative_error(parent.parameters(), plain.parameters()) == 0
    with pytest.raises(RuntimeError, match="Missing key"):
        parent.load_state_dict({})


def test_modes_attributes_conversion_copying_and_pickling():
    class Named(nn.Sequential):
        width = 3

    small = chunked(Named(nn.Linear(5, 3), nn.Dropout(0.5)), 4)
    assert small.width == 3
    assert isinstance(small.get_submodule("0"), nn.Linear)
    with pytest.raises(AttributeError, match="nothing"):
        small.nothing  # noqa: B018
    small.width, small.micro_batch_size = 5, 3
    assert (small.module.width, small.micro_batch_size, hasattr(small.module, "micro_batch_size")) == (5, 3, False)
    del small.width
    assert small.width == 3
    small.eval()
    assert (small.training, small.module.training, small.module[1].training) == (False, False, False)
    assert nn.Sequential(small).train()[0].module[1].training
    small.float()
    assert small.module[0].weight.dtype == torch.float32
    other = copy.deepcopy(small).double()
    assert small.module[0].weight.dtype == torch.float32
    assert next(other.module.parameters()) is next(other.parameters())
    other(torch.randn(9, 5)).sum().backward()
    assert other.module[0].weight.grad is not None
    stored = io.BytesIO()
    torch.save(chunked(encoder(), 4), stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    loaded(torch.randn(9, 5)).sum().backward()
    assert "micro_batch_size=4" in repr(loaded)


def test_it_is_indexed_counted_and_iterated_as_its_module():
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    small = chunked(model, 2)
    assert (small[0], len(small), list(small), model[1] in small) == (model[0], 2, list(model), True)
    names = nn.ModuleDict({"first": nn.Linear(4, 3)})
    assert list(chunked(names, 2)) == ["first"]
    assert chunked(names, 2)["first"] is names["first"]
    plain = chunked(nn.Linear(4, 3), 2)
    assert plain  # nothing that is empty
    for look, message in ((lambda m: m[0], "not subscriptable"), (list, "not iterable"), (len, r"has no len")):
        with pytest.raises(TypeError, match=f"'Linear'.*{message}"):
            look(plain)


SAVED_BY_0_1 = Path(__file__).parents[1] / "data" / "chunked_0_1.pt"
"""`nn.ModuleDict(plain=chunked(linear, norm, linear; 2, keep=1, "pooled"), exact=chunked(linear, norm; 3, "exact"))`,
after a forward pass over 8 rows of 3 numbers."""


def test_a_chunked_model_saved_by_version_0_1_loads_and_works():
    model = torch.load(SAVED_BY_0_1, weights_only=False)
    assert all(isinstance(part, chunked) for part in model.values())
    assert (model["plain"].micro_batch_size, model["plain"].keep) == (2, 1)
    model.eval()
    whole = copy.deepcopy(model)
    x = torch.randn(8, 3, dtype=torch.float32)
    model["exact"](model["plain"](x)).logsumexp((0, 1)).backward()
    whole["exact"].module(whole["plain"].module(x)).logsumexp((0, 1)).backward()
    assert relative_error(gradients(model), gradients(whole)) <= FLOAT32
    model.train()
    assert model["exact"](model["plain"](x)).shape == (8, 2)
    assert next(iter(model.state_dict())) == "plain.0.weight"


# Memory.


def live_bytes(module, x):
    """The most bytes that graphs hold at once between forward and backward, but for parameters and inputs."""
    held = {"now": 0, "most": 0}

    class Held:
        def __init__(self, tensor):
            self.tensor = tensor
            held["now"] += tensor.nbytes
            held["most"] = max(held["most"], held["now"])

        def __del__(self):
            held["now"] -= self.tensor.nbytes

    known = {t.untyped_storage().data_ptr() for t in (x, *module.parameters())}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t if t.untyped_storage().data_ptr() in known else Held(t),
        lambda t: t.tensor if isinstance(t, Held) else t,
    ):
        module(x).std().backward()
    return held["most"]


def test_activation_memory_does_not_grow_with_the_batch():
    module = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    inside = [live_bytes(chunked(module, 16), torch.randn(rows, 5)) - rows * 8 * 4 for rows in (64, 1024)]
    assert inside[1] <= inside[0]
    assert live_bytes(module, torch.randn(1024, 5)) > 15 * live_bytes(chunked(module, 16), torch.randn(1024, 5))


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
