"""`Blocks`: which modules of a model take turns in backward, when they are updated and where they live; their calls."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

from torch import nn

from gradaccum.on_torch.arguments import checked_choice

UpdateChoice = Literal["after_backward", "in_backward"]

ModulesChoice = nn.ModuleList | nn.Sequential | list[nn.Module] | tuple[nn.Module, ...] | str
"""An `nn.ModuleList`, its dotted path, a list of modules, or `"auto"`."""


class Blocks:
    """The blocks of a model for `TrainStep(blocks=...)`, layer by layer: when they are updated, and where they live.

    Backward runs the blocks one after the other, each on all micro-batches. So a block's gradient is finished when
    backward leaves the block, and only one block has to be on the device at a time:

        g_k = sum_i g_k,i      over micro-batches i, for block K, then K - 1, ..., then the layers before the blocks

    Args:
        modules: An `nn.ModuleList`, its dotted path, a list of modules in the order in which they are called, or
            `"auto"`: the longest list of modules of one class.
        update: `"after_backward"`: one step of the optimizer when all gradients are finished. `"in_backward"`: a
            block's parameters are updated as soon as its gradient is finished, and the gradient is freed. It takes no
            `clip_grad_norm` and no GradScaler, which need all gradients at once.
        on: `"cpu"`: parameters, gradients and optimizer state of the blocks live in host memory. A block is copied to
            the device while it computes, and the next one meanwhile. None: the blocks stay where they are.

    Raises:
        TypeError, ValueError: An argument is invalid.

    Example:
        >>> import torch
        >>> from gradaccum.torch import TrainStep
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 2))
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> blocks = Blocks(model[1], update="in_backward")
        >>> step = TrainStep(model, optimizer, loss_fn=nn.CrossEntropyLoss(), micro_batch_size=4, blocks=blocks)
        >>> step(torch.randn(16, 4), torch.randint(2, (16,))).shape
        torch.Size([])
    """

    def __init__(
        self, modules: ModulesChoice, *, update: UpdateChoice = "after_backward", on: Literal["cpu"] | None = None
    ) -> None:
        self.modules = modules
        self.update = checked_choice("update", update, get_args(UpdateChoice))
        if on not in (None, "cpu"):
            raise ValueError(
                f"`on` must be 'cpu' or None. Received: on={on!r}. Blocks live in host memory or on the device; "
                "activations between blocks can be kept in files, with TrainStep's `offload`."
            )
        self.on = on

    def __repr__(self) -> str:
        modules = self.modules if isinstance(self.modules, str) else type(self.modules).__name__
        return f"Blocks({modules!r}, update={self.update!r}, on={self.on!r})"


BlocksChoice = ModulesChoice | Blocks | None
"""What `TrainStep(blocks=...)` takes."""


def checked_blocks(blocks: BlocksChoice, *, batch_norm: str, noise_scale: bool) -> Blocks | None:
    """The blocks as `Blocks`, where other options of a `TrainStep` go together with them."""
    if blocks is None:
        return None
    if batch_norm == "exact":
        raise ValueError(
            '`blocks` runs the model in micro-batches, and batch_norm="exact" all rows at once. Leave out one of them.'
        )
    if noise_scale:
        raise ValueError(
            "noise_scale=True compares a micro-batch's gradient with the batch's, but with `blocks` no micro-batch's "
            "gradient is ever complete. Leave out one of them."
        )
    return blocks if isinstance(blocks, Blocks) else Blocks(blocks)


def check_in_backward(*, clips: bool, scales: bool, closure: str | None, searched: bool, replicated: bool) -> None:
    """Raise a ValueError if a block can't be updated before the gradients of the others are known."""
    for wrong, why in (
        (clips, "`clip_grad_norm` needs the norm of all of them"),
        (scales, "a GradScaler makes an update only where all of them are finite: use autocast=torch.bfloat16"),
        (closure, f"{closure} evaluates a closure, which needs all gradients and all parameters as they were"),
        (searched, "the search for a size measures whole micro-batches: give a `micro_batch_size` in rows"),
        (
            replicated,
            "ranks that replicate a model reduce all gradients together. fully_shard with a mesh of (ranks, 1) "
            "replicates it, too, and reduces by blocks",
        ),
    ):
        if wrong:
            raise ValueError(
                f"update='in_backward' frees each gradient before the next is known, and {why}. Use "
                "update='after_backward', or leave that out."
            )


class Block(NamedTuple):
    """A block, and what it is called."""

    path: str
    module: nn.Module


def find_blocks(model: nn.Module, blocks: Any) -> list[Block]:
    """The blocks of a model, in the order in which they are called."""
    _check_runs_in_parts(model)
    if isinstance(blocks, str):
        blocks = _longest(model) if blocks == "auto" else _at(model, blocks)
    if not isinstance(blocks, (nn.ModuleList, nn.Sequential, list, tuple)):
        raise TypeError(
            "`blocks` must be an nn.ModuleList, its dotted path, a list of modules, or 'auto'. "
            f"Received: {blocks!r} of type {type(blocks).__name__}."
        )
    paths, owners, found = {id(module): path for path, module in model.named_modules()}, dict[int, str](), list[Block]()
    for index, module in enumerate(blocks):
        if not isinstance(module, nn.Module):
            raise TypeError(f"`blocks` must hold modules. Received: blocks[{index}] of type {type(module).__name__}.")
        path = paths.get(id(module))
        if path is None:
            raise ValueError(
                f"blocks[{index}], of type {type(module).__name__}, is not a module of the model. Give the model's own "
                "modules, or the dotted path of the list that holds them."
            )
        if owners.get(id(module)) == path:
            raise ValueError(
                f"The block {path!r} is in `blocks` twice. Each is to be called once: leave layers that share one "
                "module out of `blocks`."
            )
        for part in module.modules():
            if id(part) in owners:
                raise ValueError(
                    f"The blocks {owners[id(part)]!r} and {path!r} have a module in common, a {type(part).__name__}. "
                    "Blocks must not overlap: give the outer ones, or the inner."
                )
        owners.update((id(part), path) for part in module.modules())
        found.append(Block(path, module))
    if not found:
        raise ValueError("`blocks` must hold at least one module. Received: none.")
    return found


def _check_runs_in_parts(model: nn.Module) -> None:
    """Raise a ValueError if `torch.compile` has made one program of all blocks, or FSDP1 has sharded a part."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    inside = getattr(model, "module", model)
    if eval_frame is not None and any(isinstance(m, eval_frame.OptimizedModule) for m in (model, inside)):
        raise ValueError(
            "`blocks` runs the model's blocks one by one, and torch.compile(model) makes one program of them. "
            "Compile each block instead: `for block in model.layers: block.compile()`."
        )
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for path, module in model.named_modules() if fsdp is not None else ():
        if isinstance(module, fsdp.FullyShardedDataParallel):  # type: ignore[union-attr]  # not None here
            raise ValueError(
                f"{path or 'The model'!r} is a FullyShardedDataParallel (FSDP1), whose parameters `blocks` can't "
                "gather for a second run. Shard the model with fully_shard (FSDP2)."
            )


def _at(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        lists = list(_lists(model))
        raise ValueError(
            f"The model has no module at the path given. Received: blocks={path!r}. "
            + (f"Lists of modules are at {', '.join(map(repr, lists[:8]))}." if lists else "It has no list of modules.")
        ) from None


def has_blocks(model: nn.Module) -> bool:
    """Whether `"auto"` finds blocks."""
    return bool(_outermost(model))


def _longest(model: nn.Module) -> nn.Module:
    outermost = _outermost(model)
    if not outermost:
        raise ValueError(
            "blocks='auto' looks for an nn.ModuleList or nn.Sequential of two or more modules of one class, with "
            f"parameters, and {type(model).__name__} has none. Give a list of its modules."
        )
    return max(outermost, key=lambda module: len(list(module.children())))  # the first of the longest


def _outermost(model: nn.Module) -> list[nn.Module]:
    """Lists of modules of one class, with parameters, that are inside of no other."""
    found = {
        path: module
        for path, module in _lists(model).items()
        if len(set(map(type, module.children()))) == 1 and any(True for _ in module.parameters())
    }
    return [module for path, module in found.items() if not any(path.startswith(f"{other}.") for other in found)]


def _lists(model: nn.Module) -> dict[str, nn.Module]:
    kinds = nn.ModuleList, nn.Sequential
    return {path: module for path, module in model.named_modules() if isinstance(module, kinds) and len(module) > 1}


# Calls of modules, on their way to somebody else.

_handlers: dict[int, Callable[..., Any]] = {}
"""Of each module, by id, who gets its calls."""


@contextlib.contextmanager
def intercepted(
    modules: Sequence[nn.Module], handle: Callable[[int, tuple[Any, ...], dict[str, Any]], Any]
) -> Iterator[None]:
    """Calls of these modules go to `handle(place, args, kwargs)`, those by hooks and wrappers of their class, too.

    Inside of another one, calls go to the inner one alone.

    A module's class is another one meanwhile, of the same name: it is the class that Python looks at for `__call__`,
    and classes such as transformers' checkpointed layers have one of their own, which a call from inside of `handle`
    must run.
    """
    held = [(module, type(module), _handlers.get(id(module))) for module in modules]
    try:
        for place, module in enumerate(modules):
            _handlers[id(module)] = functools.partial(handle, place)
            if not hasattr(type(module), "_gradaccum_own"):
                module.__class__ = _intercepting(type(module))  # type: ignore[arg-type]  # a class is hashable
        yield
    finally:
        for module, own, before in held:
            if module.__class__ is not own:
                module.__class__ = own
            if before is None:
                _handlers.pop(id(module), None)
            else:
                _handlers[id(module)] = before


def called(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The module's own outputs, whether its calls are intercepted or not."""
    own = type(module)
    return getattr(own, "_gradaccum_own", own).__call__(module, *args, **kwargs)


@functools.cache
def _intercepting(own: type[nn.Module]) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        handler = _handlers.get(id(self))
        return own.__call__(self, *args, **kwargs) if handler is None else handler(args, kwargs)

    names = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
    body = {**names, "__call__": call, "_gradaccum_own": own}
    return types.new_class(own.__name__, (own,), exec_body=lambda namespace: namespace.update(body))
