"""The argument `compile` of a `TrainStep`, and what doesn't go with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch._dynamo
import torch._inductor

_KEYWORDS = ("backend", "mode", "options")
_REPEATABLE = {"fallback_random": True}
"""Inductor draws the random numbers that the eager passes draw, so that a program can be compared with them."""


def keywords_of(choice: Any) -> dict[str, Any]:
    """Keywords for `torch.compile`, of a `choice` that isn't False."""
    if not isinstance(choice, bool | Mapping):
        raise TypeError(
            "`compile` must be True, False, or a dict of torch.compile's keywords. "
            f"Received: compile={choice!r} of type {type(choice).__name__}."
        )
    keywords: dict[str, Any] = {} if isinstance(choice, bool) else dict(choice)
    if unknown := [name for name in keywords if name not in _KEYWORDS]:
        raise ValueError(
            f"`compile` takes the keywords {', '.join(_KEYWORDS)} of torch.compile; TrainStep itself sets `fullgraph` "
            f"and `dynamic`. Received: {', '.join(map(repr, unknown))}."
        )
    if keywords.get("backend", "inductor") != "inductor":
        return keywords
    mode, options = keywords.get("mode"), dict(keywords.get("options") or {})
    if mode is not None:  # torch.compile takes either a mode or options
        options = {**torch._inductor.list_mode_options(mode), **options}
    return {"backend": "inductor", "options": {**_REPEATABLE, **options}}


def check_compiled(*, batch_norm: str, noise_scale: bool, distributed: bool) -> None:
    """Raise a ValueError for options whose windows can't be compiled."""
    if not hasattr(torch._dynamo.config, "trace_autograd_ops"):
        raise ValueError(
            f"compile= needs a torch.compile that traces backward passes, and that of torch {torch.__version__} "
            "doesn't. Install torch 2.13 or later."
        )
    problems = {
        "noise_scale": noise_scale and "measures the gradient of a micro-batch, which a compiled sum doesn't show",
        "batch_norm='exact'": batch_norm == "exact" and "runs each layer over the whole batch",
        "batch_norm='pooled'": batch_norm == "pooled" and "collects statistics with hooks, which are not traced",
        "several ranks": distributed and "reduce gradients by hooks of a backward pass, which a program doesn't run",
    }
    for what, why in problems.items():
        if why:
            raise ValueError(f"compile= can't be combined with {what}, which {why}. Leave one of them out.")
