"""What each rank does in test_contrastive.py. Ranks differ in rows; the oracle is one process with all of them."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from gradaccum.torch import chunked
from gradaccum.torch.losses import info_nce, sigmoid_loss
from tests.reference import relative_error
from tests.torch.contrastive.problems import Largest, plain_info_nce, plain_sigmoid, same

ROWS, COLUMNS = [5, 0, 8], [7, 2, 8]
OF_A = [torch.arange(n) % 4 + rank for rank, n in enumerate(ROWS)]
OF_B = [torch.arange(n) % 3 + rank for rank, n in enumerate(COLUMNS)]


def rows_of(rank, count, size=4):
    generator = torch.Generator().manual_seed(rank + 100 * count)
    return F.normalize(torch.randn(count, size, generator=generator, dtype=torch.float64), dim=1)


def paired():
    """Row i of each rank's `a`, and row i of its `b`."""
    matrix = torch.zeros(sum(ROWS), sum(COLUMNS), dtype=torch.bool)
    for rank, rows in enumerate(ROWS):
        for i in range(rows):
            matrix[sum(ROWS[:rank]) + i, sum(COLUMNS[:rank]) + i] = True
    return matrix


def every_pair(rank, how, loss_name):
    """The largest error of the loss and of each gradient, of this rank's rows and of the temperature."""
    a, b = ([rows_of(10 * n + other, counts[other]) for other in range(3)] for n, counts in ((1, ROWS), (2, COLUMNS)))
    numbers = (torch.arange(sum(ROWS))[:, None] * torch.arange(sum(COLUMNS))) % 5 == 1
    positives, ignore, matrix, ignored = {
        "row i and row i": (None, None, paired(), None),
        "ids of the pairs": (OF_A[rank], None, None, None),
        "ids of both": ((OF_A[rank], OF_B[rank]), None, same(torch.cat(OF_A), torch.cat(OF_B)), None),
        "false negatives": (None, (OF_A[rank], OF_B[rank]), paired(), same(torch.cat(OF_A), torch.cat(OF_B))),
        "functions": (lambda i, j: (i[:, None] * j) % 5 == 1, lambda i, j: i[:, None] + j == 7, numbers,
                      torch.arange(sum(ROWS))[:, None] + torch.arange(sum(COLUMNS)) == 7),
    }[how]  # fmt: skip
    if how == "ids of the pairs":
        extended = [torch.cat([ids, torch.full((m - len(ids),), -1)]) for ids, m in zip(OF_A, COLUMNS, strict=True)]
        matrix = same(torch.cat(OF_A), torch.cat(extended))

    def scalar(value):
        return torch.tensor(value, dtype=torch.float64, requires_grad=True)

    whole, mine = [
        [t.clone().requires_grad_() for t in (torch.cat(a), torch.cat(b))],
        [a[rank].clone(), b[rank].clone()],
    ]
    mine = [t.requires_grad_() for t in mine]
    extra, my_extra = [[scalar(0.2)] + ([scalar(-3.0)] if loss_name == "sigmoid" else []) for _ in range(2)]
    options = {"tile": 3, "positives": positives, "ignore": ignore, "group": dist.group.WORLD}
    if loss_name == "sigmoid":
        expected = plain_sigmoid(*whole, *extra, matrix, ignored)
        loss = sigmoid_loss(*mine, temperature=my_extra[0], bias=my_extra[1], **options)
    else:
        symmetric = loss_name == "symmetric"
        expected = plain_info_nce(*whole, *extra, matrix, ignored, symmetric)
        loss = info_nce(*mine, temperature=my_extra[0], symmetric=symmetric, **options)
    expected.backward()
    (loss * (rank + 1) / 6).backward()  # the sum of what the ranks make of it is the loss itself
    first = sum(ROWS[:rank]), sum(COLUMNS[:rank])
    of_rows = [t.grad[f : f + len(m)] for t, f, m in zip(whole, first, mine, strict=True)]
    for t in my_extra:
        dist.all_reduce(t.grad)
    return [
        relative_error([loss], [expected]),
        *(
            relative_error([m.grad], [g]) * (g.abs().max() / w.grad.abs().max()).item() if len(m) else 0.0
            for m, g, w in zip(mine, of_rows, whole, strict=True)
        ),
        *(relative_error([m.grad], [t.grad]) for m, t in zip(my_extra, extra, strict=True)),
    ]


class Towers(nn.Module):
    def __init__(self, wrap=lambda tower: tower):
        super().__init__()
        torch.manual_seed(0)
        self.images, self.texts = (
            wrap(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)).double()) for _ in "ab"
        )
        self.logit_scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, x, t):
        return F.normalize(self.images(x), dim=1), F.normalize(self.texts(t), dim=1), (-self.logit_scale).exp()


def update_under_ddp(rank, wrapped):
    """The error of parameters after two updates of DDP, and of the loss, against one process with all ranks' rows."""
    whole = Towers()
    wrap = (lambda tower: chunked(tower, 2)) if wrapped else (lambda tower: tower)
    model = DistributedDataParallel(Towers(wrap))
    sizes = [6, 3, 9]
    x, t = ([rows_of(10 * n + r, sizes[r], size=5) for r in range(3)] for n in (1, 2))
    optimizers = [torch.optim.SGD(m.parameters(), 0.5, momentum=0.9) for m in (whole, model)]
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = plain_info_nce(*whole(torch.cat(x), torch.cat(t)))
        expected.backward()
        a, b, temperature = model(x[rank], t[rank])
        loss = info_nce(a, b, temperature=temperature, tile=4, group=dist.group.WORLD)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return relative_error([loss, *model.parameters()], [expected, *whole.parameters()])


def half_precision(rank):
    a, b = ([rows_of(10 * n + r, 6).bfloat16() for r in range(3)] for n in (1, 2))
    whole = info_nce(torch.cat(a).double(), torch.cat(b).double(), tile=4)
    mine = a[rank].requires_grad_()
    loss = info_nce(mine, b[rank], tile=4, group=dist.group.WORLD)
    loss.backward()
    assert (loss.dtype, mine.grad.dtype) == (torch.float32, torch.bfloat16)
    return relative_error([loss], [whole])


def gradients_of_a_subgroup(rank):
    """Ranks 0 and 2 compare their rows; rank 1 doesn't take part."""
    group = dist.new_group([0, 2])
    if rank == 1:
        return 0.0
    a, b = ([rows_of(10 * n + r, 4).requires_grad_() for r in (0, 2)] for n in (1, 2))
    expected = torch.autograd.grad(2 * info_nce(torch.cat(a), torch.cat(b)), (a[rank // 2], b[rank // 2]))
    mine = a[rank // 2], b[rank // 2]
    return relative_error(torch.autograd.grad(info_nce(*mine, tile=3, group=group), mine), expected)


def differing(rank, what):
    a, b = rows_of(1, 4).requires_grad_(), rows_of(2, 4)
    options = {"temperature": 0.1, "symmetric": True}
    if what == "`temperature`" and rank == 1:
        options["temperature"] = 0.2
    if what == "`symmetric`" and rank == 1:
        options["symmetric"] = False
    if what == "whether `a` needs a gradient" and rank == 1:
        a = a.detach()
    if what == "the size of a row" and rank == 1:
        a, b = a[:, :3], b[:, :3]
    if what == "the dtype of `b`" and rank == 1:
        b = b.float()
    if what == "the kind of `positives`" and rank == 1:
        options["positives"] = torch.arange(4)
    if what == "an error" and rank == 1:
        b = b[:2]
    info_nce(a, b, group=dist.group.WORLD, **options)


def second_derivatives(rank):
    a, b = rows_of(1, 4).requires_grad_(), rows_of(2, 4)
    torch.autograd.grad(info_nce(a, b, group=dist.group.WORLD), a, create_graph=True)


def largest_block(rank):
    """The most bytes in one tensor, on each rank."""
    a, b = copy.deepcopy(rows_of(rank, 50, size=8)).requires_grad_(), rows_of(rank + 3, 50, size=8).requires_grad_()
    with Largest() as largest:
        info_nce(a, b, tile=16, group=dist.group.WORLD).backward()
    return largest.numbers
