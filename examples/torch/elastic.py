"""Elastic training: the effective batch stays what it was when the number of ranks changes between runs.

    torchrun --nproc-per-node 4 examples/torch/elastic.py --checkpoint run.pt
    torchrun --nproc-per-node 2 examples/torch/elastic.py --checkpoint run.pt     # continues after a node was lost

Every update sees the same rows on any number of ranks. Rank 0 saves closed windows, which are the same on every rank.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradaccum
import gradaccum.torch
from gradaccum.torch.optim import Optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--desired-batch-size", type=int, default=48, help="rows of an update, over all ranks")
    parser.add_argument("--maximum-batch-size", type=int, default=8, help="rows that fit into one rank's memory")
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--kill-after", type=int, help="updates after which this run is killed, to try it out")
    arguments = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 3)).to(device, torch.float64)
    ddp = DistributedDataParallel(model)
    optimizer = Optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        steps=gradaccum.steps_for(arguments.desired_batch_size, arguments.maximum_batch_size, ranks=ranks),
        model=ddp,
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.updates)
    if arguments.checkpoint.exists():
        saved = torch.load(arguments.checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
    if rank == 0:
        print(f"{ranks} ranks, {optimizer.steps} steps, from update {optimizer.updates}", flush=True)

    while optimizer.updates < arguments.updates:
        x, y = rows_of(optimizer.updates, arguments.desired_batch_size)
        # This rank's part of the update's rows, in as many micro-batches as a window has steps.
        for part_x, part_y in zip(mine(x, rank, ranks, optimizer.steps), mine(y, rank, ranks, optimizer.steps)):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(part_x.to(device)), part_y.to(device))
            optimizer.backward(loss, weight=len(part_x))
            optimizer.step()
        scheduler.step()
        if rank == 0:
            save(arguments.checkpoint, model, optimizer, scheduler)
        if optimizer.updates == arguments.kill_after:
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)

    dist.destroy_process_group()


def rows_of(update: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of an update: they depend on its number alone, as those of a sampler with a seed do."""
    generator = torch.Generator().manual_seed(update)
    x = torch.randn(rows, 10, generator=generator, dtype=torch.float64)
    return x, x[:, :3].argmax(1)


def mine(rows: torch.Tensor, rank: int, ranks: int, steps: int) -> list[torch.Tensor]:
    """One rank's micro-batches; sizes may differ by a row."""
    return list(rows.tensor_split(ranks)[rank].tensor_split(steps))


def save(path: Path, model: nn.Module, optimizer: Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
    """Write a checkpoint, or leave the last one as it is."""
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save(states, f"{path}.new")
    os.replace(f"{path}.new", path)


if __name__ == "__main__":
    main()
