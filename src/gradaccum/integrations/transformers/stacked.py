"""Batches in which an example has several rows, in blocks one after another: chosen answers, then rejected ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradaccum.on_torch.batch import has_rows

__all__ = ["can_be_trimmed", "check_cuttable", "stacked", "stacks", "unstacked"]

_TRL = {"DPOTrainer": 2, "RewardTrainer": 2}


def stacks(trainer: Any) -> int:
    """How many blocks the rows of a trainer's batches come in."""
    if trainer.rows_per_example is not None:
        return trainer.rows_per_example
    names = [cls.__name__ for cls in type(trainer).__mro__ if cls.__module__.partition(".")[0] == "trl"]
    return next((_TRL[name] for name in names if name in _TRL), 1)


def stacked(inputs: Mapping[str, Any], blocks: int) -> dict[str, Any]:
    """A batch with a row for each example: tensors of `blocks` times as many rows become (examples, blocks, ...).

    Raises:
        ValueError: The rows can't be as many blocks.

    Example:
        >>> import torch
        >>> stacked({"ids": torch.tensor([1, 2, 3, 10, 20, 30]), "margin": torch.zeros(3)}, 2)["examples"]["ids"]
        tensor([[ 1, 10],
                [ 2, 20],
                [ 3, 30]])
    """
    batch = dict(inputs)
    if blocks == 1:
        return batch
    most = max((len(leaf) for leaf in batch.values() if has_rows(leaf)), default=0)
    if most % blocks:
        raise ValueError(
            f"A batch of {blocks} rows for each example has a multiple of {blocks} rows. Received: {most} rows."
        )
    examples = {
        name: batch.pop(name).unflatten(0, (blocks, -1)).transpose(0, 1)
        for name, leaf in inputs.items()
        if has_rows(leaf) and len(leaf) == most
    }
    return {"examples": examples, **batch}


def unstacked(batch: Mapping[str, Any], blocks: int) -> dict[str, Any]:
    """What `stacked` has made a batch from."""
    if blocks == 1:
        return dict(batch)
    inputs = {name: leaf.transpose(0, 1).flatten(0, 1) for name, leaf in batch["examples"].items()}
    return inputs | {name: leaf for name, leaf in batch.items() if name != "examples"}


def can_be_trimmed(batch: Mapping[str, Any]) -> bool:
    """Whether a batch has text that is padded: one attention mask of (rows, columns), for single rows.

    Example:
        >>> import torch
        >>> can_be_trimmed({"attention_mask": torch.ones(3, 5)}), can_be_trimmed({"pixel_values": torch.ones(3, 5)})
        (True, False)
    """
    if "examples" in batch:
        return False
    masks = [leaf for name, leaf in batch.items() if name.endswith("attention_mask") and "decoder" not in name]
    return len(masks) == 1 and has_rows(masks[0]) and masks[0].ndim == 2 and 0 not in masks[0].shape


def check_cuttable(inputs: Any, blocks: int, max_tokens: int | None) -> None:
    """Raise where a batch can't be cut into micro-batches.

    Args:
        inputs: The batch.
        blocks: How many blocks its rows come in.
        max_tokens: Padded tokens of a micro-batch, if columns are to be cut off.

    Raises:
        TypeError: Inputs that are no mapping.
        ValueError: Tensors of other numbers of rows; a list as long as the batch; several masks for columns that are to
            be cut off, or blocks.
    """
    if not isinstance(inputs, Mapping):
        raise TypeError(
            "MicroBatchTrainer takes batches that are mappings, as data collators make them. "
            f"Received: {type(inputs).__name__}."
        )
    lengths = {name: len(leaf) for name, leaf in inputs.items() if has_rows(leaf)}
    rows = set(lengths.values())
    if blocks == 1 and len(rows) > 1:
        raise ValueError(
            "A micro-batch takes rows of each tensor in the batch, and these have different numbers of rows: "
            f"{', '.join(f'{name} {length}' for name, length in lengths.items())}. Give what all rows share to each of "
            f"them in the data collator: tensor.expand({max(rows)}, ...)."
        )
    for name, value in inputs.items():
        if isinstance(value, (list, tuple)) and len(value) in rows and not any(map(has_rows, value)):
            raise ValueError(
                f"inputs[{name!r}] is a {type(value).__name__} with an entry for each of {len(value)} rows, which "
                "micro-batches would not cut. Make it a tensor in the data collator, or leave it out."
            )
    masks = [name for name in inputs if name.endswith("attention_mask") and "decoder" not in name]
    if max_tokens is not None and len(masks) > 1:
        raise ValueError(
            f"`max_tokens` cuts off padding by one attention mask, and this batch has several attention masks "
            f"({', '.join(masks)}). Leave it out, and give a `micro_batch_size`."
        )
    if max_tokens is not None and blocks > 1:
        raise ValueError(
            f"`max_tokens` packs single rows, and here {blocks} rows belong together. Leave it out, and give a "
            "`micro_batch_size`."
        )
