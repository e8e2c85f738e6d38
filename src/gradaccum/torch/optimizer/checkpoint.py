"""Checkpoints of a wrapped optimizer: the inner one's state dict, and beside it the open window with its gradients.

Of a sharded model it is in the inner one's state (see sharded_checkpoint.py). Everything in it is a number, a string, a
list, a dict or a tensor, so `torch.load(weights_only=True)` reads it.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradaccum.core.window import uncounted_error
from gradaccum.errors import WindowError
from gradaccum.on_torch.batch import map_leaves
from gradaccum.torch.optimizer.proxy import KEY, optimizers_of
from gradaccum.torch.optimizer.several import SeveralOptimizers
from gradaccum.torch.watch import parameters_of
from gradaccum.torch.window import Windows

logger = logging.getLogger("gradaccum")

_DISTINCT = {"betas", "momentum", "rho", "lambd", "etas", "beta2_decay", "lr_decay"}
"""Hyperparameters that tell torch's optimizers apart."""

_IN_WINDOW = "gradaccum_window"
"""In the first group: how many micro-batches the open window holds, and its steps."""


def state_dict(windows: Windows) -> dict[str, Any]:
    state = window_state(windows)
    if _is_sharded(windows):
        from gradaccum.torch.optimizer import sharded_checkpoint

        return sharded_checkpoint.pack(windows.inner, state, windows.ranks)
    packed, window = {**windows.inner.state_dict(), KEY: state}, state["window"]
    if "param_groups" in packed and (windows.ranks is not None or window["micro_batches"]):
        # torch.distributed.checkpoint keeps "state" and "param_groups" alone: it shall not lose a window unnoticed.
        first, *others = packed["param_groups"]
        packed["param_groups"] = [{**first, _IN_WINDOW: [window["micro_batches"], window["steps"]]}, *others]
    return packed


def is_initialisation(windows: Windows) -> bool:
    """Whether a `step()` is what torch.distributed.checkpoint means by one: it wants to see state, not to train."""
    if windows.inner.state:
        return False
    from gradaccum.torch.optimizer import sharded_checkpoint

    return sharded_checkpoint.is_initialisation(windows.inner)


def _is_sharded(windows: Windows) -> bool:
    return windows.ranks is not None and windows.ranks.sharded


def initialise(windows: Windows) -> None:
    if not windows.window.is_open:
        windows.inner.step()
        if _is_sharded(windows) and not windows.updates:
            from gradaccum.torch.optimizer import sharded_checkpoint

            sharded_checkpoint.reserve(windows.inner)
            windows.before_update = functools.partial(sharded_checkpoint.release, windows.inner)
    for parameter in windows.parameters():
        parameter.grad = None


def load(windows: Windows, state_dict: dict[str, Any]) -> None:
    several = isinstance(windows.inner, SeveralOptimizers)
    _check_form(state_dict, len(optimizers_of(windows.inner)) if several else 0)
    if several:
        _load_several(windows, dict(state_dict))
        return
    state_dict, own = dict(state_dict), None
    if any(KEY in group for group in state_dict["param_groups"]):
        from gradaccum.torch.optimizer import sharded_checkpoint

        state_dict, own = sharded_checkpoint.unpack(state_dict, *_place(windows))
    own = state_dict.pop(KEY, own)
    groups = state_dict["param_groups"] = [dict(group) for group in state_dict["param_groups"]]
    held, steps = next(iter([group.pop(_IN_WINDOW) for group in groups if _IN_WINDOW in group]), (0, 0))
    if held and own is None:
        logger.warning(
            "This checkpoint was taken inside a window by something that keeps nothing of the window, such as "
            "get_state_dict of torch.distributed.checkpoint: %d of %d micro-batches are lost, and the window begins "
            "again. Save after an update, or save each rank's optimizer.state_dict().",
            held,
            steps,
        )
    _check_inner(windows.inner, state_dict)
    _check_own(windows, own)
    windows.inner.load_state_dict(_cloned(state_dict))
    _go_on(windows, own)


def _load_several(windows: Windows, state_dict: dict[str, Any]) -> None:
    own = state_dict.pop(KEY, None)
    for optimizer, state in zip(optimizers_of(windows.inner), state_dict["optimizers"], strict=True):
        _check_inner(optimizer, state)
    _check_own(windows, own)
    windows.inner.load_state_dict({"optimizers": [*map(_cloned, state_dict["optimizers"])]})
    _go_on(windows, own)


def _check_own(windows: Windows, own: Any) -> None:
    if own is not None:
        _check_whole(own)
        if own["window"]["micro_batches"]:
            _check_window(windows, own)


def _cloned(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """torch would share tensors with the dict it is given, and the next update change them there."""
    state = map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, state_dict["state"])
    return {**state_dict, "state": state}


def _go_on(windows: Windows, own: Any) -> None:
    if own is not None:
        restore(windows, own)
    else:
        windows.discard()


def window_state(windows: Windows) -> dict[str, Any]:
    """How far training has come, and the open window with its gradients: copies, so that a snapshot stays one."""
    open_, ranks = windows.current, windows.ranks
    state: dict[str, Any] = {**windows.state_dict(), "window": open_.window.state_dict()}
    if ranks is not None:
        state["unit"], state["rank"] = ranks.unit, [ranks.rank, ranks.size]
    if not open_.window.is_open:
        return state
    open_.saved, open_.passes.ordinary = True, False
    windows.parameter_monitor.check_parameters()
    open_.check_sum()  # an ordinary window does so at its end, which is elsewhere
    if _is_sharded(windows):
        ranks.reduce_pending()
        open_.monitor.forget_arrivals()  # of the reduction
    elif open_.in_progress[0] and open_.passes.arrivals:
        raise uncounted_error()
    scale = open_.loss_scale
    state["scaled"] = scale.in_use or open_.buffer.restored is not None
    state["overflow"] = scale.overflowed()
    return {**state, "gradients": open_.buffer.copies(scale.scale), **open_.losses.state_dict()}


def restore(windows: Windows, state: dict[str, Any]) -> None:
    open_, ranks = windows.current, windows.ranks
    announced = copy.copy(windows.one)  # of the loop in whose body this is
    if ranks is not None:
        ranks.resume(state.get("unit", ranks.unit))
    open_.close()
    open_.be_special()
    open_.empty()
    open_.expect_nothing()
    open_.losses.restart()
    if state["window"]["micro_batches"]:
        open_.window.load_state_dict(state["window"])
        open_.losses.load_state_dict(state, open_.buffer.parameters()[0].device)
        open_.buffer.restore(state["gradients"])
        open_.loss_scale.restore(state["overflow"])
        open_.build_stages()
        open_.be_special()
        if _is_sharded(windows):
            ranks.engine.restored([p for i, p in enumerate(open_.buffer.parameters()) if i in state["gradients"]])
    windows.load_state_dict(state)
    if announced.announced:
        windows.expect_batch(announced.default, announced.default_given, announced.last)


def _place(windows: Windows) -> tuple[int, int]:
    """This rank, and of how many."""
    return (0, 1) if windows.ranks is None else (windows.ranks.rank, windows.ranks.size)


def _check_window(windows: Windows, state: dict[str, Any]) -> None:
    saved, current = state["window"], windows.current
    inside, updated = "The checkpoint was taken inside a window", "take it when `updated` is True"
    saved_on, here = state.get("rank", [0, 1]), [*_place(windows)]
    if saved_on != here:
        raise WindowError(
            f"{inside}, on rank {saved_on[0]} of {saved_on[1]}, and holds that rank's part of it; this is rank "
            f"{here[0]} of {here[1]}. Save and load one checkpoint per rank, or {updated}: a closed window is the same "
            "on every rank, and on any number of them."
        )
    steps = windows.schedule(state["epoch"], state["updates"])
    if steps != saved["steps"]:
        raise WindowError(
            f"{inside} of {saved['steps']} steps ({saved['micro_batches']} of them done), and this optimizer has "
            f"steps={steps} there. A window's length changes only between windows: load it with "
            f"steps={saved['steps']}, or {updated}."
        )
    if state.get("terms") or not all(state.get("counted", [])):
        kind = "of several losses with a denominator each" if state.get("terms") else "that left out micro-batches"
        raise WindowError(
            f"{inside} {kind}, as this version doesn't make any more. Finish that window with the version that "
            f"saved it, and {updated}."
        )
    reduction = current.window.reduction
    if saved.get("reduction", reduction) != reduction:
        raise WindowError(
            f'{inside} of losses with reduction="{saved["reduction"]}", and this optimizer has '
            f'reduction="{reduction}". Load it with the same, or {updated}.'
        )
    parameters = windows.parameters()
    for index, gradient in state["gradients"].items():
        shape = tuple(parameters[index].shape) if index < len(parameters) else None
        if shape != tuple(gradient.shape):
            raise ValueError(
                f"The checkpoint's window is of another model: the gradient of parameter {index} has the shape "
                f"{tuple(gradient.shape)}, and the parameter {shape if shape is not None else 'is not there'}."
            )


def _check_form(state_dict: Any, several: int = 0) -> None:
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            "A state dict must be a dict, as state_dict() returns it. "
            f"Received: state_dict={state_dict!r} of type {type(state_dict).__name__}."
        )
    saved = state_dict.get("optimizers")
    if several:
        if not isinstance(saved, (list, tuple)) or len(saved) != several:
            found = "one optimizer" if saved is None else f"{len(saved)} optimizers"
            raise ValueError(
                f"This optimizer wraps {several} optimizers, and the state dict is of {found}. To load one use "
                "optimizer.inner[0].load_state_dict()."
            )
        for state in saved:
            _check_form(state)
        return
    if saved is not None and "param_groups" not in state_dict:
        raise ValueError(f"The state dict is of {len(saved)} optimizers, and this optimizer wraps one.")
    no_state_dict = "This is no optimizer's state dict:"
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(f"{no_state_dict} {key!r} is missing. Received keys: {[*state_dict]}.")
    for group in state_dict["param_groups"]:
        if "params" not in group:
            raise ValueError(f"{no_state_dict} a group has no 'params'. Received keys: {[*group]}.")


def _check_whole(state: Any) -> None:
    state = state if isinstance(state, Mapping) else {}
    needed, window = ["epoch", "updates", "in_epoch", "window"], state.get("window")
    window = window if isinstance(window, Mapping) else None
    if window is not None and window.get("micro_batches", 1):
        needed += ["gradients", "overflow", "losses", "losses_weighed"]
    in_window = [f"window[{k!r}]" for k in ("micro_batches", "steps") if window is not None and k not in window]
    if missing := [key for key in needed if key not in state] + in_window:
        raise ValueError(
            f"The checkpoint's window is incomplete: {', '.join(missing)} is missing under {KEY!r}. Load what "
            "state_dict() returned; without that key, it is an inner optimizer's, and no window is open."
        )
    _check_values(state)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_weight(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


_VALUES: dict[str, Callable[[Any], bool]] = {
    "epoch": _is_count,
    "updates": _is_count,
    "window.micro_batches": _is_count,
    "window.steps": lambda value: _is_count(value) and value > 0,
    "window.weight": _is_weight,
    "window.largest": _is_weight,
    "window.unit": lambda value: value is None or _is_weight(value),
    "gradients": lambda value: (
        isinstance(value, Mapping) and all(_is_count(i) and isinstance(g, Tensor) for i, g in value.items())
    ),
    "losses": lambda value: isinstance(value, (list, tuple)) and all(len(entry) >= 3 for entry in value),
}
"""What the parts of a saved window are, where they are there."""


def _check_values(state: Mapping[str, Any]) -> None:
    for name, fits in _VALUES.items():
        *outer, key = name.split(".")
        part = state[outer[0]] if outer else state
        if key in part and not fits(part[key]):
            raise ValueError(
                f"The checkpoint's window is damaged: {name} is {part[key]!r} under {KEY!r}. Load what state_dict() "
                "returned; without that key, it is an inner optimizer's, and no window is open."
            )


def _check_inner(inner: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """torch compares the number of parameters only, and fails later, or trains on with another's state."""
    saved, here = (
        [len(group["params"]) for group in groups] for groups in (state_dict["param_groups"], inner.param_groups)
    )
    if saved != here:
        raise ValueError(
            f"The state dict is of another model: its groups hold {saved} parameters, and this optimizer's {here}."
        )
    if not type(inner).__module__.startswith("torch.optim"):
        return  # a custom optimizer's state may have any shape
    for group in state_dict["param_groups"]:
        if (saved_names := _DISTINCT & group.keys()) != (own_names := _DISTINCT & inner.defaults.keys()):
            raise ValueError(
                f"The state dict is of another kind of optimizer: its groups have {sorted(saved_names)}, and "
                f"those of {type(inner).__name__} {sorted(own_names)}."
            )
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    for index, parameter in zip(indices, parameters_of(inner), strict=True):
        for name, value in state_dict["state"].get(index, {}).items():
            if not isinstance(value, Tensor) or not value.dim() == parameter.dim() > 0:
                continue
            # Factored state (Adafactor's rows and columns) has ones where it sums over a dimension.
            if any(a not in (1, b) for a, b in zip(value.shape, parameter.shape, strict=True)):
                raise ValueError(
                    f"The state dict is of another model: {name!r} of parameter {index} has the shape "
                    f"{tuple(value.shape)}, and the parameter {tuple(parameter.shape)}."
                )
