"""Delegate torch's optimizer protocol to an inner optimizer: parameter groups, state, step hooks, GradScaler."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.errors import WindowError
from gradaccum.on_torch.arguments import needs_closure
from gradaccum.on_torch.private import global_step_hooks, without_global_step_hooks
from gradaccum.schedule import Schedule
from gradaccum.torch.optimizer.several import SeveralOptimizers
from gradaccum.torch.watch import callers, check_outside_of_trainers, parameters_of
from gradaccum.torch.window import LossScale, Windows

KEY = "gradaccum"
"""Where a state dict has the open window."""

_WRAPPED = "Optimizer(torch.optim.Adam(model.parameters()), steps=4)"
_PREPARED = {
    "accelerate.": f"accelerator.prepare({_WRAPPED})",
    "lightning.fabric.": f"fabric.setup(model, {_WRAPPED})",
    "lightning_fabric.": f"fabric.setup(model, {_WRAPPED})",
    "lightning.pytorch.": f"return {_WRAPPED} from configure_optimizers",
    "pytorch_lightning.": f"return {_WRAPPED} from configure_optimizers",
}
"""Where frameworks define optimizers around the user's, and how to have them go around the window's, too."""


def _inners(name: str) -> property:
    """The inner optimizer's own table, so that schedulers, scalers and checkpoints find it where they look."""

    def get(self: OptimizerProxy) -> Any:
        return getattr(self._inner, name)

    def set_(self: OptimizerProxy, value: Any) -> None:
        if "_inner" in self.__dict__:
            setattr(self._inner, name, value)

    return property(get, set_)


class OptimizerProxy(torch.optim.Optimizer):
    """torch's optimizer protocol, passed on to an inner optimizer; `step` and the files are left to subclasses."""

    inner: Any
    """The inner optimizer; of several, the list."""
    _loss_scale: LossScale
    _windows: Windows
    param_groups: Any = _inners("param_groups")
    state: Any = _inners("state")
    defaults: Any = _inners("defaults")

    def _hold(self, inner: Any) -> None:
        # torch's constructor makes the hook tables. It would also write groups and state, which are the inner
        # optimizer's: until `_inner` is set, the properties swallow that.
        super().__init__(inner.param_groups, inner.defaults)
        self._inner = inner
        self.inner = inner.optimizers if isinstance(inner, SeveralOptimizers) else inner
        self._scaled: list[Any] = []
        self._answer: tuple[Callable[[], Any], ...] = ()  # the inner optimizer's, for a closure that has been evaluated
        own = self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks
        self._step_hooks: tuple[dict[Any, Any], ...] = (*own, *global_step_hooks())

    def __getattr__(self, name: str) -> Any:
        # What an inner optimizer has beyond torch's interface (train() and eval() of schedule-free ones, say).
        if name.startswith("_") or "_inner" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if self.inner is not self._inner:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}. Ask one of `.inner`, a list"
            )
        found = getattr(self.inner, name)
        if self._windows.schedule.constant != 1 and inspect.ismethod(found) and _works_on_gradients(found):
            return functools.partial(_refuse, f"{type(self.inner).__name__}.{name}()")
        return found

    def _step_inner(self, *closure: Callable[[], Any]) -> Any:
        """The inner optimizer's step, between the hooks of all optimizers and those that were registered here."""
        given = closure or self._answer
        if not any(self._step_hooks):
            return self._inner.step(*given)
        args: Any = (self, *given)
        kwargs = dict[str, Any]()
        with without_global_step_hooks() as (before, after):
            for pre_hook in (*before, *self._optimizer_step_pre_hooks.values()):
                args, kwargs = pre_hook(self, args, kwargs) or (args, kwargs)
            result = self._inner.step(*args[1:], **kwargs)
            for post_hook in (*self._optimizer_step_post_hooks.values(), *after):
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


_INSTEAD = "Use gradaccum.torch.TrainStep, which does that, or steps=1 without options."


def optimizers_of(inner: Any) -> list[torch.optim.Optimizer]:
    """The optimizers that an inner one is made of: most often itself."""
    return inner.optimizers if isinstance(inner, SeveralOptimizers) else [inner]


def ranks_of(model: nn.Module | None, inner: Any, options: Mapping[str, Any]) -> Any:
    """The ranks that close their windows together; None on one device."""
    if model is None or not has_process_group():
        return None
    from gradaccum.torch.distributed import check_closures, detect_ranks

    optimizers = optimizers_of(inner)
    ranks = detect_ranks(model, optimizers, options=options)
    if not ranks.is_distributed:
        return None
    if ranks.sharded and len(optimizers) > 1:
        raise ValueError(
            "A list of optimizers can't share the window of a sharded model (fully_shard). Use TrainStep, with a "
            "list; or wrap one optimizer."
        )
    check_closures(filter(needs_closure, optimizers), ranks)
    return ranks


def has_process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def check_alone(model: nn.Module | None, parameters: list[Tensor], steps: int | None) -> None:
    """Raise a ValueError, or warn, if these parameters are data-parallel and the optimizer doesn't know it."""
    if has_process_group():
        from gradaccum.torch.distributed import Ranks, check_detected

        check_detected(model, parameters, Ranks(), steps)


def may_evaluate_again(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its `step` takes a closure, and is none of torch's own, which evaluate it once, before anything else."""
    of_torch = type(optimizer).__module__.startswith("torch.optim")
    return not of_torch and "closure" in inspect.signature(optimizer.step).parameters


def evaluated(optimizer: torch.optim.Optimizer, result: Any) -> Callable[[], Any]:
    """A closure that was evaluated before the step, for optimizers that ask for it once, before anything else."""

    def now() -> list[int]:
        return [parameter._version for parameter in parameters_of(optimizer)]

    asked = [now()]

    def closure() -> Any:
        asked.append(now())
        if len(asked) > 2 or asked[0] != asked[1]:
            raise ValueError(
                f"{type(optimizer).__name__}.step evaluates its closure again, which would have to run the whole "
                f"window again. Parameters may have been left in the middle of a step. {_INSTEAD}"
            )
        return result

    return closure


def check_steps_of(inner: torch.optim.Optimizer, arguments: dict[str, Any], schedule: Schedule) -> None:
    """Raise if the inner optimizer re-evaluates closures, and windows are longer than one micro-batch."""
    if needs_closure(inner) and (schedule.largest not in (1, None) or has_options({**arguments, "reduction": "mean"})):
        raise ValueError(
            f"{type(inner).__name__} re-evaluates its closure, which would have to run the whole window again. "
            f"Received: steps={schedule}. {_INSTEAD}"
        )


def has_options(arguments: dict[str, Any]) -> bool:
    """Whether something is done to the gradients between a backward pass and the update."""
    neutral = {"nonfinite": "propagate", "reduction": "mean"}
    return any(value != neutral.get(name) for name, value in arguments.items())


def lightning_module(closure: Any) -> Any:
    """The module whose automatic optimization has made this closure, if Lightning has."""
    module = next(iter(getattr(closure, "args", ())), None)
    return module if getattr(module, "automatic_optimization", False) is True else None


def check_first_step(closure: Any) -> None:
    """Raise, or warn, for what is around a wrapped optimizer, or on its parameters, and makes its windows inexact."""
    check_outside_of_trainers()
    steps, setting = 1, ""
    if (module := lightning_module(closure)) is not None:
        steps = module.trainer.accumulate_grad_batches
        setting = f"Trainer(accumulate_grad_batches={steps})"
    elif "accelerate.optimizer" in callers():
        steps = sys.modules["accelerate.state"].GradientState().num_steps
        setting = f"Accelerator(gradient_accumulation_steps={steps})"
    if steps != 1:
        raise ValueError(
            f"{setting} accumulates as well as this optimizer does, and averages batches as if all had the same size. "
            "Remove it: the wrapped optimizer accumulates."
        )


def checked_inner(optimizer: Any) -> Any:
    """The inner optimizer; of a list, one that is made of them."""
    if not isinstance(optimizer, (list, tuple)):
        return _checked_optimizer(optimizer)
    if not optimizer:
        raise ValueError("`optimizer` must be an optimizer, or a list of at least one. Received: an empty list.")
    optimizers = [_checked_optimizer(each) for each in optimizer]
    for each in optimizers:
        if needs_closure(each):
            raise ValueError(f"{type(each).__name__} re-evaluates its closure: it can't be one of several. {_INSTEAD}")
    return SeveralOptimizers(optimizers)


def _checked_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    if isinstance(optimizer, OptimizerProxy):
        raise ValueError(
            f"This {type(optimizer).__name__} is wrapped already, with steps={optimizer.steps!r}. Use it, or pass its "
            "`.inner`."
        )
    kind = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"`optimizer` must be a torch.optim.Optimizer. Received: {kind}. "
            "For example: Optimizer(torch.optim.Adam(model.parameters()), steps=4)."
        )
    if not hasattr(optimizer, "defaults"):
        raise ValueError(
            f"{kind} doesn't call super().__init__, so it lacks what torch.optim.Optimizer sets up. If it wraps an "
            f"optimizer, wrap that one: {kind}(Optimizer(inner, steps), ...)."
        )
    framework = next((f for base in type(optimizer).__mro__ for f in _PREPARED if base.__module__.startswith(f)), None)
    if framework is not None:
        raise ValueError(
            f"{framework.partition('.')[0].rstrip('_')} has prepared this optimizer already: its checkpoints would "
            "leave out the open window, and its loss scale and its own accumulation would act inside of windows. "
            f"Received: {kind}. Wrap first, then prepare: {_PREPARED[framework]}."
        )
    return optimizer


def checked_gradients(gradients: Any, parameters: list[Tensor]) -> list[Tensor | None]:
    if isinstance(gradients, Mapping):
        if not all(isinstance(parameter, Tensor) for parameter in gradients):
            raise TypeError(
                "`gradients` must be a sequence in the order of the optimizer's parameters, or {parameter: gradient}. "
                f"Received: a dict with keys {[*gradients][:3]}. In their order, that is [*gradients.values()]."
            )
        if unknown := {id(p) for p in gradients} - {id(p) for p in parameters}:
            raise ValueError(f"`gradients` has {len(unknown)} parameters that are not the optimizer's.")
        gradients = [gradients.get(parameter) for parameter in parameters]
    found = list(gradients)
    if len(found) != len(parameters):
        raise ValueError(
            f"`gradients` must have one for each of the {len(parameters)} parameters, None for those without one. "
            f"Received: {len(found)}."
        )
    for index, (gradient, parameter) in enumerate(zip(found, parameters, strict=True)):
        if gradient is not None and gradient.shape != parameter.shape:
            raise ValueError(
                f"The gradient of parameter {index} has the shape {tuple(gradient.shape)}, and the parameter "
                f"{tuple(parameter.shape)}."
            )
    return found


def _works_on_gradients(method: Any) -> bool:
    """Whether a method is called a step, or names gradients or a step in what it does."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    names = {method.__name__, *(code.co_names if code is not None else ())}
    names -= {"no_grad", "enable_grad", "set_grad_enabled", "inference_mode"}
    return any(word in ("grad", "step") for name in names for word in name.split("_"))


def _refuse(method: str, *args: Any, **kwargs: Any) -> Any:
    raise WindowError(
        f"{method} works on gradients, and inside a window p.grad holds an undivided sum. Use "
        "gradaccum.torch.TrainStep, which evaluates closures on the whole batch; or steps=1; or call it on "
        "`optimizer.inner` if you know that the gradients are what it needs."
    )
