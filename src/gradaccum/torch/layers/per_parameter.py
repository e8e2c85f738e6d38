"""Whether an optimizer updates each parameter by itself: found out on a copy with small made-up parameters."""

from __future__ import annotations

import contextlib
import copy
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradaccum.core.rounding import rounding
from gradaccum.on_torch.adapter.arrays import relative_error
from gradaccum.on_torch.batch import leaves
from gradaccum.on_torch.private import without_global_step_hooks

__all__ = ["check_own_step", "check_per_parameter", "limited_to"]

LONGEST, UPDATES = 32, 3
"""A made-up parameter's longest dimension; how often they are updated."""


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


def check_own_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise if somebody has put another function in the place of the optimizer's `step`.

    Example:
        >>> optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        >>> check_own_step(optimizer)
        >>> optimizer.step = lambda closure=None: print("an average of the weights")
        >>> check_own_step(optimizer)
        Traceback (most recent call last):
            ...
        ValueError: SGD's step was replaced by <lambda>, and update='in_backward' calls it ...
    """
    found, own = vars(optimizer).get("step"), type(optimizer).step
    while getattr(found, "__globals__", {}).get("__name__") == torch.optim.lr_scheduler.__name__:
        found = found.__wrapped__  # type: ignore[union-attr]
    if found is not None and getattr(found, "__func__", found) is not own:
        raise ValueError(
            f"{type(optimizer).__name__}'s step was replaced by {getattr(found, '__name__', found)}, and "
            "update='in_backward' calls it several times in an update. What is to be done once belongs into a hook of "
            "register_step_post_hook; or use update='after_backward'."
        )


def check_per_parameter(optimizer: torch.optim.Optimizer) -> list[float]:
    """Raise if what the optimizer does to a parameter depends on others, or on how often it steps, or it does more.

    Example:
        >>> check_per_parameter(torch.optim.Adam([nn.Parameter(torch.ones(3, 3))]))[0] > 8
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
    more = _done_without_parameters(optimizer)
    if more is not None:
        raise ValueError(
            f"{name}.step() does more than update its parameters: it calls {more} where it has none to update. "
            "update='in_backward' would do that several times in an update. What is to be done once belongs into a "
            "hook of register_step_post_hook; or use update='after_backward'."
        )
    return _bytes_of_state(at_once)


class _FoundMore(BaseException):  # no error, and nothing that a step would catch
    """An operation."""


class _Refusing(TorchDispatchMode):
    """Lets no operation happen, but the profiler's marks around a step."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "profiler":
            raise _FoundMore(func)
        return func(*args, **(kwargs or {}))


def _done_without_parameters(optimizer: torch.optim.Optimizer) -> str | None:
    """The first operation of a step that has no parameters, or None."""
    small = _in_small(optimizer)
    try:
        with limited_to(small, set()), without_global_step_hooks(), _Refusing():
            small.step()
    except _FoundMore as found:
        return str(found.args[0])
    except Exception:
        return None  # a step that wants parameters gets some
    return None


def _bytes_of_state(optimizer: torch.optim.Optimizer) -> list[float]:
    def each(p: Tensor) -> float:
        return (
            sum(leaf.nbytes for _, leaf in leaves(optimizer.state.get(p, {})) if isinstance(leaf, Tensor)) / p.numel()
        )

    return [max(map(each, group["params"]), default=0.0) for group in optimizer.param_groups]


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
        made = [nn.Parameter(_random(p, shape, generator)) for p, shape in _shapes(group["params"])]
        others = {key: value for key, value in group.items() if key != "params"}
        groups.append({"params": made, **copy.deepcopy(others, memo)})
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


def _shapes(parameters: list[Any]) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Shapes to make parameters of, with one that has it: of each number of dimensions the most common and the largest,

    and two of each, so that those of the same shape meet.
    """
    kinds: dict[Any, list[tuple[int, ...]]] = defaultdict(list)
    example = {}
    for p in parameters:
        kind = p.dim(), p.dtype, p.device
        kinds[kind].append(tuple(min(size, LONGEST) for size in p.shape))
        example[kind] = p
    for kind, shapes in kinds.items():
        (common, _), *_ = Counter(shapes).most_common(1)
        for shape in dict.fromkeys([common, max(shapes, key=math.prod)]):
            yield from [(example[kind], shape)] * 2


def _random(like: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    dtype = torch.float64 if like.dtype.is_floating_point else like.dtype
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(like.device, dtype)


def _numbers(value: Any) -> list[Any]:
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, (Tensor, float, int))]


def _everything(optimizer: torch.optim.Optimizer) -> list[Any]:
    """All numbers of an optimizer: its own, its groups', its parameters and their state."""
    found = _numbers({key: value for key, value in vars(optimizer).items() if key not in ("param_groups", "state")})
    for group in optimizer.param_groups:
        found += _numbers({key: value for key, value in group.items() if key != "params"})
        for p in group["params"]:
            found += [p.detach(), *_numbers(optimizer.state.get(p, {}))]
    return found


def _agree(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> bool:
    """Whether parameters, state and groups are the same but for rounding."""
    own, others = _everything(one), _everything(other)
    return len(own) == len(others) and not any(x is not y and _far(x, y) for x, y in zip(own, others, strict=True))


def _far(x: Any, y: Any) -> bool:
    x, y = torch.as_tensor(x), torch.as_tensor(y)
    dtype = x.dtype if x.is_floating_point() else torch.float64
    return x.shape != y.shape or bool(relative_error(x.double(), y.double()) > rounding(str(dtype), x.device.type))
