"""BatchNorm over the large batch, in micro-batches: outputs, gradients and running statistics are the large batch's.

The model is traced by torch.fx and cut at its BatchNorm layers. Each segment is a module that runs in two passes over
all micro-batches before the next one starts; in between, the layer's mean and variance are pooled over all rows. What
layers normalise is kept, and the little else that later segments need; activations inside segments are not.

A segment normalises what it loads by fixed statistics, as in eval mode, with weights and biases of this call's own.
Their gradients are the sums over all rows that a layer's backward pass needs,

    dx = w / sigma (dy - mean(dy) - xhat mean(dy xhat))        with means over all rows

and arrive in `_Statistics`, which subtracts what goes through the mean and the variance.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import operator
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import CheckpointFunction

from gradaccum.on_torch.batch import leaves
from gradaccum.on_torch.memory import is_out_of_memory
from gradaccum.torch.batch_norm import BatchNormPolicy, Pool, move_running_statistics, summed_over_ranks
from gradaccum.torch.chunking.two_passes import (
    Inputs,
    Passes,
    no_word_of_missing_gradients,
    tensors_of,
    with_tensors,
    without_tensors,
)
from gradaccum.torch.watch import is_of_the_user


def run_exact(
    module: nn.Module,
    policy: BatchNormPolicy,
    micro_batches: Sequence[Inputs],
    sizes: Sequence[int],
    keep: int,
    *,
    offload: bool,
    **how: bool,
) -> list[Any]:
    """The outputs of each micro-batch; `offload` keeps what crosses BatchNorm layers in host memory."""
    for path, leaf in leaves(micro_batches[0]):
        if hasattr(leaf, "shape") and not isinstance(leaf, Tensor):
            raise ValueError(f'batch_norm="exact" takes only tensors. Received: {path.removeprefix(".")} = {leaf!r}.')
    model = _Model(module, micro_batches[0], offload)
    known: list[dict[fx.Node, Any]] = [{model.inputs: tensors_of(inputs)} for inputs in micro_batches]
    statistics: dict[fx.Node, Sequence[Tensor]] = {}
    outputs: list[Any] = []
    for segment in model.segments:
        loaded = [Inputs(tuple(segment.arguments(values, statistics)), {}) for values in known]
        passes = _SegmentPasses(segment, policy, loaded[0], sizes, others=segment.owners_of_buffers())
        passes.name = type(module).__name__
        outputs = passes.run(loaded, keep, **how)
        boundary = segment.boundary
        if boundary is not None:
            boundary.is_settled = True
            for values, stored in zip(known, outputs, strict=True):
                values.update(zip(segment.stores, stored.args, strict=True))
            xs = [values[boundary.source] for values in known]
            statistics[boundary.node] = _Statistics.apply(boundary, boundary.weight, boundary.bias, *xs)
    return outputs


@dataclasses.dataclass(eq=False)
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
    layer: _BatchNorm | None = None
    pool: Pool | None = None
    """The statistics of the rows that have come to it."""
    is_settled: bool = False
    """Whether all have."""

    def move_running(self, pool: Pool) -> None:
        if self.layer is not None:
            move_running_statistics(self.layer, pool.mean, pool.unbiased_variance)
        elif self.running_mean is not None and self.running_var is not None:
            # A layer with a forward of its own has counted this batch, and derived its momentum, while it was traced.
            for running, now in ((self.running_mean, pool.mean), (self.running_var, pool.unbiased_variance)):
                running.data.lerp_(now.to(running.dtype), self.momentum or 0.0)


class _Statistics(torch.autograd.Function):
    """A BatchNorm's mean and variance over all rows, and its weight and bias, whose gradients are sums over rows."""

    @staticmethod
    def forward(
        ctx: Any, boundary: Boundary, weight: Tensor | None, bias: Tensor | None, *xs: Tensor
    ) -> tuple[Tensor, ...]:
        assert boundary.pool is not None
        pool = boundary.pool.over_ranks(boundary.layer)
        if pool.count < 2:
            line = _line(boundary.node)
            raise ValueError(f"BatchNorm needs more than one value per channel in training mode: {line}.")
        boundary.move_running(pool)
        like = next((tensor for tensor in (weight, boundary.running_mean) if tensor is not None), pool.mean)
        mean, variance = pool.mean.to(like.dtype), (pool.deviations / pool.count).to(like.dtype)
        weight = torch.ones_like(mean) if weight is None else weight.clone()
        bias = torch.zeros_like(mean) if bias is None else bias.clone()
        ctx.boundary, ctx.count = boundary, pool.count
        ctx.save_for_backward(mean, variance, weight, *xs)
        ctx.mark_non_differentiable(mean, variance)
        ctx.set_materialize_grads(False)
        return mean, variance, weight, bias

    @staticmethod
    def backward(ctx: Any, _: Any, __: Any, dy_xhat: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                'batch_norm="exact" has no second derivatives (create_graph=True). Use "frozen", or the whole batch.'
            )
        mean, variance, weight, *xs = ctx.saved_tensors
        if dy_xhat is None or dy is None:
            return (None,) * (3 + len(xs))
        needed = ctx.needs_input_grad
        # Of this rank's rows, as those of any parameter.
        of_weight, of_bias = dy_xhat if needed[1] else None, dy if needed[2] else None
        dy_xhat, dy = summed_over_ranks(ctx.boundary.layer, dy_xhat, dy)
        deviation = (variance + ctx.boundary.eps).rsqrt()
        scale = weight * deviation / ctx.count
        constant, slope = -scale * dy, -scale * deviation * dy_xhat

        def through_statistics(x: Tensor) -> Tensor:
            shape = [1, -1] + [1] * (x.dim() - 2)
            centred = x.to(slope.device, slope.dtype) - mean.view(shape)
            return torch.addcmul(constant.view(shape), centred, slope.view(shape)).to(x.device, x.dtype)

        of_xs = [through_statistics(x) if is_needed else None for x, is_needed in zip(xs, needed[3:])]
        return (None, of_weight, of_bias, *of_xs)


class _Root(nn.Module):
    """A module whose forward takes the tensors among its inputs alone."""

    def __init__(self, module: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.module, self._inputs, self._count = module, without_tensors(inputs), len(tensors_of(inputs))

    def forward(self, *tensors: Any) -> Any:
        inputs = with_tensors(self._inputs, [tensors[index] for index in range(self._count)])
        return self.module(*inputs.args, **inputs.kwargs)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, _BatchNorm) and type(m).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
            return True
        return not any(isinstance(layer, _BatchNorm) and _active(layer) for layer in m.modules())

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        if not torch.is_grad_enabled() and _in_reentrant_checkpoint(sys._getframe(1)):
            raise ValueError("A reentrant checkpoint hides its graph: pass use_reentrant=False to `checkpoint`.")
        node.meta["modes"] = _modes()
        node.meta["line"] = _line_of(sys._getframe(1))
        return node


class _Model:
    """A model, cut at the BatchNorm layers that are in training mode."""

    def __init__(self, module: nn.Module, inputs: Inputs, offload: bool) -> None:
        self.root, self.offload = _Root(module, inputs), offload
        try:
            with torch.enable_grad(), no_word_of_missing_gradients():
                self.modes = _modes()
                """Grad mode and autocast outside the model."""
                graph = _Tracer().trace(self.root)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise ValueError(
                f'{type(module).__name__} can\'t be cut at its BatchNorm layers, as batch_norm="exact" does: the code '
                f"between them must not depend on values or sizes.\n{_blame(error)}\nMove that code into a module "
                "of its own without BatchNorm in it, which is called as it is."
            ) from error
        self.inputs = next(node for node in graph.nodes if node.op == "placeholder")
        self.outputs = next(node for node in graph.nodes if node.op == "output").args[0]
        """With nodes in place of values."""
        self.segments, self.boundaries = [Segment(self)], dict[fx.Node, Boundary]()
        self.devices: dict[fx.Node, list[torch.device]] = {}
        """Where the tensors in a value were made that is in host memory."""
        for node in list(graph.nodes):
            if node.op in ("call_module", "call_function", "call_method"):
                self._add(node)
        self._find_crossings()

    def _find_crossings(self) -> None:
        made = {node: segment for segment in self.segments for node in segment.nodes}
        for segment in self.segments:
            used = [node for user in segment.nodes for node in user.all_input_nodes]
            used += _nodes(self.outputs) if segment.boundary is None else []
            segment.loads = [node for node in dict.fromkeys(used) if made.get(node) is not segment]
            needed = [*segment.loads, *([segment.boundary.source] if segment.boundary is not None else [])]
            for node in [node for node in needed if node in made and node not in made[node].stores]:
                made[node].stores.append(node)

    def attribute(self, node: fx.Node) -> Any:
        return operator.attrgetter(str(node.target))(self.root)

    def _add(self, node: fx.Node) -> None:
        segment, boundary = self.segments[-1], self._boundary(node)
        if boundary is None:
            segment.add(node)
            return
        if boundary.source not in segment.nodes:  # right behind another BatchNorm: make the value its own
            with node.graph.inserting_before(node):
                boundary.source = node.graph.call_function(_identity, (boundary.source,))
            boundary.source.meta.update(node.meta)
            segment.add(boundary.source)
        segment.boundary = self.boundaries[node] = boundary
        self.segments.append(Segment(self))

    def _boundary(self, node: fx.Node) -> Boundary | None:
        if node.op == "call_module":
            layer = self.attribute(node)
            if not (isinstance(layer, _BatchNorm) and _active(layer)):
                return None
            source: Any = node.args[0] if node.args else node.kwargs["input"]
            running = (layer.running_mean, layer.running_var) if layer.track_running_stats else (None, None)
            return Boundary(node, source, layer.weight, layer.bias, *running, layer.eps, layer.momentum, layer)
        if node.target is not F.batch_norm:
            return None
        bound = inspect.signature(F.batch_norm).bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if not given.pop("training"):
            return None
        for name in ("weight", "bias", "running_mean", "running_var"):
            if isinstance(value := given[name], fx.Node):
                if value.op != "get_attr":
                    raise ValueError(
                        f"The `{name}` of a batch_norm call must be a parameter or a buffer, to cut the model there. "
                        f"Received: the result of {value.target}, {_line(node)}."
                    )
                given[name] = self.attribute(value)
        return Boundary(node, given.pop("input"), **given)


class Segment(nn.Module):
    """What happens between two BatchNorm layers: a module of what it loads, which returns what it stores."""

    def __init__(self, model: _Model) -> None:
        super().__init__()
        self.model, self.nodes = model, list[fx.Node]()
        self.loads: list[fx.Node] = []
        """Values from before: inputs, parameters, BatchNorm outputs and what earlier segments stored."""
        self.stores: list[fx.Node] = []
        """Values made here that later segments or the next BatchNorm need."""
        self.boundary: Boundary | None = None
        """The BatchNorm at its end; None for the last segment."""

    def add(self, node: fx.Node) -> None:
        if node.op == "call_module":
            self.add_module(str(len(self.nodes)), self.model.attribute(node))
        self.nodes.append(node)

    def arguments(self, values: dict[fx.Node, Any], statistics: dict[fx.Node, Sequence[Tensor]]) -> Iterator[Any]:
        """What it is called with: for a BatchNorm's output, what it is made of; for a buffer, None."""
        for node in self.loads:
            if node in self.model.boundaries:
                yield values[self.model.boundaries[node].source]
                yield from statistics[node]
            elif node.op == "get_attr":
                yield value if isinstance(value := self.model.attribute(node), nn.Parameter) else None
            else:
                yield values[node]

    def node_of(self, argument: int) -> fx.Node:
        return [node for node in self.loads for _ in range(5 if node in self.model.boundaries else 1)][argument]

    def owners_of_buffers(self) -> list[nn.Module]:
        """The modules whose buffers its own code reads or moves."""
        found = [str(node.target) for node in self.loads if node.op == "get_attr"]
        return [self.model.root.get_submodule(path.rpartition(".")[0]) for path in found]

    def forward(self, *arguments: Any) -> Any:
        remaining = iter(arguments)
        values = {node: self._loaded(node, remaining) for node in self.loads}
        needed = {*self.stores, *(_nodes(self.model.outputs) if self.boundary is None else ())}
        last = {used: node for node in self.nodes for used in node.all_input_nodes}
        for number, node in enumerate(self.nodes):
            args, kwargs = _filled(node.args, values), _filled(node.kwargs, values)
            modes = node.meta["modes"]
            with _NO_CONTEXT if modes == self.model.modes else _in_modes(modes):
                if node.op == "call_module":
                    values[node] = getattr(self, str(number))(*args, **kwargs)
                elif node.op == "call_method":
                    values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
                else:
                    values[node] = node.target(*args, **kwargs)
            del args, kwargs
            for used in node.all_input_nodes:
                if last[used] is node and used not in needed:
                    values.pop(used, None)
        if self.boundary is None:
            return _filled(self.model.outputs, values)
        if not self.boundary.is_settled:
            own = Pool.of(values[self.boundary.source])
            self.boundary.pool = own if self.boundary.pool is None else self.boundary.pool.merged(own)
        return Inputs(tuple([self._stored(node, values[node]) for node in self.stores]), {})

    def _loaded(self, node: fx.Node, arguments: Iterator[Any]) -> Any:
        """A value from before, on its device; a BatchNorm's output is computed."""
        value, boundary = next(arguments), self.model.boundaries.get(node)
        if boundary is not None:
            mean, variance, weight, bias = itertools.islice(arguments, 4)
            x = value.to(mean.device, non_blocking=True)
            return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, boundary.eps)
        if node.op == "get_attr" and value is None:  # a buffer, as it is now
            return self.model.attribute(node)
        if node in self.model.devices:
            devices = zip(tensors_of(value), self.model.devices[node], strict=True)
            return with_tensors(value, [tensor.to(device, non_blocking=True) for tensor, device in devices])
        return value

    def _stored(self, node: fx.Node, value: Any) -> Any:
        """A value for later; in host memory, if that is wanted."""
        if not self.model.offload or (self.boundary is not None and self.boundary.is_settled):
            return value
        tensors = tensors_of(value)
        self.model.devices[node] = [tensor.device for tensor in tensors]
        return with_tensors(value, map(_in_host_memory, tensors))


class _SegmentPasses(Passes):
    def edited(self, inputs: Inputs, tensor: Tensor) -> Exception:
        assert isinstance(self.module, Segment)
        place = next(n for n, value in enumerate(inputs.args) if any(t is tensor for t in tensors_of(value)))
        node = self.module.node_of(place)
        if node.op == "placeholder":
            return super().edited(inputs, tensor)
        return ValueError(
            f"A value is edited in place across a BatchNorm layer: the result of {_line(node)} is changed after a "
            'later layer, where batch_norm="exact" cuts the model. Edit a clone of it.'
        )


_NO_CONTEXT = contextlib.nullcontext()


def _in_host_memory(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)  # on the stream that will fetch it


def _identity(value: Any) -> Any:
    return value


def _active(layer: _BatchNorm) -> bool:
    return layer.training or layer.running_mean is None


def _filled(tree: Any, values: dict[fx.Node, Any]) -> Any:
    """A tree with what nodes stand for."""
    return fx.node.map_arg(tree, lambda node: values[node])


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


def _line(node: fx.Node) -> str:
    return node.meta.get("line") or f"node {node.name}"


def _line_of(frame: Any) -> str:
    while frame is not None and not is_of_the_user(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f'File "{frame.f_code.co_filename}", line {frame.f_lineno}'


def _in_reentrant_checkpoint(frame: Any) -> bool:
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back
    return frame is not None


def _blame(error: BaseException) -> str:
    """The user's line in which it happened, and what happened."""
    lines = [entry for entry in traceback.extract_tb(error.__traceback__) if is_of_the_user(entry.filename)]
    what = f"    {type(error).__name__}: {error}"
    if not lines:
        return what
    at = lines[-1]
    return f'  File "{at.filename}", line {at.lineno}, in {at.name}\n    {at.line}\n{what}'
