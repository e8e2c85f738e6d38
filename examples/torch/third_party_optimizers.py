"""Wrapped optimizers from outside PyTorch (Lion, schedule-free, bitsandbytes' 8-bit ones), and Muon.

    python examples/torch/third_party_optimizers.py

Optimizers that aren't installed are left out.
"""

import contextlib

import torch
from torch import nn

import gradaccum.torch

ROWS, STEPS, SIZE = 30, 4, 64
ROUNDED = {"Muon": 1e-3, "8bit": 1e-3}
"""Muon orthogonalizes in bfloat16; the last bits of a gradient change an 8-bit state."""


class Lion(torch.optim.Optimizer):
    """The sign of an interpolation between gradient and momentum."""

    def __init__(self, parameters, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * mean.lerp(p.grad, 1 - group["betas"][0]).sign())
                mean.lerp_(p.grad, 1 - group["betas"][1])


def optimizers():
    found = {"Lion": lambda p: Lion(p, lr=1e-3), "Muon": lambda p: torch.optim.Muon(p, lr=1e-2)}
    with contextlib.suppress(ImportError):
        import schedulefree

        found["schedule-free"] = lambda p: schedulefree.AdamWScheduleFree(p, lr=1e-2, warmup_steps=2)
    with contextlib.suppress(ImportError):
        import bitsandbytes

        found["bitsandbytes Adam8bit"] = lambda p: bitsandbytes.optim.Adam8bit(p, lr=1e-3)
        found["bitsandbytes Lion8bit"] = lambda p: bitsandbytes.optim.Lion8bit(p, lr=1e-3)
    return found


def network():
    torch.manual_seed(0)
    # Weights alone: Muon takes matrices. Of this size bitsandbytes keeps its state in 8 bits.
    return nn.Sequential(nn.Linear(SIZE, SIZE, bias=False), nn.Tanh(), nn.Linear(SIZE, SIZE, bias=False))


def train_mode(optimizer):
    if hasattr(optimizer, "train"):  # schedule-free ones evaluate elsewhere than they train
        optimizer.train()


def windows(make, data):
    model = network()
    inner = make(model.parameters())
    train_mode(inner)
    optimizer = gradaccum.torch.optim.Optimizer(inner, STEPS)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=4)
    for x, y in optimizer.batches(loader):
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def large_batches(make, data):
    model = network()
    optimizer = make(model.parameters())
    train_mode(optimizer)
    for start in range(0, ROWS, STEPS * 4):
        optimizer.zero_grad()
        x, y = (part[start : start + STEPS * 4] for part in data)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


def error(found, expected):
    flat = [nn.utils.parameters_to_vector(model.parameters()).detach() for model in (found, expected)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


if __name__ == "__main__":
    torch.manual_seed(1)
    data = torch.randn(ROWS, SIZE), torch.randn(ROWS, SIZE)
    for name, make in optimizers().items():
        off = error(windows(make, data), large_batches(make, data))
        print(f"{name}: relative error against the large batch {off:.1e}")
        assert off < next((much for part, much in ROUNDED.items() if part in name), 1e-6), name
