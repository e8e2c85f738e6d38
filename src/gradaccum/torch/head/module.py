"""The module whose outputs are logits over a huge vocabulary."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradaccum.on_torch.private import casts_outputs, sharded_groups
from gradaccum.torch.head.logits import Logits

__all__ = ["Head", "tiling"]

logger = logging.getLogger("gradaccum")

_TILED = "TiledLinear"
"""The class of a head, meanwhile."""


class Head:
    """A linear layer of a model, whose outputs are computed in tiles, together with their cross entropy.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 9))
        >>> with Head(model, "1").tiled():
        ...     type(model(torch.randn(3, 4))).__name__
        'Logits'
    """

    def __init__(self, model: nn.Module, head: Any) -> None:
        self._told = False
        self.module: nn.Module | None = _found(model, head)
        if type(self.module).forward is not nn.Linear.forward or "forward" in vars(self.module):
            raise TypeError(
                "`head` must be an nn.Linear with its own forward, whose outputs are the logits. Received: "
                f"{self.module!r} of type {type(self.module).__name__}."
            )
        if all(module is not self.module for module in model.modules()):
            raise ValueError("`head` must be a module of the model. Received: a layer that isn't.")
        self._casts = casts_outputs(model)
        own = [parameter for parameter in self.module.parameters() if not self._casts]
        self._groups = [group for group in sharded_groups(model) if any(map(group.holds, own))]

    @contextlib.contextmanager
    def tiled(self) -> Iterator[None]:
        """While active, the layer returns what stands for its outputs."""
        layer: Any = self.module
        own = type(layer)

        def forward(layer: Any, x: Tensor) -> Any:
            plain = type(layer.weight) in (Tensor, nn.Parameter) and type(x) is Tensor
            if self._casts or not plain or torch.compiler.is_compiling():  # sharded otherwise, or parametrized
                self._tell("output_dtype" if self._casts else "another type of tensors")
                return F.linear(x, layer.weight, layer.bias)
            weight, bias = layer.weight, layer.bias
            kind = x.device.type
            if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:  # as linear does it
                narrow = torch.get_autocast_dtype(kind)
                x, weight, bias = x.to(narrow), weight.to(narrow), None if bias is None else bias.to(narrow)
            return Logits(x, weight, bias, computed=self._tell)

        # A class of its own rather than an attribute, since copies of the model are to compute with their weights.
        layer.__class__ = own if own.__name__ == _TILED else type(_TILED, (own,), {"forward": forward})
        try:
            with contextlib.ExitStack() as stack:
                for group in self._groups:  # the loss takes their weights later
                    stack.enter_context(group.staying_gathered())
                yield
        finally:
            layer.__class__ = own

    def _tell(self, what: str) -> None:
        if not self._told:
            self._told = True
            logger.warning(
                "head: the logits of a micro-batch are computed whole, for %r. Tiles are for cross_entropy on classes, "
                "after slices, reshape, transpose and casts.",
                what,
            )


def tiling(model: nn.Module, head: Any) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A context for forward passes in which this head's logits come in tiles; an empty one for None."""
    return contextlib.nullcontext if head is None else Head(model, head).tiled


def _found(model: nn.Module, head: Any) -> nn.Module:
    if isinstance(head, nn.Module):
        return head
    if not isinstance(head, str):
        raise TypeError(
            '`head` must be a module of the model, its dotted path, or "auto". Received: '
            f"{head!r} of type {type(head).__name__}."
        )
    if head != "auto":
        try:
            return model.get_submodule(head)
        except AttributeError:
            raise ValueError(
                f"The model has no module {head!r}. `head` is the module whose outputs are logits."
            ) from None
    ask = getattr(model, "get_output_embeddings", None)
    layer = ask() if callable(ask) else None
    if not isinstance(layer, nn.Module):
        raise ValueError(
            f'head="auto" finds the head of transformers\' models. Received: {type(model).__name__}. Name it, as in '
            'head="lm_head".'
        )
    return layer
