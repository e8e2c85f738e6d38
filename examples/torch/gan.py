"""A GAN with two wrapped optimizers: generator and discriminator make the large batch's updates.

    python examples/torch/gan.py

Both losses of a micro-batch are computed before either optimizer steps, so all micro-batches of a window see the same
networks, as the rows of a large batch do.
"""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as against

import gradaccum.torch

ROWS, STEPS, NOISE = 27, 4, 3  # the last micro-batch is a short one, and the last window has two


def networks():
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(NOISE, 16), nn.Tanh(), nn.Linear(16, 2))
    discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(), nn.Linear(16, 1))
    return generator.double(), discriminator.double()


def optimizers(generator, discriminator):
    return [torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.5, 0.9)) for model in (generator, discriminator)]


def losses(generator, discriminator, real, noise):
    """The generator's loss and the discriminator's."""
    fake = generator(noise)
    discriminator.requires_grad_(False)  # the generator's loss leaves no gradient there
    judged = discriminator(fake)
    fooled = against(judged, torch.ones_like(judged))
    discriminator.requires_grad_(True)
    on_real, on_fake = discriminator(real), discriminator(fake.detach())
    found = against(on_real, torch.ones_like(on_real)) + against(on_fake, torch.zeros_like(on_fake))
    return fooled, found


def windows(data, batch_size):
    generator, discriminator = networks()
    inner = optimizers(generator, discriminator)
    one, other = (gradaccum.torch.optim.Optimizer(optimizer, STEPS) for optimizer in inner)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=batch_size)
    for real, noise in loader:
        fooled, found = losses(generator, discriminator, real, noise)
        one.backward(fooled, weight=len(real))
        other.backward(found, weight=len(real))
        for optimizer in (one, other):
            optimizer.step()
            optimizer.zero_grad()
    one.flush()
    other.flush()
    return generator, discriminator


def large_batches(data, batch_size):
    generator, discriminator = networks()
    both = optimizers(generator, discriminator)
    for start in range(0, ROWS, STEPS * batch_size):
        for optimizer in both:
            optimizer.zero_grad()
        for loss in losses(generator, discriminator, *(part[start : start + STEPS * batch_size] for part in data)):
            loss.backward()
        for optimizer in both:
            optimizer.step()
    return generator, discriminator


def error(found, expected):
    pairs = [[p.detach().flatten() for model in models for p in model.parameters()] for models in (found, expected)]
    flat = [torch.cat(parts) for parts in pairs]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


if __name__ == "__main__":
    torch.manual_seed(1)
    data = torch.randn(ROWS, 2, dtype=torch.float64) + 2, torch.randn(ROWS, NOISE, dtype=torch.float64)
    off = error(windows(data, 5), large_batches(data, 5))
    print(f"gan: relative error of both networks against the large batch {off:.1e}")
    assert off < 1e-12
