"""Notices what happens to an optimizer's groups inside an open window."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradaccum.errors import WindowError

__all__ = ["ParameterGroups", "are", "parameters_of"]


class ParameterGroups:
    """The inner optimizer's groups as a window began: parameters stay until it closes, hyperparameters should.

    Args:
        inner: The optimizer.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner, self._warned, self._parameters = inner, False, parameters_of(inner)
        self.note()

    def note(self) -> bool:
        """A window begins. Returns whether other parameters are there than before."""
        self._settings, before = [*map(dict, self._inner.param_groups)], self._parameters
        self.note_parameters()
        return not are(before, self._parameters)

    def note_parameters(self) -> None:
        """The parameters that are there now are those of the window."""
        self._parameters, self._lists = parameters_of(self._inner), self._look()

    def _look(self) -> list[tuple[int, int]]:
        return [(id(parameters := group["params"]), len(parameters)) for group in self._inner.param_groups]

    def check_lists(self) -> None:
        """A micro-batch is in: has a parameter come or gone? What replaces one, or stands elsewhere, shows at the end.

        Raises:
            WindowError: One has.
        """
        if self._look() != self._lists:
            raise self._changed_error()

    def check_parameters(self) -> None:
        """The sum of an open window is about to be used.

        Raises:
            WindowError: The parameters are others, or in another order.
        """
        if not are(self._parameters, parameters_of(self._inner)):
            raise self._changed_error()

    def check_settings(self) -> None:
        """Hyperparameters belong to an update: warn, once, if one has changed inside the window."""
        if self._warned or not _differ(self._inner.param_groups, self._settings):  # next to always
            return
        changed = dict[str, str]()
        for group, before in zip(self._inner.param_groups, self._settings):
            for name, value in before.items():
                if name != "params" and name in group and _differ(value, group[name]):
                    changed.setdefault(name, f"{name} from {value} to {group[name]}")
        if changed:
            self._warned = True
            warnings.warn(
                f"Hyperparameters changed, {', '.join(changed.values())} inside an open window: the update uses the "
                "last ones. A scheduler steps once per update: `if optimizer.updated: scheduler.step()`; whatever "
                "else changes them belongs there, too.",
                stacklevel=5,
            )

    def _changed_error(self) -> WindowError:
        before, now = ({id(p) for p in ps} for ps in (self._parameters, parameters_of(self._inner)))
        how = f"{len(before - now)} of {len(before)} were removed, {len(now - before)} came"
        return WindowError(
            f"The optimizer's parameters changed inside an open window: {how if before != now else 'their order'}. The "
            "sum of its micro-batches belongs to those that were there. Change param_groups when `updated` is True; "
            "optimizer.add_param_group() may be called at any time. discard() drops the window."
        )


def are(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether both hold the same objects."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _differ(one: Any, other: Any) -> bool:
    """Whether two values of a hyperparameter differ; tensors that are not the same one do."""
    if one is other:
        return False
    try:
        return isinstance(one, Tensor) or isinstance(other, Tensor) or bool(one != other)
    except (RuntimeError, TypeError, ValueError):  # arrays, or tensors inside of a tuple
        return True


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
