"""What backward computes anew is what forward has computed: pairs, precision, and nothing twice."""

import random

import numpy as np
import pytest
import torch

from gradaccum import NotEquivalentError
from gradaccum.torch.losses import info_nce, sigmoid_loss
from tests.reference import FLOAT64, relative_error
from tests.torch.contrastive.problems import plain_info_nce, plain_sigmoid, rows_of, same

ROWS = 19
LOSSES = {
    "info_nce": (info_nce, lambda a, b, p=None, i=None: plain_info_nce(a, b, 0.07, p, i)),
    "sigmoid_loss": (sigmoid_loss, lambda a, b, p=None, i=None: plain_sigmoid(a, b, 0.1, -10.0, p, i)),
}
DRAWS = {
    "torch": lambda shape: torch.rand(shape) < 0.5,
    "numpy": lambda shape: torch.from_numpy(np.random.rand(*shape) < 0.5),  # noqa: NPY002  # the global one
    "python": lambda shape: torch.tensor([[random.random() < 0.5 for _ in range(shape[1])] for _ in range(shape[0])]),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("drawn", DRAWS)
def test_functions_that_draw_give_the_gradient_of_the_pairs_that_forward_has_drawn(drawn, create_graph, loss):
    a, b = rows_of(1, ROWS, ROWS)
    tiled, plain = LOSSES[loss]
    asked = {"positives": torch.zeros(2, ROWS, ROWS) > 0, "ignore": torch.zeros(2, ROWS, ROWS) > 0}

    def function(name):
        def draw(i, j):
            found = DRAWS[drawn]((len(i), len(j)))
            kept = asked[name][1 if backward else 0]
            kept[i[0] : i[-1] + 1, j[0] : j[-1] + 1] = found
            return found

        return draw

    backward = False
    value = tiled(a, b, tile=5, positives=function("positives"), ignore=function("ignore"))
    backward = True
    torch.manual_seed(5)
    state = torch.get_rng_state()
    found = torch.autograd.grad(value, (a, b), create_graph=create_graph)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(*both) for both in asked.values())
    whole = plain(a, b, asked["positives"][0], asked["ignore"][0])
    assert relative_error([value, *found], [whole, *torch.autograd.grad(whole, (a, b))]) <= FLOAT64


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("name", ["positives", "ignore"])
def test_a_function_that_answers_otherwise_in_backward_is_an_error_by_name(name, create_graph, loss):
    a, b = rows_of(2, ROWS, ROWS)
    order = torch.randperm(ROWS)  # each row and column has one, before and after
    value = LOSSES[loss][0](a, b, tile=5, **{name: lambda i, j: order[i, None] == j})
    order.copy_(order.roll(1))
    with pytest.raises(NotEquivalentError, match=f"`{name}.rows, columns.` answers otherwise when backward asks"):
        torch.autograd.grad(value, a, create_graph=create_graph)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["positives", "ignore"])
@pytest.mark.parametrize("both", [False, True])
def test_ids_that_are_edited_after_forward_are_those_of_forward(both, name, loss):
    a, b = rows_of(3, ROWS, ROWS)
    tiled, plain = LOSSES[loss]
    ids = torch.arange(ROWS) // 2, torch.arange(ROWS) // 3
    matrix = same(*ids) if both else same(ids[0], ids[0])
    value = tiled(a, b, tile=5, **{name: ids if both else ids[0]})
    for each in ids:
        each.zero_()
    whole = plain(a, b, *((matrix, None) if name == "positives" else (None, matrix)))
    found, expected = (torch.autograd.grad(one, (a, b)) for one in (value, whole))
    assert relative_error(found, expected) <= FLOAT64


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_taken_inside_of_autocast_are_those_of_float32(create_graph, loss):
    a, b = rows_of(4, ROWS, ROWS, dtype=torch.float32)
    found = []
    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            first = torch.autograd.grad(LOSSES[loss][0](a, b, tile=5), (a, b), create_graph=create_graph)
            second = torch.autograd.grad(sum(g.square().sum() for g in first), (a, b)) if create_graph else ()
        found.append([*first, *second])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("loss", LOSSES)
def test_hooks_see_the_finished_gradient_once_under_create_graph(loss):
    found = []
    for compute in LOSSES[loss]:
        a, b = rows_of(5, ROWS, ROWS)
        seen = []
        a.register_hook(lambda g, seen=seen: seen.append(g.detach()) or 2 * g)
        first = torch.autograd.grad(compute(a, b), (a, b), create_graph=True)
        sum(g.square().sum() for g in first).backward()
        assert len(seen) == 2
        found.append([*seen, *first, a.grad, b.grad])
    assert relative_error(*found) <= FLOAT64


@pytest.mark.parametrize("loss", LOSSES)
def test_transforms_of_torch_func_are_refused_by_name(loss):
    a, b = (t.detach() for t in rows_of(6, ROWS, ROWS))
    for transform in (
        torch.func.grad(lambda a: LOSSES[loss][0](a, b)),
        torch.func.vmap(lambda a: LOSSES[loss][0](a, b)),
    ):
        with pytest.raises(NotImplementedError, match=f"{loss} is called inside of a transform of torch.func"):
            transform(a if transform.__name__ == "wrapper" else a[None])


def test_numbers_that_are_not_a_number_are_refused_and_what_was_learned_passes():
    a, b = rows_of(7, ROWS, ROWS)
    with pytest.raises(ValueError, match="Received: temperature=nan"):
        info_nce(a, b, temperature=float("nan"))
    with pytest.raises(ValueError, match="Received: bias=nan"):
        sigmoid_loss(a, b, bias=float("nan"))
    assert info_nce(a, b, temperature=torch.tensor(float("nan"))).isnan()
