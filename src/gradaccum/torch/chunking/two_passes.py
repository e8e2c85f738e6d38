"""One call of a module on a large batch, in micro-batches that can be run again when backward asks for them.

The module's parameters are inputs of one autograd function, which returns each parameter's gradient once, summed over
micro-batches. So hooks on parameters, DistributedDataParallel's among them, `torch.autograd.grad` and modules that are
called several times see what they would see of the large batch.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradaccum.core.rounding import rounding
from gradaccum.errors import NotEquivalentError
from gradaccum.on_torch.adapter.arrays import relative_error
from gradaccum.on_torch.batch import BatchDims, concatenate, described, has_rows, leaves, take
from gradaccum.on_torch.private import run_backward
from gradaccum.on_torch.random_state import RandomState, all_generators, is_generator, kept
from gradaccum.torch.batch_norm import BatchNormPolicy
from gradaccum.torch.buffers import LentBuffers
from gradaccum.torch.chunking.gradients import (
    GradientSums,
    aliases,
    backward_hooks_only_look,
    backward_roots,
    hooks_on_activations_explained,
    spare_hooks,
    without_a_word_of_gradients,
)
from gradaccum.torch.chunking.recompute import (
    Conditions,
    Inputs,
    ModuleContents,
    Samples,
    accelerators,
    parametrizations_computed,
    tensors_of,
    version_of,
    with_tensors,
    without_tensors,
)
from gradaccum.torch.padding import Packs

__all__ = ["Call", "ColumnsError", "added"]


class ColumnsError(ValueError):
    """Outputs for each token, where micro-batches have columns of their own."""


class Call:
    """One call of a chunked module: all it takes to run any of its micro-batches, once or twice.

    A call is a chain of segments. Forward, a segment runs on all micro-batches before the next one begins; backward,
    segments run again in reverse. Here it is one segment, the module; `ExactCall` has one between BatchNorm layers.
    """

    def __init__(
        self,
        module: nn.Module,
        policy: BatchNormPolicy,
        inputs: Inputs,
        batch_dims: BatchDims,
        out_dims: BatchDims,
        sizes: list[int],
        packs: Packs | None = None,
    ) -> None:
        self.module, self.policy, self.state, self.packs = module, policy, ModuleContents(module), packs
        self.out_dims, self.sizes = out_dims, sizes
        of_tensors = _checked_tensors(inputs, batch_dims)
        self.paths = [path for path, _, _ in of_tensors]
        self.dims = [dim for _, _, dim in of_tensors]
        self.skeleton = without_tensors(inputs)
        self.slices = [slice(end - size, end) for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
        self.skeletons = [self.skeleton] * len(sizes)
        self._given_generators = [leaf for _, leaf in leaves(inputs) if is_generator(leaf)]
        if any(has_rows(leaf) and not isinstance(leaf, Tensor) for _, leaf in leaves(inputs)):  # arrays
            ordered = inputs if packs is None else take(inputs, packs.order, batch_dims)
            self.skeletons = [without_tensors(take(ordered, rows, batch_dims)) for rows in self.slices]
        self.devices = accelerators([*(leaf for _, leaf, _ in of_tensors), *self.state.parameters])
        self.conditions: dict[Any, Conditions] = {}
        """What each first pass started from, by what it ran."""
        self._next: Conditions | None = None  # what the next first pass starts from, while that is to be remembered
        self._shapes: dict[str, tuple[int, ...]] = {}  # of each output the shape of a row
        self.first_outputs: dict[int, list[Tensor]] | None = None
        """Of each micro-batch, for second passes to be compared with, where that is wanted: set to `{}`."""
        self.trained: list[Tensor] = []
        """The parameters that may get gradients."""
        self.output_skeleton: Any = None
        self.output_dims: list[int | None] = []
        """Where the rows of the tensors in the outputs are."""

    def run(self, tensors: Sequence[Tensor], keep: int, *, differentiated: bool) -> Any:
        """The outputs of all micro-batches, of which the last `keep` keep their activations."""
        recomputed = max(len(self.slices) - keep, 0) if differentiated else 0
        if self.packs is not None:
            tensors = [
                tensor if dim is None else tensor.index_select(dim, self.packs.order.to(tensor.device))
                for tensor, dim in zip(tensors, self.dims, strict=True)
            ]
        with self.buffers_moved_once():
            parts = [self.in_two_passes(range(recomputed), tensors)] if recomputed else []
            parts += [self.first_pass(tensors, index) for index in range(recomputed, len(self.slices))]
            outputs = parts[0] if len(parts) == 1 else concatenate(parts, self.out_dims)
        return outputs if self.packs is None else take(outputs, self.packs.back, self.out_dims)

    def in_two_passes(self, indices: Sequence[int], tensors: Sequence[Tensor]) -> Any:
        """The outputs of these micro-batches, whose activations backward recomputes."""
        self.trained = [parameter for parameter in self.state.parameters if parameter.requires_grad]
        flat = TwoPasses.apply(self, tuple(indices), *self.trained, *tensors)
        return with_tensors(self.output_skeleton, flat)

    def first_passes(self, indices: Sequence[int], tensors: Sequence[Tensor]) -> Any:
        """The outputs of these micro-batches, without activations."""
        self._next = Conditions(self.generators(), self.devices)
        before = self._next.random
        pieces = self.split_inputs(tensors)
        outputs = [self.first_pass(tensors, index, pieces[index]) for index in indices]
        unwatched = before.only(set(before.states) - set(self._next.random.states))
        self._next = None
        if unwatched.moved():
            self._watch_all(indices, tensors, before)
        return concatenate(outputs, self.out_dims)

    def generators(self) -> list[Any]:
        """All that the module may draw random numbers from."""
        return [*all_generators(self.devices), *self.state.generators, *self._given_generators]

    def _watch_all(self, indices: Sequence[int], tensors: Sequence[Tensor], before: RandomState) -> None:
        """A later micro-batch has drawn from a generator that the first one left alone: run them again to see which."""
        with kept(before.states), torch.no_grad(), self.policy.recomputation():
            before.put_back()
            here = Conditions(self.generators(), self.devices)
            for index in indices:
                inputs = self.inputs_of(self.pieces(tensors, index), index)
                with self.buffers.lent():
                    self.module(*inputs.args, **inputs.kwargs)
                self.conditions[index], here = here, here.advance()

    def first_pass(self, tensors: Sequence[Tensor], index: int, pieces: Sequence[Tensor] | None = None) -> Any:
        """The outputs of one micro-batch; graph and activations are kept as the grad mode says."""
        inputs = self.inputs_of(self.pieces(tensors, index) if pieces is None else pieces, index)
        versions = [version_of(tensor) for tensor in tensors]
        with self.policy.micro_batch(), self.buffers.lent(self.sizes[index]), hooks_on_activations_explained():
            outputs = self.module(*inputs.args, **inputs.kwargs)
        if self._next is not None:
            self.conditions[index], self._next = self._next, self._next.advance(all_moved=index > 0)
            if index == 0:  # it takes long to look at generators: from here on only at those that are used
                self._next.random = self._next.random.only(self.conditions[0].random.states)
        self.policy.commit()
        for path, tensor, version in zip(self.paths, tensors, versions, strict=True):
            if version_of(tensor) != version:
                raise ValueError(
                    f"{type(self.module).__name__} edits its input {path.removeprefix('.')} in place, so it can't be "
                    "run again on the same input. Its first operation may have inplace=True; or give it a clone."
                )
        self._check_rows(outputs, index)
        if self._next is not None:
            self.note_first(outputs, index)
        return outputs

    def note_first(self, outputs: Any, index: int) -> None:
        """Keep a micro-batch's outputs, if second passes are to be compared with them."""
        if self.first_outputs is not None:
            self.first_outputs[index] = [tensor.detach() for tensor in tensors_of(outputs)]

    def compare_second(self, outputs: Any, index: int) -> None:
        """Raise a NotEquivalentError if a micro-batch's second pass gives other outputs than its first."""
        expected = self.first_outputs.pop(index, None) if self.first_outputs is not None else None
        for first, second in zip(expected or [], tensors_of(outputs)):
            error = relative_error(second.detach(), first)
            if error > rounding(str(first.dtype), first.device.type):
                raise NotEquivalentError(
                    f"{type(self.module).__name__} gives other outputs when backward runs it again on the same inputs "
                    f"(relative error {error:.3g}), so its gradients would be those of something else. Does it ask "
                    "whether gradients are enabled, which they are in the second run alone? Does it draw from a "
                    "generator that is neither an attribute of a module nor an input, or depend on a global that moves?"
                )

    def second_pass(self, inputs: Inputs, index: int) -> Any:
        """The outputs of one micro-batch again, inside `recomputation`."""
        with self.conditions[index].restored(), self.policy.recomputation(), self.buffers.lent():
            return self.module(*inputs.args, **inputs.kwargs)

    @contextlib.contextmanager
    def recomputation(self, replacements: Mapping[int, Tensor]) -> Iterator[None]:
        """Around second passes: the module is as it was in the first ones, and they leave no trace."""
        moved = {generator for conditions in self.conditions.values() for generator in conditions.random.states}
        with self.state.restored(replacements), parametrizations_computed(), kept(moved):
            yield

    # Second passes.

    segment_count = 1

    def second_passes(
        self,
        indices: Sequence[int],
        tensors: Sequence[Tensor],
        stored: Sequence[Tensor],
        needed: Sequence[bool],
        grads: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """The gradients of the trained parameters and of the tensors in the inputs.

        Each micro-batch's graph is built and used up before the next one's. `tensors` are the parameters, then those in
        the inputs; `needed`: whether the gradient of each is; `stored` is what `stored_tensors` has returned.
        """
        if torch.is_grad_enabled():
            return self._differentiable(indices, tensors, needed, grads)
        sums = GradientSums(self.trained, self.dims, tensors, needed)
        pieces, pieces_of_grads = self.split_inputs(sums.inputs), self.split_gradients(grads, len(indices))
        self.begin_backward(sums, stored)
        with self.recomputation(sums.parameters), torch.enable_grad():
            for segment in reversed(range(self.segment_count)):
                for index in indices:
                    values = sums.leaves_of(pieces[index])
                    self.backward_through(segment, index, values, pieces_of_grads[index])
                    sums.add(values, self.slices[index])
                    del values
                self.end_segment(segment)
        return sums.gradients()

    def begin_backward(self, sums: GradientSums, stored: Sequence[Tensor]) -> None:
        """All gradients of the outputs are there."""

    def backward_through(
        self, segment: int, index: int, values: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> None:
        """Run a segment again on a micro-batch, with a graph from these leaves, and backward."""
        outputs = self.second_pass(self.inputs_of(values, index), index)
        self.compare_second(outputs, index)
        roots, given = backward_roots(outputs, grads)
        del outputs
        if roots:
            run_backward(roots, given)

    def end_segment(self, segment: int) -> None:
        """All micro-batches have gone backward through it."""

    def _differentiable(
        self,
        indices: Sequence[int],
        tensors: Sequence[Tensor],
        needed: Sequence[bool],
        grads: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """The same under `create_graph=True`: gradients that can be differentiated again, so all graphs stay."""
        own = aliases(tensors, needed)  # so that hooks see a finished gradient, not that of each micro-batch
        inputs = own[len(self.trained) :]
        parameters = {id(p): alias for p, alias in zip(self.trained, own)}
        wanted = [tensor for tensor, is_needed in zip(own, needed, strict=True) if is_needed]
        total: list[Tensor | None] = [None] * len(wanted)
        pieces_of_grads = self.split_gradients(grads, len(indices))
        with self.recomputation(parameters), backward_hooks_only_look(self.module):
            for index in indices:
                outputs = self.second_pass(self.inputs_of(self.pieces(inputs, index), index), index)
                roots, given = backward_roots(outputs, pieces_of_grads[index])
                if roots:
                    parts = torch.autograd.grad(roots, wanted, given, create_graph=True, allow_unused=True)
                    total = [added(one, other) for one, other in zip(total, parts, strict=True)]
        summed = iter(total)
        return [next(summed) if is_needed else None for is_needed in needed]

    def stored_tensors(self) -> list[Tensor]:
        """What first passes have made for second ones, for autograd to keep."""
        return []

    def pieces(self, tensors: Sequence[Tensor], index: int) -> list[Tensor]:
        """A micro-batch's rows of these tensors, those of the inputs."""
        return [
            tensor if dim is None else tensor.narrow(dim, self.slices[index].start, self.sizes[index])
            for tensor, dim in zip(tensors, self.dims, strict=True)
        ]

    def split_inputs(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """Each micro-batch's rows of these tensors, those of the inputs; not to be edited in place."""
        parts = [
            [tensor] * len(self.sizes) if dim is None else tensor.split(self.sizes, dim)
            for tensor, dim in zip(tensors, self.dims, strict=True)
        ]
        return list(zip(*parts)) if parts else [()] * len(self.sizes)

    def split_gradients(self, grads: Sequence[Tensor | None], count: int) -> list[tuple[Tensor | None, ...]]:
        """The rows of each of the first `count` micro-batches of the gradients of the tensors in the outputs."""
        parts: list[Sequence[Tensor | None]] = []
        sizes = self.sizes[:count]
        for grad, dim in zip(grads, self.output_dims, strict=True):
            assert grad is None or dim is not None
            parts.append([None] * count if grad is None else grad.split(sizes, dim or 0))
        return list(zip(*parts))

    def inputs_of(self, pieces: Sequence[Tensor], index: int) -> Inputs:
        """The inputs of a micro-batch, from its tensors."""
        inputs = with_tensors(self.skeletons[index], pieces)
        return inputs if self.packs is None else self.packs.trimmed(inputs, index)

    @contextlib.contextmanager
    def buffers_moved_once(self) -> Iterator[None]:
        """Around all first passes: every micro-batch starts from the buffers as they are now, and they move once."""
        excluded = {  # which the BatchNorm policy takes care of
            id(buffer)
            for layer in self.module.modules()
            if isinstance(layer, _BatchNorm) and layer.training
            for buffer in layer.buffers(recurse=False)
        }
        self.buffers = LentBuffers(self.state.buffers, excluded, self.state.owners, self.state.holders)
        yield
        self.buffers.move()

    def _check_rows(self, outputs: Any, index: int) -> None:
        rows = self.sizes[index]
        for path, leaf, dim in described(outputs, self.out_dims):
            if isinstance(leaf, Tensor) and (dim is None or leaf.shape[dim] != rows):
                where = "no dimension" if dim is None else f"dimension {dim}"
                raise ValueError(
                    f"Outputs must have a row for every row of the inputs. Received: output{path} of shape "
                    f"{tuple(leaf.shape)} for {rows} rows, looked for in {where}. Return one value per row and reduce "
                    "over them outside, or name the dimension in `out_dims`."
                )
            if self.packs is not None and isinstance(leaf, Tensor) and dim is not None:
                shape = (*leaf.shape[:dim], *leaf.shape[dim + 1 :])
                if self._shapes.setdefault(path, shape) != shape:
                    raise ColumnsError(
                        "With `max_tokens` each micro-batch has columns of its own, so outputs must have none: pool "
                        f"over tokens in the chunked module. Received: rows of output{path} of shapes "
                        f"{self._shapes[path]} and {shape}."
                    )


class TwoPasses(torch.autograd.Function):
    """The first passes forward, the second ones backward."""

    @staticmethod
    def forward(ctx: Any, call: Call, indices: tuple[int, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.indices = call, indices
        ctx.set_materialize_grads(False)
        with without_a_word_of_gradients():
            outputs = call.first_passes(indices, tensors[len(call.trained) :])
        ctx.save_for_backward(*tensors, *call.stored_tensors())
        ctx.samples = Samples(call.paths, tensors[len(call.trained) :], call.skeleton)
        # Autocast keeps half-precision copies of parameters for reuse. In some releases a copy made here, without
        # a graph, would hide its parameter from the loss.
        if torch.is_autocast_cache_enabled():
            torch.clear_autocast_cache()
        call.output_skeleton = without_tensors(outputs)
        found = [(leaf, dim) for _, leaf, dim in described(outputs, call.out_dims) if isinstance(leaf, Tensor)]
        call.output_dims = [dim for _, dim in found]
        flat = tuple([leaf for leaf, _ in found])
        ctx.mark_non_differentiable(*(t for t in flat if not (t.is_floating_point() or t.is_complex())))
        return flat

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        call: Call = ctx.call
        needed, saved = ctx.needs_input_grad[2:], ctx.saved_tensors
        tensors, stored = saved[: len(needed)], saved[len(needed) :]
        ctx.samples.check(tensors[len(call.trained) :])
        gradients: list[Tensor | None] = [None] * len(needed)
        if any(grad is not None for grad in grads):
            gradients = call.second_passes(ctx.indices, tensors, stored, needed, grads)
        spare_hooks(call.trained, gradients)
        return (None, None, *gradients)


def _checked_tensors(inputs: Inputs, batch_dims: BatchDims) -> list[tuple[str, Tensor, int | None]]:
    """The tensors of the inputs: path, tensor, dimension of the rows."""
    found = [(path, leaf, dim) for path, leaf, dim in described(inputs, batch_dims) if isinstance(leaf, Tensor)]
    for path, tensor, dim in found:
        if dim is not None and (tensor.is_nested or tensor.layout is not torch.strided):
            kind = "a nested tensor" if tensor.is_nested else f"of layout {tensor.layout}"
            raise ValueError(
                f"{path.removeprefix('.')} is {kind}, which can't be sliced into rows. Pass a dense, padded "
                "tensor; or None for it in `batch_dims`, where all micro-batches share it."
            )
    return found


def added(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The sum of two gradients, either of which may be missing."""
    return other if one is None else one if other is None else one + other
