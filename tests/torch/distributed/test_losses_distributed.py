"""Losses that look across the batch, over several ranks: contrastive ones, and chunked modules under DDP and FSDP2.

Ranks differ in rows; the oracle is one process with all of them.
"""

import copy

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from gradaccum.torch import chunked
from gradaccum.torch.losses import info_nce, sigmoid_loss
from tests.reference import FLOAT32, FLOAT64, relative_error
from tests.torch.contrastive.problems import Largest, plain_info_nce, plain_sigmoid
from tests.torch.distributed.problems import error_of, lines_of, mesh, slowly, step_of, whole
from tests.torch.distributed.processes import on_ranks

ROWS, COLUMNS = [5, 0, 8], [7, 2, 8]
OF_A = [torch.arange(n) % 4 + rank for rank, n in enumerate(ROWS)]
OF_B = [torch.arange(n) % 3 + rank for rank, n in enumerate(COLUMNS)]


def drawn(rank, count, size=4):
    generator = torch.Generator().manual_seed(rank + 100 * count)
    return F.normalize(torch.randn(count, size, generator=generator, dtype=torch.float64), dim=1)


def both(counts, columns=None, size=4):
    """Each rank's rows of `a`, and of `b`."""
    return [
        [drawn(10 * n + r, count, size) for r, count in enumerate(c)] for n, c in ((1, counts), (2, columns or counts))
    ]


def pairs(rule):
    """A matrix over all ranks: whether row i of rank r's `a` and row j of rank q's `b` are a pair."""
    columns = [(q, j) for q, count in enumerate(COLUMNS) for j in range(count)]
    return torch.tensor([[rule(r, i, q, j) for q, j in columns] for r, count in enumerate(ROWS) for i in range(count)])


def same_row(r, i, q, j):
    return (r, i) == (q, j)


def same_ids(r, i, q, j):
    return bool(OF_A[r][i] == OF_B[q][j])


def numbered(rule):
    """Of rows that are counted over all ranks."""
    return pairs(lambda r, i, q, j: rule(sum(ROWS[:r]) + i, sum(COLUMNS[:q]) + j))


HOW = {
    # Positives and what is ignored, of a rank; as matrices over all ranks.
    "row i and row i": lambda rank: (None, None, pairs(same_row), None),
    "ids of the pairs": lambda rank: (
        *(OF_A[rank], None),
        *(pairs(lambda r, i, q, j: bool((OF_A[q][j : j + 1] == OF_A[r][i]).any())), None),
    ),
    "ids of both": lambda rank: ((OF_A[rank], OF_B[rank]), None, pairs(same_ids), None),
    "false negatives": lambda rank: (None, (OF_A[rank], OF_B[rank]), pairs(same_row), pairs(same_ids)),
    "functions": lambda rank: (
        *(lambda i, j: (i[:, None] * j) % 5 == 1, lambda i, j: i[:, None] + j == 7),
        *(numbered(lambda i, j: (i * j) % 5 == 1), numbered(lambda i, j: i + j == 7)),
    ),
}
QUICK = [
    *(("symmetric", how) for how in HOW),
    *(("one way", how) for how in ("row i and row i", "false negatives")),
    *(("sigmoid", how) for how in ("row i and row i", "ids of both", "functions")),
]
SLOWLY = [(loss, how) for loss in ("one way", "sigmoid") for how in HOW if (loss, how) not in QUICK]


@pytest.mark.parametrize(("loss_name", "how"), slowly(QUICK, SLOWLY))
@on_ranks("three_ranks")
def test_every_rank_has_the_loss_of_all_rows_and_the_gradients_of_its_own(rank, loss_name, how):
    positives, ignore, matrix, ignored = HOW[how](rank)

    def scalars():
        numbers = [0.2, -3.0] if loss_name == "sigmoid" else [0.2]
        return [torch.tensor(number, dtype=torch.float64, requires_grad=True) for number in numbers]

    a, b = both(ROWS, COLUMNS)
    every = [torch.cat(t).requires_grad_() for t in (a, b)]
    mine = [t[rank].clone().requires_grad_() for t in (a, b)]
    extra, my_extra = scalars(), scalars()
    options = {"tile": 3, "positives": positives, "ignore": ignore, "group": dist.group.WORLD}
    if loss_name == "sigmoid":
        expected = plain_sigmoid(*every, *extra, matrix, ignored)
        loss = sigmoid_loss(*mine, temperature=my_extra[0], bias=my_extra[1], **options)
    else:
        symmetric = loss_name == "symmetric"
        expected = plain_info_nce(*every, *extra, matrix, ignored, symmetric)
        loss = info_nce(*mine, temperature=my_extra[0], symmetric=symmetric, **options)
    expected.backward()
    (loss * (rank + 1) / 6).backward()  # the sum of what the ranks make of it is the loss itself
    for t in my_extra:
        dist.all_reduce(t.grad)
    assert relative_error([loss], [expected]) <= FLOAT64
    for m, t, counts in zip(mine, every, (ROWS, COLUMNS), strict=True):
        first = sum(counts[:rank])
        error = (m.grad - t.grad[first : first + len(m)]).abs()
        assert len(m) == 0 or error.max() <= FLOAT64 * t.grad.abs().max()
    assert relative_error([t.grad for t in my_extra], [t.grad for t in extra]) <= FLOAT64


def tower():
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 4)).double()


class Towers(nn.Module):
    """Two towers, and one of them called twice."""

    def __init__(self, wrap=lambda tower: tower):
        super().__init__()
        torch.manual_seed(0)
        self.images, self.texts = wrap(tower()), wrap(tower())
        self.logit_scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, x, t):
        texts = self.texts(t) + self.images(x + 1)
        return F.normalize(self.images(x), dim=1), F.normalize(texts, dim=1), (-self.logit_scale).exp()


@on_ranks("three_ranks")
def test_half_precision_travels_as_it_is_and_is_summed_in_float32(rank):
    a, b = ([t.bfloat16() for t in ts] for ts in both([6] * 3))
    mine = a[rank].requires_grad_()
    loss = info_nce(mine, b[rank], tile=4, group=dist.group.WORLD)
    loss.backward()
    assert (loss.dtype, mine.grad.dtype) == (torch.float32, torch.bfloat16)
    assert relative_error([loss], [info_nce(torch.cat(a).double(), torch.cat(b).double(), tile=4)]) <= FLOAT32


@on_ranks("three_ranks")
def test_the_ranks_of_a_group_compare_their_rows_alone(rank):
    """Ranks 0 and 2; rank 1 doesn't take part."""
    group = dist.new_group([0, 2])
    if rank == 1:
        return
    a, b = ([t.requires_grad_() for t in (ts[0], ts[2])] for ts in both([4] * 3))
    mine = a[rank // 2], b[rank // 2]
    expected = torch.autograd.grad(2 * info_nce(torch.cat(a), torch.cat(b)), mine)
    assert relative_error(torch.autograd.grad(info_nce(*mine, tile=3, group=group), mine), expected) <= FLOAT64


@on_ranks("three_ranks")
def test_no_rank_ever_holds_all_ranks_rows(rank):
    a, b = drawn(rank, 50, size=8).requires_grad_(), drawn(rank + 3, 50, size=8).requires_grad_()
    with Largest() as largest:
        info_nce(a, b, tile=16, group=dist.group.WORLD).backward()
    assert largest.numbers == 50 * 8 * 8  # its own rows, or one other rank's


DIFFERING = {  # what another rank calls it with, and what is said of it
    "`temperature`": (lambda a, b: {"temperature": 0.2}, "0.1, 0.2, 0.1"),
    "`symmetric`": (lambda a, b: {"symmetric": False}, "True, False, True"),
    "whether `a` needs a gradient": (
        lambda a, b: {"a": a.detach()}, "a gradient needed, no gradient needed, a gradient needed",
    ),
    "the size of a row": (lambda a, b: {"a": a[:, :3], "b": b[:, :3]}, "4, 3, 4"),
    "the dtype of `b`": (lambda a, b: {"b": b.float()}, "torch.float64, torch.float32, torch.float64"),
    "the kind of `positives`": (lambda a, b: {"positives": torch.arange(4)}, "None, ids, None"),
    "an error": (lambda a, b: {"b": b[:2]}, ""),
}  # fmt: skip


@pytest.mark.parametrize("what", DIFFERING)
@on_ranks("three_ranks")
def test_ranks_that_differ_are_an_error_on_all_of_them(rank, what):
    (other, received), a, b = DIFFERING[what], drawn(1, 4).requires_grad_(), drawn(2, 4)
    options = {"a": a, "b": b, "temperature": 0.1, "symmetric": True, **(other(a, b) if rank == 1 else {})}
    said = error_of(lambda: info_nce(group=dist.group.WORLD, **options)).partition(": ")[2]
    expected = f"The ranks call info_nce differently: {what} must be the same. Received, by rank: {received}."
    if what == "an error":
        expected = (
            "Row i of a and row i of b are a pair"
            if rank == 1
            else "info_nce was called with wrong arguments on rank 1"
        )
    assert said.startswith(expected)


@on_ranks("three_ranks")
def test_second_derivatives_over_ranks_are_refused(rank):
    a, b = drawn(1, 4).requires_grad_(), drawn(2, 4)
    with pytest.raises(NotImplementedError, match="Second derivatives of a contrastive loss over ranks"):
        torch.autograd.grad(info_nce(a, b, group=dist.group.WORLD), a, create_graph=True)


# Chunked modules.

FEW_AND_MANY = [4, 14]


class Convolutional(nn.Sequential):
    def __init__(self):
        torch.manual_seed(2)
        norms = nn.BatchNorm2d(3), nn.BatchNorm2d(4)
        convolutions = nn.Conv2d(2, 3, 3, bias=False), nn.Conv2d(3, 4, 3, bias=False)
        super().__init__(convolutions[0], norms[0], nn.ReLU(), convolutions[1], norms[1], nn.Flatten(), nn.Linear(4, 3))
        self.double()


def rows_of(rank, *shape):
    generator = torch.Generator().manual_seed(10 + rank)
    return torch.randn(FEW_AND_MANY[rank], *shape, generator=generator, dtype=torch.float64) * (rank + 1) + rank


def gradients(model):
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]


@pytest.mark.parametrize(("flag", "keep"), [("", 0), ("find_unused_parameters", 0), ("static_graph", 1)])
@on_ranks()
def test_gradients_of_chunked_modules_under_ddp_are_the_mean_over_ranks(rank, flag, keep):
    plain, small = Towers(), Towers(lambda tower: chunked(tower, 4, keep=keep))
    for other in (0, 1):
        (plain_info_nce(*plain(rows_of(other, 5), rows_of(other, 5).cos())) / 2).backward()
    model = DistributedDataParallel(small, **({flag: True} if flag else {}))
    for _ in range(2):
        model.zero_grad()
        plain_info_nce(*model(rows_of(rank, 5), rows_of(rank, 5).cos())).backward()
        assert relative_error(gradients(small), gradients(plain)) <= FLOAT64


@pytest.mark.parametrize("keep", [0, 1])
@on_ranks()
def test_sharded_parameters_of_chunked_modules_get_the_mean_over_ranks(rank, keep):
    """The chunked module is sharded, or what it is a part of; a part inside of it can't be."""
    torch.manual_seed(3)
    start = tower()
    plain, inside = copy.deepcopy(start), copy.deepcopy(start)
    for other in (0, 1):
        (plain(rows_of(other, 5)).std() / 2).backward()
    model = nn.Sequential(chunked(start, 4, keep=keep), nn.Identity())
    fully_shard(model if keep else model[0], mesh=mesh())
    model(rows_of(rank, 5)).std().backward()
    assert relative_error(gradients(model), gradients(plain)) <= FLOAT64
    fully_shard(inside[0], mesh=mesh())
    with pytest.raises(ValueError, match=r"'0' inside a chunked module is sharded.*fully_shard\(chunked"):
        chunked(inside, 4)(rows_of(1, 5))


@on_ranks()
def test_exact_batch_norm_spans_the_ranks(rank):
    """In chunked modules, and in TrainStep, which cuts what DistributedDataParallel wraps."""
    with pytest.MonkeyPatch.context() as patch:
        # PyTorch's own SyncBatchNorm has no kernel for the CPU, so its wrapper refuses it there; ours has.
        patch.setattr(DistributedDataParallel, "_passing_sync_batchnorm_handle", lambda self, module: None)
        plain, total = Convolutional(), sum(FEW_AND_MANY)
        local, start = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain)), copy.deepcopy(plain)
        y = [torch.arange(count) % 3 for count in FEW_AND_MANY]
        x = [rows_of(r, 2, 5, 5) for r in (0, 1)]
        F.cross_entropy(plain(torch.cat(x)), torch.cat(y)).backward()

        model = DistributedDataParallel(chunked(local, 4, batch_norm="exact"))
        said = lines_of(lambda: model(x[rank]).sum().backward())
        model.zero_grad()
        local.load_state_dict(start.state_dict())
        (F.cross_entropy(model(x[rank]), y[rank], reduction="sum") / total * 2).backward()
        assert relative_error(gradients(model), gradients(plain)) <= 1e-11
        assert relative_error(local.buffers(), plain.buffers()) <= 1e-11
        assert [sentence.partition(":")[0] for sentence in said] == [
            "Whether a chunked Convolutional gives the outputs and gradients of all rows at once is not proven here"
        ]

        model = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(start))
        keys = list(model.state_dict())
        step_of(model, "plain sgd", batch_norm="exact")(x[rank], y[rank])
        torch.optim.SGD(plain.parameters(), 0.1).step()
        assert relative_error(whole(model), plain.parameters()) <= 1e-11
        assert list(model.state_dict()) == keys


@on_ranks()
def test_chunking_what_is_wrapped_in_ddp_is_an_error(rank):
    with pytest.raises(ValueError, match=r"DistributedDataParallel\(chunked\(encoder, \.\.\.\)\)"):
        chunked(DistributedDataParallel(tower()), 4)


@pytest.mark.parametrize("inside", slowly([True], [False]))
def test_compiled_chunked_modules(inside, float64):
    plain, x = tower(), torch.randn(23, 5)
    module = copy.deepcopy(plain)
    torch._dynamo.reset()
    if inside:
        small = chunked(torch.compile(module, backend="eager"), 4)
    else:
        small = torch.compile(chunked(module, 4), backend="eager")
    for m in (plain, small):
        for _ in range(2):
            m(x).std().backward()
    assert relative_error(gradients(module), gradients(plain)) <= FLOAT64
    torch._dynamo.reset()
