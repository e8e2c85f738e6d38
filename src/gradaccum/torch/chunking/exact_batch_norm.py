"""BatchNorm over the large batch, in micro-batches: outputs, gradients and running statistics are the large batch's.

The model is cut at its BatchNorm layers. Forward, each segment runs over all micro-batches before the next one starts,
and in between the layer's mean and variance are pooled over all rows. What the layers normalise is kept, and the little
else that later segments need; activations inside segments are not. Backward goes through the segments in reverse:
each is run again, micro-batch by micro-batch, and at a layer

    dx = w / sigma (dy - mean(dy) - xhat mean(dy xhat))        with means over all rows

needs sums over all micro-batches, which have all reached it by then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from gradaccum.on_torch.batch import concatenate, leaves
from gradaccum.on_torch.private import run_backward
from gradaccum.torch.batch_norm import BatchNormPolicy, Pool, move_running_statistics, summed_over_ranks
from gradaccum.torch.buffers import LentBuffers
from gradaccum.torch.chunking.gradients import GradientSums, backward_roots
from gradaccum.torch.chunking.recompute import Conditions, Inputs, tensors_of, with_tensors, without_tensors
from gradaccum.torch.chunking.segments import Boundary, Segment, SegmentedModel, segmented
from gradaccum.torch.chunking.two_passes import Call, added

__all__ = ["ExactCall"]


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
    """One call of a module whose BatchNorm layers normalise over all micro-batches: a segment between each two of
    them.
    """

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
        return self.in_two_passes(every, tensors) if differentiated else self._outputs(tensors, store=False)

    def first_passes(self, indices: Sequence[int], tensors: Sequence[Tensor]) -> Any:
        return self._outputs(tensors, store=True)

    def stored_tensors(self) -> list[Tensor]:
        every = [stored for of_node in self.stored.values() for stored in of_node]
        tensors = [tensor for stored in every for tensor in stored.tensors]
        for stored in every:  # autograd has them from here on, and frees them as soon as backward is through
            stored.tensors = []
        return tensors

    def _outputs(self, tensors: Sequence[Tensor], *, store: bool) -> Any:
        """The outputs of all micro-batches; `store` what crosses BatchNorm layers, or drop it after its last use."""
        outputs: list[Any] = []
        for number, segment in enumerate(self.segmented.segments):
            self._segment_buffers.append(self._buffers_of(segment))
            made: dict[fx.Node, list[Stored]] = {node: [] for node in segment.stores}
            source = None if segment.boundary is None else segment.boundary.source
            pool = self._pooled_before(source)
            here = Conditions(self.generators(), self.devices)
            for index in range(len(self.sizes)):
                values = self._first_values(number, tensors, index)
                self.conditions[number, index], here = here, here.advance()
                for node in segment.stores:
                    made[node].append(Stored.of(values[node], self.offload))
                    if node is source:
                        pool = Pool.of(values[node]).onto(pool)
                if segment.boundary is None:
                    outputs.append(self.segmented.returned(values))
                    self._check_rows(outputs[-1], index)
                    self.note_first(outputs[-1], index)
                del values
            self._segment_buffers[-1].move()
            self.stored.update(made)
            if segment.boundary is not None:
                assert pool is not None
                self._normalise(segment.boundary, pool)
            if not store:
                for node in set(self.stored) - self.segmented.read_after(number):
                    del self.stored[node]
        return concatenate(outputs, self.out_dims)

    def _buffers_of(self, segment: Segment) -> LentBuffers:
        held = {id(layer._buffers) for module in segment.modules for layer in module.modules()}
        places = [place for place in self.state.buffers if id(place[0]) in held]
        holders = [holder for holder in self.state.holders if id(holder) in held]
        return LentBuffers(places, owners=self.state.owners, holders=holders)

    def _first_values(self, number: int, tensors: Sequence[Tensor], index: int) -> dict[fx.Node, Any]:
        """Run a segment on a micro-batch, without gradients. Returns what it has loaded and made."""
        segment = self.segmented.segments[number]
        sliced = dict(zip(self.segmented.inputs, self.pieces(tensors, index), strict=True))
        values: dict[fx.Node, Any] = {}
        for node in segment.loads:
            if node in sliced:
                values[node] = sliced[node]
            elif node in self.normalisations:
                normalised = self.normalisations[node]
                (x,) = self.stored[normalised.boundary.source][index].fetched()
                values[node] = normalised(x, normalised.boundary.weight, normalised.boundary.bias)
            else:
                stored = self.stored[node][index]
                values[node] = with_tensors(stored.skeleton, stored.fetched())
        loaded = [(node, self.stored[node][index].tensors) for node in segment.loads if node in self.stored]
        versions = [[tensor._version for tensor in stored] for _, stored in loaded]
        with self._segment_buffers[number].lent(self.sizes[index]):
            self.segmented.run(segment, values)
        for (node, stored_tensors), before in zip(loaded, versions, strict=True):
            if [tensor._version for tensor in stored_tensors] != before:
                raise ValueError(
                    f"A value is edited in place across a BatchNorm layer: what was made in {_line(node)} is "
                    'changed after a later layer, so batch_norm="exact" can\'t cut the model there. Edit a '
                    "clone of it."
                )
        return values

    def _pooled_before(self, source: fx.Node | None) -> Pool | None:
        """The statistics of what an earlier segment has made for the next layer, if so."""
        pool: Pool | None = None
        for stored in self.stored.get(source, []) if source is not None else []:
            pool = Pool.of(*stored.fetched()).onto(pool)
        return pool

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
            for running, new_value in (
                (boundary.running_mean, pool.mean),
                (boundary.running_var, pool.unbiased_variance),
            ):
                running.data.lerp_(new_value.to(running.dtype), boundary.momentum or 0.0)

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
        of_segment, known = self.segmented.segments[segment], dict[fx.Node, Any]()
        leaves_of = [self._loaded_again(node, index, known) for node in of_segment.loads]
        known.update(zip(self.segmented.inputs, values, strict=True))
        with self.conditions[segment, index].restored(), self._segment_buffers[segment].lent():
            self.segmented.run(of_segment, known)
        roots, given = self._roots(of_segment, index, known, grads)
        del known
        if roots:
            run_backward(roots, given)
        for node, tensors in leaves_of:
            if node is not None:
                none = [[None] * len(one.devices) for one in self._crossing[node]]
                so_far = self._gradients.setdefault(node, none)[index]  # type: ignore[arg-type]  # it will hold tensors
                so_far[:] = [added(one, tensor.grad) for one, tensor in zip(so_far, tensors, strict=True)]

    def _loaded_again(
        self, node: fx.Node, index: int, known: dict[fx.Node, Any]
    ) -> tuple[fx.Node | None, list[Tensor]]:
        """A value that a segment loads, from leaves. Returns what these leaves stand for, and the leaves."""
        normalised = self.normalisations.get(node)
        source = node if normalised is None else normalised.boundary.source
        if source not in self._crossing:
            return None, []  # one of the inputs
        stored = self._crossing[source][index]
        copies = [tensor.detach() for tensor in stored.fetched()]
        made = [t.requires_grad_(t.is_floating_point() or t.is_complex()) for t in copies]
        known[node] = (
            with_tensors(stored.skeleton, made) if normalised is None else normalised(made[0], *self._affine[node])
        )
        return source, made

    def _roots(
        self, segment: Segment, index: int, values: dict[fx.Node, Any], grads: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Where a segment's backward pass starts: the outputs, and what later segments have loaded."""
        roots: list[Tensor] = []
        given: list[Tensor] = []
        if segment.boundary is None:
            outputs = self.segmented.returned(values)
            self.compare_second(outputs, index)
            roots, given = backward_roots(outputs, grads)
        for node in segment.stores:
            if node in self._gradients:
                more, of_these = backward_roots(tensors_of(values[node]), self._gradients[node][index])
                roots, given = [*roots, *more], [*given, *of_these]
                self._gradients[node][index] = []
        return roots, given

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
            self._through_statistics(boundary, weight, bias)

    def _through_statistics(self, boundary: Boundary, weight: Tensor, bias: Tensor) -> None:
        assert weight.grad is not None
        assert bias.grad is not None
        rest = self.normalisations[boundary.node].through_statistics(weight.detach(), weight.grad, bias.grad)
        for stored, gradients in zip(self._crossing[boundary.source], self._gradients[boundary.source], strict=True):
            (subtracted,) = (rest(x) for x in stored.fetched())
            gradients[0] = -subtracted if gradients[0] is None else gradients[0].sub_(subtracted)
        for parameter, leaf in ((boundary.weight, weight), (boundary.bias, bias)):
            own = None if parameter is None else self._parameters.get(id(parameter))
            if own is not None and own.requires_grad:
                own.grad = added(own.grad, leaf.grad)


def _line(node: fx.Node) -> str:
    return node.meta.get("line") or f"node {node.name}"
