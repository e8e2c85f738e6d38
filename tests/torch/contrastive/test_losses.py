"""Contrastive losses in tiles against those of the whole matrix of pairs."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradaccum.torch import chunked
from gradaccum.torch.losses import info_nce, sigmoid_loss
from tests.reference import FLOAT32, FLOAT64, relative_error
from tests.torch.contrastive.problems import Largest, plain_info_nce, plain_sigmoid, rows_of, same

ROWS, COLUMNS = 23, 31
OF_A, OF_B = torch.arange(ROWS) % 7, torch.arange(COLUMNS) % 9  # some have several positives, ids 7 and 8 none
IGNORED = torch.arange(ROWS)[:, None] + torch.arange(COLUMNS) % 5 == 6

PAIRS = {
    # how it is said: (positives, ignore), (the same as matrices)
    "row i and row i": ((None, None), (None, None)),
    "ids of the pairs": ((OF_A, None), (same(OF_A, torch.cat([OF_A, torch.full((8,), -1)])), None)),
    "ids of both": (((OF_A, OF_B), None), (same(OF_A, OF_B), None)),
    "a column for each row": (((OF_A, torch.arange(COLUMNS)), None), (same(OF_A, torch.arange(COLUMNS)), None)),
    "a function": ((lambda i, j: (i[:, None] * j) % 4 == 1, None), (None, None)),
    "false negatives by id": ((None, (OF_A, OF_B)), (None, same(OF_A, OF_B))),
    "false negatives by function": (((OF_A, OF_B), lambda i, j: IGNORED[i][:, j]), (same(OF_A, OF_B), IGNORED)),
}
PAIRS["a function"] = (
    PAIRS["a function"][0],
    (torch.arange(ROWS)[:, None] * torch.arange(COLUMNS) % 4 == 1, None),
)


def gradients(loss, *inputs):
    return [loss, *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("said", "tile"),
    [
        pytest.param(said, tile, marks=[] if tile == 5 or number == 0 else pytest.mark.slow)
        for number, said in enumerate(PAIRS)
        for tile in (1, 5, 8, 100)
    ],
)
def test_the_value_and_all_gradients_are_those_of_the_whole_matrix(said, symmetric, tile):
    (positives, ignore), (matrix, ignored) = PAIRS[said]
    a, b = rows_of(0, ROWS, COLUMNS)
    scale = torch.tensor(2.3, dtype=torch.float64, requires_grad=True)  # CLIP's, learned as a logarithm
    whole = plain_info_nce(a, b, (-scale).exp(), matrix, ignored, symmetric)
    tiles = info_nce(
        a, b, temperature=(-scale).exp(), tile=tile, symmetric=symmetric, positives=positives, ignore=ignore
    )
    assert relative_error(gradients(tiles, a, b, scale), gradients(whole, a, b, scale)) <= FLOAT64


@pytest.mark.parametrize("tile", [5, 100])
@pytest.mark.parametrize("said", PAIRS)
def test_sigmoid_loss_is_that_of_the_whole_matrix_bias_and_temperature_included(said, tile):
    (positives, ignore), (matrix, ignored) = PAIRS[said]
    a, b = rows_of(1, ROWS, COLUMNS)
    temperature, bias = (torch.tensor([value], dtype=torch.float64, requires_grad=True) for value in (0.03, -10.0))
    whole = plain_sigmoid(a, b, temperature, bias, matrix, ignored)
    tiles = sigmoid_loss(a, b, temperature=temperature, bias=bias, tile=tile, positives=positives, ignore=ignore)
    inputs = a, b, temperature, bias
    assert relative_error(gradients(tiles, *inputs), gradients(whole, *inputs)) <= FLOAT64


def test_one_way_with_labels_is_cross_entropy_and_both_ways_is_clips_loss():
    a, b = rows_of(2, 12, 12)
    labels = torch.randint(12, (12,), generator=torch.Generator().manual_seed(3))
    numbers = torch.arange(12)
    one_way = info_nce(a, b, temperature=0.1, tile=5, symmetric=False, positives=(labels, numbers))
    assert relative_error([one_way], [F.cross_entropy(a @ b.T / 0.1, labels)]) <= FLOAT64
    both = (F.cross_entropy(a @ b.T / 0.1, numbers) + F.cross_entropy(b @ a.T / 0.1, numbers)) / 2
    assert relative_error([info_nce(a, b, temperature=0.1, tile=5)], [both]) <= FLOAT64


def test_two_views_against_each_other_without_themselves_is_simclrs_loss():
    views = torch.cat(rows_of(4, 9, 9)).detach().requires_grad_()
    ids = torch.arange(18) % 9
    scores = (views @ views.T / 0.5).masked_fill(torch.eye(18, dtype=torch.bool), -float("inf"))
    whole = F.cross_entropy(scores, torch.cat([torch.arange(9, 18), torch.arange(9)]))
    tiles = info_nce(
        views,
        views,
        temperature=0.5,
        tile=4,
        symmetric=False,
        positives=lambda i, j: (ids[i][:, None] == ids[j]) & (i[:, None] != j),
        ignore=torch.arange(18),  # every row and itself
    )
    assert relative_error(gradients(tiles, views), gradients(whole, views)) <= FLOAT64


@pytest.mark.parametrize("loss", [info_nce, sigmoid_loss])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_are_summed_in_float32_whatever_the_rows_and_autocast_are(loss, dtype):
    a, b = rows_of(5, 300, 300, size=16, dtype=dtype)
    exact = [t.detach().double().requires_grad_() for t in (a, b)]
    with torch.autocast("cpu", torch.bfloat16):
        found = loss(a, b, tile=64)
        whole = loss(*exact, tile=64)
    assert found.dtype == torch.float32
    assert relative_error([found], [whole]) <= FLOAT32
    rounding = FLOAT32 if dtype == torch.float32 else torch.finfo(dtype).eps
    (1000 * found).backward()
    (1000 * whole).backward()
    assert a.grad.dtype == b.grad.dtype == dtype
    assert relative_error([a.grad, b.grad], [t.grad for t in exact]) <= rounding


def test_rows_of_two_types_are_compared_in_the_wider_one():
    a, b = rows_of(6, 9, 9)
    half = b.detach().bfloat16().requires_grad_()
    found = info_nce(a, half, tile=4)
    assert found.dtype == torch.float64
    whole = info_nce(a, half.double(), tile=100)
    assert relative_error([found], [whole]) <= FLOAT64


def test_large_scores_neither_overflow_nor_vanish():
    a, b = (1e4 * t.detach() for t in rows_of(7, 20, 20))
    a.requires_grad_()
    found = info_nce(a, b, temperature=1e-3, tile=6)
    whole = plain_info_nce(a, b, 1e-3)
    assert math.isfinite(found.item())
    assert relative_error(gradients(found, a), gradients(whole, a)) <= FLOAT64
    found, whole = sigmoid_loss(a, b, tile=6), plain_sigmoid(a, b, 0.1, -10.0)
    assert relative_error(gradients(found, a), gradients(whole, a)) <= FLOAT64


@pytest.mark.parametrize("needs", ["a", "b", "temperature"])
def test_what_needs_no_gradient_gets_none_and_the_other_is_exact(needs):
    a, b = rows_of(8, 14, 17)
    inputs = {"a": a.detach(), "b": b.detach(), "temperature": torch.tensor(0.2, dtype=torch.float64)}
    inputs[needs].requires_grad_()
    a, b, temperature = inputs.values()
    found = gradients(info_nce(a, b, temperature=temperature, tile=5), inputs[needs])
    whole = gradients(plain_info_nce(a, b, temperature), inputs[needs])
    assert relative_error(found, whole) <= FLOAT64


def test_rows_without_a_positive_are_left_out_and_a_batch_without_any_has_loss_0():
    a, b = rows_of(9, 6, 6)
    nobody = torch.arange(6), torch.arange(6, 12)
    loss = info_nce(a, b, tile=4, positives=nobody)
    assert [t.abs().max().item() for t in gradients(loss, a, b)] == [0, 0, 0]
    loss = info_nce(a, b, tile=4, positives=nobody, ignore=lambda i, j: torch.ones(len(i), len(j), dtype=torch.bool))
    assert [t.abs().max().item() for t in gradients(loss, a, b)] == [0, 0, 0]
    assert info_nce(a[:0], b[:0]).item() == 0


def test_memory_is_linear_in_the_rows():
    """Of everything that is made meanwhile nothing is larger than rows or a tile."""
    a, b = rows_of(10, 400, 500, size=4)
    with Largest() as largest:
        info_nce(
            a, b, tile=32, positives=(torch.arange(400) % 50, torch.arange(500) % 50), ignore=torch.arange(400)
        ).backward()
    assert largest.numbers == max(500 * 4, 32 * 32)


@pytest.mark.parametrize("symmetric", [True, False])
def test_second_derivatives_are_exact(symmetric):
    (positives, ignore), (matrix, ignored) = PAIRS["false negatives by function"]
    a, b = rows_of(11, ROWS, COLUMNS)
    temperature = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    inputs = a, b, temperature
    found = []
    for loss in (
        info_nce(a, b, temperature=temperature, tile=5, symmetric=symmetric, positives=positives, ignore=ignore),
        plain_info_nce(a, b, temperature, matrix, ignored, symmetric),
    ):
        first = torch.autograd.grad(loss**2, inputs, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), inputs))
    assert relative_error(*found) <= FLOAT64


def test_second_derivatives_of_sigmoid_loss_are_exact():
    a, b = rows_of(12, ROWS, COLUMNS)
    bias = torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)
    found = []
    for loss in (sigmoid_loss(a, b, bias=bias, tile=5), plain_sigmoid(a, b, 0.1, bias)):
        first = torch.autograd.grad(loss, (a, b, bias), create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), (a, b, bias)))
    assert relative_error(*found) <= FLOAT64


class Towers(nn.Module):
    def __init__(self, wrap=lambda tower: tower):
        super().__init__()
        torch.manual_seed(0)
        self.images, self.texts = (wrap(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))) for _ in "ab")
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x, t):
        return F.normalize(self.images(x), dim=1), F.normalize(self.texts(t), dim=1), (-self.logit_scale).exp()


def test_chunked_towers_and_a_loss_in_tiles_train_as_the_large_batch(float64):
    x, t = torch.randn(37, 5), torch.randn(37, 5)
    large, small = Towers(), Towers(lambda tower: chunked(tower, 8))
    plain_info_nce(*large(x, t)).backward()
    a, b, temperature = small(x, t)
    info_nce(a, b, temperature=temperature, tile=10).backward()
    assert relative_error([p.grad for p in small.parameters()], [p.grad for p in large.parameters()]) <= FLOAT64


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


GOOD = rows_of(14, 4, 4)
ERRORS = {
    "a list": (([1.0], GOOD[1]), {}, TypeError, "`a` must be a dense tensor. Received: .1.0. of type list"),
    "ints": ((GOOD[0].long(), GOOD[1]), {}, ValueError, "`a` must be a dense tensor of floats, of shape"),
    "a vector": ((GOOD[0], GOOD[1][0]), {}, ValueError, r"`b` must be .* Received: float64 of shape \(6,\)"),
    "other sizes": ((GOOD[0], GOOD[1][:, :3]), {}, ValueError, r"rows of the same size.*\(4, 6\) and \(4, 3\)"),
    "fewer rows of b": ((GOOD[0], GOOD[1][:3]), {}, ValueError, "4 rows of a, 3 of b. Swap them, or pass pos"),
    "no tile": (GOOD, {"tile": 0}, ValueError, "`tile` must be an int >= 1"),
    "temperature 0": (GOOD, {"temperature": 0}, ValueError, "positive number.*Received: temperature=0"),
    "negative": (GOOD, {"temperature": torch.tensor(-1.0)}, ValueError, "Received: temperature=-1.0"),
    "a temperature per row": (GOOD, {"temperature": torch.ones(4)}, ValueError, r"float32 of shape \(4,\)"),
    "no temperature": (GOOD, {"temperature": None}, TypeError, "`temperature` must be a positive number"),
    "a matrix": (GOOD, {"positives": torch.eye(4) > 0}, TypeError, r"lambda rows, columns: matrix\[rows\]\[:, col"),
    "float ids": (GOOD, {"ignore": torch.ones(4)}, TypeError, "`ignore` must be a tensor of ids, which are integers"),
    "too few ids": (GOOD, {"positives": torch.arange(3)}, ValueError, "must have an id for each row"),
    "ids as a list": (GOOD, {"positives": [1, 2, 3, 4]}, TypeError, "a tuple of two"),
    "ids of the pairs of fewer": (
        (GOOD[0], GOOD[1][:3]), {"positives": torch.arange(4)}, ValueError, r"positives=\(ids_of_a, ids_of_b\)",
    ),
    "a function of another shape": (
        GOOD, {"positives": lambda i, j: i == j}, ValueError, r"must return a bool tensor .* here \(4, 4\)",
    ),
    "no group": (GOOD, {"group": 3}, TypeError, "`group` must be a process group"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors_say_what_was_received_and_what_to_do(case):
    rows, options, kind, message = ERRORS[case]
    for loss in (info_nce, sigmoid_loss):
        with pytest.raises(kind, match=f"(?s){message}"):
            loss(*rows, **options)


def test_sigmoid_loss_without_a_bias_is_an_error():
    with pytest.raises(TypeError, match="0.0 adds nothing"):
        sigmoid_loss(*GOOD, bias=None)
