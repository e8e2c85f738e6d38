"""State that moves in the forward pass: how to put it back, and where several passes from one start lead together."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from operator import is_
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradaccum.on_torch.random_state import all_generators, is_generator, kept
from gradaccum.on_torch.state import BufferSnapshot, Snapshot, put, same

logger = logging.getLogger("gradaccum")

_SMALL = 1 << 20
"""Bytes up to which a frozen parameter is copied: larger ones are pretrained weights, which stand still."""
LOOKED_AT = 1 << 14
"""Bytes of a buffer in host memory that is compared by value."""

_NO_CONTEXT = contextlib.nullcontext()
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_CONTAINERS = (list, dict, set, OrderedDict)
_INSIDE = ("_parameters", "_buffers", "_modules")
_HOOKS = tuple(name for name in sorted(_OF_EVERY_MODULE) if "hooks" in name)
_OF_PASSES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_UNWATCHED = {*_CONTAINERS, tuple, str, bool, int, float, type(None)}
"""Types of most attributes of a module, which need no second look."""


class Contents:
    """What modules hold at this moment: attributes, parameters, buffers, submodules, and hooks.

    All of it together: a flag that says whether hooks have been registered is right beside those hooks alone.
    `containers`: lists, dicts and sets among the attributes as well. Of what is `hooked`, hooks alone.
    """

    def __init__(
        self, modules: Iterable[nn.Module], hooked: Iterable[nn.Module] = (), *, containers: bool = True
    ) -> None:
        self._held, self._empty = list[tuple[Any, Any]](), list[Any]()
        names = (*_INSIDE, *(_HOOKS if containers else _OF_PASSES))
        for module in modules:
            if not isinstance(module, torch.jit.ScriptModule):
                own = vars(module)
                self._hold([own, *[own[name] for name in names if name in own]])
                if containers:
                    self._hold([value for value in _own_attributes(own).values() if type(value) in _CONTAINERS])
        for module in hooked:
            self._hold([vars(module)[name] for name in _HOOKS if name in vars(module)])

    def _hold(self, holders: Iterable[Any]) -> None:
        holders = [*holders]
        self._held += [(holder, holder.copy()) for holder in holders if holder]
        self._empty += [holder for holder in holders if not holder]  # as most are

    def put_back(self) -> None:
        """Make it what it was."""
        for holder, content in self._held:
            _set(holder, content)
        for holder in self._empty if any(self._empty) else ():
            holder.clear()


def _own_attributes(own: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a module that not every module has."""
    return {name: value for name, value in own.items() if name not in _OF_EVERY_MODULE}


def _set(holder: Any, content: Any) -> None:
    same_names = isinstance(holder, dict) and holder.keys() == content.keys()
    if same_names and all(map(is_, holder.values(), content.values())):
        return
    holder.clear()
    (holder.extend if isinstance(holder, list) else holder.update)(content)


class ModuleContents(Contents):
    """What a module holds at this moment, to run it again.

    Attributes are remembered as they are assigned; what is edited inside one of them, say a list, is not noticed.
    """

    def __init__(self, module: nn.Module) -> None:
        self.modules = _with_hidden_ones(module)
        super().__init__(self.modules, containers=False)
        self.buffers = [buffer for part in self.modules for buffer in part.buffers(recurse=False)]
        every = [parameter for part in self.modules for parameter in part.parameters(recurse=False)]
        self.parameters: list[Tensor] = list({id(p): p for p in every}.values())
        """Each once. What `torch.func.functional_call` puts in their place counts."""
        self.trained_count = sum(parameter.requires_grad for parameter in every)
        own = [value for part in self.modules for value in vars(part).values() if type(value) not in _UNWATCHED]
        self.generators = [*filter(is_generator, own)]
        """Random number generators that are attributes."""
        self.tensors = {id(tensor) for tensor in (*self.buffers, *own) if isinstance(tensor, Tensor)}
        """The buffers, and the tensors that are attributes, by `id`."""
        self._forget_graphs({id(value) for value in own if isinstance(value, Tensor) and value.grad_fn is not None})
        self._frozen = [(p, p._version) for p in self.parameters if not (p.requires_grad or p.is_inference())]

    def _forget_graphs(self, made: Collection[int]) -> None:
        """A tensor that an earlier call has made has a graph, which would live as long as this one's."""
        for _, then in self._held if made else ():
            for name in [name for name, value in then.items() if id(value) in made] if then else ():
                del then[name]

    def modes(self) -> set[tuple[Any, ...]]:
        """What each module, by its place, is, whether it is in training mode, with the root's own, and its hooks."""
        found: set[tuple[Any, ...]] = set()
        for place, part in enumerate(self.modules):
            own = vars(part)
            found.add((self.modules[0].training, place, part.training, type(part).__qualname__))
            found.update([(place, *where) for kind in _OF_PASSES for where in _hooks(kind, own[kind])])
            found.update([(place, "forward", _code_of(own["forward"]))] if "forward" in own else [])
        everywhere = vars(torch.nn.modules.module)  # hooks that are called for every module
        return found.union(*([(-1, *where) for where in _hooks(k, everywhere[f"_global{k}"])] for k in _OF_PASSES))

    @contextlib.contextmanager
    def restored(self, replacements: Mapping[int, Tensor] | None = None) -> Iterator[None]:
        """The module holds what it held then, with these in place of parameters; afterwards what it holds now."""
        replacements = dict(replacements or {})
        for parameter, version in self._frozen:
            if parameter._version != version:
                raise RuntimeError(
                    f"A frozen parameter of shape {tuple(parameter.shape)} of a chunked module was edited in place "
                    "between forward and backward, which runs the module again. Update it after backward."
                )
            if parameter.requires_grad:  # unfrozen since
                replacements[id(parameter)] = parameter.detach()
        found = [(holder, dict(holder)) for holder in (*[holder for holder, _ in self._held], *self._empty)]
        try:
            self.put_back()
            for module in self.modules:
                own = module._parameters
                own.update({name: replacements[id(p)] for name, p in own.items() if id(p) in replacements})  # type: ignore[misc]  # what takes the place of parameters
            yield
        finally:
            for holder, now in found:
                _set(holder, now)


def _with_hidden_ones(module: nn.Module) -> list[nn.Module]:
    """Its modules, and those among attributes that torch doesn't know of, such as the inside of a `Chunked`."""
    found = dict.fromkeys(module.modules())
    waiting = [*found]
    for part in waiting:
        for value in vars(part).values():
            if type(value) not in _UNWATCHED and isinstance(value, nn.Module) and value not in found:
                new = [inside for inside in value.modules() if inside not in found]
                found.update(dict.fromkeys(new))
                waiting += new
    return waiting


def _hooks(kind: str, hooks: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    """Where the code of these hooks is; not this package's, which come and go."""
    for hook in hooks.values() if hooks else ():
        where = _code_of(hook)
        if not where.startswith("gradaccum."):
            yield kind, where


def _code_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)
    named = function if code is not None and hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}:{code.co_firstlineno if code is not None else 0}"


class ModuleState:
    """The contents of modules at this moment, with the values of buffers, attributes and small frozen parameters."""

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        seen: set[nn.Module] = set()
        named = [found for prefix, root in roots.items() for found in root.named_modules(seen, prefix=prefix)]
        modules = [module for _, module in named]
        self.made: dict[str, tuple[str, str, str]] = {}
        """Of each buffer that a pass has made since, by its full name: path and kind of its module, its name there."""
        self._contents, self._held = Contents(modules), list[tuple[str, BufferSnapshot]]()
        self._start = Snapshot(modules=[module for module in modules if not isinstance(module, _BatchNorm)])
        self._places = {id(module._buffers): (path, module) for path, module in named}
        self._numbers = list[tuple[str, dict[str, Any], str]]()
        for path, module in named:
            frozen = [(n, p) for n, p in module._parameters.items() if p is not None and not p.requires_grad]
            self._hold(path, module._buffers, module._buffers)
            self._hold(path, {name: p for name, p in frozen if p.nbytes <= _SMALL}, module._parameters)
            if not isinstance(module, torch.jit.ScriptModule):
                own, others = vars(module), _own_attributes(vars(module))
                self._hold(path, others, own)
                is_ours = type(module).__module__.startswith("gradaccum.")  # a chunked module counts its calls
                numbers = [] if is_ours else [key for key, value in others.items() if type(value) in (int, float)]
                self._numbers += [(_joined(path, key), own, key) for key in numbers]

    def _hold(self, path: str, found: Mapping[str, Any], owner: Any) -> None:
        for key, value in found.items():
            if isinstance(value, Tensor) and value.grad_fn is None and not value.is_meta:
                parts = getattr(value, "__tensor_flatten__", lambda: ((), 0))()[0]
                inner = {part: vars(value).get(part) for part in parts}
                if inner and None not in inner.values():  # quantised: the tensor itself can't be compared or copied
                    self._hold(_joined(path, key), inner, vars(value))
                else:
                    snapshot = BufferSnapshot(owner, key)
                    snapshot.take(whole=True)
                    self._held.append((_joined(path, key), snapshot))

    def tensors(self) -> dict[str, Tensor]:
        """Copies of what these tensors are now, by name; without attributes that are of another shape now."""
        now = {}
        for name, held in self._held:
            found = held.owner.get(held.name)
            if not isinstance(found, Tensor) or found.grad_fn is not None:
                continue
            if found.shape == held.copy.shape or id(held.owner) in self._places:  # type: ignore[union-attr]  # there is
                now[name] = found.detach().clone()
        for made in self._start.made():
            path, module = self._places[id(made.owner)]
            name = _joined(path, made.name)
            self.made[name] = path, type(module).__name__, made.name
            now[name] = made.owner[made.name].detach().clone()
        return now

    def numbers(self) -> dict[str, float]:
        """The numbers among the attributes as they are now, by name: one that hasn't moved is the same object."""
        now = [(name, own.get(key)) for name, own, key in self._numbers]
        return {name: value for name, value in now if type(value) in (int, float)}  # type: ignore[misc]  # numbers

    @torch.no_grad()
    def put_back(self) -> None:
        """Make everything what it was."""
        self._contents.put_back()
        for _, held in self._held:
            held.put_back()


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def owners_of_buffers(roots: Mapping[str, nn.Module]) -> dict[str, tuple[str, str, str]]:
    """Of each buffer, by its full name, the path and the kind of its module, and its name there."""
    return {
        _joined(path, name): (path, type(layer).__name__, name)
        for prefix, root in roots.items()
        for path, layer in root.named_modules(prefix=prefix)
        for name in layer._buffers
    }


@contextlib.contextmanager
def left_as_found(
    roots: Mapping[str, nn.Module],
    parameters: Sequence[Tensor],
    devices: Iterable[torch.device] = (),
    generators: Iterable[Any] = (),
) -> Iterator[ModuleState]:
    """Gradients, module state and random numbers are afterwards what they were before. Gradients start empty."""
    state = ModuleState(roots)
    with kept([*all_generators(devices), *generators]), gradients_kept(parameters):
        try:
            yield state
        finally:
            state.put_back()


@contextlib.contextmanager
def gradients_kept(tensors: Sequence[Tensor]) -> Iterator[None]:
    """The gradients of these tensors are afterwards what they are now. They start empty."""
    gradients = [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = gradient


# Rules.

Word = Literal["mean", "sum", "max", "once"]
BufferRule = Word | Callable[[Any, Tensor, list[Tensor]], Tensor]
"""One of the words, or `rule(module, start, ends) -> Tensor`."""

_of_kinds: dict[type[nn.Module], dict[str, BufferRule]] = {}
_of_modules: MutableMapping[nn.Module, dict[str, BufferRule]] = weakref.WeakKeyDictionary()

_WORDS = "_gradaccum_buffers"
"""A module's attribute with the words that were said of itself, so that its copies and files have them, too."""


def combine_buffers(module: nn.Module | type[nn.Module], **rules: BufferRule) -> None:
    """Define how `TrainStep` and `chunked` combine buffers that the forward pass moves.

    Every micro-batch starts from the buffers of the window's start, so a buffer has several ends, which a rule
    combines:

    | rule | the buffer becomes | right for |
    |---|---|---|
    | `"mean"`, the default | the mean of the ends, over rows | moving averages of means over rows |
    | `"sum"` | `start + sum_i (end_i - start)` | counts of rows |
    | `"max"` | the elementwise maximum of the ends | largest values, as in the histories of FP8 |
    | `"once"` | the first end that differs from the start | power iterations, counters of forward passes |
    | a callable | `rule(module, start, ends)`, after the other buffers, in the order given here | everything else |

    A callable needs a copy of every end.

    Args:
        module: A module, or a class of modules, subclasses included. Copies of a module inherit named rules, but not
            callables.
        rules: A rule for each of the module's own buffers, by the buffer's name.

    Raises:
        TypeError: `module` is neither.
        ValueError: A rule is neither callable nor one of these names, or the module has no such buffer.

    Example:
        >>> import torch, gradaccum.torch
        >>> class Codebook(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.register_buffer("rows", torch.zeros(()))
        ...
        ...     def forward(self, x):
        ...         self.rows += len(x)
        ...         return x
        >>> combine_buffers(Codebook, rows="sum")
        >>> model = nn.Sequential(Codebook(), nn.Linear(4, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> step = gradaccum.torch.TrainStep(model, optimizer, loss_fn=nn.MSELoss(), micro_batch_size=3)
        >>> loss = step(torch.randn(10, 4), torch.randn(10, 1))
        >>> model[0].rows
        tensor(10.)
    """
    if not isinstance(module, nn.Module) and not (isinstance(module, type) and issubclass(module, nn.Module)):
        raise TypeError(
            "`module` must be a torch.nn.Module or a class of them. "
            f"Received: module={module!r} of type {type(module).__name__}."
        )
    for name, rule in rules.items():
        _check_rule(name, rule)
        if isinstance(module, nn.Module) and name not in module._buffers:
            raise ValueError(
                f"{type(module).__name__} has no buffer of its own of this name. Received: {name}={rule!r}; its "
                f"buffers are {', '.join(map(repr, module._buffers)) or 'none'}. Pass the module that has it."
            )
    if not isinstance(module, nn.Module):
        _of_kinds.setdefault(module, {}).update(rules)
        return
    words, others = dict(vars(module).get(_WORDS, {})), dict(_of_modules.get(module, {}))
    for name, rule in rules.items():
        here, there = (words, others) if isinstance(rule, str) else (others, words)
        here[name] = rule
        there.pop(name, None)
    vars(module)[_WORDS], _of_modules[module] = words, others


def _check_rule(name: str, rule: Any) -> None:
    if not callable(rule):
        if rule not in get_args(Word):
            raise ValueError(
                f"A rule must be one of {', '.join(map(repr, get_args(Word)))}, or rule(module, start, ends) -> "
                f"Tensor. Received: {name}={rule!r}."
            )
        return
    try:
        inspect.signature(rule).bind(None, None, [])
    except TypeError as error:
        raise TypeError(
            f"A rule is called as rule(module, start, ends). Received: {name}={rule!r}, which can't be called so: "
            f"{error}."
        ) from None
    except ValueError:  # of a builtin: nobody knows
        pass


def rules_of(module: nn.Module) -> dict[str, BufferRule]:
    """What users have said of a module's buffers: of its classes, the nearest last, then of itself."""
    module, rules = standing_for(module), dict[str, BufferRule]()
    for kind in reversed(type(module).__mro__) if _of_kinds else ():
        rules.update(_of_kinds.get(kind, {}))
    rules.update(vars(module).get(_WORDS, {}))
    rules.update(_of_modules.get(module, {}))
    return rules


def standing_for(module: nn.Module) -> nn.Module:
    """The module whose buffers these are: the one inside of a chunked module, which shares them."""
    inner = vars(module).get("module")
    while isinstance(inner, nn.Module) and inner._buffers is module._buffers:
        module, inner = inner, vars(inner).get("module")
    return module


def warn_of_buffers(buffers: Sequence[tuple[str, str, str]]) -> None:
    """Warn of buffers that do not go where all rows at once take them."""
    if buffers:
        listed = [f"{name!r} of {path or 'the model'!r} ({kind})" for path, kind, name in buffers]
        _, kind, name = buffers[0]
        logger.warning(
            "The update is the large batch's, but these buffers get other values than from the large batch: %s. Each "
            "becomes the mean, over rows, of its values after the micro-batches. To choose another rule, call "
            'gradaccum.torch.combine_buffers(%s, %s="sum"), or pass "max", "once" or a callable.',
            ", ".join(listed[:5]) + (", ..." if len(listed) > 5 else ""),
            kind,
            name,
        )


# Where passes lead together, given their start, where those before lead, where one leads, and its share of rows.


def _mean(start: Tensor | None, so_far: Tensor, end: Tensor, share: float) -> Tensor:
    if not (end.is_floating_point() or end.is_complex()):
        return end.clone()
    # Where nothing differs nothing changes, so that infinities and constants stay what they are.
    return torch.where(end == so_far, so_far, so_far + (end - so_far) * share)


def _sum(start: Tensor | None, so_far: Tensor, end: Tensor, share: float) -> Tensor:
    if end.dtype == torch.bool:
        return so_far | end
    if start is None or not _same_kind(end, start):
        return so_far + end
    return torch.where(end == start, so_far, so_far + (end - start))  # infinities that stand still stay what they are


def _once(start: Tensor | None, so_far: Tensor, end: Tensor, share: float) -> Tensor:
    return end.clone() if start is not None and _same_kind(so_far, start) and torch.equal(so_far, start) else so_far


_RULES: dict[str, Callable[[Tensor | None, Tensor, Tensor, float], Tensor]] = {
    "mean": _mean,
    "sum": _sum,
    "once": _once,
    "max": lambda start, so_far, end, share: torch.maximum(so_far, end),
}


def _exactly(value: Tensor | None) -> Tensor | None:
    """As it is; float8, which has no arithmetic of its own, as float32."""
    narrow = value is not None and value.is_floating_point() and value.itemsize == 1
    return value.float() if narrow else value  # type: ignore[union-attr]  # there is one


def _same_kind(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.layout, one.device) == (other.shape, other.dtype, other.layout, other.device)


class _Moved:
    """One buffer that passes move, or make, each from the same start.

    mean:   start + sum_i n_i (end_i - start) / N        with the rows n_i of pass i, and N = sum_i n_i
    """

    def __init__(self, buffer: BufferSnapshot, rows: int) -> None:
        assert buffer.module is not None
        self.buffer, self.start, self._rows, self._module = buffer, buffer.copy, rows, standing_for(buffer.module)
        rules = rules_of(self._module)
        self.rule = rules.get(buffer.name, "mean")
        self.place = [*rules].index(buffer.name) if callable(self.rule) else -1
        """Callable rules come last, as they may look at other buffers, in the order they came in."""
        self._together, self._ends = _exactly(self.start), list[Tensor]()
        self._dtype: torch.dtype | None = None
        self._named = False

    def add(self, end: Tensor | None, named: bool, rows: int) -> None:
        """A pass over so many rows led here; None: it has deleted the buffer, unless it is `named`, or not made it."""
        self._rows += rows
        self._named = named
        if end is None:
            self._together = None if self.start is not None else self._together
        elif callable(self.rule):
            self._ends.append(end.detach().clone())
        else:
            self._dtype = end.dtype
            end, so_far = _exactly(end.detach()), self._together
            assert end is not None
            if rows == self._rows or so_far is None or not _same_kind(end, so_far):  # the first, or no arithmetic leads
                self._together = end.clone()  # from one to the other
            else:
                self._together = _RULES[self.rule](_exactly(self.start), so_far, end, rows / self._rows)

    def move(self) -> None:
        """Have the buffer where all passes lead together; there is none any more where they have deleted it."""
        buffer, end = self.buffer, self._together
        if callable(self.rule):
            end = self._ruled(self.rule) if self._ends else None
        elif end is not None and self._dtype is not None:
            end = end.to(self._dtype)
        if end is not None:
            put(buffer.owner, buffer.name, buffer.tensor, end)
        elif buffer.name in buffer.owner and buffer.tensor is not None:
            if self._named:
                buffer.owner[buffer.name] = None
            else:
                del buffer.owner[buffer.name]

    def _ruled(self, rule: Callable[..., Any]) -> Tensor:
        """What a callable rule makes of it."""
        module = self._module
        like, end = self._ends[0], rule(module, None if self.start is None else self.start.clone(), self._ends)
        what = (
            f"The rule for {self.buffer.name!r} of {type(module).__name__} must return a tensor like the buffer's ends"
        )
        if not isinstance(end, Tensor):
            raise TypeError(f"{what}. Received: {end!r} of type {type(end).__name__}.")
        if (end.shape, end.dtype, end.device) != (like.shape, like.dtype, like.device):
            raise ValueError(
                f"{what}, of shape {tuple(like.shape)}, {like.dtype}, on {like.device}. Received: shape "
                f"{tuple(end.shape)}, {end.dtype}, on {end.device}."
            )
        return end.detach()


Ends = dict[Hashable, tuple[BufferSnapshot, Tensor | None, bool]]
"""Buffers, where a pass has led each of them, and whether its name is there, if only for None."""


class _Moves:
    """Buffers that passes move, each from the same start."""

    def __init__(self) -> None:
        self.open()

    def open(self) -> None:
        """Passes begin."""
        self._moves, self._rows = dict[Hashable, _Moved](), 0

    @torch.no_grad()
    def add(self, ends: Ends, rows: int, new: Iterable[Hashable]) -> None:
        """A pass over so many rows led here, and moved those that are `new`; others are where they were."""
        for key in new:
            if key not in self._moves:
                self._moves[key] = _Moved(ends[key][0], self._rows)
        for key, moved in self._moves.items():
            _, end, named = ends.get(key, (moved.buffer, moved.start, True))
            moved.add(end, named, rows)
        self._rows += rows

    def move(self) -> bool:
        """After all passes. Returns whether any has moved one."""
        if not self._moves:
            return False
        with torch.no_grad():
            for moved in sorted(self._moves.values(), key=lambda moved: moved.place):
                moved.move()
        self.open()
        return True


class WindowBuffers(_Moves):
    """The buffers of a window's micro-batches: each finds them as the window did, and they move once, at its end."""

    @torch.no_grad()
    def micro_batch(self, moved: Sequence[BufferSnapshot], rows: int) -> None:
        """A micro-batch of so many rows is in, which moved these. Has the next one find what this one has found."""
        ends: Ends = {(id(b.owner), b.name): (b, b.owner.get(b.name), b.name in b.owner) for b in moved}
        self.add(ends, rows, ends)
        for key in ends:  # all ends are known: some may share memory
            self._moves[key].buffer.reset()


def _clones(tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
    return {key: tensor.clone() for key, tensor in tensors.items()}


class LentBuffers(_Moves):
    """Buffers of a chunked module: every forward pass finds copies of them as they were at first, and they move once.

    They move to where the passes took them on average over rows, or as `combine_buffers` says. The former is exact for
    what doesn't depend on the rows (counters, power iterations) and for moving averages of means over rows.
    """

    def __init__(self, modules: Iterable[nn.Module], excluded: Collection[int] = ()) -> None:
        super().__init__()
        owners = {id(module._buffers): module for module in modules}
        self._places = [(m._buffers, n, b) for m in owners.values() for n, b in m._buffers.items() if b is not None]
        self._excluded, self._found = excluded, dict[int, BufferSnapshot]()
        buffers = {id(buffer): buffer for _, _, buffer in self._places}
        memory = [b.untyped_storage().data_ptr() for b in buffers.values() if type(b) is Tensor and not b.is_meta]
        self._copied = copy.deepcopy if len(set(memory)) < len(memory) else _clones  # views go on sharing memory
        self._starts = self._copied({key: buffer.detach() for key, buffer in buffers.items()})
        for holder, name, buffer in self._places:
            if id(buffer) not in self._found:
                self._found[id(buffer)] = found = BufferSnapshot(holder, name, owners[id(holder)])
                found.tensor, found.copy = buffer, self._starts[id(buffer)]
        self._start = Snapshot(modules=[m for m in owners.values() if not isinstance(m, _BatchNorm)])
        self._there = [(m._buffers, {n: b is not None for n, b in m._buffers.items()}) for m in owners.values()]

    def lent(self, rows: int | None = None) -> contextlib.AbstractContextManager[Any]:
        """Around one pass: a first pass over so many rows, or, without rows, a repetition that moves nothing."""
        return self._lent(rows) if self._found or self._start.there else _NO_CONTEXT

    @contextlib.contextmanager
    def _without_others(self) -> Iterator[None]:
        """What passes before have deleted, or set to None, isn't there: one that is repeated has found it."""
        others = [
            (holder, name, other, name in there)
            for holder, there in self._there
            for name, other in holder.items()
            if not there.get(name) and (other is not None or name not in there)
        ]
        for holder, name, _, emptied in others:
            if emptied:
                holder[name] = None
            else:
                del holder[name]
        try:
            yield
        finally:
            for holder, name, other, _ in others:
                holder[name] = other

    @contextlib.contextmanager
    def _lent(self, rows: int | None) -> Iterator[None]:
        wanted = [key for key in self._found if rows is None or key not in self._excluded]
        copies = self._copied({key: self._starts[key] for key in wanted})
        versions = {key: lent._version for key, lent in copies.items() if not lent.is_inference()}
        places = [(holder, name, buffer) for holder, name, buffer in self._places if id(buffer) in copies]
        before = [(name in holder, holder.get(name)) for holder, name, _ in places]
        ends, made = Ends(), Ends()
        with self._without_others():
            try:
                for holder, name, buffer in places:
                    holder[name] = copies[id(buffer)]
                yield
            finally:
                for found in self._start.made():
                    made[id(found.owner), found.name] = found, found.owner[found.name], True
                    found.reset()
                for (holder, name, buffer), (there, value) in zip(places, before, strict=True):
                    ends[id(buffer)] = self._found[id(buffer)], holder.get(name), name in holder
                    if there:
                        holder[name] = value
                    else:  # first passes have made it, and the one that is repeated found none
                        holder.pop(name, None)
        if rows is not None:
            edited = [key for key, lent in copies.items() if self._edited(*ends[key][:2], lent, versions.get(key))]
            self.add({**ends, **made}, rows, [*edited, *made])

    def _edited(self, found: BufferSnapshot, value: Tensor | None, lent: Tensor, version: int | None) -> bool:
        # PyTorch's normalisation kernels don't count their moves as in-place edits.
        if value is not lent or found.unversioned or version is None or value._version != version:
            return True
        # What moves through `.data` or NumPy shows in its value alone; elsewhere a look would wait for the device.
        return lent.is_cpu and lent.nbytes <= LOOKED_AT and not torch.equal(lent, found.copy)  # type: ignore[arg-type]  # there is


Key = tuple[int, str]
Buffers = Mapping[Key, tuple[dict[str, Any], Mapping[str, BufferSnapshot]]]


@torch.no_grad()
def take_over(
    buffers: Buffers,
    device: torch.device,
    broadcast: Callable[[Any], Any],
    *,
    gives: bool,
    takes: bool,
) -> None:
    """Have the ranks agree after an update on the buffers on which they agreed before, where some have run nothing.

    Those on which they didn't are each rank's own, as statistics of its rows are: without rows they stay.
    """
    moved: dict[Key, dict[str, tuple[Tensor | None, Tensor, bool]]] = broadcast(_moved(buffers) if gives else None)
    for key, names in moved.items() if takes else ():
        holder, held = buffers.get(key, ({}, {}))
        for name, (start, end, on_device) in names.items():
            now, before = holder.get(name), held.get(name)
            own = now if before is None else before.tensor if before.copy is None else before.copy
            if (own is not None) if start is None else (own is None or not same(own, start.to(own.device))):
                continue
            put(holder, name, now, end.to(device if on_device else "cpu"))


def _moved(buffers: Buffers) -> dict[Key, dict[str, tuple[Tensor | None, Tensor, bool]]]:
    """Where an update has moved buffers from and to, in host memory, and whether they live elsewhere."""
    found: dict[Key, dict[str, tuple[Tensor | None, Tensor, bool]]] = {}
    for key, (holder, held) in buffers.items():
        for name, now in holder.items():
            before = held.get(name)
            start = None if before is None else before.copy
            if type(now) is not Tensor or (before is not None and (start is None or same(now, start))):
                continue
            found.setdefault(key, {})[name] = None if start is None else start.cpu(), now.detach().cpu(), not now.is_cpu
    return found
