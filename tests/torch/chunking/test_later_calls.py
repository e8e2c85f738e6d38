"""What comes after the first call: hooks and layers that are added, inputs that are refilled, second derivatives."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from gradaccum import NotEquivalentError
from gradaccum.torch import chunked
from tests.reference import FLOAT64, relative_error

ROWS, SIZE = 11, 4


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)  # which conftest sets back


def encoder():
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def loss_of(outputs):
    return outputs.logsumexp((0, 1)) + outputs.std()


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
    with pytest.raises(NotEquivalentError, match=r"keeps a tensor of shape \(8, 6\) with a graph, made in '0'"):
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


@pytest.mark.parametrize("edit", [edited_by_numpy, edited_by_data])
@pytest.mark.parametrize("shape", ["plain", "not contiguous", "shared"])
@pytest.mark.parametrize("batch_norm", ["micro", "exact"])
def test_inputs_edited_behind_autograds_back_are_an_error_in_calls_1_2_4(batch_norm, shape, edit):
    class Shifts(nn.Linear):
        def forward(self, x, by):
            return super().forward(x).tanh() + by

    module = nn.ModuleList([Shifts(5, 3), nn.BatchNorm1d(3)])
    module.forward = lambda x, by: module[1](module[0](x, by)) if batch_norm == "exact" else module[0](x, by)
    small = chunked(module, SIZE, batch_dims=(0, None), batch_norm=batch_norm)
    x = torch.randn(5, ROWS).T if shape == "not contiguous" else torch.randn(ROWS, 5)
    by = torch.randn(3)
    for _ in range(3):
        loss_of(small(x, by)).backward()
    loss = loss_of(small(x, by))
    edit(by if shape == "shared" else x)
    with pytest.raises(NotEquivalentError, match="other outputs when backward runs it again.*Was an input refilled"):
        loss.backward()


def test_arrays_that_are_refilled_are_an_error_and_nan_is_none():
    class OfArrays(nn.Linear):
        def forward(self, x):
            return super().forward(torch.from_numpy(np.nan_to_num(x)))

    x = np.random.default_rng(0).normal(size=(ROWS, 5))
    x[0] = np.nan
    small = chunked(OfArrays(5, 3), SIZE)
    loss_of(small(x)).backward()
    loss = loss_of(small(x))
    x[:] = 1.0
    with pytest.raises(NotEquivalentError, match="other outputs when backward runs it again.*Was an input refilled"):
        loss.backward()


def test_a_modules_backward_hook_is_refused_under_create_graph_alone():
    whole, x = encoder(), torch.randn(ROWS, 5)
    module = copy.deepcopy(whole)
    for inside in (whole, module):
        inside[2].register_full_backward_hook(lambda m, given, received: tuple(2 * g for g in given))
    small = chunked(module, SIZE)
    with pytest.raises(NotImplementedError, match=r"'2' \(Linear\) in a chunked module has a backward hook"):
        torch.autograd.grad(loss_of(small(x)), list(module.parameters()), create_graph=True)
    for m in (whole, small):
        loss_of(m(x)).backward()
    assert relative_error([p.grad for p in module.parameters()], [p.grad for p in whole.parameters()]) <= FLOAT64
