"""Which modules of a model are its blocks, and how calls of them are intercepted."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

BlocksChoice = nn.ModuleList | nn.Sequential | list[nn.Module] | tuple[nn.Module, ...] | str
"""An `nn.ModuleList`, its dotted path, a list of modules, or `"auto"`."""


class Block(NamedTuple):
    """A block, and what it is called."""

    path: str
    module: nn.Module


def find_blocks(model: nn.Module, blocks: Any) -> list[Block]:
    """The blocks of a model, in the order in which they are called."""
    if isinstance(blocks, str):
        blocks = _longest(model) if blocks == "auto" else _at(model, blocks)
    if not isinstance(blocks, (nn.ModuleList, nn.Sequential, list, tuple)):
        raise TypeError(
            "`blocks` must be an nn.ModuleList, its dotted path, a list of modules, or 'auto'. "
            f"Received: {blocks!r} of type {type(blocks).__name__}."
        )
    paths, owners = {id(module): path for path, module in model.named_modules()}, dict[int, str]()
    listed: list[Block] = []
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
        listed.append(Block(path, module))
    if not listed:
        raise ValueError("`blocks` must hold at least one module. Received: none.")
    return listed


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
    lists = {
        path: module
        for path, module in _lists(model).items()
        if len(set(map(type, module.children()))) == 1 and any(True for _ in module.parameters())
    }
    return [module for path, module in lists.items() if not any(path.startswith(f"{other}.") for other in lists)]


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
    usual = [(module, type(module), _handlers.get(id(module))) for module in modules]
    try:
        for place, module in enumerate(modules):
            _handlers[id(module)] = functools.partial(handle, place)
            if not hasattr(type(module), "_gradaccum_own"):
                module.__class__ = _intercepting(type(module))  # type: ignore[arg-type]  # a class is hashable
        yield
    finally:
        for module, kind, handler in usual:
            if module.__class__ is not kind:
                module.__class__ = kind
            if handler is None:
                _handlers.pop(id(module), None)
            else:
                _handlers[id(module)] = handler


def called(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The module's own outputs, whether its calls are intercepted or not."""
    kind = type(module)
    return getattr(kind, "_gradaccum_own", kind).__call__(module, *args, **kwargs)


@functools.cache
def _intercepting(kind: type[nn.Module]) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        handler = _handlers.get(id(self))
        return kind.__call__(self, *args, **kwargs) if handler is None else handler(args, kwargs)

    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    body = {**names, "__call__": call, "_gradaccum_own": kind}
    return types.new_class(kind.__name__, (kind,), exec_body=lambda namespace: namespace.update(body))
