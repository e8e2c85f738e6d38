"""Padded rows: sorted, packed, and rid of columns of nothing but padding."""

from gradaccum.torch.padding.columns import (
    IGNORED,
    Left,
    Packs,
    can_take_positions,
    extents,
    kept_columns,
    mask_of,
    packed_rows,
    text_of,
    what_is_cut,
    widths_apart,
)
from gradaccum.torch.padding.joined import causal_lm

__all__ = [
    "IGNORED",
    "Left",
    "Packs",
    "can_take_positions",
    "causal_lm",
    "extents",
    "kept_columns",
    "mask_of",
    "packed_rows",
    "text_of",
    "what_is_cut",
    "widths_apart",
]
