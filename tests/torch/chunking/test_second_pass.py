"""The second pass is the first one again, whatever has happened in between; and what comes after the first call."""

import copy
import random
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from gradaccum import NotEquivalentError
from gradaccum.torch import chunked
from tests.reference import FLOAT64, relative_error
from tests.torch.chunking.problems import assert_same, encoder, frozen, gradients, loss_of

ROWS, SIZE = 11, 4


class Heads(nn.Module):
    """Of which a call uses one."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(5, 3) for _ in range(2))

    def forward(self, x, head=0):
        return self.heads[head](x)


def test_hooks_on_parameters_see_the_finished_gradient_where_there_is_one():
    torch.manual_seed(0)
    whole = Heads()
    module = copy.deepcopy(whole)
    small, seen = chunked(module, SIZE), []
    x = torch.randn(ROWS, 5)
    for model in (whole, module):
        for index, parameter in enumerate(model.parameters()):
            parameter.register_hook(lambda g, index=index: seen.append(index) or g.clamp(-0.02, 0.02))
    for head in (0, 1, 1):
        counts = []
        for call in (whole, small):
            seen.clear()
            loss_of(call(x, head)).backward()
            counts.append(sorted(seen))
        assert counts == [[2 * head, 2 * head + 1]] * 2
        assert_same(gradients(module), gradients(whole))


class Adapter(nn.Linear):
    """A layer whose attributes say what it does, as adapters and schedules have it."""

    def __init__(self):
        super().__init__(5, 3)
        self.adapters = nn.ParameterDict({name: nn.Parameter(torch.randn(3, 5)) for name in "ab"})
        self.active, self.scale = "a", 1.0

    def forward(self, x):
        y = super().forward(x) + F.linear(x, self.adapters[self.active])
        return y * self.scale + (0.0 if self.training else x.sum(1, keepdim=True))


# What happens to a module before its forward pass, and between forward and backward.


def another_mode(module):
    yield
    module.eval()


def another_adapter(module):
    yield
    module.active, module.scale = "b", 3.0


def another_method(module):
    yield
    module.forward = lambda x: x[:, :3]


def a_hook_that_comes(module):
    yield
    module.register_forward_hook(lambda m, args, output: output * 2)


def a_hook_that_goes(module):
    handle = module.register_forward_hook(lambda m, args, output: output * 2)
    yield
    handle.remove()


@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("change", [another_mode, another_adapter, another_method, a_hook_that_comes, a_hook_that_goes])
def test_what_changes_the_module_between_forward_and_backward_does_not_reach_the_second_pass(change, keep):
    whole, x = Adapter(), torch.randn(ROWS, 5)
    module = copy.deepcopy(whole)
    small = chunked(module, SIZE, keep=keep)
    for m, inside in ((whole, whole), (small, module)):
        changes = change(inside)
        next(changes)
        loss = loss_of(m(x))
        next(changes, None)
        later = dict(vars(inside))
        loss.backward()
        assert vars(inside) == later
    assert_same(gradients(small), gradients(whole))


def test_layers_that_are_replaced_or_unfrozen_between_forward_and_backward():
    whole, x = encoder(), torch.randn(ROWS, 5)
    frozen(whole, whole[0])
    module, old = copy.deepcopy(whole), []
    for m, inside in ((whole, whole), (chunked(module, SIZE), module)):
        loss = loss_of(m(x))
        inside.requires_grad_(True)
        old.append(inside[3])
        inside[3] = nn.Linear(8, 4)
        loss.backward()
        assert all(p.grad is None for p in [*inside[0].parameters(), *inside[3].parameters()])
    assert_same(gradients(old[1]), gradients(old[0]))


def test_a_frozen_parameter_edited_in_between_is_an_error():
    module = encoder()
    loss = loss_of(chunked(frozen(module, module[0]), SIZE)(torch.randn(ROWS, 5)))
    with torch.no_grad():
        module[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"frozen parameter of shape \(8, 5\).*edited in place between forward and"):
        loss.backward()


@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("through", ["the module", "its parent"])
def test_functional_call_with_derived_parameters(through, keep):
    """A step of an inner loop, differentiated through, as meta-learning and hypernetworks have it."""
    module, x = nn.Sequential(encoder(), nn.BatchNorm1d(4).eval()), torch.randn(ROWS, 5)
    small = copy.deepcopy(module)
    small[0] = chunked(small[0], SIZE, keep=keep)
    found = []
    for m in (module, small):
        called = m[0] if through == "the module" else m
        own = dict(called.named_parameters())
        loss = loss_of(functional_call(called, own, (x,)))
        steps = torch.autograd.grad(loss, list(own.values()), create_graph=True)
        derived = {name: p - 0.1 * step for (name, p), step in zip(own.items(), steps, strict=True)}
        loss_of(functional_call(called, derived, (x,))).backward()
        found.append([p.grad for p in own.values()])
    assert relative_error(found[1], found[0]) <= FLOAT64


def test_functional_call_with_other_buffers_and_with_parameters_that_are_not_the_modules():
    class Shifted(nn.Linear):
        def __init__(self):
            super().__init__(5, 3)
            self.register_buffer("shift", torch.ones(3))

        def forward(self, x):
            return (super().forward(x) + self.shift).tanh()

    module, x, found = Shifted(), torch.randn(ROWS, 5), []
    other = {"weight": torch.randn(3, 5, requires_grad=True), "bias": torch.randn(3), "shift": torch.randn(3)}
    for m in (module, chunked(module, SIZE)):
        found += torch.autograd.grad(loss_of(functional_call(m, other, (x,))), other["weight"])
    assert relative_error(found[1:], found[:1]) <= FLOAT64


class Draws(nn.Module):
    """Draws from a generator of its own, or from one that it is given."""

    def __init__(self, draw, generator=None):
        super().__init__()
        self.linear, self.generator, self.draw = nn.Linear(5, 3), generator, draw

    def forward(self, x, generator=None):
        return self.linear(x) * self.draw(self.generator if generator is None else generator, x.shape[0])


def of_numpy(generator, rows):
    return torch.from_numpy(generator.random((rows, 3)))


GENERATORS = {
    "torch": (lambda: torch.Generator().manual_seed(0), lambda g, n: torch.rand(n, 3, generator=g)),
    "numpy": (lambda: np.random.default_rng(0), of_numpy),
    "numpy, the old one": (lambda: np.random.RandomState(0), lambda g, n: torch.from_numpy(g.rand(n, 3))),
    "numpy, Mersenne twister": (lambda: np.random.Generator(np.random.MT19937(0)), of_numpy),
    "python": (lambda: random.Random(0), lambda g, n: torch.tensor([[g.random()] * 3 for _ in range(n)])),
}


@pytest.mark.parametrize("where", ["an attribute", "an attribute of a chunked one inside", "an input"])
@pytest.mark.parametrize("make", GENERATORS)
def test_a_generator_of_the_users_draws_the_same_again(make, where):
    generator, draw = GENERATORS[make]
    generators, given = [generator(), generator()], where == "an input"
    whole, module = (Draws(draw, None if given else one) for one in generators)
    module.load_state_dict(whole.state_dict())
    nested = where == "an attribute of a chunked one inside"
    small, x = chunked(chunked(module, 2) if nested else module, SIZE), torch.randn(ROWS, 5)
    parts = x.split([2, 2, 2, 2, 2, 1] if nested else [4, 4, 3])
    loss_of(torch.cat([whole(rows, generators[0] if given else None) for rows in parts])).backward()
    loss_of(small(x, generators[1] if given else None)).backward()
    assert_same(gradients(module), gradients(whole))
    assert torch.equal(*(draw(one, 2) for one in generators))


def test_gradients_that_nobody_asked_for_are_not_made():
    module, theta = nn.Linear(5, 3), torch.ones(5, requires_grad=True)
    small = chunked(module, SIZE, batch_dims=(0, None))
    module.forward = lambda x, shift: F.linear(x + shift, module.weight, module.bias)
    loss = loss_of(small(torch.randn(ROWS, 5), theta * 2))
    torch.autograd.grad(loss, [module.weight])
    assert theta.grad is None


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("keep", [0, 1])
def test_hooks_see_the_finished_gradient_once_under_create_graph(keep, calls):
    whole = encoder()
    module, x = copy.deepcopy(whole), torch.randn(ROWS, 5)
    found = []
    for call, inside in ((whole, whole), (chunked(module, SIZE, keep=keep), module)):
        leaf, seen = x.clone().requires_grad_(), []
        rows = leaf * 1.0  # not a leaf, with a hook of its own
        for tensor in (rows, leaf, *inside.parameters()):
            tensor.register_hook(lambda g, seen=seen: seen.append(g.detach()) or g.clamp(-0.02, 0.05))
        loss = sum(loss_of(call(rows)) for _ in range(calls))
        wanted = [leaf, *inside.parameters()]
        first = torch.autograd.grad(loss, wanted, create_graph=True)
        assert len(seen) == 2 + len(list(inside.parameters()))
        (loss + sum(g.square().sum() for g in first)).backward()
        assert len(seen) == 2 * (2 + len(list(inside.parameters())))
        found.append([*first, *(t.grad for t in wanted)])
    assert relative_error(found[1], found[0]) <= FLOAT64


def normalised(gradient):
    return gradient / gradient.norm()


class Centre(nn.Module):
    def forward(self, h):
        return h - h.mean(0)


def on_activations(module):
    module[1].register_forward_hook(
        lambda m, args, output: output.register_hook(normalised) and None if output.requires_grad else None
    )


def by_a_backward_hook(module):
    module[1].register_full_backward_hook(lambda m, given, received: tuple(normalised(g) for g in given))


def by_an_object(module):
    class Hook:
        def __call__(self, m, args):
            return (args[0] - args[0].mean(0),)

    module[2].register_forward_pre_hook(Hook())


def of_all_modules(module):
    return nn.modules.module.register_module_forward_hook(
        lambda m, args, output: output - output.mean(0) if m is module[1] else None
    )


def in_place_of_a_layer(module):
    module[1] = Centre()


def in_place_of_forward(module):
    module[1].forward = lambda h: h - h.mean(0)


LATE = [on_activations, by_a_backward_hook, by_an_object, of_all_modules, in_place_of_a_layer, in_place_of_forward]


@pytest.mark.parametrize("late", LATE)
def test_what_is_added_after_the_first_call_is_proven_too(late):
    module, x = encoder(), torch.randn(ROWS, 5)
    small = chunked(module, SIZE)
    loss_of(small(x)).backward()
    handle = late(module)
    try:
        with pytest.raises(NotEquivalentError, match="Sequential is not per-row"):
            small(x)
    finally:
        if handle is not None:
            handle.remove()


def test_activations_collected_by_a_hook_that_comes_later_are_named():
    module, x, held = encoder(), torch.randn(ROWS, 5), []
    small = chunked(module, SIZE)
    loss_of(small(x)).backward()
    module[0].register_forward_hook(lambda m, args, output: held.append(output))
    with pytest.raises(NotEquivalentError, match=r"keeps a tensor of shape \(8, 8\) with a graph, made in '0'"):
        small(x)


def test_a_hook_that_comes_and_goes_is_proven_once():
    module, x, rows = encoder(), torch.randn(ROWS, 5), []
    small = chunked(module, SIZE)
    for step in range(4):
        rows.clear()
        handle = module[0].register_forward_hook(lambda m, args, output: rows.append(len(output)))
        loss_of(small(x)).backward()
        handle.remove()
        assert (8 in rows) == (step == 0)


def test_hooks_on_activations_without_a_graph_are_explained():
    module, x = encoder(), torch.randn(ROWS, 5)
    module[1].register_forward_hook(lambda m, args, output: output.register_hook(lambda g: g) and None)
    with pytest.raises(RuntimeError, match="runs twice, at first without gradients. Register hooks on"):
        chunked(module, SIZE)(x)


def edited_by_numpy(x):
    x.numpy()[:] = 0.3


def edited_by_data(x):
    x.data.mul_(2)


def edited_array(x):
    x[:] = 1.0


class Shifts(nn.Linear):
    def forward(self, x, by):
        x = x if isinstance(x, torch.Tensor) else torch.from_numpy(np.nan_to_num(x))
        return super().forward(x).tanh() + by


@pytest.mark.parametrize(
    ("batch_norm", "shape", "edit"),
    [
        *product(["micro", "exact"], ["plain", "not contiguous", "shared"], [edited_by_numpy, edited_by_data]),
        ("micro", "an array with a NaN", edited_array),
    ],
)
def test_inputs_edited_behind_autograds_back_are_an_error_in_calls_1_2_4(batch_norm, shape, edit):
    module = nn.ModuleList([Shifts(5, 3), nn.BatchNorm1d(3)])
    module.forward = lambda x, by: module[1](module[0](x, by)) if batch_norm == "exact" else module[0](x, by)
    small = chunked(module, SIZE, batch_dims=(0, None), batch_norm=batch_norm)
    x, by = torch.randn(5, ROWS).T if shape == "not contiguous" else torch.randn(ROWS, 5), torch.randn(3)
    if shape == "an array with a NaN":
        x = x.numpy()
        x[0] = np.nan
    for _ in range(3):
        loss_of(small(x, by)).backward()
    loss = loss_of(small(x, by))
    edit(by if shape == "shared" else x)
    with pytest.raises(NotEquivalentError, match="other outputs when backward runs it again.*an input was refilled"):
        loss.backward()


def test_a_modules_backward_hook_is_refused_under_create_graph_alone():
    whole, x = encoder(), torch.randn(ROWS, 5)
    module = copy.deepcopy(whole)
    for inside in (whole, module):
        inside[3].register_full_backward_hook(lambda m, given, received: tuple(2 * g for g in given))
    small = chunked(module, SIZE)
    with pytest.raises(NotImplementedError, match=r"'3' \(Linear\) in a chunked module has a backward hook"):
        torch.autograd.grad(loss_of(small(x)), list(module.parameters()), create_graph=True)
    for m in (whole, small):
        loss_of(m(x)).backward()
    assert relative_error([p.grad for p in module.parameters()], [p.grad for p in whole.parameters()]) <= FLOAT64
