"""Contrastive losses in tiles against those of the whole matrix of pairs."""

import math
import random

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from gradaccum import NotEquivalentError
from gradaccum.torch.losses import info_nce, sigmoid_loss
from tests.contrastive import COLUMNS, ROWS, assert_refused, each_refused
from tests.reference import FLOAT32, FLOAT64, relative_error
from tests.torch.contrastive.problems import Largest, plain_info_nce, plain_sigmoid, rows_of, same

OF_A, OF_B = torch.arange(ROWS) % 7, torch.arange(COLUMNS) % 9  # some have several positives, ids 7 and 8 none
IGNORED = torch.arange(ROWS)[:, None] + torch.arange(COLUMNS) % 5 == 6
FOURTH = torch.arange(ROWS)[:, None] * torch.arange(COLUMNS) % 4 == 1

PAIRS = {  # how it is given: (positives, ignore), (the same as matrices)
    "row i and row i": ((None, None), (None, None)),
    "ids of the pairs": ((OF_A, None), (same(OF_A, torch.cat([OF_A, torch.full((8,), -1)])), None)),
    "ids of both": (((OF_A, OF_B), None), (same(OF_A, OF_B), None)),
    "a column for each row": (((OF_A, torch.arange(COLUMNS)), None), (same(OF_A, torch.arange(COLUMNS)), None)),
    "a function": ((lambda i, j: (i[:, None] * j) % 4 == 1, None), (FOURTH, None)),
    "false negatives by id": ((None, (OF_A, OF_B)), (None, same(OF_A, OF_B))),
    "false negatives by function": (((OF_A, OF_B), lambda i, j: IGNORED[i][:, j]), (same(OF_A, OF_B), IGNORED)),
}
LOSSES = {  # in tiles, and of the matrix, by rows, a temperature and a bias
    "info_nce": (
        lambda a, b, t, _, **options: info_nce(a, b, temperature=t, **options),
        lambda a, b, t, _, *pairs: plain_info_nce(a, b, t, *pairs),
    ),
    "info_nce, one way": (
        lambda a, b, t, _, **options: info_nce(a, b, temperature=t, symmetric=False, **options),
        lambda a, b, t, _, positives=None, ignored=None: plain_info_nce(a, b, t, positives, ignored, False),
    ),
    "sigmoid_loss": (
        lambda a, b, t, bias, **options: sigmoid_loss(a, b, temperature=t, bias=bias, **options),
        plain_sigmoid,
    ),
}
every_loss = pytest.mark.parametrize("loss", LOSSES)
one_each = pytest.mark.parametrize("loss", [info_nce, sigmoid_loss])


def gradients(loss, *inputs):
    return [loss, *torch.autograd.grad(loss, inputs)]


def both(loss, given, seed, temperature=0.2, bias=-2.0, tile=5):
    """The loss in tiles and that of the whole matrix, and what has gradients."""
    (positives, ignore), matrices = PAIRS[given]
    scalars = [torch.tensor([value], dtype=torch.float64, requires_grad=True) for value in (temperature, bias)]
    inputs = [*rows_of(seed, ROWS, COLUMNS), *scalars]
    tiles = LOSSES[loss][0](*inputs, tile=tile, positives=positives, ignore=ignore)
    return tiles, LOSSES[loss][1](*inputs, *matrices), inputs[: 4 if loss == "sigmoid_loss" else 3]


USUAL = {(given, 5) for given in PAIRS} | {("row i and row i", tile) for tile in (1, 8, 100)}
SWEEP = [
    pytest.param(given, tile, marks=[] if (given, tile) in USUAL else pytest.mark.slow)
    for given in PAIRS
    for tile in (1, 5, 8, 100)
]


@every_loss
@pytest.mark.parametrize(("given", "tile"), SWEEP)
def test_the_value_and_all_gradients_are_those_of_the_whole_matrix(given, tile, loss):
    tiles, whole, wanted = both(loss, given, 0, tile=tile)
    assert relative_error(gradients(tiles, *wanted), gradients(whole, *wanted)) <= FLOAT64


@every_loss
def test_second_derivatives_are_exact(loss):
    *values, wanted = both(loss, "false negatives by function", 11, 0.5, -1.0)
    first = [torch.autograd.grad(value**2, wanted, create_graph=True) for value in values]
    found = [torch.autograd.grad(sum(g.square().sum() for g in grads), wanted) for grads in first]
    assert relative_error(*found) <= FLOAT64


def test_one_way_with_labels_is_cross_entropy_and_both_ways_is_clips_loss():
    a, b = rows_of(2, 12, 12)
    labels, numbers = torch.randint(12, (12,), generator=torch.Generator().manual_seed(3)), torch.arange(12)
    one_way = info_nce(a, b, temperature=0.1, tile=5, symmetric=False, positives=(labels, numbers))
    assert relative_error([one_way], [F.cross_entropy(a @ b.T / 0.1, labels)]) <= FLOAT64
    clip = (F.cross_entropy(a @ b.T / 0.1, numbers) + F.cross_entropy(b @ a.T / 0.1, numbers)) / 2
    assert relative_error([info_nce(a, b, temperature=0.1, tile=5)], [clip]) <= FLOAT64


def test_two_views_against_each_other_without_themselves_is_simclrs_loss():
    views = torch.cat(rows_of(4, 9, 9)).detach().requires_grad_()
    ids = torch.arange(18) % 9
    scores = (views @ views.T / 0.5).masked_fill(torch.eye(18, dtype=torch.bool), -float("inf"))
    whole = F.cross_entropy(scores, torch.cat([torch.arange(9, 18), torch.arange(9)]))
    others = lambda i, j: (ids[i][:, None] == ids[j]) & (i[:, None] != j)  # noqa: E731
    options = {"symmetric": False, "positives": others, "ignore": torch.arange(18)}  # every row and itself
    tiles = info_nce(views, views, temperature=0.5, tile=4, **options)
    assert relative_error(gradients(tiles, views), gradients(whole, views)) <= FLOAT64


@one_each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_are_summed_in_float32_whatever_the_rows_and_autocast_are(loss, dtype):
    a, b = rows_of(5, 300, 300, size=16, dtype=dtype)
    exact = [t.detach().double().requires_grad_() for t in (a, b)]
    with torch.autocast("cpu", torch.bfloat16):
        found, whole = loss(a, b, tile=64), loss(*exact, tile=64)
    assert found.dtype == torch.float32
    assert relative_error([found], [whole]) <= FLOAT32
    rounding = FLOAT32 if dtype == torch.float32 else torch.finfo(dtype).eps
    (1000 * found).backward()
    (1000 * whole).backward()
    assert a.grad.dtype == b.grad.dtype == dtype
    assert relative_error([a.grad, b.grad], [t.grad for t in exact]) <= rounding


@one_each
@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_taken_inside_of_autocast_are_those_of_float32(create_graph, loss):
    a, b = rows_of(4, ROWS, ROWS, dtype=torch.float32)
    found = []
    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            first = torch.autograd.grad(loss(a, b, tile=5), (a, b), create_graph=create_graph)
            second = torch.autograd.grad(sum(g.square().sum() for g in first), (a, b)) if create_graph else ()
        found.append([*first, *second])
    assert all(map(torch.equal, *found))


def test_rows_of_two_types_are_compared_in_the_wider_one():
    a, b = rows_of(6, 9, 9)
    half = b.detach().bfloat16().requires_grad_()
    found = info_nce(a, half, tile=4)
    assert found.dtype == torch.float64
    assert relative_error([found], [info_nce(a, half.double(), tile=100)]) <= FLOAT64


@every_loss
def test_large_scores_neither_overflow_nor_vanish(loss):
    a, b = (1e4 * t.detach() for t in rows_of(7, 20, 20))
    a.requires_grad_()
    found, whole = LOSSES[loss][0](a, b, 1e-3, -10.0, tile=6), LOSSES[loss][1](a, b, 1e-3, -10.0)
    assert math.isfinite(found.item())
    assert relative_error(gradients(found, a), gradients(whole, a)) <= FLOAT64


@pytest.mark.parametrize("needs", ["a", "b", "temperature"])
def test_what_needs_no_gradient_gets_none_and_the_other_is_exact(needs):
    a, b = (t.detach() for t in rows_of(8, 14, 17))
    inputs = {"a": a, "b": b, "temperature": torch.tensor(0.2, dtype=torch.float64)}
    wanted = inputs[needs].requires_grad_()
    found = gradients(info_nce(**inputs, tile=5), wanted)
    assert relative_error(found, gradients(plain_info_nce(**inputs), wanted)) <= FLOAT64


def test_rows_without_a_positive_are_left_out_and_a_batch_without_any_has_loss_0():
    a, b = rows_of(9, 6, 6)
    nobody, everybody = (torch.arange(6), torch.arange(6, 12)), lambda i, j: torch.ones(len(i), len(j)) > 0
    for ignore in (None, everybody):
        loss = info_nce(a, b, tile=4, positives=nobody, ignore=ignore)
        assert [t.abs().max().item() for t in gradients(loss, a, b)] == [0, 0, 0]
    assert info_nce(a[:0], b[:0]).item() == 0


def test_memory_is_linear_in_the_rows():
    """Of everything that is made meanwhile nothing is larger than rows or a tile."""
    a, b = rows_of(10, 400, 500, size=4)
    ids = torch.arange(400) % 50, torch.arange(500) % 50
    with Largest() as largest:
        info_nce(a, b, tile=32, positives=ids, ignore=torch.arange(400)).backward()
    assert largest.numbers == max(500 * 4, 32 * 32)


# torch's own look at tensors between two graphs, which it hides where warnings aren't errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_loop_calls_it_eagerly():
    def step(a, b):
        return info_nce(F.normalize(a, dim=1), F.normalize(b, dim=1), tile=4) * 2

    a, b = rows_of(13, 9, 9)
    torch._dynamo.reset()
    compiled = torch.compile(step, backend="eager")
    assert relative_error(gradients(compiled(a, b), a, b), gradients(step(a, b), a, b)) <= FLOAT64
    torch._dynamo.reset()


# What backward computes anew is what forward has computed.

DRAWS = {
    "torch": lambda shape: torch.rand(shape) < 0.5,
    "numpy": lambda shape: torch.from_numpy(np.random.rand(*shape) < 0.5),  # noqa: NPY002  # the global one
    "python": lambda shape: torch.tensor([[random.random() < 0.5 for _ in range(shape[1])] for _ in range(shape[0])]),
}
with_and_without_a_graph = pytest.mark.parametrize("create_graph", [False, True])
of_either = pytest.mark.parametrize("name", ["positives", "ignore"])


@every_loss
@with_and_without_a_graph
@pytest.mark.parametrize("drawn", DRAWS)
def test_functions_that_draw_give_the_gradient_of_the_pairs_that_forward_has_drawn(drawn, create_graph, loss):
    a, b = rows_of(1, ROWS, ROWS)
    asked = {name: torch.zeros(2, ROWS, ROWS, dtype=torch.bool) for name in ("positives", "ignore")}

    def drawing(name):
        def draw(i, j):
            found = DRAWS[drawn]((len(i), len(j)))
            asked[name][1 if backward else 0][i[0] : i[-1] + 1, j[0] : j[-1] + 1] = found
            return found

        return draw

    backward = False
    value = LOSSES[loss][0](a, b, 0.1, -10.0, tile=5, **{name: drawing(name) for name in asked})
    backward = True
    torch.manual_seed(5)
    state = torch.get_rng_state()
    found = torch.autograd.grad(value, (a, b), create_graph=create_graph)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(*passes) for passes in asked.values())
    whole = LOSSES[loss][1](a, b, 0.1, -10.0, asked["positives"][0], asked["ignore"][0])
    assert relative_error([value, *found], gradients(whole, a, b)) <= FLOAT64


@every_loss
@with_and_without_a_graph
@of_either
def test_a_function_that_answers_otherwise_in_backward_is_an_error_by_name(name, create_graph, loss):
    a, b = rows_of(2, ROWS, ROWS)
    order = torch.randperm(ROWS)  # each row and column has one, before and after
    value = LOSSES[loss][0](a, b, 0.1, -10.0, tile=5, **{name: lambda i, j: order[i, None] == j})
    order.copy_(order.roll(1))
    with pytest.raises(NotEquivalentError, match=f"`{name}.rows, columns.` returns other pairs in backward than"):
        torch.autograd.grad(value, a, create_graph=create_graph)


@every_loss
@of_either
@pytest.mark.parametrize("two", [False, True])
def test_ids_that_are_edited_after_forward_are_those_of_forward(two, name, loss):
    a, b = rows_of(3, ROWS, ROWS)
    ids = torch.arange(ROWS) // 2, torch.arange(ROWS) // 3
    matrix = same(*ids) if two else same(ids[0], ids[0])
    value = LOSSES[loss][0](a, b, 0.1, -10.0, tile=5, **{name: ids if two else ids[0]})
    for each in ids:
        each.zero_()
    whole = LOSSES[loss][1](a, b, 0.1, -10.0, *((matrix, None) if name == "positives" else (None, matrix)))
    assert relative_error(gradients(value, a, b), gradients(whole, a, b)) <= FLOAT64


@every_loss
def test_hooks_see_the_finished_gradient_once_under_create_graph(loss):
    found = []
    for compute in LOSSES[loss]:
        (a, b), seen = rows_of(5, ROWS, ROWS), []
        a.register_hook(lambda g, seen=seen: seen.append(g.detach()) or 2 * g)
        first = torch.autograd.grad(compute(a, b, 0.1, -10.0), (a, b), create_graph=True)
        sum(g.square().sum() for g in first).backward()
        assert len(seen) == 2
        found.append([*seen, *first, a.grad, b.grad])
    assert relative_error(*found) <= FLOAT64


GOOD = rows_of(14, 4, 4)
ERRORS = {
    "negative": (GOOD, {"temperature": torch.tensor(-1.0)}, ValueError, "Received: temperature=-1.0"),
    "no temperature": (GOOD, {"temperature": None}, TypeError, "`temperature` must be a positive number"),
    "a matrix": (GOOD, {"positives": torch.eye(4) > 0}, TypeError, r"lambda rows, columns: matrix\[rows\]\[:, col"),
    "float ids": (GOOD, {"ignore": torch.ones(4)}, TypeError, "`ignore` must be a tensor of ids, which are integers"),
    "a function of another shape": (
        GOOD, {"positives": lambda i, j: i == j}, ValueError, r"must return a bool tensor .* here \(4, 4\)",
    ),
    "no group": (GOOD, {"group": 3}, TypeError, "`group` must be a process group"),
    "no bias": (GOOD, {"bias": None}, TypeError, "0.0 adds nothing"),
    "bias NaN": (GOOD, {"bias": float("nan")}, ValueError, "Received: bias=nan"),
}  # fmt: skip


@one_each
@each_refused
def test_what_is_wrong_is_named(case, loss):
    assert_refused(case, loss, torch.from_numpy, "a dense tensor")


@pytest.mark.parametrize("case", ERRORS)
def test_errors_say_what_was_received_and_what_to_do(case):
    rows, options, kind, message = ERRORS[case]
    for loss in (info_nce, sigmoid_loss) if "bias" not in options else (sigmoid_loss,):
        with pytest.raises(kind, match=f"(?s){message}"):
            loss(*rows, **options)


def test_a_temperature_that_was_learned_may_be_nan():
    assert info_nce(*GOOD, temperature=torch.tensor(float("nan"))).isnan()
