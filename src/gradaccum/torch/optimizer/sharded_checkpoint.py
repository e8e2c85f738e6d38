"""The open window of a sharded model among the inner optimizer's state, where torch.distributed.checkpoint looks.

`get_state_dict` knows two places, `state` by parameter and `param_groups`, and renames, saves and reshards what is in
them. So a parameter's sum stands beside its momentum, as the DTensor it is; and what the window weighs is a line of
text in the first group. The sums are reduced already: nothing in them belongs to one rank, and any number of ranks can
go on from them. Over R ranks a sum is the mean `A = sum_r S_r / R`; over Q ranks it is `A R / Q`.

A checkpoint is loaded into what the new optimizer's own state dict holds, entry by entry. So an entry is always there:
where there is no sum, `False`; and before the first micro-batch zeros, which tensors can be loaded into.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from gradaccum.on_torch.memory import local_part
from gradaccum.torch.distributed import Ranks
from gradaccum.torch.optimizer.proxy import KEY
from gradaccum.torch.watch import parameters_of


def pack(inner: torch.optim.Optimizer, window: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """The state dict of an inner optimizer with the window in it, the same for all ranks, which all take part."""
    nothing_yet, blank = not inner.state, _is_reserved(inner)
    if nothing_yet:
        _initialise(inner)
    packed = inner.state_dict()
    if nothing_yet:
        inner.state.clear()
    sums, losses = window.pop("gradients", {}), window.pop("losses", [])
    begun = window["window"]["micro_batches"] or window["updates"] or window["epoch"] or window["in_epoch"]
    for index, parameter in enumerate(parameters_of(inner)):
        if parameter.requires_grad:
            nothing = False if begun else torch.zeros_like(parameter, requires_grad=False)
            packed["state"][index] = {**packed["state"].get(index, {}), KEY: sums.get(index, nothing)}
    mine = {
        "weight": window["window"]["weight"],
        "largest": window["window"]["largest"],
        "losses": [[i, loss.item(), str(loss.dtype).removeprefix("torch."), weight] for i, loss, weight in losses],
    }
    packed["param_groups"][0][KEY] = json.dumps(
        {**window, "blank": blank or nothing_yet, "parts": [*map(json.loads, ranks.channel.texts(json.dumps(mine)))]}
    )
    return packed


def unpack(state_dict: dict[str, Any], rank: int, size: int) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What `pack` was given: the inner optimizer's state dict, and this rank's window; None without one."""
    groups = state_dict.get("param_groups", [])
    found = [group[KEY] for group in groups if KEY in group]
    if not found:
        return state_dict, None
    window = json.loads(found[0])
    parts = window.pop("parts")
    state, sums = _taken_apart(state_dict["state"], [name for group in groups for name in group["params"]])
    if len(parts) != size:
        sums = {index: total * (len(parts) / size) for index, total in sums.items()}
        # The first rank has seen all of it.
        weight = sum(part["weight"] for part in parts) if rank == 0 else 0.0
        mine = {"weight": weight, "largest": max(part["largest"] for part in parts), "losses": []}
    else:
        mine = parts[rank]
    window["window"].update(weight=mine["weight"], largest=mine["largest"])
    losses = [[i, torch.tensor(loss, dtype=getattr(torch, d)), w] for i, loss, d, w in mine["losses"]]
    groups = [{key: value for key, value in group.items() if key != KEY} for group in groups]
    inner = {**state_dict, "state": {} if window["blank"] else state, "param_groups": groups}
    return inner, {**window, "losses": losses, "gradients": sums, "rank": [rank, size]}


def _taken_apart(packed: dict[Any, Any], names: list[Any]) -> tuple[dict[Any, Any], dict[int, Tensor]]:
    """The inner optimizer's state, and the sums that stood in it, by the parameters' numbers."""
    state, sums = dict(packed), dict[int, Tensor]()
    for index, name in enumerate(names):
        own = {**state.pop(name, {})}
        # torch.distributed.checkpoint loads what is no tensor under the number's text.
        own.update(state.pop(str(index), {}) if isinstance(name, int) else {})
        total = own.pop(KEY, False)
        if isinstance(total, Tensor):
            sums[index] = total
        if own:
            state[name] = own
    return state, sums


def reserve(inner: torch.optim.Optimizer) -> None:
    """Make the entries of `pack` in a new optimizer: with `flatten_optimizer_state_dict` torch loads only such."""
    for parameter in _trained(inner):
        inner.state[parameter][KEY] = False
    inner.param_groups[0][KEY] = ""


def release(inner: torch.optim.Optimizer) -> None:
    """If nothing has been loaded into what `reserve` made, drop it: the first update finds the optimizer new."""
    if _is_reserved(inner):
        inner.state.clear()
        del inner.param_groups[0][KEY]


def _is_reserved(inner: torch.optim.Optimizer) -> bool:
    return any(KEY in group for group in inner.param_groups[:1])


def _trained(inner: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for parameter in parameters_of(inner) if parameter.requires_grad]


def _initialise(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer make its state without an update, as torch.distributed.checkpoint does: nothing at rate 0."""
    parameters, groups = _trained(optimizer), [group for group in optimizer.param_groups if "lr" in group]
    gradients, rates = [p.grad for p in parameters], [group["lr"] for group in groups]
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        optimizer.step()
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate


def is_initialisation(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a `step()` is torch.distributed.checkpoint's, which means no update: rates and gradients are all zero."""
    rates = [group.get("lr", 0.0) for group in optimizer.param_groups]
    if optimizer.state or any((isinstance(rate, Tensor) and rate.device.type != "cpu") or rate for rate in rates):
        return False
    gradients = [p.grad for p in _trained(optimizer)]
    return bool(gradients) and all(g is not None and not local_part(g).any() for g in gradients)
