"""What each rank does in the tests of chunked modules on several ranks. Every case compares itself with one process."""

import copy

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from gradaccum.torch import TrainStep, chunked
from tests.reference import FLOAT64, relative_error
from tests.torch.distributed.problems import lines_of

RANKS, ROWS = 2, [4, 14]


def encoder():
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 4)).double()


class TwoTowers(nn.Module):
    """Two towers, and one of them called twice."""

    def __init__(self, wrap=lambda tower: tower):
        super().__init__()
        torch.manual_seed(1)
        self.images, self.texts = wrap(encoder()), wrap(encoder())
        self.temperature = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, x, t):
        a, b, c = self.images(x), self.texts(t), self.images(x + 1)
        logits, labels = a @ (b + c).T * self.temperature.exp(), torch.arange(len(x))
        return F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)


class Convolutional(nn.Sequential):
    def __init__(self):
        torch.manual_seed(2)
        norms = nn.BatchNorm2d(3), nn.BatchNorm2d(4)
        convolutions = nn.Conv2d(2, 3, 3, bias=False), nn.Conv2d(3, 4, 3, bias=False)
        super().__init__(convolutions[0], norms[0], nn.ReLU(), convolutions[1], norms[1], nn.Flatten(), nn.Linear(4, 3))
        self.double()


def rows_of(rank, shape):
    generator = torch.Generator().manual_seed(10 + rank)
    return torch.randn(ROWS[rank], *shape, generator=generator, dtype=torch.float64) * (rank + 1) + rank


def gradients(model):
    return [p.grad for p in model.parameters()]


def gradients_are_the_mean_over_ranks(rank):
    whole = TwoTowers()
    for other in range(RANKS):
        (whole(rows_of(other, (5,)), rows_of(other, (5,)).cos()) / RANKS).backward()
    for options, keep in (({}, 0), ({"find_unused_parameters": True}, 0), ({"static_graph": True}, 1)):
        small = TwoTowers(lambda tower, keep=keep: chunked(tower, 4, keep=keep))
        model = DistributedDataParallel(small, **options)
        for _ in range(2):
            model.zero_grad()
            model(rows_of(rank, (5,)), rows_of(rank, (5,)).cos()).backward()
            assert relative_error(gradients(small), gradients(whole)) <= FLOAT64, options


def sharded_parameters_get_the_mean_over_ranks(rank):
    mesh = distributed.init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(3)
    start = encoder()
    whole = copy.deepcopy(start)
    for other in range(RANKS):
        (whole(rows_of(other, (5,))).std() / RANKS).backward()
    for keep in (0, 1):
        model = nn.Sequential(chunked(copy.deepcopy(start), 4, keep=keep), nn.Identity())
        if keep:
            fully_shard(model, mesh=mesh)
        else:
            fully_shard(model[0], mesh=mesh)
        model(rows_of(rank, (5,))).std().backward()
        assert relative_error([p.grad.full_tensor() for p in model.parameters()], gradients(whole)) <= FLOAT64
    inside = copy.deepcopy(start)
    fully_shard(inside[0], mesh=mesh)
    with pytest.raises(ValueError, match=r"'0' inside a chunked module is sharded.*fully_shard\(chunked"):
        chunked(inside, 4)(rows_of(1, (5,)))


def exact_batch_norm_spans_the_ranks(rank):
    # PyTorch's own SyncBatchNorm has no kernel for the CPU, so its wrapper refuses it there; ours has.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistributedDataParallel, "_passing_sync_batchnorm_handle", lambda self, module: None)
        _exact_batch_norm(rank)


def _exact_batch_norm(rank):
    whole, total = Convolutional(), sum(ROWS)
    local, start = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(whole)), copy.deepcopy(whole)
    y = [torch.arange(ROWS[r]) % 3 for r in range(RANKS)]
    x = [rows_of(r, (2, 5, 5)) for r in range(RANKS)]
    F.cross_entropy(whole(torch.cat(x)), torch.cat(y)).backward()

    model = DistributedDataParallel(chunked(local, 4, batch_norm="exact"))
    said = lines_of(lambda: model(x[rank]).sum().backward())
    model.zero_grad()
    local.load_state_dict(start.state_dict())
    (F.cross_entropy(model(x[rank]), y[rank], reduction="sum") / total * RANKS).backward()
    assert relative_error(gradients(model), gradients(whole)) <= 1e-11
    assert relative_error(local.buffers(), whole.buffers()) <= 1e-11
    assert [sentence.partition(":")[0] for sentence in said] == [
        "Whether a chunked Convolutional gives the outputs and gradients of all rows at once is not proven here"
    ]

    # TrainStep cuts what DistributedDataParallel wraps; its update is that of all ranks' rows.
    model = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(start)))
    keys = list(model.state_dict())

    step = TrainStep(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        loss_fn=nn.CrossEntropyLoss(),
        micro_batch_size=4,
        batch_norm="exact",
        verify=False,
    )
    step(x[rank], y[rank])
    optimizer = torch.optim.SGD(start.parameters(), 0.1)
    F.cross_entropy(start(torch.cat(x)), torch.cat(y)).backward()
    optimizer.step()
    assert relative_error(model.parameters(), start.parameters()) <= 1e-11
    assert list(model.state_dict()) == keys
