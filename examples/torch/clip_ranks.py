"""CLIP on two ranks: encoders in chunks, and each image is contrasted with the texts of both ranks.

    python examples/torch/clip_ranks.py

Ranks have different numbers of rows. The result is compared with one process that has all rows.
"""

import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradaccum.torch import chunked
from gradaccum.torch.losses import info_nce

RANKS, ROWS, MICRO, UPDATES = 2, (11, 6), 4, 3


class Towers(nn.Module):
    """Two encoders and a temperature. `cut` wraps each encoder."""

    def __init__(self, cut=lambda encoder: encoder):
        super().__init__()
        torch.manual_seed(0)
        self.images = cut(nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 8)))
        self.texts = cut(nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 8)))
        self.scale = nn.Parameter(torch.tensor(2.6592))

    def forward(self, images, texts):
        normalize = nn.functional.normalize
        return normalize(self.images(images), dim=1), normalize(self.texts(texts), dim=1), (-self.scale).exp()


def data(update):
    generator = torch.Generator().manual_seed(update)
    return [torch.randn(sum(ROWS), width, generator=generator, dtype=torch.float64) for width in (12, 6)]


def all_rows_at_once():
    model = Towers().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for update in range(UPDATES):
        images, texts, temperature = model(*data(update))
        logits = images @ texts.T / temperature
        target = torch.arange(len(logits))
        optimizer.zero_grad()
        ((nn.functional.cross_entropy(logits, target) + nn.functional.cross_entropy(logits.T, target)) / 2).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def rank(index, folder):
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=index, world_size=RANKS)
    model = DistributedDataParallel(Towers(lambda encoder: chunked(encoder, MICRO)).double())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    own = slice(sum(ROWS[:index]), sum(ROWS[: index + 1]))
    for update in range(UPDATES):
        images, texts, temperature = model(*(part[own] for part in data(update)))
        optimizer.zero_grad()
        info_nce(images, texts, temperature=temperature, group=dist.group.WORLD).backward()
        optimizer.step()
    if index == 0:
        torch.save(nn.utils.parameters_to_vector(model.parameters()).detach(), f"{folder}/found.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank, (folder,), nprocs=RANKS)
        found = torch.load(f"{folder}/found.pt")
    expected = all_rows_at_once()
    off = float((found - expected).norm() / expected.norm())
    print(f"clip on {RANKS} ranks: relative error against one process with all rows {off:.1e}")
    assert off < 1e-12
