"""Where a buffer goes that every micro-batch moves from the same start: what users say of their modules."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Literal, get_args

from torch import Tensor, nn

__all__ = ["Rule", "Word", "combine_buffers", "ruled", "rules_of", "standing_for", "warn_of_buffers"]

logger = logging.getLogger("gradaccum")

Word = Literal["mean", "sum", "max", "once"]
Rule = Word | Callable[[Any, Tensor, list[Tensor]], Tensor]
"""One of the words, or `rule(module, start, ends) -> Tensor`."""

_of_kinds: dict[type[nn.Module], dict[str, Rule]] = {}
_of_modules: MutableMapping[nn.Module, dict[str, Rule]] = weakref.WeakKeyDictionary()

_WORDS = "_gradaccum_buffers"
"""A module's attribute with the words that were said of itself, so that its copies and files have them, too."""


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
        module: A module, or a class of modules: then all of them, subclasses included. Copies of a module have its
            words; callables are its own.
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
        _check_rule(name, rule)
        if isinstance(module, nn.Module) and name not in module._buffers:
            raise ValueError(
                f"{type(module).__name__} has no buffer of its own of this name. Received: {name}={rule!r}; its "
                f"buffers are {', '.join(map(repr, module._buffers)) or 'none'}. Say it of the module that has it."
            )
    if not isinstance(module, nn.Module):
        _of_kinds.setdefault(module, {}).update(rules)
        return
    words, others = dict(vars(module).get(_WORDS, {})), dict(_of_modules.get(module, {}))
    for name, rule in rules.items():
        here, there = (words, others) if isinstance(rule, str) else (others, words)
        here[name] = rule
        there.pop(name, None)
    vars(module)[_WORDS], _of_modules[module] = words, others


def _check_rule(name: str, rule: Any) -> None:
    if not callable(rule):
        if rule not in get_args(Word):
            raise ValueError(
                f"A rule must be one of {', '.join(map(repr, get_args(Word)))}, or rule(module, start, ends) -> "
                f"Tensor. Received: {name}={rule!r}."
            )
        return
    try:
        inspect.signature(rule).bind(None, None, [])
    except TypeError as error:
        raise TypeError(
            f"A rule is called as rule(module, start, ends). Received: {name}={rule!r}, which can't be: {error}."
        ) from None
    except ValueError:  # of a builtin: nobody knows
        pass


def rules_of(module: nn.Module | None) -> dict[str, Rule]:
    """What users have said of a module's buffers: of its classes, the nearest last, then of itself.

    A chunked module is the one that it stands for.
    """
    if module is None:
        return {}
    module, rules = standing_for(module), dict[str, Rule]()
    for kind in reversed(type(module).__mro__) if _of_kinds else ():
        rules.update(_of_kinds.get(kind, {}))
    rules.update(vars(module).get(_WORDS, {}))
    rules.update(_of_modules.get(module, {}))
    return rules


def standing_for(module: nn.Module) -> nn.Module:
    """The module whose buffers these are: the one inside of a chunked module, which shares them."""
    inner = vars(module).get("module")
    while isinstance(inner, nn.Module) and inner._buffers is module._buffers:
        module, inner = inner, vars(inner).get("module")
    return module


def ruled(module: nn.Module | None, name: str, rule: Any, start: Tensor | None, ends: list[Tensor]) -> Tensor:
    """What a callable rule makes of a buffer."""
    module = None if module is None else standing_for(module)
    end = rule(module, None if start is None else start.clone(), ends)
    like = ends[0]
    what = f"The rule for {name!r} of {type(module).__name__} must return a tensor like the buffer's ends"
    if not isinstance(end, Tensor):
        raise TypeError(f"{what}. Received: {end!r} of type {type(end).__name__}.")
    if (end.shape, end.dtype, end.device) != (like.shape, like.dtype, like.device):
        raise ValueError(
            f"{what}, of shape {tuple(like.shape)}, {like.dtype}, on {like.device}. Received: shape "
            f"{tuple(end.shape)}, {end.dtype}, on {end.device}."
        )
    return end.detach()


def warn_of_buffers(buffers: Sequence[tuple[str, str, str]]) -> None:
    """Warn of buffers that do not go where all rows at once take them."""
    if not buffers:
        return
    listed = [f"{name!r} of {path or 'the model'!r} ({kind})" for path, kind, name in buffers]
    _, kind, name = buffers[0]
    logger.warning(
        "The update is the large batch's, but these buffers do not go where all rows at once take them: %s. "
        "They go to the mean over rows of where micro-batches take them from one start, unless something else "
        'is said: gradaccum.torch.combine_buffers(%s, %s="sum"), or "max", "once", or a callable.',
        ", ".join(listed[:5]) + (", ..." if len(listed) > 5 else ""),
        kind,
        name,
    )
