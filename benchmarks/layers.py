"""Layer by layer against accumulation and the whole batch: time, and the peaks of live bytes and of gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from benchmarks.harness import WARM_UP, arguments, keep_freed_memory, looks, publish, ratio_of, ratios, table
from gradaccum.torch import BlockStep, TrainStep
from gradaccum.torch.measure.fake_memory import LiveBytes

SIZE, DEPTH, VOCABULARY, ROWS, LENGTH, MICRO_BATCH = 256, 12, 4096, 32, 16, 4


class Model(nn.Module):
    """A transformer of equal blocks."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.checkpointed = checkpointed
        self.embedding = nn.Embedding(VOCABULARY, SIZE)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(SIZE, 4, 4 * SIZE, dropout=0.0, batch_first=True) for _ in range(DEPTH)
        )
        self.head = nn.Linear(SIZE, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(x).flatten(0, 1)


def compute_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids), ids.flatten())


WAYS: dict[str, dict[str, Any]] = {
    "whole batch": {"micro_batch_size": ROWS},
    "accumulation": {},
    "accumulation, each block checkpointed": {"checkpointed": True},
    "BlockStep": {"kind": BlockStep, "blocks": "layers"},
    'BlockStep(..., update="in_backward")': {"kind": BlockStep, "blocks": "layers", "update": "in_backward"},
}
FLOOR = "accumulation, and its blocks forward once more"


def step_of(
    *, kind: Any = TrainStep, checkpointed: bool = False, dtype: torch.dtype = torch.float32, **options: Any
) -> TrainStep | BlockStep:
    model = Model(checkpointed).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    options = {"micro_batch_size": MICRO_BATCH, "verify": False, **options}
    step: TrainStep | BlockStep = kind(model, optimizer, compute_loss=compute_loss, **options)
    return step


def times(rounds: int, ids: Tensor, warm_up: int) -> dict[str, dict[str, float]]:
    contenders: dict[str, Callable[[], object]] = {
        name: functools.partial(step_of(**options), ids) for name, options in WAYS.items()
    }
    contenders[FLOOR] = functools.partial(once_more, step_of(), ids)
    found = ratios(contenders, "accumulation", rounds, about="an update", warm_up=warm_up)
    rival = found["accumulation, each block checkpointed"]
    return {name: {"plain": ratio, "checkpointed": ratio / rival} for name, ratio in found.items()}


def once_more(step: TrainStep | BlockStep, ids: Tensor) -> None:
    """What layer by layer adds at least: all blocks but the last go forward once more."""
    step(ids)
    with torch.no_grad():
        for rows in ids.split(MICRO_BATCH):
            x = step.model.embedding(rows)
            for layer in step.model.layers[:-1]:
                x = layer(x)


def peaks(ids: Tensor, **options: Any) -> tuple[int, int, int]:
    """Peaks of an update: bytes of all that it makes, of gradients, and of what is not a gradient."""
    step = step_of(**options)
    step(ids)  # the optimizer's state is there from here on
    model, most, rest = step.model, 0, 0
    for parameter in model.parameters():
        parameter.grad = None
    live = LiveBytes()

    def look(*_: Any) -> None:
        nonlocal most, rest
        gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        most, rest = max(most, gradients), max(rest, live.bytes - gradients)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    for module in model.modules():
        module.register_forward_hook(look)
    with live:
        step(ids)
    return live.peak, most, rest


def main() -> None:
    global DEPTH, SIZE, VOCABULARY
    options = arguments(__doc__, cuda=True)
    if options.quick:
        DEPTH, SIZE, VOCABULARY = 3, 64, 512
    keep_freed_memory()
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH))
    taken = times(1, ids, 1) if options.quick else times(7, ids, WARM_UP)
    proven = ratio_of(looks(functools.partial(step_of(kind=BlockStep, verify=True), ids), 8 if options.quick else 16))
    found = {name: peaks(ids, **way) for name, way in WAYS.items()}
    base = found["accumulation"]
    rows = [
        [name, *(one / other for one, other in zip(found[name], base, strict=True)), *taken[name].values()]
        for name in WAYS
    ]
    head = ["", "all", "gradients", "all else", "time", "time / checkpointed"]
    body = (
        f"A transformer of {DEPTH} equal blocks of width {SIZE}, a vocabulary of {VOCABULARY}, {ROWS} rows of {LENGTH} "
        f"tokens in micro-batches of {MICRO_BATCH}, AdamW. Peak live bytes, without parameters and optimizer state, "
        f"and time of an update, relative to accumulation:\n\n{table(head, rows)}\n"
        "\nOne more forward pass of all blocks but the last, which is the least that keeps no activations inside "
        f"blocks, makes {taken[FLOOR]['plain']:.2f} of accumulation's time. With `verify=False`; a "
        f"proven update takes {proven} ordinary ones with `BlockStep`.\n"
    )
    wide = {"dtype": torch.bfloat16, "accumulate_dtype": torch.float32}
    half = {name: peaks(ids, **way, **wide) for name, way in WAYS.items() if name != "whole batch"}
    least = half[list(half)[-1]][0] / half["accumulation"][0]
    body += (
        "\nWith parameters in bfloat16 and gradients summed in float32 (`accumulate_dtype`), updates in backward take "
        f"{least:.2f} of accumulation's peak."
    )
    publish(
        "layers",
        "PyTorch: layer by layer",
        body,
        ["torch"],
        options,
        ours=[name for name in WAYS if "kind" in WAYS[name]],
    )


if __name__ == "__main__":
    main()
