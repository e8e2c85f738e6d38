"""Modules, rows and losses that the check and the proof of the first update both look at."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.torch.problems import Does

CE = nn.CrossEntropyLoss()


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def of(function):
    return Does(lambda m, *inputs: function(*inputs))


def net(*middle):
    """6 -> 8 -> 4, with these modules or functions between."""
    middle = [part if isinstance(part, nn.Module) else of(part) for part in middle]
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), *middle, nn.Linear(8, 4))


def with_gradient_hook(hook):
    model = net()
    model[0].weight.register_hook(hook)
    return model


def token_mean(model, x, y):
    return F.cross_entropy(model(x), y)
