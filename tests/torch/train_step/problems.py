"""What the tests of TrainStep train: models, their batches, and optimizers."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from tests.fuzz.problem import Faulty
from tests.torch.problems import Does as Of

OUT = "CUDA out of memory (simulated)"
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
}


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def batches(rows=13, count=3, dtype=torch.float64):
    torch.manual_seed(1)
    return [(torch.randn(rows, 5, dtype=dtype), torch.randint(0, 3, (rows,))) for _ in range(count)]


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.float64)


def plain_loss(model, x, y):
    return F.cross_entropy(model(x), y)


def linear(inputs, outputs):
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, dtype=torch.float64)


def moves_statistics(module, x):
    """As a BatchNorm does: one in place, one by assignment."""
    module.mean.mul_(0.9).add_(x.detach().mean(0))
    module.count = module.count + 1


class Fragile(nn.Module):
    """Layers with dropout and buffers that move, which fit up to a number of rows."""

    def __init__(self, forward_limit=99, backward_limit=99, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 6, dtype=torch.float64)
        self.statistics = Of(moves_statistics, mean=zeros(5), count=torch.zeros(()))
        self.dropout = nn.Dropout(dropout)
        self.last, self.fault, self.sizes = nn.Linear(6, 3, dtype=torch.float64), Faulty(), []
        self.fault.most = {"forward": forward_limit, "backward": backward_limit}

    def forward(self, x):
        self.sizes.append(len(x))
        self.statistics(x)
        return self.last(self.fault(self.dropout(torch.tanh(self.first(x)))))


def centred(module, x):
    """Subtracts a moving average of the rows' mean."""
    outputs = x - module.mean.clone()
    with torch.no_grad():
        module.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return outputs


class Sharp(torch.optim.SGD):
    """Moves parameters between two evaluations of an optional closure, in steps after the `first` ones."""

    first = 0

    def step(self, closure=None):
        if closure is None:
            return super().step()
        loss = closure()
        self.first -= 1
        if self.first < 0:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.add_(parameter.grad, alpha=0.5)
            closure()
        super().step()
        return loss


class Experts(nn.Module):
    """Blocks with buffers, and experts through which rows of each kind go: the first column's sign, if not `kinds`."""

    def __init__(self):
        super().__init__()
        self.first = Of(centred, mean=zeros(5))
        self.blocks = nn.ModuleList(nn.Sequential(linear(5, 5), copy.deepcopy(self.first), nn.Tanh()) for _ in range(2))
        self.experts = nn.ModuleList(linear(5, 4) for _ in range(3))

    def forward(self, x, kinds=None):
        kinds = (x[:, 0] > 0).long() if kinds is None else kinds
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        outputs = x.new_zeros(len(x), 4)
        for kind in kinds.unique().tolist():  # the last one is never used
            outputs[kinds == kind] = self.experts[kind](x[kinds == kind])
        return outputs
