"""Detect changes of parameters, parameter groups and hyperparameters inside an open window."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradaccum.errors import WindowError
from gradaccum.torch.watch.monitor import Values


class ParameterMonitor:
    """The inner optimizer's parameters and groups as a window began: parameters stay until it closes, settings should.

    It looks in windows 1, 2, 4, 8, ...; in the others it tells whether parameters have joined or left between windows.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner, self._warned, self._looking = inner, False, False
        self._warned_of_hooks = False
        self.note_parameters()

    def window_begins(self, looking: bool) -> bool:
        """The window's first micro-batch is in. Returns whether other parameters are there than before."""
        self._looking = looking
        if not looking and self.same_lists():
            return False
        before = self._parameters
        self.note_parameters()
        return not _same_objects(before, self._parameters)

    def note_parameters(self, looking: bool | None = None) -> None:
        """The parameters that are there now are those of the window, and written from here on at the user's risk."""
        self._looking = self._looking if looking is None else looking
        groups = self._inner.param_groups
        self._lists = [(group["params"], len(group["params"])) for group in groups]
        self._parameters, self._settings = [*parameters_of(self._inner)], [*map(dict, groups)]
        self._versions = [parameter._version for parameter in self._parameters]
        self._values = self._values_now() if self._looking else None

    def same_lists(self) -> bool:
        """Whether no parameter has come or gone; what replaces one, or stands elsewhere, shows at the window's end."""
        groups = self._inner.param_groups
        if len(groups) != len(self._lists):
            return False
        for group, (parameters, count) in zip(groups, self._lists):
            if group["params"] is not parameters or len(parameters) != count:
                return False
        return True

    def check_lists(self) -> None:
        if not self.same_lists():
            raise self._changed_error()

    def written(self) -> bool:
        return self._looking and any(p._version != v for p, v in zip(self._parameters, self._versions, strict=True))

    def values_differ(self) -> bool:
        """Whether the parameters have other values than as the window began, as after `p.data.clamp_()`."""
        return self._values is not None and self._values.differ(self._values_now())

    def _values_now(self) -> Values | None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return None  # FSDP moves parts of them through `.data`
        return Values.of([p.detach() for p in self._parameters if p.is_floating_point() and Values.has(p)])

    def check_parameters(self) -> None:
        if not _same_objects(self._parameters, parameters_of(self._inner)):
            raise self._changed_error()

    def check_settings(self) -> None:
        """Hyperparameters belong to an update: warn, once, if one has changed inside the window."""
        if self._warned or not self._looking:
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
                "last ones. A scheduler steps once per update: `if optimizer.updated: scheduler.step()`. Make all "
                "other changes there, too.",
                stacklevel=5,
            )

    def check_hooks(self) -> None:
        """Hooks on gradients see a micro-batch's part: warn, once, where there are some."""
        if self._warned_of_hooks:
            return
        hooked = {
            index
            for index, parameter in enumerate(self._parameters)
            for hook in (parameter._backward_hooks or {}).values()
            if not (getattr(hook, "__module__", None) or "").startswith(("gradaccum.", "torch."))
        }
        if hooked:
            self._warned_of_hooks = True
            warnings.warn(
                f"{len(hooked)} parameters have hooks on their gradients (parameter {min(hooked)} of the optimizer is "
                "the first). Hooks are called for every micro-batch, with its part of the window's gradient. This is "
                "exact for hooks that multiply by a constant or a mask, not for those that clip or clamp. Pass "
                "clip_grad_norm= to the wrapper, or edit the finished gradient in a hook: register_step_pre_hook.",
                stacklevel=5,
            )

    def _changed_error(self) -> WindowError:
        before, now = ({id(p) for p in ps} for ps in (self._parameters, parameters_of(self._inner)))
        how = f"{len(before - now)} of {len(before)} were removed, {len(now - before)} came"
        return WindowError(
            f"The optimizer's parameters changed inside an open window: {how if before != now else 'their order'}. The "
            "window's sum belongs to the parameters it began with. Change param_groups when `updated` is True; "
            "optimizer.add_param_group() may be called at any time. discard() drops the window."
        )


def _same_objects(some: Sequence[Any], others: Sequence[Any]) -> bool:
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
    """Not to be changed: of an optimizer with one group it is the group's own list."""
    groups = optimizer.param_groups
    if len(groups) == 1:
        own: list[Tensor] = groups[0]["params"]
        return own
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
