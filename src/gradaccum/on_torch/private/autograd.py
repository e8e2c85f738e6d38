"""What is used of the autograd engine, and of optimizers, beyond their public API."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def run_backward(tensors: Sequence[Tensor], gradients: Sequence[Tensor], retain_graph: bool = False) -> None:
    """`torch.autograd.backward(tensors, gradients)`, where the gradients are known to fit.

    What torch looks at first, once more for each micro-batch, takes as long as the backward pass of a small layer.
    """
    engine = backward_engine()
    plain = type(tensors[0]) is Tensor if len(tensors) == 1 else all([type(tensor) is Tensor for tensor in tensors])
    if engine is None or not plain:
        torch.autograd.backward(tensors, gradients, retain_graph=retain_graph)
    else:
        engine(tuple(tensors), tuple(gradients), retain_graph, False, (), allow_unreachable=True, accumulate_grad=True)


@functools.cache
def backward_engine() -> Callable[..., Any] | None:
    """What `torch.autograd.backward` calls in the end; None where a trial shows that it is another than expected."""
    try:
        from torch.autograd.graph import _engine_run_backward as engine

        leaf = torch.ones((), requires_grad=True, device="cpu")
        with torch.enable_grad():
            end = leaf * 2
        engine((end,), (torch.full_like(end, 3.0),), False, False, (), allow_unreachable=True, accumulate_grad=True)
        return engine if leaf.grad is not None and leaf.grad.item() == 6.0 else None
    except Exception:
        return None


def after_backward(callback: Callable[[], None]) -> None:
    """In a backward pass: call this at its end, after what DDP and FSDP2 have queued by then."""
    queue_callback(lambda: queue_callback(callback))  # DDP queues its own when its last bucket is full


queue_callback: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
"""In a backward pass: call this at its end, if it comes to one."""


_UNTRACED = (
    "gradaccum.core.window", "gradaccum.on_torch", "gradaccum.torch.buffers", "gradaccum.torch.distributed",
    "gradaccum.torch.loss", "gradaccum.torch.optimizer", "gradaccum.torch.proof", "gradaccum.torch.train_step",
    "gradaccum.torch.watch", "gradaccum.torch.window",
)  # fmt: skip


@functools.cache
def leave_uncompiled() -> None:
    """Have torch.compile trace nothing of windows, where a user compiles a loop's whole body: a graph ends there."""
    from torch._dynamo import trace_rules  # which takes long to load, and has been loaded by the first optimizer

    for module in _UNTRACED:
        trace_rules.add(module)


def pass_for_parameter(tensor: Tensor) -> None:
    """Have `isinstance(tensor, torch.nn.Parameter)` say yes."""
    tensor._is_param = True


def leaves_of(*outputs: Tensor) -> set[int]:
    """The ids of the leaves that a backward pass from these outputs would reach."""
    return {id(getattr(node, "variable", None)) for node in graph_of(*[output.grad_fn for output in outputs])}


def graph_of(*ends: Any, without: Iterable[Any] = ()) -> Iterator[Any]:
    """The nodes that a backward pass from these would run, each once; those `without` which it would end there."""
    waiting, seen = [*ends], {*without}
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
            yield node


current_backward: Callable[[], int | None] = getattr(torch._C, "_current_graph_task_id", lambda: None)
"""A number for the backward pass that is running, -1 where none is; None if it cannot be told."""

recorded_operations: Callable[[], int] = getattr(getattr(torch._C, "_autograd", None), "_get_sequence_nr", lambda: 0)
"""How many operations autograd has recorded in this thread, in all graphs; 0 if it cannot be told."""


# Optimizers.

_GLOBAL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


def global_step_hooks() -> tuple[dict[Any, Any], dict[Any, Any]]:
    module = sys.modules["torch.optim.optimizer"]  # torch.optim hides it
    return getattr(module, _GLOBAL_HOOKS[0], {}), getattr(module, _GLOBAL_HOOKS[1], {})


@contextlib.contextmanager
def without_global_step_hooks() -> Iterator[tuple[list[Any], list[Any]]]:
    """The hooks of every optimizer's step, before and after it; meanwhile no optimizer calls them by itself."""
    module, found = sys.modules["torch.optim.optimizer"], global_step_hooks()
    for name, table in zip(_GLOBAL_HOOKS, found, strict=True):
        if table:
            setattr(module, name, type(table)())
    try:
        yield [*found[0].values()], [*found[1].values()]
    finally:
        for name, table in zip(_GLOBAL_HOOKS, found, strict=True):
            if table:
                setattr(module, name, table)
