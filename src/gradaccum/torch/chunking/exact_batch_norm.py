"""BatchNorm over the large batch, in micro-batches: outputs, gradients and running statistics are the large batch's.

The model is cut at its BatchNorm layers. Forward, each segment runs over all micro-batches before the next one starts,
and in between the layer's mean and variance are pooled over all rows. What the layers normalise is kept, and the little
else that later segments need; activations inside segments are not. Backward goes through the segments in reverse:
each is run again, micro-batch by micro-batch, and at a layer

    dx = w / sigma (dy - mean(dy) - xhat mean(dy xhat))        with means over all rows

needs sums over all micro-batches, which have all reached it by then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import operator
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradaccum.on_torch.batch import concatenate, leaves
from gradaccum.on_torch.memory import is_out_of_memory
from gradaccum.on_torch.private import run_backward
from gradaccum.torch.batch_norm import BatchNormPolicy, Pool, is_of_the_user, move_running_statistics, summed_over_ranks
from gradaccum.torch.buffers import LentBuffers
from gradaccum.torch.chunking.two_passes import (
    Call,
    Conditions,
    GradientSums,
    Inputs,
    added,
    backward_roots,
    is_floating,
    tensors_of,
    with_tensors,
    without_tensors,
)


@dataclasses.dataclass
class Stored:
    """A value of one micro-batch that crosses a BatchNorm layer, on its device or in host memory."""

    skeleton: Any
    tensors: list[Tensor]
    devices: list[torch.device]

    @classmethod
    def of(cls, value: Any, offload: bool) -> Stored:
        tensors = [tensor.detach() for tensor in tensors_of(value)]
        devices = [tensor.device for tensor in tensors]
        return cls(without_tensors(value), [_in_host_memory(t) for t in tensors] if offload else tensors, devices)

    def fetched(self) -> list[Tensor]:
        return [t.to(device, non_blocking=True) for t, device in zip(self.tensors, self.devices, strict=True)]


def _in_host_memory(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)  # on the stream that will fetch it


@dataclasses.dataclass
class Normalisation:
    """A BatchNorm layer's statistics over the large batch."""

    boundary: Boundary
    count: float
    mean: Tensor
    variance: Tensor
    """Biased, as rows are normalised with."""

    def __call__(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return nn.functional.batch_norm(x, self.mean, self.variance, weight, bias, False, 0.0, self.boundary.eps)

    def affine(self) -> tuple[Tensor, Tensor]:
        """The layer's weight and bias as leaves of this use's own, whose gradients are the sums over rows it needs."""
        weight = torch.ones_like(self.mean) if self.boundary.weight is None else self.boundary.weight
        bias = torch.zeros_like(self.mean) if self.boundary.bias is None else self.boundary.bias
        return weight.detach().requires_grad_(), bias.detach().requires_grad_()

    def through_statistics(self, weight: Tensor, to_weight: Tensor, to_bias: Tensor) -> Callable[[Tensor], Tensor]:
        """What a row's gradient gets through the mean and the variance, as a function of the row.

        It is what the formula above subtracts. `to_weight` and `to_bias` are this rank's sums of dy xhat and dy.
        """
        to_weight, to_bias = summed_over_ranks(self.boundary.layer, to_weight, to_bias)
        deviation = (self.variance + self.boundary.eps).rsqrt()
        scale = weight * deviation / self.count
        constant, slope = scale * to_bias, scale * deviation * to_weight

        def rest(x: Tensor) -> Tensor:
            shape = [1, -1] + [1] * (x.dim() - 2)
            centred = x.to(slope.dtype) - self.mean.view(shape)
            return torch.addcmul(constant.view(shape), centred, slope.view(shape)).to(x.dtype)

        return rest


class ExactCall(Call):
    """One call of a module whose BatchNorm layers normalise over all micro-batches: a segment between each two."""

    def __init__(
        self, module: nn.Module, policy: BatchNormPolicy, inputs: Inputs, *where: Any, offload: bool = False
    ) -> None:
        super().__init__(module, policy, inputs, *where)
        for path, leaf in leaves(inputs):
            if hasattr(leaf, "shape") and not isinstance(leaf, Tensor):
                raise ValueError(f'batch_norm="exact" takes tensors. Received: {path.removeprefix(".")} = {leaf!r}.')
        self.offload = offload
        self.segmented: SegmentedModel = segmented(module, self.skeleton, len(self.paths), with_tensors)
        self.segment_count = len(self.segmented.segments)
        self.normalisations: dict[fx.Node, Normalisation] = {}
        self.stored: dict[fx.Node, list[Stored]] = {}
        """Of each value that crosses a BatchNorm layer, what each micro-batch has of it."""
        self._segment_buffers: list[LentBuffers] = []

    # Forward.

    def run(self, tensors: Sequence[Tensor], keep: int, *, differentiated: bool) -> Any:
        every = range(len(self.slices))
        return self.in_two_passes(every, tensors) if differentiated else self.first_passes(every, tensors)

    def first_passes(self, indices: Sequence[int], tensors: Sequence[Tensor]) -> Any:
        """All outputs. What crosses BatchNorm layers stays."""
        outputs: list[Any] = []
        for number, segment in enumerate(self.segmented.segments):
            buffers = LentBuffers(layer for module in segment.modules for layer in module.modules())
            self._segment_buffers.append(buffers)
            self.stored.update({node: [] for node in segment.stores})
            pool, here = None, Conditions(self.generators, self.devices)
            for index in indices:
                values = self._first_values(number, tensors, index)
                self.conditions[number, index], here = here, here.advance()
                for node in segment.stores:
                    self.stored[node].append(Stored.of(values[node], self.offload))
                if segment.boundary is not None:
                    own = Pool.of(values[segment.boundary.source])
                    pool = own if pool is None else pool.merged(own)
                else:
                    outputs.append(self.checked(self.segmented.filled(self.segmented.outputs, values), index))
                    self.note_outputs(outputs[-1], index)
                del values
            buffers.move()
            if segment.boundary is not None and pool is not None:
                self._normalise(segment.boundary, pool)
        return concatenate(outputs, self.out_dims)

    def stored_tensors(self) -> list[Tensor]:
        every = [stored for of_node in self.stored.values() for stored in of_node]
        tensors = [tensor for stored in every for tensor in stored.tensors]
        for stored in every:  # autograd has them from here on, and frees them as soon as backward is through
            stored.tensors = []
        return tensors

    def _first_values(self, number: int, tensors: Sequence[Tensor], index: int) -> dict[fx.Node, Any]:
        """Run a segment on a micro-batch, without gradients. Returns what it has loaded and made."""
        segment = self.segmented.segments[number]
        values: dict[fx.Node, Any] = {}
        sliced = dict(zip(self.segmented.inputs, self.pieces(tensors, self.dims, index), strict=True))
        loaded = [(node, self.stored[node][index]) for node in segment.loads if node in self.stored]
        for node in segment.loads:
            if node in sliced:
                values[node] = sliced[node]
            elif node in self.normalisations:
                boundary = self.normalisations[node].boundary
                (x,) = self.stored[boundary.source][index].fetched()
                values[node] = self.normalisations[node](x, boundary.weight, boundary.bias)
        values.update({node: with_tensors(stored.skeleton, stored.fetched()) for node, stored in loaded})
        versions = [[tensor._version for tensor in stored.tensors] for _, stored in loaded]
        with self._segment_buffers[number].lent(self.sizes[index]):
            self.segmented.run(segment, values)
        for (node, stored), before in zip(loaded, versions, strict=True):
            if [tensor._version for tensor in stored.tensors] != before:
                raise ValueError(
                    f"A value is edited in place across a BatchNorm layer: what was made in {_line(node)} is "
                    'changed after a later layer, so batch_norm="exact" can\'t cut the model there. Edit a '
                    "clone of it."
                )
        return values

    def _normalise(self, boundary: Boundary, pool: Pool) -> None:
        """Fix what a layer normalises with, given its statistics over all rows, and move its running ones."""
        pool = pool.over_ranks(boundary.layer)
        if pool.count < 2:
            raise ValueError(
                f"BatchNorm needs more than one value per channel in training mode: {_line(boundary.node)}."
            )
        dtype = next((t.dtype for t in (boundary.weight, boundary.running_mean) if t is not None), pool.mean.dtype)
        mean, variance = pool.mean.to(dtype), (pool.deviations / pool.count).to(dtype)
        self.normalisations[boundary.node] = Normalisation(boundary, pool.count, mean, variance)
        if boundary.layer is not None:
            move_running_statistics(boundary.layer, pool.mean, pool.unbiased_variance)
        elif boundary.running_mean is not None and boundary.running_var is not None:
            # A layer with a forward of its own has counted this batch, and derived its momentum, while it was recorded.
            for running, now in ((boundary.running_mean, pool.mean), (boundary.running_var, pool.unbiased_variance)):
                running.data.lerp_(now.to(running.dtype), boundary.momentum or 0.0)

    # Backward.

    def _differentiable(self, *args: Any) -> list[Tensor | None]:
        raise NotImplementedError(
            'batch_norm="exact" has first derivatives only: create_graph=True needs the large batch\'s graph.'
        )

    def begin_backward(self, sums: GradientSums, stored: Sequence[Tensor]) -> None:
        values = iter(stored)
        self._parameters = sums.parameters
        self._crossing = {
            node: [dataclasses.replace(one, tensors=[next(values) for _ in one.devices]) for one in of_node]
            for node, of_node in self.stored.items()
        }
        self._gradients: dict[fx.Node, list[list[Tensor | None]]] = {}  # by value, micro-batch and tensor
        self._affine = {node: normalised.affine() for node, normalised in self.normalisations.items()}

    def backward_through(
        self, segment: int, index: int, values: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> None:
        of_segment, known = self.segmented.segments[segment], dict(zip(self.segmented.inputs, values, strict=True))
        starts = [self._loaded_again(node, index, known) for node in of_segment.loads if node not in known]
        with self.conditions[segment, index].restored(), self._segment_buffers[segment].lent():
            self.segmented.run(of_segment, known)
        # Backward starts at the outputs, and at what later segments have loaded.
        roots: list[Tensor] = []
        given: list[Tensor] = []
        if of_segment.boundary is None:
            outputs = self.compared(self.segmented.filled(self.segmented.outputs, known), index)
            roots, given = backward_roots(outputs, grads)
            del outputs
        for node in of_segment.stores:
            if self.first_outputs is not None:
                self.compare(tensors_of(known[node]), self._crossing[node][index].fetched())
            if node in self._gradients:
                more, of_these = backward_roots(known[node], self._gradients[node][index])
                roots, given = [*roots, *more], [*given, *of_these]
                self._gradients[node][index] = []
        del known
        if roots:
            run_backward(roots, given)
        for source, leaves_ in starts:
            if source not in self._gradients:
                self._gradients[source] = [[None] * len(one.devices) for one in self._crossing[source]]
            so_far = self._gradients[source][index]
            so_far[:] = [added(one, leaf.grad) for one, leaf in zip(so_far, leaves_, strict=True)]

    def _loaded_again(self, node: fx.Node, index: int, known: dict[fx.Node, Any]) -> tuple[fx.Node, list[Tensor]]:
        """A value that a segment loads, from leaves. Returns what these leaves stand for, and the leaves."""
        normalised = self.normalisations.get(node)
        source = node if normalised is None else normalised.boundary.source
        stored = self._crossing[source][index]
        made = [t.detach().requires_grad_(is_floating(t)) for t in stored.fetched()]
        known[node] = (
            with_tensors(stored.skeleton, made) if normalised is None else normalised(made[0], *self._affine[node])
        )
        return source, made

    def end_segment(self, segment: int) -> None:
        """Pass on what goes through the mean and variance of the layer before the segment."""
        for node in self.segmented.segments[segment].stores:
            self._gradients.pop(node, None)
        boundary = self.segmented.segments[segment - 1].boundary if segment else None
        if boundary is None:
            return
        weight, bias = self._affine[boundary.node]
        if weight.grad is None or bias.grad is None:
            return
        with torch.no_grad():
            rest = self.normalisations[boundary.node].through_statistics(weight.detach(), weight.grad, bias.grad)
            for stored, gradients in zip(
                self._crossing[boundary.source], self._gradients[boundary.source], strict=True
            ):
                (subtracted,) = (rest(x) for x in stored.fetched())
                gradients[0] = -subtracted if gradients[0] is None else gradients[0].sub_(subtracted)
            for parameter, leaf in ((boundary.weight, weight), (boundary.bias, bias)):
                own = None if parameter is None else self._parameters.get(id(parameter))
                if own is not None and own.requires_grad:
                    own.grad = added(own.grad, leaf.grad)


def _line(node: fx.Node) -> str:
    return node.meta.get("line") or f"node {node.name}"


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
        if is_out_of_memory(error):
            raise
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
