"""Padded rows: sorted, cut and packed for `max_tokens`, or laid one behind the other."""

from gradaccum.torch.padding.text import (
    IGNORED,
    Left,
    Packs,
    Text,
    can_take_positions,
    causal_lm,
    other_widths,
    what_is_cut,
)

__all__ = ["IGNORED", "Left", "Packs", "Text", "can_take_positions", "causal_lm", "other_widths", "what_is_cut"]
