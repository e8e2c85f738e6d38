"""Whether a module is row-independent: whether a row's output depends on that row only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from gradaccum.errors import NotEquivalentError
from gradaccum.on_torch.batch import BatchDims, concatenate, leaves
from gradaccum.on_torch.random_state import RandomState, all_generators, kept, torch_generators
from gradaccum.on_torch.transaction import as_found
from gradaccum.sizes import even_sizes
from gradaccum.torch.chunking.recompute import accelerators

__all__ = ["verify_row_independence"]

_ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-4}
_ALLOWED_IN_HALF = 5e-2


@torch.no_grad()
def verify_row_independence(
    module: nn.Module, micro_batch: Callable[[slice], tuple[tuple[Any, ...], dict[str, Any]]], rows: int, out: BatchDims
) -> None:
    """Compare the outputs of two chunkings of the same rows: all of them at once, and in two halves.

    Dropout layers are switched off meanwhile; random state and buffers are left as found.

    Args:
        module: What is called.
        micro_batch: Its positional and keyword arguments for a slice of rows.
        rows: How many rows to compare.
        out: Where the outputs' rows are.

    Raises:
        NotEquivalentError: They differ; the message names the first layer of which it is so.
        ValueError: The module draws random numbers, or there is one row only.
    """
    if rows < 2:
        raise ValueError(f"Two rows at least are needed to compare two chunkings. Received: {rows}.")
    halves = even_sizes(rows, -(-rows // 2))
    devices = accelerators(module.parameters())
    found = []
    for slices in ([slice(0, rows)], [slice(0, halves[0]), slice(halves[0], rows)]):
        outputs, inside = [], []
        for part in slices:
            args, kwargs = micro_batch(part)
            random_kept, buffers_kept = kept(all_generators(devices)), as_found(module.modules(), torch.device("cpu"))
            with random_kept, buffers_kept, _without_dropout(module), _recorded(module) as record:
                before = RandomState(torch_generators(devices))
                outputs.append(module(*args, **kwargs))
                if before.moved():
                    raise ValueError(
                        f"{type(module).__name__} draws random numbers besides those of its dropout layers, so two "
                        "chunkings can't be compared. Call eval() first."
                    )
            inside.append(record)
        found.append((concatenate(outputs, out), inside))
    (whole, (inside_whole,)), (joined, inside_parts) = found
    lines = []
    for (path, one), (_, other) in zip(leaves(whole), leaves(joined), strict=True):
        error, allowed = _difference(one, other)
        if error > allowed:
            lines.append(f"  output{path}   relative error {error:.3g}   ({allowed:g} allowed)")
    if lines:
        listing = "\n".join(lines)
        raise NotEquivalentError(
            f"{type(module).__name__} is not per-row: its outputs for {rows} rows differ from those for "
            f"{' and '.join(map(str, halves))} of them.\n{listing}\n{_culprit(module, inside_whole, inside_parts)}"
        )


def _culprit(module: nn.Module, whole: dict[str, Tensor], parts: list[dict[str, Tensor]]) -> str:
    layers = dict(module.named_modules())
    for path, one in whole.items():
        pieces = [part[path] for part in parts if path in part]
        if len(pieces) != len(parts) or one.dim() == 0 or sum(len(p) for p in pieces) != len(one):
            continue
        error, allowed = _difference(one, torch.cat(pieces))
        if error > allowed:
            layer = layers[path]
            advice = 'Use batch_norm="exact", or GroupNorm.' if isinstance(layer, _BatchNorm) else ""
            return f"{path!r} is the first layer of which that is so: a {type(layer).__name__}. {advice}".rstrip()
    return "It happens outside its layers. Do what looks across rows after the chunked module, on the whole batch."


def _difference(one: Any, other: Any) -> tuple[float, float]:
    """Relative error and what is allowed."""
    if not isinstance(one, Tensor) or not one.is_floating_point():
        return 0.0, 0.0
    scale = one.abs().max().item() if one.numel() else 0.0
    error = (one - other).abs().max().item() / (scale or 1.0) if one.numel() else 0.0
    return error, _ALLOWED.get(one.dtype, _ALLOWED_IN_HALF)


@contextlib.contextmanager
def _without_dropout(module: nn.Module) -> Iterator[None]:
    layers = [layer for layer in module.modules() if isinstance(layer, _DropoutNd) and layer.training]
    try:
        for layer in layers:
            layer.training = False
        yield
    finally:
        for layer in layers:
            layer.training = True


@contextlib.contextmanager
def _recorded(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The outputs of the innermost layers, in the order of execution."""
    record: dict[str, Tensor] = {}
    handles = []
    try:
        for path, layer in module.named_modules():
            if path and not list(layer.children()):

                def note(layer: nn.Module, args: Any, output: Any, path: str = path) -> None:
                    if isinstance(output, Tensor):
                        record.setdefault(path, output)

                handles.append(layer.register_forward_hook(note))
        yield record
    finally:
        for handle in handles:
            handle.remove()
