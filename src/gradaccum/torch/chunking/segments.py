"""A model in segments: cut at its BatchNorm layers.

    x -> [segment 0] -> BatchNorm -> [segment 1] -> BatchNorm -> ... -> [last segment] -> outputs

torch.fx records what the code around the BatchNorm layers does, in its order. Modules without BatchNorm inside are
called as they are, whatever they contain; only the code of modules that hold BatchNorm layers is recorded. It is
recorded anew for every forward pass, so its Python side (a coin toss, a counter) happens once per forward pass, as on
the large batch.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

import gradaccum

__all__ = ["Boundary", "Segment", "SegmentedModel", "segmented"]


@dataclasses.dataclass
class Boundary:
    """A BatchNorm layer's one use of its batch's statistics."""

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
    """The layer, unless it is a call of `torch.nn.functional.batch_norm`."""


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

    @property
    def boundaries(self) -> dict[fx.Node, Boundary]:
        return {segment.boundary.node: segment.boundary for segment in self.segments if segment.boundary is not None}

    def run(self, segment: Segment, values: dict[fx.Node, Any]) -> None:
        """Run a segment's nodes, given the values it loads; leaves in `values` what it stores (and what it returns)."""
        needed = {*segment.stores, *(_nodes(self.outputs) if segment.boundary is None else ())}
        last = {used: node for node in segment.nodes for used in node.all_input_nodes}
        for node in segment.nodes:
            with _Modes(node.meta["modes"], self.modes):
                values[node] = self._call(node, values)
            for used in node.all_input_nodes:
                if last[used] is node and used not in needed:
                    values.pop(used, None)

    def read_after(self, number: int) -> set[fx.Node]:
        """What segments after this one, and the BatchNorm layers between them, read."""
        read: set[fx.Node] = set()
        boundaries = self.boundaries
        for segment in self.segments[number + 1 :]:
            read.update(segment.loads, *([[segment.boundary.source]] if segment.boundary is not None else []))
        return read | {boundaries[node].source for node in read if node in boundaries}

    def value(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        """What a node stands for; parameters are looked up in the model as it is now."""
        return _attribute(self.root, str(node.target)) if node.op == "get_attr" else values[node]

    def returned(self, values: dict[fx.Node, Any]) -> Any:
        return fx.node.map_arg(self.outputs, lambda node: self.value(node, values))

    def _call(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        args: Any = fx.node.map_arg(node.args, lambda used: self.value(used, values))
        kwargs: Any = fx.node.map_arg(node.kwargs, lambda used: self.value(used, values))
        if node.op == "call_module":
            return self.root.get_submodule(str(node.target))(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert node.op == "call_function", node.op
        assert callable(node.target)
        return node.target(*args, **kwargs)


def segmented(module: nn.Module, inputs: Any, count: int, with_tensors: Any) -> SegmentedModel:
    """Cut a model at the BatchNorm layers that are in training mode."""
    root = _Root(module, inputs, with_tensors, count)
    tracer = _Tracer()
    here = _modes()
    try:
        with torch.enable_grad():
            tracer.ambient = _modes()
            graph = tracer.trace(root)
    except Exception as error:
        raise ValueError(
            f'{type(module).__name__} can\'t be cut at its BatchNorm layers, as batch_norm="exact" does: the code '
            f"around them must do the same whatever the values are.\n{_blame(error)}\nMove that code into a module "
            "of its own without BatchNorm in it, which is called as it is."
        ) from error
    outputs = next(node for node in graph.nodes if node.op == "output").args[0]
    result = SegmentedModel(
        root, [n for n in graph.nodes if n.op == "placeholder"], [Segment()], outputs, tracer.ambient
    )
    assert here[1:] == tracer.ambient[1:]
    made: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node.op in ("call_module", "call_function", "call_method"):
            boundary = _boundary(root, node)
            if boundary is None:
                result.segments[-1].nodes.append(node)
                made.add(node)
            else:
                if boundary.source not in made:
                    with graph.inserting_before(node):
                        boundary.source = graph.call_function(_identity, (boundary.source,))
                    boundary.source.meta.update(node.meta)
                    result.segments[-1].nodes.append(boundary.source)
                    made.add(boundary.source)
                result.segments[-1].boundary = boundary
                result.segments.append(Segment())
    _find_crossings(result)
    return result


def _find_crossings(result: SegmentedModel) -> None:
    made: dict[fx.Node, Segment | None] = dict.fromkeys([*result.inputs, *result.boundaries], None)
    for segment in result.segments:
        made.update(dict.fromkeys(segment.nodes, segment))
        users = [used for node in segment.nodes for used in node.all_input_nodes]
        for used in dict.fromkeys(users + (_nodes(result.outputs) if segment.boundary is None else [])):
            if used.op != "get_attr" and made[used] is not segment:
                segment.loads.append(used)
                _store(made[used], used)
        if segment.boundary is not None:
            _store(made[segment.boundary.source], segment.boundary.source)
        for node in segment.nodes:
            if node.op == "call_module":
                segment.modules.append(result.root.get_submodule(str(node.target)))


def _store(origin: Segment | None, node: fx.Node) -> None:
    if origin is not None and node not in origin.stores:
        origin.stores.append(node)


def _identity(value: Any) -> Any:
    """A node of a segment's own for a BatchNorm to normalise that directly follows another one, or the input."""
    return value


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
    ambient: tuple[Any, ...]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if _is_plain_batch_norm(m):
            return True
        return not any(isinstance(layer, _BatchNorm) and _active(layer) for layer in m.modules())

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["modes"] = _modes()
        node.meta["line"] = _line_of(sys._getframe(1))
        return node


def _active(layer: _BatchNorm) -> bool:
    return layer.training or layer.running_mean is None


def _is_plain_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and type(module).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward)


def _boundary(root: nn.Module, node: fx.Node) -> Boundary | None:
    if node.op == "call_module":
        layer = root.get_submodule(str(node.target))
        if not (isinstance(layer, _BatchNorm) and _active(layer)):
            return None
        keeps = layer.track_running_stats
        source = node.args[0] if node.args else node.kwargs["input"]
        assert isinstance(source, fx.Node)
        return Boundary(
            node,
            source,
            layer.weight,
            layer.bias,
            layer.running_mean if keeps else None,
            layer.running_var if keeps else None,
            layer.eps,
            layer.momentum,
            layer,
        )
    if node.target is not nn.functional.batch_norm:
        return None
    bound = inspect.signature(nn.functional.batch_norm).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    if not bound.arguments["training"]:
        return None

    def tensor(name: str) -> Any:
        value = bound.arguments[name]
        if isinstance(value, fx.Node):
            if value.op != "get_attr":
                raise ValueError(
                    f"The `{name}` of a batch_norm call must be a parameter or a buffer, to cut the model there. "
                    f"Received: the result of {value.target}, {node.meta['line']}."
                )
            return _attribute(root, str(value.target))
        return value

    parts = {name: tensor(name) for name in ("weight", "bias", "running_mean", "running_var")}
    return Boundary(
        node,
        bound.arguments["input"],
        **parts,
        eps=bound.arguments["eps"],
        momentum=bound.arguments["momentum"],
        layer=None,
    )


def _attribute(root: nn.Module, path: str) -> Any:
    value: Any = root
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _nodes(tree: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(tree, lambda node: found.append(node) or node)  # type: ignore[func-returns-value]
    return found


def _modes() -> tuple[Any, ...]:
    """Grad mode, and autocast on each kind of device."""
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return (
        torch.is_grad_enabled(),
        *((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
    )


class _Modes:
    """A context of the grad mode and autocast that a node was recorded under, where they aren't those around it."""

    def __init__(self, recorded: tuple[Any, ...], ambient: tuple[Any, ...]) -> None:
        self.managers: list[Any] = []
        if recorded != ambient:
            self.managers = [torch.autocast(kind, dtype=dtype, enabled=on) for kind, on, dtype in recorded[1:]]
            if not recorded[0]:
                self.managers.append(torch.no_grad())

    def __enter__(self) -> None:
        for manager in self.managers:
            manager.__enter__()

    def __exit__(self, *error: Any) -> None:
        for manager in reversed(self.managers):
            manager.__exit__(*error)


_OURS = Path(gradaccum.__file__).resolve().parent
_TORCH = Path(torch.__file__).resolve().parent


def _is_users(filename: str) -> bool:
    path = Path(filename)
    return _OURS not in path.parents and _TORCH not in path.parents and not filename.startswith("<")


def _line_of(frame: Any) -> str:
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f'File "{frame.f_code.co_filename}", line {frame.f_lineno}'


def _blame(error: BaseException) -> str:
    """The user's line in which it happened, and what happened."""
    lines = [entry for entry in traceback.extract_tb(error.__traceback__) if _is_users(entry.filename)]
    what = f"    {type(error).__name__}: {error}"
    if not lines:
        return what
    at = lines[-1]
    return f'  File "{at.filename}", line {at.lineno}, in {at.name}\n    {at.line}\n{what}'
