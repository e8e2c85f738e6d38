"""Whether an optimizer treats parameters one by one: found out on small ones that are made up."""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.on_torch.batch import leaves
from gradaccum.on_torch.private import without_global_step_hooks
from gradaccum.rounding import rounding
from gradaccum.torch.equivalence import relative_error

__all__ = ["bytes_of_state", "check_one_by_one", "limited_to", "state_bytes_of"]

SIZE, MOST, UPDATES = 3, 3, 3
"""Of a made-up parameter's dimensions; of those in a group; how often they are updated."""


@contextlib.contextmanager
def limited_to(optimizer: torch.optim.Optimizer, parameters: Collection[int]) -> Iterator[None]:
    """The optimizer has these parameters alone, by id, meanwhile, in groups that are the same objects.

    Example:
        >>> first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([first, second], lr=1.0)
        >>> first.grad = second.grad = torch.ones(1)
        >>> with limited_to(optimizer, {id(first)}):
        ...     optimizer.step()
        >>> first.item(), second.item()
        (0.0, 1.0)
    """
    groups = optimizer.param_groups
    held = [(group, group["params"]) for group in groups]
    for group, listed in held:
        group["params"] = [p for p in listed if id(p) in parameters]
    groups[:] = [group for group in groups if group["params"]]
    try:
        yield
    finally:
        for group, listed in held:
            group["params"] = listed
        groups[:] = [group for group, _ in held]


def check_one_by_one(optimizer: torch.optim.Optimizer) -> dict[int, float]:
    """Raise if what the optimizer does to a parameter depends on others, or on how often it steps.

    Args:
        optimizer: The user's. It and its parameters stay as they are.

    Returns:
        Of each group, by its place, how many bytes of state there are for one of a parameter's numbers.

    Raises:
        ValueError: It does; or a copy of it can't be stepped.

    Example:
        >>> check_one_by_one(torch.optim.Adam([nn.Parameter(torch.ones(3, 3))]))[0] > 8
        True
    """
    name, failed = type(optimizer).__name__, None
    for sparse in (False, True):  # SparseAdam takes no dense gradients
        try:
            at_once = _trained(optimizer, sparse=sparse, one_by_one=False)
            alone = _trained(optimizer, sparse=sparse, one_by_one=True)
            break
        except Exception as error:
            failed = failed or error
    else:
        raise ValueError(
            f"Whether {name} treats parameters one by one could not be found out, as update='in_backward' needs: a "
            f"copy of it can't be stepped with small parameters ({type(failed).__name__}: {failed}). Use "
            "update='after_backward'."
        )
    if not _agree(at_once, alone):
        raise ValueError(
            f"{name} makes another update where it steps parameters one by one: what it does to one depends on the "
            "others, or it counts its steps for all of them together. update='in_backward' would be inexact. Use "
            "update='after_backward', or an optimizer that treats each parameter by itself."
        )
    return bytes_of_state(at_once)


def state_bytes_of(optimizer: torch.optim.Optimizer) -> list[float]:
    """Of each group, how many bytes of state there are for one of a parameter's numbers, in float64.

    0 where a copy of the optimizer can't be stepped, as of those that evaluate a closure.

    Example:
        >>> state_bytes_of(torch.optim.SGD([nn.Parameter(torch.ones(3))], momentum=0.9))
        [8.0]
    """
    try:
        return [*bytes_of_state(_trained(optimizer, sparse=False, one_by_one=False)).values()]
    except Exception:
        return [0.0] * len(optimizer.param_groups)


def bytes_of_state(optimizer: torch.optim.Optimizer) -> dict[int, float]:
    """Of each group, by its place, how many bytes of state there are for one of a parameter's numbers, at most."""
    found = {}
    for place, group in enumerate(optimizer.param_groups):
        each = [
            sum(leaf.nbytes for _, leaf in leaves(optimizer.state.get(p, {})) if isinstance(leaf, Tensor)) / p.numel()
            for p in group["params"]
        ]
        found[place] = max(each, default=0.0)
    return found


def _trained(optimizer: torch.optim.Optimizer, *, sparse: bool, one_by_one: bool) -> torch.optim.Optimizer:
    """A copy of the optimizer, after some updates of small parameters."""
    small = _in_small(optimizer)
    parameters = [p for group in small.param_groups for p in group["params"]]
    generator = torch.Generator().manual_seed(0)
    with without_global_step_hooks():
        for update in range(UPDATES):
            for p in parameters:
                grad = torch.randn(p.shape, generator=generator, dtype=torch.float64) * 100.0 ** (1 - update)
                grad = grad.to(p.device, p.dtype)
                p.grad = grad.to_sparse(1) if sparse else grad
            for wanted in [{id(p)} for p in reversed(parameters)] if one_by_one else [set(map(id, parameters))]:
                with limited_to(small, wanted):
                    small.step()
    return small


def _in_small(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A copy with a few small parameters in place of its own, and without state and hooks."""
    generator, memo = torch.Generator().manual_seed(1), dict[int, Any]()
    groups = []
    for group in optimizer.param_groups:
        made: dict[Any, nn.Parameter] = {}
        for p in group["params"]:
            kind = p.dim(), p.dtype, p.device, len([1 for key in made if key[0] == p.dim()])
            if len(made) < MOST + 1 and kind[-1] < 2:
                shape = [SIZE + kind[-1]] * p.dim()
                dtype = torch.float64 if p.dtype.is_floating_point else p.dtype
                start = torch.randn(shape, generator=generator, dtype=torch.float64).to(p.device, dtype)
                made[kind] = nn.Parameter(start)
        others = {key: value for key, value in group.items() if key != "params"}
        groups.append({"params": list(made.values()), **copy.deepcopy(others, memo)})
        if isinstance(groups[-1].get("lr"), (int, float)):
            groups[-1]["lr"] = 0.1  # which a schedule may have set to 0
    small: torch.optim.Optimizer = object.__new__(type(optimizer))
    apart = {"param_groups", "state", "step"}
    hooks = {key for key in vars(optimizer) if key.endswith("_hooks")}
    memo.update({id(p): p for group in optimizer.param_groups for p in group["params"]})  # never copied
    vars(small).update(
        {key: copy.deepcopy(value, memo) for key, value in vars(optimizer).items() if key not in apart | hooks}
    )
    vars(small).update({key: type(vars(optimizer)[key])() for key in hooks})
    small.param_groups, small.state = groups, defaultdict(dict)
    return small


def _agree(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> bool:
    """Whether parameters, state and groups are the same but for rounding."""
    pairs = list(zip(one.param_groups, other.param_groups, strict=True))
    for a, b in pairs:
        scalars = {key: value for key, value in a.items() if key != "params" and not isinstance(value, Tensor)}
        if any(b.get(key) != value for key, value in scalars.items()):
            return False
        both: list[tuple[Any, Any]] = [(a[key], b[key]) for key in a if isinstance(a[key], Tensor)]
        for p, q in zip(a["params"], b["params"], strict=True):
            states = [
                [leaf for _, leaf in leaves(optimizer.state.get(key, {})) if isinstance(leaf, (Tensor, float, int))]
                for optimizer, key in ((one, p), (other, q))
            ]
            if len(states[0]) != len(states[1]):
                return False
            both += [(p.detach(), q.detach()), *zip(*states, strict=True)]
        for x, y in both:
            x, y = torch.as_tensor(x), torch.as_tensor(y)
            dtype = x.dtype if x.is_floating_point() else torch.float64
            if relative_error(x.double(), y.double()) > rounding(str(dtype), x.device.type):
                return False
    return True
