"""The second pass is the first one again, whatever has happened in between; and what comes after the first call."""

import copy
import functools
import random
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradaccum import NotEquivalentError
from gradaccum.torch import chunked
from tests.reference import FLOAT64, relative_error
from tests.torch.chunking.problems import assert_same, encoder, frozen, gradients, loss_of
from tests.torch.problems import Does

ROWS, SIZE = 11, 4


def test_hooks_on_parameters_see_the_finished_gradient_where_there_is_one():
    whole = Does(lambda m, x, head: m.heads[head](x), heads=nn.ModuleList(nn.Linear(5, 3) for _ in range(2)))
    module, x, seen = copy.deepcopy(whole), torch.randn(ROWS, 5), []
    small = chunked(module, SIZE)
    for model in (whole, module):
        for index, parameter in enumerate(model.parameters()):
            parameter.register_hook(lambda g, index=index: seen.append(index) or g.clamp(-0.02, 0.02))
    for head in (0, 1, 1):
        for call in (whole, small):
            seen.clear()
            loss_of(call(x, head)).backward()
            assert sorted(seen) == [2 * head, 2 * head + 1]
        assert_same(gradients(module), gradients(whole))


def adapted(m, x):
    """A layer whose attributes say what it does, as adapters and schedules have it."""
    y = m.layer(x) + F.linear(x, m.adapters[m.active])
    return y * m.scale + (0.0 if m.training else x.sum(1, keepdim=True))


def doubled(layer, args, output):
    return output * 2


CHANGES = {  # what happens before a forward pass, and what between that and backward
    "another mode": (lambda m: None, lambda m, _: m.eval()),
    "another adapter": (lambda m: None, lambda m, _: vars(m).update(active="b", scale=3.0)),
    "another method": (lambda m: None, lambda m, _: vars(m).update(forward=lambda x: x[:, :3])),
    "a hook that comes": (lambda m: None, lambda m, _: m.register_forward_hook(doubled)),
    "a hook that goes": (lambda m: m.register_forward_hook(doubled), lambda m, hook: hook.remove()),
}


@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_the_module_between_forward_and_backward_does_not_reach_the_second_pass(change, keep):
    adapters = nn.ParameterDict({name: nn.Parameter(torch.randn(3, 5)) for name in "ab"})
    whole = Does(adapted, layer=nn.Linear(5, 3), adapters=adapters, active="a", scale=1.0)
    module, x, (before, between) = copy.deepcopy(whole), torch.randn(ROWS, 5), CHANGES[change]
    for m, inside in ((whole, whole), (chunked(module, SIZE, keep=keep), module)):
        handle = before(inside)
        loss = loss_of(m(x))
        between(inside, handle)
        later = dict(vars(inside))
        loss.backward()
        assert vars(inside) == later
    assert_same(gradients(module), gradients(whole))


def test_layers_that_are_replaced_or_unfrozen_between_forward_and_backward():
    whole, x, old = encoder(), torch.randn(ROWS, 5), []
    module = copy.deepcopy(frozen(whole, whole[0]))
    for m, inside in ((whole, whole), (chunked(module, SIZE), module)):
        loss = loss_of(m(x))
        inside.requires_grad_(True)
        old.append(inside[3])
        inside[3] = nn.Linear(8, 4)
        loss.backward()
        assert all(p.grad is None for p in [*inside[0].parameters(), *inside[3].parameters()])
    assert_same(gradients(old[1]), gradients(old[0]))


EDITED = {
    "an input": "modified by an inplace operation",
    "a parameter": "modified by an inplace operation",
    "a frozen parameter": r"frozen parameter of shape \(8, 5\).*edited in place between forward and",
}


@pytest.mark.parametrize("what", EDITED)
def test_what_is_edited_between_forward_and_backward_is_an_error(what):
    module, x = encoder(), torch.randn(ROWS, 5)
    if what == "a frozen parameter":
        frozen(module, module[0])
    loss = loss_of(chunked(module, SIZE)(x))
    with torch.no_grad():
        (x if what == "an input" else module[0].weight).mul_(2)
    with pytest.raises(RuntimeError, match=EDITED[what]):
        loss.backward()


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
    generators, nested = [generator(), generator()], "inside" in where
    kept, given = ([None] * 2, generators) if where == "an input" else (generators, [None] * 2)

    def run(m, x, one):
        return m.linear(x) * draw(one or m.generator, len(x))

    whole, module = (Does(run, linear=nn.Linear(5, 3), generator=one) for one in kept)
    module.load_state_dict(whole.state_dict())
    small, x = chunked(chunked(module, 2) if nested else module, SIZE), torch.randn(ROWS, 5)
    parts = x.split([2, 2, 2, 2, 2, 1] if nested else [4, 4, 3])
    loss_of(torch.cat([whole(rows, given[0]) for rows in parts])).backward()
    loss_of(small(x, given[1])).backward()
    assert_same(gradients(module), gradients(whole))
    assert torch.equal(*(draw(one, 2) for one in generators))


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("keep", [0, 1])
def test_hooks_see_the_finished_gradient_once_under_create_graph(keep, calls):
    whole = encoder()
    module, x, found = copy.deepcopy(whole), torch.randn(ROWS, 5), []
    for call, inside in ((whole, whole), (chunked(module, SIZE, keep=keep), module)):
        leaf, seen = x.clone().requires_grad_(), []
        rows = leaf * 1.0  # not a leaf, with a hook of its own
        wanted = [leaf, *inside.parameters()]
        for tensor in (rows, *wanted):
            tensor.register_hook(lambda g, seen=seen: seen.append(g.detach()) or g.clamp(-0.02, 0.05))
        loss = sum(loss_of(call(rows)) for _ in range(calls))
        first = torch.autograd.grad(loss, wanted, create_graph=True)
        assert len(seen) == 1 + len(wanted)
        (loss + sum(g.square().sum() for g in first)).backward()
        assert len(seen) == 2 * (1 + len(wanted))
        found.append([*first, *(t.grad for t in wanted)])
    assert relative_error(found[1], found[0]) <= FLOAT64


# What comes after the first call.


def normalised(gradient):
    return gradient / gradient.norm()


def centred(h):
    return h - h.mean(0)


def on_activations(layer, args, output):
    return output.register_hook(normalised) and None if output.requires_grad else None


def collecting(module):
    held = []
    module[0].register_forward_hook(lambda layer, args, output: held.append(output))


def of_all_modules(module):
    return nn.modules.module.register_module_forward_hook(
        lambda layer, args, output: centred(output) if layer is module[1] else None
    )


PRE_HOOK = functools.partial(lambda function, layer, args: (function(args[0]),), centred)
MIXES, KEEPS = "Sequential is not per-row", r"keeps a tensor of shape \(8, 8\) with a graph, made in '0'"
LATE = {
    "on activations": (lambda m: m[1].register_forward_hook(on_activations), MIXES),
    "a backward hook": (
        lambda m: m[1].register_full_backward_hook(lambda layer, given, received: tuple(map(normalised, given))),
        MIXES,
    ),
    "an object as a hook": (lambda m: m[2].register_forward_pre_hook(PRE_HOOK), MIXES),
    "a hook of all modules": (of_all_modules, MIXES),
    "another layer": (lambda m: m.__setitem__(1, Does(lambda m, h: centred(h))), MIXES),
    "another forward": (lambda m: setattr(m[1], "forward", centred), MIXES),
    "a hook that collects": (collecting, KEEPS),
}


@pytest.mark.parametrize("late", LATE)
def test_what_is_added_after_the_first_call_is_proven_too(late):
    module, x, (add, message) = encoder(), torch.randn(ROWS, 5), LATE[late]
    small = chunked(module, SIZE)
    loss_of(small(x)).backward()
    handle = add(module)
    try:
        with pytest.raises(NotEquivalentError, match=message):
            small(x)
    finally:
        if handle is not None:
            handle.remove()


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


BY_NUMPY, BY_DATA = lambda x: x.numpy().fill(0.3), lambda x: x.data.mul_(2)
BEHIND = [
    *product(["micro", "exact"], ["plain", "not contiguous", "shared"], [BY_NUMPY, BY_DATA]),
    ("micro", "an array with a NaN", lambda x: x.fill(1.0)),
]


@pytest.mark.parametrize(("batch_norm", "shape", "edit"), BEHIND)
def test_inputs_edited_behind_autograds_back_are_an_error_in_calls_1_2_4(batch_norm, shape, edit):
    def run(m, x, by):
        x = x if isinstance(x, torch.Tensor) else torch.from_numpy(np.nan_to_num(x))
        return m.linear(x).tanh() + by

    norm, shifts = nn.BatchNorm1d(3) if batch_norm == "exact" else nn.Identity(), Does(run, linear=nn.Linear(5, 3))
    module = Does(lambda m, x, by: m.norm(m.shifts(x, by)), shifts=shifts, norm=norm)
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
    assert relative_error(gradients(module), gradients(whole)) <= FLOAT64
