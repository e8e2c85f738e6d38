"""What a checkpoint of a wrapped optimizer holds beside the inner one's state: the open window.

Of a sharded model it is in the inner one's state (see sharded_state.py). Everything in it is a number, a string, a
list, a dict or a tensor, so `torch.load(weights_only=True)` reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradaccum.errors import WindowError
from gradaccum.on_torch.batch import map_leaves
from gradaccum.torch.optimizer import sharded_checkpoint as sharded_state

if TYPE_CHECKING:
    from gradaccum.torch.optimizer.optimizer import Optimizer

__all__ = ["KEY", "initialise", "load", "load_window", "state_dict", "window_state"]

KEY = "gradaccum"


def state_dict(optimizer: Optimizer) -> dict[str, Any]:
    """The inner optimizer's state and the window."""
    window = window_state(optimizer)
    if optimizer._ranks.in_step:
        return sharded_state.pack(optimizer.inner, window, optimizer._ranks)
    return {**optimizer.inner.state_dict(), KEY: window}


def initialise(optimizer: Optimizer) -> None:
    """What torch.distributed.checkpoint means by a step at rate 0: it wants to see state, not to train."""
    if not optimizer._accumulation.window.is_open:
        optimizer.inner.step()
        if optimizer._ranks.in_step and not optimizer.updates:
            sharded_state.reserve(optimizer.inner)
    for parameter in optimizer._parameters():
        parameter.grad = None


def window_state(optimizer: Optimizer) -> dict[str, Any]:
    """The open window with its gradients: copies, so that a snapshot in memory stays one."""
    accumulation = optimizer._accumulation
    state: dict[str, Any] = {
        "epoch": optimizer.epoch,
        "updates": optimizer.updates,
        "in_epoch": optimizer._in_epoch,
        "window": accumulation.window.state_dict(),
    }
    if accumulation.ranks.several:
        state["unit"], state["rank"] = accumulation.unit, accumulation.ranks.place
    if not accumulation.window.is_open:
        return state
    if accumulation.ranks.in_step:
        accumulation.ranks.reduce_pending()
        accumulation.guard.arrivals = 0
    scale, loss = accumulation.loss_scale, accumulation.loss
    sums = scale.restored or scale.unscaled(accumulation.sums.held())
    state["gradients"] = {index: s.detach() for index, s in enumerate(sums) if s is not None}
    state["scaled"] = scale.in_use or scale.restored is not None
    state["overflow"] = bool(scale.overflow.item()) if scale.overflow is not None else False
    state["losses"] = [[index, loss.clone(), weight] for index, loss, weight in loss.entries]
    state["losses_weighed"] = loss.weighed
    if accumulation.screened is not None:
        state["weights"], state["counted"] = list(accumulation.weights), accumulation.screened.counted()
    return state


def load(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Load the inner optimizer's state and the window, or nothing."""
    state_dict, own = sharded_state.unpack(state_dict, optimizer._ranks)
    own = state_dict.pop(KEY, own)
    _check_inner(optimizer.inner, state_dict)
    if own is not None:
        _check_window(optimizer, own)
    # torch would share tensors with the dict it is given, and the next update change them there.
    cloned = map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, state_dict["state"])
    optimizer.inner.load_state_dict({**state_dict, "state": cloned})
    if own is not None:
        load_window(optimizer, own)
    else:
        optimizer.discard()


def load_window(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Go on with the window that `window_state` wrote."""
    accumulation = optimizer._accumulation
    accumulation.close()
    accumulation.empty()
    accumulation.expect_nothing()
    accumulation.loss.restart()
    optimizer.epoch, optimizer.updates, optimizer._in_epoch = state["epoch"], state["updates"], state["in_epoch"]
    accumulation.unit = state.get("unit", accumulation.unit)
    accumulation.begin()
    optimizer._batches, optimizer._scheduled_for = None, None
    optimizer._restored = bool(state["window"]["micro_batches"])
    optimizer.updated = False
    if not optimizer._restored:
        optimizer._expect()
        return
    accumulation.ranks.restored()
    accumulation.window.load_state_dict(state["window"])
    parameters = optimizer._parameters()
    device = parameters[0].device
    accumulation.loss.entries = [(index, loss.to(device, copy=True), weight) for index, loss, weight in state["losses"]]
    accumulation.loss.weighed = state["losses_weighed"]
    optimizer._scheduled_for = (optimizer.epoch, optimizer.updates)
    optimizer._rates = [group.get("lr") for group in optimizer.param_groups]
    sums: list[Tensor | None] = [None] * len(parameters)
    for index, gradient in state["gradients"].items():
        sums[index] = gradient.detach().to(parameters[index].device, copy=True)
    if accumulation.screened is not None:
        counted = state.get("counted", [True] * accumulation.window.micro_batches)
        mean_weight = accumulation.window.weight / accumulation.window.micro_batches
        accumulation.weights = list(state.get("weights", [mean_weight] * len(counted)))
        accumulation.screened.restore(sums, counted)
    elif state["scaled"]:
        accumulation.loss_scale.restore(sums, state["overflow"])
    else:
        accumulation.sums.hold(sums)
    accumulation.guard.accept()
    optimizer._expect()


def _check_window(optimizer: Optimizer, state: dict[str, Any]) -> None:
    saved = state["window"]
    if not saved["micro_batches"]:
        return
    saved_on, here = state.get("rank", [0, 1]), optimizer._ranks.place
    if saved_on != here:
        raise WindowError(
            f"The checkpoint was taken inside a window, on rank {saved_on[0]} of {saved_on[1]}, and holds that rank's "
            f"part of it; this is rank {here[0]} of {here[1]}. Save and load one checkpoint per rank, or take it when "
            "`updated` is True: a closed window is the same on every rank, and on any number of them."
        )
    steps = optimizer._schedule(state["epoch"], state["updates"])
    if steps != saved["steps"]:
        raise WindowError(
            f"The checkpoint was taken inside a window of {saved['steps']} steps ({saved['micro_batches']} of them "
            f"done), and this optimizer has steps={steps} there. A window's length changes only between windows: load "
            f"it with steps={saved['steps']}, or take the checkpoint when `updated` is True."
        )
    parameters = optimizer._parameters()
    for index, gradient in state["gradients"].items():
        shape = tuple(parameters[index].shape) if index < len(parameters) else None
        if shape != tuple(gradient.shape):
            raise ValueError(
                f"The checkpoint's window is of another model: the gradient of parameter {index} has the shape "
                f"{tuple(gradient.shape)}, and the parameter {shape if shape is not None else 'is not there'}."
            )


def _check_inner(inner: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """torch compares the number of parameters only, and fails later, or trains on with another's state."""
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(f"This is no optimizer's state dict: {key!r} is missing. Received keys: {[*state_dict]}.")
    saved, here = [len(g["params"]) for g in state_dict["param_groups"]], [len(g["params"]) for g in inner.param_groups]
    if saved != here:
        raise ValueError(
            f"The state dict is of another model: its groups hold {saved} parameters, and this optimizer's {here}."
        )
    if not type(inner).__module__.startswith("torch.optim"):
        return  # a custom optimizer's state may have any shape
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    for index, parameter in zip(indices, parameters, strict=True):
        for name, value in state_dict["state"].get(index, {}).items():
            # Factored state (Adafactor's rows and columns) has ones where it sums over a dimension.
            if (
                isinstance(value, Tensor)
                and value.dim() == parameter.dim() > 0
                and any(a not in (1, b) for a, b in zip(value.shape, parameter.shape, strict=True))
            ):
                raise ValueError(
                    f"The state dict is of another model: {name!r} of parameter {index} has the shape "
                    f"{tuple(value.shape)}, and the parameter {tuple(parameter.shape)}."
                )
