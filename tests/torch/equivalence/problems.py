"""Modules and losses that the check and the proof of the first update both look at."""

import torch
import torch.nn.functional as F
from torch import nn

CE = nn.CrossEntropyLoss()


class Apply(nn.Module):
    """A module of one function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def net(*middle):
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), *middle, nn.Linear(8, 4))


def token_mean(model, x, y):
    return F.cross_entropy(model(x), y)


def counted(x, y):
    return (y != -100).sum()


class Codebook(nn.Module):
    """Vector quantisation whose codes follow an average of what they stand for."""

    def __init__(self):
        super().__init__()
        self.register_buffer("code", torch.randn(5, 8))

    def forward(self, h):
        nearest = torch.cdist(h, self.code).argmin(1)
        quantised = self.code[nearest]
        with torch.no_grad():
            for index in nearest.unique():
                self.code[index] = 0.9 * self.code[index] + 0.1 * h[nearest == index].mean(0)
        return h + (quantised - h).detach()
