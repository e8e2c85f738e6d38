"""Contrastive losses in tiles against the matrix of all pairs, in time and memory; whole updates with encoders."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.chunked import random_state, set_random_state
from benchmarks.harness import arguments, in_fresh_process, publish, ratios, seconds, table
from gradaccum.torch import chunked
from gradaccum.torch.losses import info_nce
from gradaccum.torch.measure.fake_memory import LiveBytes

SIZE, TEMPERATURE, BLOCK, MICRO_BATCH = 512, 0.07, 1024, 256
PROBE = "import sys; from benchmarks.info_nce import peak; print(peak(sys.argv[1], int(sys.argv[2])))"


def matrix(a: Tensor, b: Tensor) -> Tensor:
    scores, labels = a @ b.T / TEMPERATURE, torch.arange(len(a), device=a.device)
    return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2


def by_hand(a: Tensor, b: Tensor) -> Tensor:
    """Blocks of rows against all others, once each way, each under a checkpoint."""

    def block(rows: Tensor, others: Tensor, first: int) -> Tensor:
        return F.cross_entropy(
            rows @ others.T / TEMPERATURE, torch.arange(first, first + len(rows), device=rows.device), reduction="sum"
        )

    parts = [
        checkpoint(block, one[first : first + BLOCK], other, first, use_reentrant=False)
        for one, other in ((a, b), (b, a))
        for first in range(0, len(a), BLOCK)
    ]
    return sum(parts) / (2 * len(a))  # type: ignore[return-value]  # tensors


def tiles(a: Tensor, b: Tensor) -> Tensor:
    return info_nce(a, b, temperature=TEMPERATURE)


LOSSES = {"the matrix": matrix, "blocks of rows, checkpointed": by_hand, "info_nce": tiles}


def update_of(name: str, rows: int) -> Callable[[], None]:
    """The loss and its gradients; or those of an update, where a name begins with "update"."""
    torch.manual_seed(0)
    if not name.startswith("update"):
        a, b = (F.normalize(torch.randn(rows, SIZE), dim=1).requires_grad_() for _ in range(2))

        def loss() -> None:
            a.grad = b.grad = None
            LOSSES[name](a, b).backward()

        return loss
    encoders = [
        nn.Sequential(nn.Linear(SIZE, 4 * SIZE), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * SIZE, SIZE))
        for _ in range(2)
    ]
    inputs = [torch.randn(rows, SIZE) for _ in encoders]
    small = [chunked(encoder, MICRO_BATCH) for encoder in encoders]

    def whole() -> None:
        matrix(*(F.normalize(encoder(x), dim=1) for encoder, x in zip(encoders, inputs, strict=True))).backward()

    def grad_cache() -> None:
        """Gao et al. (2021), written anew: two passes, and the whole matrix between them."""
        states: list[Tensor] = []
        found = []
        with torch.no_grad():
            for encoder, x in zip(encoders, inputs, strict=True):
                parts = []
                for part in x.split(MICRO_BATCH):
                    states.append(random_state())
                    parts.append(encoder(part))
                found.append(torch.cat(parts))
        found = [outputs.requires_grad_() for outputs in found]
        matrix(*(F.normalize(outputs, dim=1) for outputs in found)).backward()
        after, given = random_state(), iter(states)
        for encoder, x, outputs in zip(encoders, inputs, found, strict=True):
            assert outputs.grad is not None
            for part, gradient in zip(x.split(MICRO_BATCH), outputs.grad.split(MICRO_BATCH), strict=True):
                set_random_state(next(given))
                torch.dot(encoder(part).flatten(), gradient.flatten()).backward()
        set_random_state(after)

    def ours() -> None:
        tiles(*(F.normalize(encoder(x), dim=1) for encoder, x in zip(small, inputs, strict=True))).backward()

    return {"update, whole batch": whole, "update, GradCache's algorithm": grad_cache, "update, chunked": ours}[name]


def live(name: str, rows: int) -> float:
    """MiB of tensors alive at the most, inputs and parameters left out and their gradients included."""
    update = update_of(name, rows)
    update()
    with LiveBytes() as bytes_:
        update()
    return bytes_.peak / 2**20


def peak(name: str, rows: int) -> float:
    """MiB that the process takes at the most, over what it had before."""
    update = update_of(name, rows)
    update_of(name, 8)()  # what the libraries take at their first call
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the most begins anew
    update()
    return (_status("VmHWM") - before) / 1024


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1])


def main() -> None:
    options = arguments(__doc__, cuda=True)
    rounds = 1 if options.quick else 3
    rows = []
    for count in (1024, 2048) if options.quick else (2048, 4096, 8192):
        contenders = {name: update_of(name, count) for name in LOSSES}
        # These have no windows, and prove a first call at the most.
        time = ratios(contenders, "the matrix", rounds, about=f"{count:,} pairs", warm_up=1)
        memory = {name: live(name, count) for name in LOSSES}
        saved = memory["info_nce"] / memory["the matrix"]
        at_most = (
            f"At {count:,} pairs of {SIZE} numbers it takes {time['info_nce']:.2f} of the matrix's time and {saved:.2f}"
        )
        rows.append([f"{count:,}", *(time[name] for name in LOSSES), *(f"{memory[name]:.0f}" for name in LOSSES)])
        print(rows[-1], file=sys.stderr, flush=True)
    largest = 4096 if options.quick else 32768
    half = seconds(update_of("info_nce", largest // 2))
    full = seconds(update_of("info_nce", largest))
    memory_of_largest = float(in_fresh_process(PROBE, "info_nce", str(largest)))
    names = ["update, whole batch", "update, GradCache's algorithm", "update, chunked"]
    pairs = 1024 if options.quick else 4096
    contenders = {name: update_of(name, pairs) for name in names}
    time = ratios(contenders, names[0], rounds, about=f"an update, {pairs:,} pairs", warm_up=1)
    updates = [[name.partition(", ")[2], time[name], f"{live(name, pairs):.0f}"] for name in names]
    updates[-1][0] = "`chunked` encoders, `info_nce`"
    copy = f"{largest**2 * 4 / 2**30:.1f} GiB"
    body = (
        f"Loss and gradients of pairs of {SIZE} numbers in float32: time relative to the matrix of all pairs, and "
        "peak MiB of live tensors without the inputs.\n\n"
        + table(["pairs", *(f"time, {name}" for name in LOSSES), *(f"MiB, {name}" for name in LOSSES)], rows)
        + f"\n\nFor {largest:,} pairs each copy of the matrix takes {copy}. `info_nce` takes {memory_of_largest:.0f} "
        f"MiB without the inputs, and {full / half:.1f} times as long as for half as many pairs.\n\n"
        f"A whole update, two encoders of two layers, {pairs:,} pairs, {MICRO_BATCH} at a time:\n\n"
        + table(["", "time", "MiB"], updates)
    )
    block = (
        f"{at_most} of its memory. {largest:,} pairs, whose matrix\ntakes {copy} a copy, take "
        f"{memory_of_largest:.0f} MiB with their gradients ([measured](benchmarks.md#contrastive-losses-in-tiles))."
    )
    publish(
        "info_nce",
        "Contrastive losses in tiles",
        body,
        ["torch"],
        options,
        ours=["info_nce", "update, chunked"],
        blocks={"docs/contrastive.md#info_nce": block},
    )


if __name__ == "__main__":
    main()
