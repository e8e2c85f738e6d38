"""What can't be the same on any number of ranks, and is refused: every rule in one place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from gradaccum.torch.distributed import Ranks

_WHY = "reproducible=True makes the same bits on any number of ranks, so "


def check_reproducible(model: nn.Module, ranks: Ranks, options: Mapping[str, Any], *, closures: bool) -> None:
    """Raise a ValueError for the first of these options of a `TrainStep` that doesn't go with `reproducible=True`."""
    for reason in _reasons(model, ranks, options, closures):
        raise ValueError(_WHY + reason)


def _reasons(model: nn.Module, ranks: Ranks, options: Mapping[str, Any], closures: bool) -> Iterator[str]:
    if options["max_tokens"] is not None or options["pack"] is not None:
        yield "rows can't be packed into micro-batches by `max_tokens`. Give a fixed `micro_batch_size`."
    if not isinstance(options["micro_batch_size"], int):
        yield (
            "micro-batches must have a fixed size. "
            f"Received: micro_batch_size={options['micro_batch_size']!r}. Give a number of rows that fits."
        )
    if options["groups"] is not None:
        yield "micro-batches must have a fixed size, which `groups` changes. Leave it out."
    if options["batch_norm"] == "exact":
        yield 'batch_norm="exact", whose sums span the batch, isn\'t available. Use "pooled", "micro" or "frozen".'
    if options["noise_scale"]:
        yield "`noise_scale`, which compares sums of each rank, isn't available. Measure it in a run without."
    if options["sync"] != "window":
        yield 'gradients are reduced once per update. Leave out sync="micro_batch".'
    if options["compile"] is not False:
        yield "`compile`, whose programs round sums in another order, isn't available. Leave it out."
    if closures:
        yield "optimizers that evaluate a closure several times aren't available. Use another optimizer."
    if ranks.sharded:
        yield (
            "a model that is sharded by fully_shard, which adds up gradients by itself, isn't available. Use "
            "DistributedDataParallel."
        )
    for path, module in model.named_modules():
        yield from _reasons_of(path or "the model", module)


def _reasons_of(where: str, module: nn.Module) -> Iterator[str]:
    kind = type(module).__name__
    if isinstance(module, nn.SyncBatchNorm):
        yield f'{where!r} ({kind}), whose statistics span the ranks, isn\'t available. Use batch_norm="pooled".'
    if getattr(module, "sparse", False) and hasattr(module, "weight"):
        yield f"{where!r} ({kind}) may not have sparse gradients. Use sparse=False."
    if kind == "Chunked" and type(module).__module__.startswith("gradaccum."):
        yield f"{where!r} ({kind}), which is chunked, isn't available: its micro-batches would be other ones."
