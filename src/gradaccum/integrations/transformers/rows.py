"""The rows of a trainer's batch: pairs in blocks, flattened sequences, padding; and back to what its loss takes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradaccum.on_torch.batch import has_rows

_TRL = {"DPOTrainer": 2, "RewardTrainer": 2}

_CU_SEQ_LENS, _MAX_LENGTH = ("cu_seq_lens_q", "cu_seq_lens_k"), ("max_length_q", "max_length_k")


def blocks_of(trainer: Any) -> int:
    """How many blocks the rows of a trainer's batches come in: 2 where the chosen ones precede the rejected."""
    if trainer.rows_per_example is not None:
        return trainer.rows_per_example
    names = [cls.__name__ for cls in type(trainer).__mro__ if cls.__module__.partition(".")[0] == "trl"]
    return next((_TRL[name] for name in names if name in _TRL), 1)


def as_rows(inputs: Mapping[str, Any], blocks: int = 1) -> dict[str, Any]:
    """A batch with a row for each example.

    Tensors of `blocks` times as many rows become (examples, blocks, ...); sequences that a collator has joined in one
    row, whose `position_ids` start anew with each, become a padded row each.

    Example:
        >>> as_rows({"ids": torch.tensor([1, 2, 3, 10, 20, 30]), "margin": torch.zeros(3)}, 2)["examples"]["ids"]
        tensor([[ 1, 10],
                [ 2, 20],
                [ 3, 30]])
        >>> as_rows({"ids": torch.tensor([[7, 8, 9]]), "position_ids": torch.tensor([[0, 1, 0]])})["sequences"]["ids"]
        tensor([[7, 8],
                [9, 0]])
    """
    batch = dict(inputs)
    if blocks == 1:
        lengths = _sequence_lengths(inputs)
        return batch if lengths is None else _split_sequences(batch, lengths)
    most = max((len(leaf) for leaf in batch.values() if has_rows(leaf)), default=0)
    if most % blocks:
        raise ValueError(
            f"A batch of {blocks} rows per example must have a multiple of {blocks} rows. Received: {most} rows."
        )
    examples = {
        name: batch.pop(name).unflatten(0, (blocks, -1)).transpose(0, 1)
        for name, leaf in inputs.items()
        if has_rows(leaf) and len(leaf) == most
    }
    return {"examples": examples, **batch}


def as_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """What `as_rows` has made a batch from, or a part of it."""
    if "examples" in batch:
        inputs = {name: leaf.transpose(0, 1).flatten(0, 1) for name, leaf in batch["examples"].items()}
        return inputs | {name: leaf for name, leaf in batch.items() if name != "examples"}
    if "sequences" not in batch:
        return dict(batch)
    rows = dict(batch["sequences"])
    mask = rows.pop("attention_mask").bool()
    inputs = {name: leaf[mask][None] for name, leaf in rows.items()}
    lengths, device = mask.sum(1), mask.device
    inputs |= {name: leaf for name, leaf in batch.items() if name != "sequences"}
    for name in _CU_SEQ_LENS:
        if name in inputs:
            inputs[name] = torch.cat([torch.zeros(1, dtype=torch.int64, device=device), lengths.cumsum(0)]).int()
    for name in _MAX_LENGTH:
        if name in inputs:
            inputs[name] = int(lengths.max())
    if "seq_idx" in inputs:
        inputs["seq_idx"] = torch.arange(len(lengths), device=device).repeat_interleave(lengths)[None].int()
    return inputs


def with_labels(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of `as_rows`' batch that has the labels, with a row for each example."""
    return batch.get("examples", batch.get("sequences", batch))


def row_count(batch: Mapping[str, Any]) -> int:
    """Examples of `as_rows`' batch."""
    return max((len(leaf) for leaf in with_labels(batch).values() if has_rows(leaf)), default=0)


def _sequence_lengths(inputs: Mapping[str, Any]) -> list[int] | None:
    """Lengths of the sequences in the one row of a flattened batch; None where there are not several, or rows."""
    positions = inputs.get("position_ids")
    if not isinstance(positions, Tensor) or positions.dim() != 2 or len(positions) != 1 or "attention_mask" in inputs:
        return None
    per_token = [leaf for name, leaf in inputs.items() if has_rows(leaf) and name not in _CU_SEQ_LENS]
    if any(leaf.shape[:2] != positions.shape for leaf in per_token):
        return None
    begins = (positions[0, 1:] != positions[0, :-1] + 1).nonzero().flatten().tolist()
    edges = [0, *(place + 1 for place in begins), positions.shape[1]]
    return [b - a for a, b in itertools.pairwise(edges)] if begins else None


def _split_sequences(batch: dict[str, Any], lengths: list[int]) -> dict[str, Any]:
    names = [name for name, leaf in batch.items() if has_rows(leaf) and name not in (*_CU_SEQ_LENS, "seq_idx")]
    pad = torch.nn.utils.rnn.pad_sequence
    tokens = {name: batch.pop(name)[0] for name in names}
    rows = {
        name: pad(leaf.split(lengths), batch_first=True, padding_value=-100 if name == "labels" else 0)
        for name, leaf in tokens.items()
    }
    ones = next(iter(tokens.values())).new_ones(sum(lengths), dtype=torch.int64)
    rows["attention_mask"] = pad(ones.split(lengths), batch_first=True)
    shared = {name: None if name in (*_CU_SEQ_LENS, *_MAX_LENGTH, "seq_idx") else leaf for name, leaf in batch.items()}
    return {"sequences": rows, **shared}


def can_be_trimmed(batch: Mapping[str, Any]) -> bool:
    """Whether a batch has text that is padded: one attention mask of (rows, columns), for single rows."""
    if "examples" in batch or "sequences" in batch:
        return False
    masks = [batch[name] for name in _masks(batch)]
    return len(masks) == 1 and has_rows(masks[0]) and masks[0].ndim == 2 and 0 not in masks[0].shape


def _masks(inputs: Mapping[str, Any]) -> list[str]:
    return [name for name in inputs if name.endswith("attention_mask") and "decoder" not in name]


def check_cuttable(inputs: Any, blocks: int, max_tokens: int | None) -> None:
    """Raise TypeError or ValueError where a batch can't be cut into micro-batches, or its padding by `max_tokens`."""
    if not isinstance(inputs, Mapping):
        raise TypeError(
            "MicroBatchTrainer takes batches that are mappings, as data collators make them. "
            f"Received: {type(inputs).__name__}."
        )
    if blocks == 1 and _sequence_lengths(inputs) is not None:
        return
    lengths = {name: len(leaf) for name, leaf in inputs.items() if has_rows(leaf)}
    rows = set(lengths.values())
    if blocks == 1 and len(rows) > 1:
        raise ValueError(
            "A micro-batch takes rows of each tensor in the batch, but these have different numbers of rows: "
            f"{', '.join(f'{name} {length}' for name, length in lengths.items())}. In the data collator, repeat what "
            f"all rows share: tensor.expand({max(rows)}, ...)."
        )
    for name, value in inputs.items():
        if isinstance(value, (list, tuple)) and len(value) in rows and not any(map(has_rows, value)):
            raise ValueError(
                f"inputs[{name!r}] is a {type(value).__name__} with an entry for each of {len(value)} rows, which "
                "micro-batches would not cut. Make it a tensor in the data collator, or leave it out."
            )
    if max_tokens is not None and len(masks := _masks(inputs)) > 1:
        raise ValueError(
            f"`max_tokens` cuts off padding by one attention mask, and this batch has several attention masks "
            f"({', '.join(masks)}). Leave it out, and give a `micro_batch_size`."
        )
    if max_tokens is not None and blocks > 1:
        raise ValueError(
            f"`max_tokens` packs single rows, and here {blocks} rows belong together. Leave it out, and give a "
            "`micro_batch_size`."
        )
