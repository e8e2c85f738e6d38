"""Buffers that the forward pass moves: where several passes from one start lead together."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Hashable, Iterable, MutableMapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from gradaccum.on_torch.state import BufferSnapshot, put

logger = logging.getLogger("gradaccum")

Word = Literal["mean", "sum", "max", "once"]
BufferRule = Word | Callable[[Any, Tensor, list[Tensor]], Tensor]
"""One of the words, or `rule(module, start, ends) -> Tensor`."""

_of_kinds: dict[type[nn.Module], dict[str, BufferRule]] = {}
_of_modules: MutableMapping[nn.Module, dict[str, BufferRule]] = weakref.WeakKeyDictionary()

_WORDS = "_gradaccum_buffers"
"""A module's attribute with the words that were said of itself, so that its copies and files have them, too."""


def combine_buffers(module: nn.Module | type[nn.Module], **rules: BufferRule) -> None:
    """Define how `TrainStep` and `chunked` combine buffers that the forward pass moves.

    Every micro-batch starts from the buffers of the window's start, so a buffer has several ends, which a rule
    combines:

    | rule | the buffer becomes | right for |
    |---|---|---|
    | `"mean"`, the default | the mean of the ends, over rows | moving averages of means over rows |
    | `"sum"` | `start + sum_i (end_i - start)` | counts of rows |
    | `"max"` | the elementwise maximum of the ends | largest values, as in the histories of FP8 |
    | `"once"` | the first end that differs from the start | power iterations, counters of forward passes |
    | a callable | `rule(module, start, ends)`, after the other buffers, in the order given here | everything else |

    A callable needs a copy of every end.

    Args:
        module: A module, or a class of modules, subclasses included. Copies of a module inherit named rules, but not
            callables.
        rules: A rule for each of the module's own buffers, by the buffer's name.

    Raises:
        TypeError: `module` is neither.
        ValueError: A rule is neither callable nor one of these names, or the module has no such buffer.

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
    if not isinstance(module, nn.Module) and not (isinstance(module, type) and issubclass(module, nn.Module)):
        raise TypeError(
            "`module` must be a torch.nn.Module or a class of them. "
            f"Received: module={module!r} of type {type(module).__name__}."
        )
    for name, rule in rules.items():
        _check_rule(name, rule)
        if isinstance(module, nn.Module) and name not in module._buffers:
            raise ValueError(
                f"{type(module).__name__} has no buffer of its own of this name. Received: {name}={rule!r}; its "
                f"buffers are {', '.join(map(repr, module._buffers)) or 'none'}. Pass the module that has it."
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
            f"A rule is called as rule(module, start, ends). Received: {name}={rule!r}, which can't be called so: "
            f"{error}."
        ) from None
    except ValueError:  # of a builtin: nobody knows
        pass


def rules_of(module: nn.Module) -> dict[str, BufferRule]:
    """What users have said of a module's buffers: of its classes, the nearest last, then of itself."""
    module, rules = standing_for(module), dict[str, BufferRule]()
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


def warn_of_buffers(buffers: Sequence[tuple[str, str, str]]) -> None:
    """Warn of buffers that do not go where all rows at once take them."""
    if buffers:
        listed = [f"{name!r} of {path or 'the model'!r} ({kind})" for path, kind, name in buffers]
        _, kind, name = buffers[0]
        logger.warning(
            "The update is the large batch's, but these buffers get other values than from the large batch: %s. Each "
            "becomes the mean, over rows, of its values after the micro-batches. To choose another rule, call "
            'gradaccum.torch.combine_buffers(%s, %s="sum"), or pass "max", "once" or a callable.',
            ", ".join(listed[:5]) + (", ..." if len(listed) > 5 else ""),
            kind,
            name,
        )


# Where passes lead together, given their start, where those before lead, where one leads, and its share of rows.


def _mean(start: Tensor | None, so_far: Tensor, end: Tensor, share: float) -> Tensor:
    if not (end.is_floating_point() or end.is_complex()):
        return end.clone()
    # Where nothing differs nothing changes, so that infinities and constants stay what they are.
    return torch.where(end == so_far, so_far, so_far + (end - so_far) * share)


def _sum(start: Tensor | None, so_far: Tensor, end: Tensor, share: float) -> Tensor:
    if end.dtype == torch.bool:
        return so_far | end
    if start is None or not _same_kind(end, start):
        return so_far + end
    return torch.where(end == start, so_far, so_far + (end - start))  # infinities that stand still stay what they are


def _once(start: Tensor | None, so_far: Tensor, end: Tensor, share: float) -> Tensor:
    return end.clone() if start is not None and _same_kind(so_far, start) and torch.equal(so_far, start) else so_far


_RULES: dict[str, Callable[[Tensor | None, Tensor, Tensor, float], Tensor]] = {
    "mean": _mean,
    "sum": _sum,
    "once": _once,
    "max": lambda start, so_far, end, share: torch.maximum(so_far, end),
}


def _exactly(value: Tensor | None) -> Tensor | None:
    """As it is; float8, which has no arithmetic of its own, as float32."""
    narrow = value is not None and value.is_floating_point() and value.itemsize == 1
    return value.float() if narrow else value  # type: ignore[union-attr]  # there is one


def _same_kind(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.layout, one.device) == (other.shape, other.dtype, other.layout, other.device)


class _Moved:
    """One buffer that passes move, or make, each from the same start.

    mean:   start + sum_i n_i (end_i - start) / N        with the rows n_i of pass i, and N = sum_i n_i
    """

    def __init__(self, buffer: BufferSnapshot, rows: int) -> None:
        assert buffer.module is not None
        self.buffer, self.start, self._rows, self._module = buffer, buffer.copy, rows, standing_for(buffer.module)
        rules = rules_of(self._module)
        self.rule = rules.get(buffer.name, "mean")
        self.place = [*rules].index(buffer.name) if callable(self.rule) else -1
        """Callable rules come last, as they may look at other buffers, in the order they came in."""
        self._together, self._ends = _exactly(self.start), list[Tensor]()
        self._dtype: torch.dtype | None = None
        self._named = False

    def add(self, end: Tensor | None, named: bool, rows: int) -> None:
        """A pass over so many rows led here; None: it has deleted the buffer, unless it is `named`, or not made it."""
        self._rows += rows
        self._named = named
        if end is None:
            self._together = None if self.start is not None else self._together
        elif callable(self.rule):
            self._ends.append(end.detach().clone())
        else:
            self._dtype = end.dtype
            end, so_far = _exactly(end.detach()), self._together
            assert end is not None
            if rows == self._rows or so_far is None or not _same_kind(end, so_far):  # the first, or no arithmetic leads
                self._together = end.clone()  # from one to the other
            else:
                self._together = _RULES[self.rule](_exactly(self.start), so_far, end, rows / self._rows)

    def move(self) -> None:
        """Have the buffer where all passes lead together; there is none any more where they have deleted it."""
        buffer, end = self.buffer, self._together
        if callable(self.rule):
            end = self._ruled(self.rule) if self._ends else None
        elif end is not None and self._dtype is not None:
            end = end.to(self._dtype)
        if end is not None:
            put(buffer.owner, buffer.name, buffer.tensor, end)
        elif buffer.name in buffer.owner and buffer.tensor is not None:
            if self._named:
                buffer.owner[buffer.name] = None
            else:
                del buffer.owner[buffer.name]

    def _ruled(self, rule: Callable[..., Any]) -> Tensor:
        """What a callable rule makes of it."""
        module = self._module
        like, end = self._ends[0], rule(module, None if self.start is None else self.start.clone(), self._ends)
        what = (
            f"The rule for {self.buffer.name!r} of {type(module).__name__} must return a tensor like the buffer's ends"
        )
        if not isinstance(end, Tensor):
            raise TypeError(f"{what}. Received: {end!r} of type {type(end).__name__}.")
        if (end.shape, end.dtype, end.device) != (like.shape, like.dtype, like.device):
            raise ValueError(
                f"{what}, of shape {tuple(like.shape)}, {like.dtype}, on {like.device}. Received: shape "
                f"{tuple(end.shape)}, {end.dtype}, on {end.device}."
            )
        return end.detach()


Ends = dict[Hashable, tuple[BufferSnapshot, Tensor | None, bool]]
"""Buffers, where a pass has led each of them, and whether its name is there, if only for None."""


class Moves:
    """Buffers that passes move, each from the same start."""

    def __init__(self) -> None:
        self.open()

    def open(self) -> None:
        """Passes begin."""
        self._moves, self._rows = dict[Hashable, _Moved](), 0

    @torch.no_grad()
    def add(self, ends: Ends, rows: int, new: Iterable[Hashable]) -> None:
        """A pass over so many rows led here, and moved those that are `new`; others are where they were."""
        for key in new:
            if key not in self._moves:
                self._moves[key] = _Moved(ends[key][0], self._rows)
        for key, moved in self._moves.items():
            _, end, named = ends.get(key, (moved.buffer, moved.start, True))
            moved.add(end, named, rows)
        self._rows += rows

    def move(self) -> bool:
        """After all passes. Returns whether any has moved one."""
        if not self._moves:
            return False
        with torch.no_grad():
            for moved in sorted(self._moves.values(), key=lambda moved: moved.place):
                moved.move()
        self.open()
        return True


class WindowBuffers(Moves):
    """The buffers of a window's micro-batches: each finds them as the window did, and they move once, at its end."""

    @torch.no_grad()
    def micro_batch(self, moved: Sequence[BufferSnapshot], rows: int) -> None:
        """A micro-batch of so many rows is in, which moved these. Has the next one find what this one has found."""
        ends: Ends = {(id(b.owner), b.name): (b, b.owner.get(b.name), b.name in b.owner) for b in moved}
        self.add(ends, rows, ends)
        for key in ends:  # all ends are known: some may share memory
            self._moves[key].buffer.reset()
