"""An optimizer in the place of another: where torch looks for the inner one's tables, hooks and loss scale."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradaccum.torch.optimizer.loss_scale import LossScale

__all__ = ["OptimizerProxy", "check_complete", "needs_closure", "parameters_of"]


class OptimizerProxy(torch.optim.Optimizer):
    """torch's optimizer protocol, passed on to an inner optimizer; `step` and the files are left to subclasses."""

    inner: torch.optim.Optimizer
    _loss_scale: LossScale

    def _hold(self, inner: torch.optim.Optimizer) -> None:
        # torch's constructor makes the hook tables. It would also write groups and state, which are the inner
        # optimizer's: until `inner` is set, the properties below swallow that.
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self._scaled: list[Any] = []

    # The inner optimizer's own tables, so that schedulers, scalers and checkpoints find them where they look.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if "inner" in self.__dict__:
            self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        if "inner" in self.__dict__:
            self.inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        if "inner" in self.__dict__:
            self.inner.defaults = defaults

    def __getattr__(self, name: str) -> Any:
        # What an inner optimizer has beyond torch's interface (train() and eval() of schedule-free ones, say).
        if name.startswith("_") or "inner" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.inner, name)

    def _step_inner(self, *closure: Callable[[], Any]) -> Any:
        """The inner optimizer's step, between the hooks that were registered here."""
        args: Any = (self, *closure)
        kwargs = dict[str, Any]()
        for pre_hook in self._optimizer_step_pre_hooks.values():
            args, kwargs = pre_hook(self, args, kwargs) or (args, kwargs)
        result = self.inner.step(*args[1:], **kwargs)
        for post_hook in self._optimizer_step_post_hooks.values():
            post_hook(self, args, kwargs)
        return result

    # GradScaler: it looks for infinity in the gradients, sets `grad_scale` and `found_inf`, steps, and deletes both.

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # True: it hands over the scale, in place of unscaling the window's sum on every micro-batch. It asks first.
        self._loss_scale.show()
        return True

    @property
    def grad_scale(self) -> Any:
        return LossScale.neutral

    @grad_scale.setter
    def grad_scale(self, scale: Any) -> None:
        self._scaled = [scale if isinstance(scale, Tensor) else None, None]

    @grad_scale.deleter
    def grad_scale(self) -> None:
        self._scaled = []

    @property
    def found_inf(self) -> Tensor | None:
        return self._scaled[1] if self._scaled else None

    @found_inf.setter
    def found_inf(self, found: Tensor) -> None:
        self._loss_scale.hide()
        self._scaled[1] = found if isinstance(found, Tensor) else torch.tensor(float(found))  # 0: it saw no gradient

    @found_inf.deleter
    def found_inf(self) -> None:
        self._scaled = []


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its `step` cannot be called without a closure, which it then evaluates as often as it likes."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def check_complete(optimizer: torch.optim.Optimizer) -> None:
    """Raise for an optimizer that wraps another one, as PostLocalSGDOptimizer does, without what all of them have."""
    if not hasattr(optimizer, "defaults"):
        kind = type(optimizer).__name__
        raise ValueError(
            f"{kind} lacks what torch.optim.Optimizer sets up: super().__init__ was not called. If it wraps an "
            f"optimizer, wrap that one: {kind}(Optimizer(inner, steps), ...)."
        )
