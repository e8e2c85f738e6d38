"""Where a buffer goes that every micro-batch moves from the same start: what users say of their modules."""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping
from typing import Any, Literal, get_args

from torch import Tensor, nn

__all__ = ["Rule", "combine_buffers", "rules_of"]

Word = Literal["mean", "sum", "max", "once"]
Rule = Word | Callable[[Any, Tensor, list[Tensor]], Tensor]
"""One of the words, or `rule(module, start, ends) -> Tensor`."""

_of_kinds: dict[type[nn.Module], dict[str, Rule]] = {}
_of_modules: MutableMapping[nn.Module, dict[str, Rule]] = weakref.WeakKeyDictionary()


def combine_buffers(module: nn.Module | type[nn.Module], **rules: Rule) -> None:
    """Say where buffers go that the forward pass moves, in `TrainStep` and `chunked`.

    Every micro-batch starts from the buffers as the window found them. So there are several ends, and one is to be made
    of them:

    | rule | the buffer becomes | right for |
    |---|---|---|
    | `"mean"`, unless something is said | the mean of the ends, over rows | moving averages of means over rows |
    | `"sum"` | `start + sum_i (end_i - start)` | counts of rows |
    | `"max"` | the largest end, number by number | largest values, as in the histories of FP8 |
    | `"once"` | the first end that differs from the start | power iterations, counters of forward passes |
    | a callable | `rule(module, start, ends)`, after the other buffers, in the order given here | everything else |

    A callable keeps a copy of every end until then.

    Args:
        module: A module, or a class of modules: then all of them, subclasses included.
        rules: By the names of the module's own buffers.

    Raises:
        TypeError: `module` is neither.
        ValueError: A rule is neither callable nor one of the words, or the module has no such buffer.

    Example:
        >>> import torch, gradaccum.torch
        >>> class Codebook(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.register_buffer("rows", torch.zeros(()))
        ...
        ...     def forward(self, x):
        ...         self.rows += len(x)
        ...         return x
        >>> combine_buffers(Codebook, rows="sum")
        >>> model = nn.Sequential(Codebook(), nn.Linear(4, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> step = gradaccum.torch.TrainStep(model, optimizer, loss_fn=nn.MSELoss(), micro_batch_size=3)
        >>> loss = step(torch.randn(10, 4), torch.randn(10, 1))
        >>> model[0].rows
        tensor(10.)
    """
    is_class = isinstance(module, type) and issubclass(module, nn.Module)
    if not is_class and not isinstance(module, nn.Module):
        raise TypeError(
            "`module` must be a torch.nn.Module or a class of them. "
            f"Received: module={module!r} of type {type(module).__name__}."
        )
    for name, rule in rules.items():
        if not callable(rule) and rule not in get_args(Word):
            raise ValueError(
                f"A rule must be one of {', '.join(map(repr, get_args(Word)))}, or rule(module, start, ends) -> "
                f"Tensor. Received: {name}={rule!r}."
            )
        if isinstance(module, nn.Module) and name not in module._buffers:
            raise ValueError(
                f"{type(module).__name__} has no buffer of its own of this name. Received: {name}={rule!r}; its "
                f"buffers are {', '.join(map(repr, module._buffers)) or 'none'}. Say it of the module that has it."
            )
    if isinstance(module, nn.Module):
        _of_modules.setdefault(module, {}).update(rules)
    else:
        _of_kinds.setdefault(module, {}).update(rules)


def rules_of(module: nn.Module | None) -> dict[str, Rule]:
    """What has been said of a module's buffers: of its classes, the nearest last, then of itself.

    Example:
        >>> rules_of(nn.BatchNorm1d(3))
        {}
    """
    said: dict[str, Rule] = {}
    if module is not None and (_of_kinds or _of_modules):
        for kind in reversed(type(module).__mro__):
            said.update(_of_kinds.get(kind, {}))
        said.update(_of_modules.get(module, {}))
    return said
