"""Modules that the check and the proof of the first update both look at."""

import torch
from torch import nn
from torch.utils import checkpoint


class Apply(nn.Module):
    """A module of one function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.ReLU(inplace=True))
        self.head = nn.Linear(8, 4)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = x.clone().requires_grad_()
        return self.head(checkpoint.checkpoint(self.body, x, use_reentrant=self.use_reentrant))


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
