"""What a callable reaches: modules, tensors, generators and optimizers that its code may use, however they are held.

One rule: everything that the code names, in whatever holds it: closures, globals, defaults, `functools.partial`, the
object of a bound method, attributes and slots of objects and of their classes, containers, decorated functions. Of
functions and classes of installed packages the code isn't read, but what they hold is looked through.
"""

from __future__ import annotations

import collections
import dis
import enum
import functools
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor, nn

from gradaccum.on_torch.random_state import is_generator

MOST = 64
"""Items of a container that are looked at."""
MOST_VALUES = 20_000
"""Values that are looked at in all, the nearest first."""
DEEPEST = 3
"""Objects of installed packages inside of each other that are looked through."""

_PLAIN = (str, bytes, int, float, complex, type(None), enum.Enum, torch.dtype, torch.device, torch.Size, types.CodeType)
_CLOSED = ("torch.optim", "torch.utils.data", "gradaccum.torch.train_step", "gradaccum.torch.optimizer")
"""Packages whose objects have nothing of a loss, and much else."""
_INSTALLED = ("site-packages", "dist-packages")
_NOBODYS = ("torch", "keras", "transformers", "gradaccum", "numpy")
_CALLED = frozenset(
    f"__{name}__" for name in ("call", "enter", "exit", "getattr", "getitem", "iter", "len", "next", "contains")
)
"""Methods that code calls without naming them."""
_HEAP = 1 << 9
"""The flag of classes that were made in Python."""
_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


class Names(MutableMapping[Any, Any]):
    """Places that hold values but are no dict: attributes of classes and slots, items of lists, cells of closures."""

    def __init__(self, names: Any, get: Callable[[Any], Any], put: Callable[[Any, Any], None]) -> None:
        self._names, self._get, self._put = tuple(names), get, put

    def __getitem__(self, name: Any) -> Any:
        try:
            return self._get(name)
        except (AttributeError, IndexError, KeyError, ValueError) as error:  # nothing there at the moment
            raise KeyError(name) from error

    def __setitem__(self, name: Any, value: Any) -> None:
        self._put(name, value)

    def __delitem__(self, name: Any) -> None:
        """A place stays, with what is in it, until something else is put there."""

    def clear(self) -> None:
        """The same for all of them."""

    def __iter__(self) -> Iterator[Any]:
        return iter([name for name in self._names if name in self])

    def __contains__(self, name: Any) -> bool:
        return self.get(name, self) is not self

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def copy(self) -> dict[Any, Any]:
        return dict(self)


class Holder(NamedTuple):
    """Something of the user's that holds values that passes may replace: an object, a container, a closure."""

    name: str
    content: Any
    """What can be copied, cleared, and filled again."""
    places: MutableMapping[Any, Any]
    """The values in it."""


class Reach:
    """What these values reach, each once and with the name that the code has for it."""

    def __init__(self, *values: Any) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.tensors: list[tuple[str, Tensor]] = []
        self.generators: list[Any] = []
        self.optimizers: list[tuple[str, torch.optim.Optimizer]] = []
        self.holders: list[Holder] = []
        self._seen: dict[int, Any] = {}  # with the values, so that their ids stay their own
        self._left = MOST_VALUES
        self._names = {"forward"}
        """All that the code names."""
        self._objects: list[tuple[str, Mapping[str, Any], set[str]]] = []
        """What has attributes, which are looked at as soon as they are named: those that wait, by object."""
        self._classes: dict[int, type] = {}
        self._waiting: collections.deque[tuple[str, Any, int]] = collections.deque(("", value, 0) for value in values)
        while self._waiting or self._named():
            name, value, depth = self._waiting.popleft()
            if not isinstance(value, _PLAIN) and id(value) not in self._seen and self._left:
                self._left -= 1
                self._seen[id(value)] = value
                self._look(name, value, depth)

    def names(self, name: str) -> bool:
        """Whether code that is reached names this."""
        return name in self._names

    def _named(self) -> bool:
        """Look at attributes that have been named since."""
        for prefix, attributes, waiting in self._objects:
            for name in waiting & self._names:
                waiting.remove(name)
                self._waiting.append((_joined(prefix, name), attributes[name], 0))
        return bool(self._waiting)

    def _look(self, name: str, value: Any, depth: int) -> None:
        if is_generator(value):
            self.generators.append(value)
        elif isinstance(value, Tensor):
            self.tensors.append((name, value))
        elif isinstance(value, torch.optim.Optimizer):
            self.optimizers.append((name, value))
        elif isinstance(value, nn.Module):
            self._module(name, value)
        elif isinstance(value, types.FunctionType):
            self._function(name, value, depth)
        elif isinstance(value, types.ModuleType):
            if _is_the_users(value.__name__):
                self._wait("", vars(value))
        elif isinstance(value, type):
            self._code_of(name, value)
        else:
            self._inside(name, value, depth)

    def _module(self, name: str, module: nn.Module) -> None:
        while name in self.modules:
            name += "'"
        if not any(part._buffers is module._buffers for part in self.modules.values()):  # as a chunked module's are
            self.modules[name] = module
        for path, part in module.named_modules(prefix=name):
            self._seen[id(part)] = part
            own = {key: value for key, value in vars(part).items() if key not in _OF_MODULES}
            self._waiting.extend((_joined(path, key), value, 0) for key, value in own.items())
            self._code_of(path, type(part))

    def _function(self, name: str, function: types.FunctionType, depth: int) -> None:
        """Its closure, defaults and attributes; and of the user's own what its code names."""
        code, space = function.__code__, function.__globals__
        cells = {key: cell for key, cell in zip(code.co_freevars, function.__closure__ or ()) if key != "__class__"}
        named = dict(names_of(function))
        if _is_the_users(function.__module__, code.co_filename):
            self._names.update(_names_in(code), _words_in(code))
            self._hold(name, Names(cells, lambda key: cells[key].cell_contents, lambda k, v: _fill(cells[k], v)))
            written = [key for key in _written_in(code) if key in space]
            self._hold(name, Names(written, space.__getitem__, space.__setitem__))
        else:
            named = {key: value for key, value in named.items() if key in cells or key not in space}
        self._waiting.extend((key, value, depth) for key, value in {**named, **vars(function)}.items())

    def _code_of(self, name: str, kind: type) -> None:
        """What the user's classes among these hold; of their functions `__call__` and the like, others when named."""
        for base in kind.__mro__:
            if not _is_the_users_class(base) or id(base) in self._classes:
                continue
            self._classes[id(base)] = base
            members = {key: _function_of(member) for key, member in vars(base).items()}
            functions = {key for key, member in members.items() if isinstance(member, types.FunctionType)}
            special = {key for key in members if key.startswith("__") and key.endswith("__")}
            held = [key for key in members.keys() - functions - special if not hasattr(members[key], "__get__")]
            self._hold(name, Names(held, functools.partial(getattr, base), functools.partial(setattr, base)))
            self._waiting.extend((_joined(name, key), members[key], 0) for key in functions & special & _CALLED)
            self._wait(name, {key: member for key, member in members.items() if key not in special})

    def _wait(self, name: str, values: Mapping[str, Any]) -> None:
        self._objects.append((name, values, {key for key, value in values.items() if not isinstance(value, _PLAIN)}))

    def _inside(self, name: str, value: Any, depth: int) -> None:
        """What a container, a method or an object holds."""
        found: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, functools.partial):
            found = [*enumerate(value.args), *value.keywords.items()]
            self._waiting.append((name, value.func, depth))
        elif isinstance(value, types.MethodType):
            self._waiting.extend([(name or "self", value.__self__, depth), (name, value.__func__, depth)])
        elif isinstance(value, types.BuiltinMethodType | weakref.ref):
            self._waiting.append((name, value() if isinstance(value, weakref.ref) else value.__self__, depth))
        elif isinstance(value, dict):
            found = value.items()
            self._hold(name, _items_of(value, {str(key): key for key in itertools.islice(value, MOST)}), value)
        elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
            found = enumerate(value)
            if isinstance(value, list):
                self._hold(name, _items_of(value, {str(place): place for place in range(min(len(value), MOST))}), value)
            elif isinstance(value, set | collections.deque):
                self._hold(name, {}, value)
        else:
            self._object(name, value, depth)
        self._waiting.extend((_joined(name, str(key)), inner, depth) for key, inner in itertools.islice(found, MOST))

    def _object(self, name: str, value: Any, depth: int) -> None:
        kind, own = type(value), getattr(value, "__dict__", None)
        own = own if isinstance(own, dict) else {}
        if kind.__module__.startswith(_CLOSED):
            return
        bases = [base for base in kind.__mro__ if base is not object and base is not Generic]
        if all(map(_is_the_users_class, bases)):
            self._wait(name, own)
        elif depth < DEEPEST:  # its code isn't read, so any attribute may be used
            self._waiting.extend((_joined(name, key), inner, depth + 1) for key, inner in [*own.items()])
        if any(map(_is_the_users_class, bases)):
            slots = [slot for base in bases for slot in _slots_of(base)]
            places = Names(slots, functools.partial(getattr, value), functools.partial(object.__setattr__, value))
            self._hold(name, own, own)
            self._hold(name, places)
            self._wait(name, dict(places))
            self._code_of(name, kind)
        elif kind is types.SimpleNamespace:
            self._hold(name, own, own)

    def _hold(self, name: str, places: MutableMapping[Any, Any], content: Any = None) -> None:
        content = places if content is None else content
        if len(content) <= MOST_VALUES and (len(places) or content is not places):
            self.holders.append(Holder(name, content, places))


def held_generators(*values: Any) -> list[Any]:
    """The generators that these functions, modules, containers and objects reach, each once."""
    return Reach(*values).generators


def names_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function refers to by name: its closure, globals, and the defaults of its arguments."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue
    for name in _names_in(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    code, defaults = function.__code__, function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults)
    yield from (function.__kwdefaults__ or {}).items()


def _nested(code: types.CodeType) -> list[types.CodeType]:
    inside = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return [code, *(inner for one in inside for inner in _nested(one))]


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    return tuple(sorted({name for part in _nested(code) for name in part.co_names}))


@functools.lru_cache(maxsize=4096)
def _words_in(code: types.CodeType) -> tuple[str, ...]:
    """Strings in the code that may name an attribute, as in `getattr(self, "loss")`."""
    strings = {c for part in _nested(code) for c in part.co_consts if isinstance(c, str) and c.isidentifier()}
    return tuple(sorted(strings))


@functools.lru_cache(maxsize=4096)
def _written_in(code: types.CodeType) -> tuple[str, ...]:
    """The globals that the code assigns."""
    steps = (step for part in _nested(code) for step in dis.get_instructions(part))
    return tuple(sorted({step.argval for step in steps if step.opname == "STORE_GLOBAL"}))


@functools.lru_cache(maxsize=4096)
def _is_the_users(module: str | None, path: str = "") -> bool:
    """Whether this module's code is none of Python's, of an installed package's, or of this one's."""
    top = (module or "builtins").partition(".")[0]
    if top in _NOBODYS or (top != "builtins" and top in sys.stdlib_module_names):
        return False
    path = path or getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return not any(part in path for part in _INSTALLED)


def _is_the_users_class(kind: type) -> bool:
    return bool(kind.__flags__ & _HEAP) and _is_the_users(kind.__module__)


def _function_of(member: Any) -> Any:
    """The function behind a property or another descriptor of a class."""
    for name in ("__func__", "fget", "func"):
        if isinstance(inner := getattr(member, name, None), types.FunctionType):
            return inner
    return member


def _slots_of(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else [*slots]
    hidden = f"_{kind.__name__.lstrip('_')}"
    names = [hidden + name if name.startswith("__") and not name.endswith("__") else name for name in names]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _items_of(container: Any, keys: Mapping[str, Any]) -> Names:
    """The items of a list or a dict, by the text of their keys."""
    return Names(keys, lambda name: container[keys[name]], lambda name, value: container.__setitem__(keys[name], value))


def _fill(cell: types.CellType, value: Any) -> None:
    cell.cell_contents = value


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
