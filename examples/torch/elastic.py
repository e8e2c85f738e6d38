"""Elastic training: the same bits, whatever number of ranks there is, and when a worker is lost in the middle.

    torchrun --standalone --nproc-per-node 3 --max-restarts 3 examples/torch/elastic.py --checkpoint run.pt
    torchrun --standalone --nproc-per-node 2 examples/torch/elastic.py --checkpoint run.pt      # goes on with two ranks

Each rank gets its micro-batches of every global batch. Rank 0 saves every few updates. In the end the program prints
the SHA-256 of parameters and optimizer state. `--kill-at 6` kills the last rank before the sixth update, to try it out.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pathlib
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import gradaccum.torch

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))  # where `examples.demo` is found
from examples.demo.data import load
from examples.demo.progress import Progress


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=pathlib.Path, required=True)
    parser.add_argument("--dataset", choices=["auto", "fashion-mnist", "digits"], default="auto")
    parser.add_argument("--batch-size", type=int, default=256, help="rows of an update, over all ranks")
    parser.add_argument("--micro-batch-size", type=int, default=16, help="rows that fit into one rank's memory")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--save-every", type=int, default=4, help="updates")
    parser.add_argument("--kill-at", type=int, help="the update before which the last rank is killed")
    arguments = parser.parse_args()

    rank, ranks = join()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")

    data = rows(arguments.dataset)
    sampler = gradaccum.torch.GlobalBatchSampler(data, arguments.batch_size, arguments.micro_batch_size)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=sampler.collate)
    torch.manual_seed(0)
    model = network(data.tensors[0].shape[1]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = gradaccum.torch.TrainStep(
        DistributedDataParallel(model),
        optimizer,
        loss_fn=nn.CrossEntropyLoss(),
        micro_batch_size=arguments.micro_batch_size,
        reproducible=True,
    )
    parts = {"model": model, "optimizer": optimizer, "step": step, "sampler": sampler}
    if arguments.checkpoint.exists():
        saved = torch.load(arguments.checkpoint, map_location=device, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    if rank == 0:
        print(f"{ranks} ranks, from update {step.updates}", flush=True)

    while step.updates < arguments.epochs * len(sampler):
        for x, y in loader:
            if step.updates + 1 == arguments.kill_at and rank == ranks - 1 and first_start():
                os.kill(os.getpid(), signal.SIGKILL)
            step(x.to(device), y.to(device))
            if rank == 0 and step.updates % arguments.save_every == 0:
                save(arguments.checkpoint, {name: part.state_dict() for name, part in parts.items()})
    if rank == 0:
        print(f"after {step.updates} updates: SHA-256 {digest(model, optimizer)}", flush=True)
    dist.destroy_process_group()


def join() -> tuple[int, int]:
    """Join the other workers that torchrun has started this time. Returns this one's rank, and their number."""
    place = {name: os.environ[name.upper()] for name in ("rank", "world_size", "master_addr", "master_port")}
    store = dist.TCPStore(place["master_addr"], int(place["master_port"]), is_master=False)  # torchrun's own
    rank, ranks = int(place["rank"]), int(place["world_size"])
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        # The store outlives a restart, and the addresses of the workers before would be found in it.
        store=dist.PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store),
        rank=rank,
        world_size=ranks,
    )
    return rank, ranks


def rows(dataset: str) -> TensorDataset:
    found = load(dataset, progress=Progress())
    return TensorDataset(torch.tensor(found.train_x, dtype=torch.float32) / found.scale, torch.tensor(found.train_y))


def network(features: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))


def first_start() -> bool:
    """Whether torchrun has not restarted the workers yet."""
    return os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"


def save(path: pathlib.Path, states: dict[str, object]) -> None:
    """Write a checkpoint, or leave the last one as it is."""
    torch.save(states, f"{path}.new")
    os.replace(f"{path}.new", path)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    for tensor in [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]:
        found.update(tensor.detach().cpu().numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    main()
