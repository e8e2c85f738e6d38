"""A model in segments: cut at its BatchNorm layers.

    x -> [segment 0] -> BatchNorm -> [segment 1] -> BatchNorm -> ... -> [last segment] -> outputs

torch.fx records what the code around the BatchNorm layers does, in its order. Modules without BatchNorm inside are
called as they are, whatever they contain; only the code of modules that hold BatchNorm layers is recorded. It is
recorded anew for every forward pass, so its Python side (a coin toss, a counter) happens once per forward pass, as on
the large batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import operator
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradaccum.torch.batch_norm import is_of_the_user

__all__ = ["Boundary", "Segment", "SegmentedModel", "segmented"]

_NO_CONTEXT = contextlib.nullcontext()


@dataclasses.dataclass
class Boundary:
    """One use of a batch's statistics, by a BatchNorm layer or by `torch.nn.functional.batch_norm`."""

    node: fx.Node
    source: fx.Node
    """What it normalises."""
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor | None
    running_var: Tensor | None
    eps: float
    momentum: float | None
    layer: _BatchNorm | None


@dataclasses.dataclass
class Segment:
    """What happens between two BatchNorm layers, in order."""

    nodes: list[fx.Node] = dataclasses.field(default_factory=list)
    loads: list[fx.Node] = dataclasses.field(default_factory=list)
    """Values from before: inputs, BatchNorm outputs and what earlier segments stored."""
    stores: list[fx.Node] = dataclasses.field(default_factory=list)
    """Values made here that later segments or the next BatchNorm need."""
    boundary: Boundary | None = None
    """The BatchNorm at its end; None for the last segment."""
    modules: list[nn.Module] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class SegmentedModel:
    """A model's segments, and how to run their nodes."""

    root: nn.Module
    inputs: list[fx.Node]
    segments: list[Segment]
    outputs: Any
    """The outputs, with nodes in place of values."""
    modes: tuple[Any, ...]
    """Grad mode and autocast outside the model."""

    def run(self, segment: Segment, values: dict[fx.Node, Any]) -> None:
        """Run a segment's nodes, given the values it loads; leaves in `values` what it stores (and what it returns)."""
        needed = {*segment.stores, *(_nodes(self.outputs) if segment.boundary is None else ())}
        last = {used: node for node in segment.nodes for used in node.all_input_nodes}
        for node in segment.nodes:
            modes = node.meta["modes"]
            with _NO_CONTEXT if modes == self.modes else _in_modes(modes):
                values[node] = self._call(node, values)
            for used in node.all_input_nodes:
                if last[used] is node and used not in needed:
                    values.pop(used, None)

    def read_after(self, number: int) -> set[fx.Node]:
        """What segments after this one, and the BatchNorm layers between them, read."""
        boundaries = {one.boundary.node: one.boundary for one in self.segments if one.boundary is not None}
        read: set[fx.Node] = set()
        for segment in self.segments[number + 1 :]:
            read.update(segment.loads, [] if segment.boundary is None else [segment.boundary.source])
        return read | {boundaries[node].source for node in read if node in boundaries}

    def filled(self, tree: Any, values: dict[fx.Node, Any]) -> Any:
        """A tree with what nodes stand for; parameters are looked up in the model as it is now."""
        return fx.node.map_arg(
            tree, lambda node: _attribute(self.root, node) if node.op == "get_attr" else values[node]
        )

    def _call(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        args, kwargs = self.filled(node.args, values), self.filled(node.kwargs, values)
        if node.op == "call_module":
            return self.root.get_submodule(str(node.target))(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        function: Any = node.target
        return function(*args, **kwargs)


def segmented(module: nn.Module, inputs: Any, count: int, with_tensors: Any) -> SegmentedModel:
    """Cut a model at the BatchNorm layers that are in training mode."""
    root, tracer = _Root(module, inputs, with_tensors, count), _Tracer()
    try:
        with torch.enable_grad():
            modes = _modes()
            graph = tracer.trace(root)
    except Exception as error:
        raise ValueError(
            f'{type(module).__name__} can\'t be cut at its BatchNorm layers, as batch_norm="exact" does: the code '
            f"around them must do the same whatever the values are.\n{_blame(error)}\nMove that code into a module "
            "of its own without BatchNorm in it, which is called as it is."
        ) from error
    outputs = next(node for node in graph.nodes if node.op == "output").args[0]
    result = SegmentedModel(root, [n for n in graph.nodes if n.op == "placeholder"], [Segment()], outputs, modes)
    for node in list(graph.nodes):
        if node.op not in ("call_module", "call_function", "call_method"):
            continue
        segment, boundary = result.segments[-1], _boundary(root, node)
        if boundary is None:
            segment.nodes.append(node)
            continue
        if boundary.source not in segment.nodes:  # it directly follows another BatchNorm, or the input: make it its own
            with graph.inserting_before(node):
                boundary.source = graph.call_function(_identity, (boundary.source,))
            boundary.source.meta.update(node.meta)
            segment.nodes.append(boundary.source)
        segment.boundary = boundary
        result.segments.append(Segment())
    _find_crossings(result)
    return result


def _identity(value: Any) -> Any:
    return value


def _find_crossings(result: SegmentedModel) -> None:
    made = {node: segment for segment in result.segments for node in segment.nodes}
    for segment in result.segments:
        used = [node for user in segment.nodes for node in user.all_input_nodes]
        used += _nodes(result.outputs) if segment.boundary is None else []
        segment.loads = [n for n in dict.fromkeys(used) if n.op != "get_attr" and made.get(n) is not segment]
        segment.modules = [
            result.root.get_submodule(str(node.target)) for node in segment.nodes if node.op == "call_module"
        ]
    for segment in result.segments:
        for node in [*segment.loads, *([segment.boundary.source] if segment.boundary is not None else [])]:
            if node in made and node not in made[node].stores:
                made[node].stores.append(node)


class _Root(nn.Module):
    """A module whose forward takes the tensors alone, as many as there are."""

    def __init__(self, module: nn.Module, inputs: Any, with_tensors: Any, count: int) -> None:
        super().__init__()
        self.module = module
        names = [f"input_{index}" for index in range(count)]
        namespace: dict[str, Any] = {"inputs": inputs, "with_tensors": with_tensors}
        # torch.fx makes one placeholder per named argument.
        exec(
            f"def forward(self, {', '.join(names)}):\n"
            f"    called_with = with_tensors(inputs, [{', '.join(names)}])\n"
            "    return self.module(*called_with.args, **called_with.kwargs)",
            namespace,
        )
        self.__class__ = type("_Root", (_Root,), {"forward": namespace["forward"]})


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, _BatchNorm) and type(m).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
            return True
        return not any(isinstance(layer, _BatchNorm) and _active(layer) for layer in m.modules())

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["modes"] = _modes()
        node.meta["line"] = _line_of(sys._getframe(1))
        return node


def _active(layer: _BatchNorm) -> bool:
    return layer.training or layer.running_mean is None


def _boundary(root: nn.Module, node: fx.Node) -> Boundary | None:
    if node.op == "call_module":
        layer = root.get_submodule(str(node.target))
        if not (isinstance(layer, _BatchNorm) and _active(layer)):
            return None
        source = node.args[0] if node.args else node.kwargs["input"]
        running = (layer.running_mean, layer.running_var) if layer.track_running_stats else (None, None)
        assert isinstance(source, fx.Node)
        return Boundary(node, source, layer.weight, layer.bias, *running, layer.eps, layer.momentum, layer)
    if node.target is not nn.functional.batch_norm:
        return None
    bound = inspect.signature(nn.functional.batch_norm).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if not given["training"]:
        return None
    for name in ("weight", "bias", "running_mean", "running_var"):
        if isinstance(value := given[name], fx.Node):
            if value.op != "get_attr":
                raise ValueError(
                    f"The `{name}` of a batch_norm call must be a parameter or a buffer, to cut the model there. "
                    f"Received: the result of {value.target}, {node.meta['line']}."
                )
            given[name] = _attribute(root, value)
    source = given.pop("input")
    return Boundary(node, source, **{name: value for name, value in given.items() if name != "training"}, layer=None)


def _attribute(root: nn.Module, node: fx.Node) -> Any:
    return operator.attrgetter(str(node.target))(root)


def _nodes(tree: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(tree, lambda node: found.append(node) or node)  # type: ignore[func-returns-value]
    return found


def _modes() -> tuple[Any, ...]:
    """Grad mode, and autocast on each kind of device."""
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    autocast = ((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
    return torch.is_grad_enabled(), *autocast


@contextlib.contextmanager
def _in_modes(recorded: tuple[Any, ...]) -> Iterator[None]:
    """The grad mode and autocast that a node was recorded under, where they aren't those around it."""
    with contextlib.ExitStack() as stack:
        for kind, on, dtype in recorded[1:]:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=on))
        if not recorded[0]:
            stack.enter_context(torch.no_grad())
        yield


def _line_of(frame: Any) -> str:
    while frame is not None and not is_of_the_user(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f'File "{frame.f_code.co_filename}", line {frame.f_lineno}'


def _blame(error: BaseException) -> str:
    """The user's line in which it happened, and what happened."""
    lines = [entry for entry in traceback.extract_tb(error.__traceback__) if is_of_the_user(entry.filename)]
    what = f"    {type(error).__name__}: {error}"
    if not lines:
        return what
    at = lines[-1]
    return f'  File "{at.filename}", line {at.lineno}, in {at.name}\n    {at.line}\n{what}'
