"""What a checkpoint of a wrapped optimizer holds beside the inner one's state: the open window.

Of a sharded model it is in the inner one's state (see sharded_state.py). Everything in it is a number, a string, a
list, a dict or a tensor, so `torch.load(weights_only=True)` reads it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradaccum.errors import WindowError
from gradaccum.on_torch.batch import map_leaves
from gradaccum.torch.optimizer import sharded_checkpoint as sharded
from gradaccum.torch.optimizer.windows import Windows

__all__ = ["KEY", "initialise", "is_initialisation", "load", "state_dict"]

KEY = "gradaccum"


def state_dict(windows: Windows) -> dict[str, Any]:
    """The inner optimizer's state and the window."""
    window = windows.state_dict()
    if windows.ranks.in_step:
        return sharded.pack(windows.inner, window, windows.ranks)
    return {**windows.inner.state_dict(), KEY: window}


def is_initialisation(windows: Windows) -> bool:
    """Whether a `step()` is what torch.distributed.checkpoint means by one: it wants to see state, not to train."""
    return not windows.inner.state and sharded.is_initialisation(windows.inner)


def initialise(windows: Windows) -> None:
    """Have the inner optimizer make its state."""
    if not windows.accumulation.window.is_open:
        windows.inner.step()
        if windows.ranks.in_step and not windows.updates:
            sharded.reserve(windows.inner)
    for parameter in windows.parameters():
        parameter.grad = None


def load(windows: Windows, state_dict: dict[str, Any]) -> None:
    """Load the inner optimizer's state and the window, or nothing."""
    state_dict, own = sharded.unpack(state_dict, windows.ranks)
    own = state_dict.pop(KEY, own)
    _check_inner(windows.inner, state_dict)
    if own is not None:
        _check_window(windows, own)
    # torch would share tensors with the dict it is given, and the next update change them there.
    cloned = map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, state_dict["state"])
    windows.inner.load_state_dict({**state_dict, "state": cloned})
    if own is not None:
        windows.load_state_dict(own)
    else:
        windows.discard()


def _check_window(windows: Windows, state: dict[str, Any]) -> None:
    saved = state["window"]
    if not saved["micro_batches"]:
        return
    saved_on, here = state.get("rank", [0, 1]), windows.ranks.place
    if saved_on != here:
        raise WindowError(
            f"The checkpoint was taken inside a window, on rank {saved_on[0]} of {saved_on[1]}, and holds that rank's "
            f"part of it; this is rank {here[0]} of {here[1]}. Save and load one checkpoint per rank, or take it when "
            "`updated` is True: a closed window is the same on every rank, and on any number of them."
        )
    steps = windows.schedule(state["epoch"], state["updates"])
    if steps != saved["steps"]:
        raise WindowError(
            f"The checkpoint was taken inside a window of {saved['steps']} steps ({saved['micro_batches']} of them "
            f"done), and this optimizer has steps={steps} there. A window's length changes only between windows: load "
            f"it with steps={saved['steps']}, or take the checkpoint when `updated` is True."
        )
    reduction = windows.accumulation.window.reduction
    if saved.get("reduction", reduction) != reduction:
        raise WindowError(
            f'The checkpoint was taken inside a window of losses with reduction="{saved["reduction"]}", and this '
            f'optimizer has reduction="{reduction}". Load it with the same, or take it when `updated` is True.'
        )
    parameters = windows.parameters()
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
