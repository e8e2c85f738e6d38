"""A diffusion loop with a GradScaler and an average of the weights, in windows of micro-batches.

    python examples/torch/diffusion.py

The scaler sees one window as one step, and the average moves once per update.
"""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import gradaccum.torch

ROWS, STEPS, SIZE, TIMES = 30, 4, 6, 10


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.time = nn.Embedding(TIMES, SIZE)
        self.network = nn.Sequential(nn.Linear(SIZE, 32), nn.SiLU(), nn.Linear(32, SIZE))

    def forward(self, x, time):
        return self.network(x + self.time(time))


def noise_loss(model, x, noise, time):
    kept = torch.linspace(0.95, 0.05, TIMES)[time][:, None]
    return nn.functional.mse_loss(model(kept.sqrt() * x + (1 - kept).sqrt() * noise, time), noise)


def parts():
    model = Denoiser()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    return model, average, torch.optim.AdamW(model.parameters(), lr=1e-3)


def windows(data, batch_size):
    model, average, inner = parts()
    optimizer = gradaccum.torch.optim.Optimizer(inner, STEPS, clip_grad_norm=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=batch_size)
    for batch in optimizer.batches(loader):
        scaler.scale(noise_loss(model, *batch)).backward()
        scaler.step(optimizer)
        scaler.update()
        if optimizer.updated:
            average.update_parameters(model)
        optimizer.zero_grad()
    return model, average


def large_batches(data, batch_size):
    model, average, optimizer = parts()
    for start in range(0, ROWS, STEPS * batch_size):
        optimizer.zero_grad()
        noise_loss(model, *(part[start : start + STEPS * batch_size] for part in data)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update_parameters(model)
    return model, average


def error(found, expected):
    pairs = [[p.detach().flatten() for model in models for p in model.parameters()] for models in (found, expected)]
    flat = [torch.cat(parts) for parts in pairs]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


if __name__ == "__main__":
    torch.manual_seed(1)
    data = torch.randn(ROWS, SIZE), torch.randn(ROWS, SIZE), torch.randint(TIMES, (ROWS,))
    off = error(windows(data, 4), large_batches(data, 4))
    print(f"diffusion: relative error of the weights and their average against the large batch {off:.1e}")
    assert off < 1e-6
