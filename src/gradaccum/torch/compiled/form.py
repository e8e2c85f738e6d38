"""What passes are: what one eager micro-batch shows of them before they are compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.random_state import RandomState, all_generators
from gradaccum.torch.loss import BatchLosses
from gradaccum.torch.train_step.window import WindowRunner


@dataclasses.dataclass(frozen=True)
class Form:
    names: tuple[Hashable, ...]
    """Of several losses; `(None,)` of a single one."""
    told: bool
    """Whether the forward pass tells weights."""
    operators: int
    """How many operators both passes run."""
    draws: bool
    """Whether they draw random numbers."""
    problem: str | None = None
    """Why they can't be compiled."""


class _Operators(TorchDispatchMode):
    """Counts operators."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def form_of(runner: WindowRunner, window: BatchLosses, micro_batch: Batch, parameters: Sequence[Tensor]) -> Form:
    """Run both passes of this micro-batch eagerly. Leaves everything as it is.

    Raises:
        ValueError: There are hooks, or sparse gradients, which a program would leave out.
    """
    _check_hooks(runner, parameters)
    objective, operators = window.objective, _Operators()
    with runner.as_found(), runner.batch_norm.micro_batch():
        random = RandomState(all_generators([objective.device]))
        with operators:
            loss, told = objective.evaluate(micro_batch, window.summed)
            terms = told if isinstance(told, dict) else None
            losses = [loss] if terms is None else [term.loss for term in terms.values()]
            ends = [loss for loss in losses if loss.requires_grad]
            gradients = torch.autograd.grad(ends, parameters, [torch.ones_like(x) for x in ends], allow_unused=True)
        draws = bool(random.moved())
    for path, parameter, gradient in zip(_names(runner, parameters), parameters, gradients):
        if gradient is not None and gradient.layout is not parameter.layout:
            raise ValueError(
                f"compile= can't be combined with sparse gradients, as {path} has one. Build the embedding with "
                "sparse=False, or leave out `compile`."
            )
    names = (None,) if terms is None else tuple(terms)
    tells = told is not None if terms is None else all(term.weight is not None for term in terms.values())
    problem = None
    if terms is None and tells and window.summed:
        problem = "a loss of torch.nn whose batch has several targets tells its weight in the forward pass alone"
    return Form(names, tells, operators.count, draws, problem)


def _names(runner: WindowRunner, parameters: Sequence[Tensor]) -> list[str]:
    found = {
        id(p): repr(name)
        for prefix, root in runner.objective.modules.items()
        for name, p in root.named_parameters(prefix)
    }
    return [found.get(id(parameter), "a parameter") for parameter in parameters]


def _check_hooks(runner: WindowRunner, parameters: Sequence[Tensor]) -> None:
    for path, parameter in zip(_names(runner, parameters), parameters):
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(_HOOKS.format(f"the gradient of {path}"))
    for prefix, root in runner.objective.modules.items():
        for name, module in root.named_modules(prefix=prefix):
            if module._backward_hooks or module._backward_pre_hooks:
                raise ValueError(_HOOKS.format(f"the backward pass of {name or type(module).__name__!r}"))


_HOOKS = (
    "compile= can't be combined with a hook on {}: a compiled program makes gradients without autograd, which calls "
    "hooks. Remove the hook, or leave out `compile`."
)
