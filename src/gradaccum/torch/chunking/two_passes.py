"""One call of a module on a large batch, in micro-batches that can be run again when backward asks for them.

The module's parameters are inputs of one autograd function, which returns each parameter's gradient once, summed over
micro-batches. So hooks on parameters, DistributedDataParallel's among them, `torch.autograd.grad` and modules that are
called several times see what they would see of the large batch.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradaccum.on_torch.backward import run_backward
from gradaccum.on_torch.batch import BatchDims, concatenate, described, has_rows, leaves, map_leaves, take
from gradaccum.on_torch.random_state import RandomState, kept
from gradaccum.torch.batch_norm import BatchNormPolicy
from gradaccum.torch.chunking.recompute import Buffers, Surroundings, accelerators, stand_ins, swapped

__all__ = [
    "Call",
    "Inputs",
    "Leaves",
    "handed_out",
    "tensors_of",
    "with_gradients",
    "with_tensors",
    "without_tensors",
]


class Inputs(NamedTuple):
    """What a module is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


_TAKEN_OUT = torch.empty(0)
"""In place of a tensor in a tree that autograd shall not find tensors in: it keeps and watches them itself."""


def tensors_of(tree: Any) -> list[Tensor]:
    return [leaf for _, leaf in leaves(tree) if isinstance(leaf, Tensor)]


def without_tensors(tree: Any) -> Any:
    return map_leaves(lambda leaf: _TAKEN_OUT if isinstance(leaf, Tensor) else leaf, tree)


def with_tensors(tree: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return tensors[0]
    if type(tree) is Inputs and not tree.kwargs and all([type(leaf) is Tensor for leaf in tree.args]):
        return Inputs(tuple(tensors), {})  # the most frequent call, without the walk
    remaining = iter(tensors)
    return map_leaves(lambda leaf: next(remaining) if isinstance(leaf, Tensor) else leaf, tree)


class Call:
    """One call of a chunked module: all it takes to run any of its micro-batches, once or twice.

    Args:
        module: What is called.
        policy: What to do about its BatchNorm layers.
        inputs: What it is called with.
        batch_dims: Where the inputs' rows are.
        out_dims: Where the outputs' rows are.
        sizes: Rows of each micro-batch.
    """

    def __init__(
        self,
        module: nn.Module,
        policy: BatchNormPolicy,
        inputs: Inputs,
        batch_dims: BatchDims,
        out_dims: BatchDims,
        sizes: list[int],
    ) -> None:
        self.module, self.policy = module, policy
        self.batch_dims, self.out_dims = batch_dims, out_dims
        of_tensors = [entry for entry in described(inputs, batch_dims) if isinstance(entry[1], Tensor)]
        self.paths = [path for path, _, _ in of_tensors]
        self.dims = [dim for _, _, dim in of_tensors]
        self.skeleton = without_tensors(inputs)
        self.sizes = sizes
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
        self.slices = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        self.skeletons = [self.skeleton] * len(sizes)
        if any(has_rows(leaf) and not isinstance(leaf, Tensor) for _, leaf in leaves(inputs)):  # arrays
            self.skeletons = [without_tensors(take(inputs, rows, batch_dims)) for rows in self.slices]
        self.devices = accelerators([*(leaf for _, leaf, _ in of_tensors), *module.parameters()])
        self.surroundings: dict[Any, Surroundings] = {}
        self._here: Surroundings | None = None
        """Those of the next micro-batch, while they are to be remembered."""
        self.parameter_ids: list[int] = []
        self.output_skeleton: Any = None
        self.output_dims: list[int | None] = []
        """Where the rows of the tensors in the outputs are."""

    def run(self, recomputed: int, parameters: Sequence[Tensor] | None, tensors: Sequence[Tensor]) -> Any:
        """The outputs of all micro-batches.

        Args:
            recomputed: How many of them backward recomputes; the others keep their activations.
            parameters: Those that may get gradients; None if there is nothing to differentiate.
            tensors: The tensors in the inputs.
        """
        parts, others = [], range(recomputed, len(self.slices))
        with self.buffers_moved_once():
            if parameters is None:
                others = range(len(self.slices))
            elif recomputed:
                parts.append(self.in_two_passes(range(recomputed), parameters, tensors))
            parts += [self.first_pass(tensors, index) for index in others]
            return parts[0] if len(parts) == 1 else concatenate(parts, self.out_dims)

    def in_two_passes(self, indices: Sequence[int], parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> Any:
        """The outputs of these micro-batches, whose activations backward computes anew."""
        self.parameter_ids = [id(parameter) for parameter in parameters]
        self._here = Surroundings(self.devices)
        before = self._here.random
        flat = TwoPasses.apply(self, tuple(indices), *parameters, *tensors)
        unwatched = before.only(set(before.states) - set(self._here.random.states))
        self._here = None
        if unwatched.moved():
            self._watch_all(indices, tensors, before)
        return with_tensors(self.output_skeleton, flat)

    def _watch_all(self, indices: Sequence[int], tensors: Sequence[Tensor], before: RandomState) -> None:
        """A later micro-batch has drawn from a generator that the first one left alone: run them again to see which."""
        with kept(before.states), torch.no_grad(), self.policy.recomputation():
            before.put_back()
            here = Surroundings(self.devices)
            for index in indices:
                inputs = self.inputs_of(self.pieces(tensors, index), index)
                with self.buffers.lent():
                    self.module(*inputs.args, **inputs.kwargs)
                self.surroundings[index], here = here, here.leave()

    def first_pass(self, tensors: Sequence[Tensor], index: int, pieces: Sequence[Tensor] | None = None) -> Any:
        """The outputs of one micro-batch; graph and activations are kept as the grad mode says.

        Args:
            tensors: Those in the inputs.
            index: Which micro-batch.
            pieces: What it has of them, where that is known already.
        """
        inputs = self.inputs_of(self.pieces(tensors, index) if pieces is None else pieces, index)
        versions = [None if tensor.is_inference() else tensor._version for tensor in tensors]
        with self.policy.micro_batch(), self.buffers.lent(self.slices[index].stop - self.slices[index].start):
            outputs = self.module(*inputs.args, **inputs.kwargs)
        if self._here is not None:
            self.surroundings[index], self._here = self._here, self._here.leave(all_moved=index > 0)
            if index == 0:  # it takes long to look at generators: from here on only at those that are used
                self._here.random = self._here.random.only(self.surroundings[0].random.states)
        self.policy.commit()
        for path, tensor, version in zip(self.paths, tensors, versions, strict=True):
            if version is not None and tensor._version != version:
                raise ValueError(
                    f"{type(self.module).__name__} edits its input {_named(path)} in place, so it can't be run again "
                    "on the same input. Its first operation may have inplace=True; or give it a clone."
                )
        self._check_rows(outputs, index)
        return outputs

    def second_pass(self, inputs: Inputs, index: int) -> Any:
        """The outputs of one micro-batch again, everything but its inputs as in the first pass.

        Nothing is moved but random numbers: second passes are made inside `random_kept`.
        """
        with self.surroundings[index].again(), self.policy.recomputation(), self.buffers.lent():
            return self.module(*inputs.args, **inputs.kwargs)

    def random_kept(self) -> contextlib.AbstractContextManager[None]:
        """Around second passes: random numbers go on outside as if they had not been made."""
        return kept({generator for here in self.surroundings.values() for generator in here.random.states})

    def pieces(self, tensors: Sequence[Tensor], index: int) -> list[Tensor]:
        """What a micro-batch has of these tensors, those of the inputs."""
        rows = self.slices[index]
        start, length = rows.start, rows.stop - rows.start
        return [
            tensor if dim is None else tensor.narrow(dim, start, length)
            for tensor, dim in zip(tensors, self.dims, strict=True)
        ]

    def cut_inputs(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """What each micro-batch has of these tensors, those of the inputs; not to be edited in place."""
        parts = [
            [tensor] * len(self.sizes) if dim is None else tensor.split(self.sizes, dim)
            for tensor, dim in zip(tensors, self.dims, strict=True)
        ]
        return list(zip(*parts)) if parts else [()] * len(self.sizes)

    def cut_gradients(self, grads: Sequence[Tensor | None], count: int) -> list[tuple[Tensor | None, ...]]:
        """What each of the first `count` micro-batches has of the gradients of the tensors in their outputs."""
        parts: list[Sequence[Tensor | None]] = []
        sizes = self.sizes[:count]
        for grad, dim in zip(grads, self.output_dims, strict=True):
            assert grad is None or dim is not None
            parts.append([None] * count if grad is None else grad.split(sizes, dim or 0))
        return list(zip(*parts))

    def inputs_of(self, pieces: Sequence[Tensor], index: int) -> Inputs:
        """The inputs of a micro-batch, from its tensors."""
        return with_tensors(self.skeletons[index], pieces)

    @contextlib.contextmanager
    def buffers_moved_once(self) -> Iterator[None]:
        """Around all first passes: every micro-batch starts from the buffers as they are now, and they move once."""
        owned = {  # which the BatchNorm policy takes care of
            id(buffer)
            for layer in self.module.modules()
            if isinstance(layer, _BatchNorm) and layer.training
            for buffer in layer.buffers(recurse=False)
        }
        self.buffers = Buffers(self.module, owned)
        yield
        self.buffers.move()

    def _check_rows(self, outputs: Any, index: int) -> None:
        rows = self.slices[index].stop - self.slices[index].start
        for path, leaf, dim in described(outputs, self.out_dims):
            if isinstance(leaf, Tensor) and (dim is None or leaf.shape[dim] != rows):
                where = "no dimension" if dim is None else f"dimension {dim}"
                raise ValueError(
                    f"Outputs must have a row for every row of the inputs. Received: output{path} of shape "
                    f"{tuple(leaf.shape)} for {rows} rows, looked for in {where}. Return one value per row and reduce "
                    "over them outside, or name the dimension in `out_dims`."
                )


def _named(path: str) -> str:
    """`.args[0]['x']` as `args[0]['x']`."""
    return path.removeprefix(".")


class TwoPasses(torch.autograd.Function):
    """The first pass forward, the second one backward."""

    @staticmethod
    def forward(ctx: Any, call: Call, indices: tuple[int, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.indices = call, indices
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        inputs = tensors[len(call.parameter_ids) :]
        with warnings.catch_warnings():
            # Reentrant checkpoints inside would say so of this pass, which is without gradients on purpose.
            warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
            pieces = call.cut_inputs(inputs)
            outputs = concatenate([call.first_pass(inputs, index, pieces[index]) for index in indices], call.out_dims)
        return handed_out(ctx, call, outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        call: Call = ctx.call
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        if all(grad is None for grad in grads):
            return (None,) * (2 + len(tensors))
        gradients = _differentiable if torch.is_grad_enabled() else _summed
        return (None, None, *gradients(call, ctx.indices, tensors, needed, grads))


def handed_out(ctx: Any, call: Call, outputs: Any) -> tuple[Tensor, ...]:
    """The tensors in a first pass' outputs, as an autograd function returns them."""
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


class Leaves:
    """What a second pass sums gradients in: stand-ins for the parameters, and for the inputs, put together of rows.

    Args:
        call: Whose second pass.
        tensors: The parameters, then the tensors in the inputs.
        needed: Of each of them whether its gradient is.
    """

    def __init__(self, call: Call, tensors: Sequence[Tensor], needed: Sequence[bool]) -> None:
        count = len(call.parameter_ids)
        self.inputs, self._needed, self._dims = tensors[count:], needed[count:], call.dims
        self.parameters = dict(zip(call.parameter_ids, stand_ins(tensors[:count]).values(), strict=True))
        for leaf, is_needed in zip(self.parameters.values(), needed[:count], strict=True):
            leaf.requires_grad_(is_needed)
        self._shared = {
            place: tensor.detach().requires_grad_()
            for place, (tensor, dim, is_needed) in enumerate(zip(self.inputs, self._dims, self._needed, strict=True))
            if is_needed and dim is None
        }
        self._per_row = [place for place, needed in enumerate(self._needed) if needed and self._dims[place] is not None]
        self._whole: dict[int, Tensor] = {}

    def of(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """The tensors in a micro-batch's inputs, as leaves."""
        return [
            value if not is_needed else self._shared[place] if dim is None else value.detach().requires_grad_()
            for place, (value, dim, is_needed) in enumerate(zip(pieces, self._dims, self._needed, strict=True))
        ]

    def add(self, values: Sequence[Tensor], rows: slice) -> None:
        """Backward has reached these leaves of a micro-batch: add their gradients to those of all rows."""
        for place in self._per_row:
            gradient, dim = values[place].grad, self._dims[place]
            if gradient is not None and dim is not None:
                if place not in self._whole:
                    self._whole[place] = torch.zeros_like(self.inputs[place])
                self._whole[place].narrow(dim, rows.start, rows.stop - rows.start).add_(gradient)

    def gradients(self) -> list[Tensor | None]:
        """Those of the parameters, then those of the inputs."""
        return [
            *(
                grad if (grad := leaf.grad) is None or grad.dtype is leaf.dtype else grad.to(leaf.dtype)
                for leaf in self.parameters.values()
            ),
            *(
                self._shared[place].grad if place in self._shared else self._whole.get(place)
                for place in range(len(self.inputs))
            ),
        ]


def with_gradients(outputs: Any, grads: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors in a micro-batch's outputs that have a gradient and pass it on, and their gradients."""
    if type(outputs) is Tensor:
        return ([outputs], [grads[0]]) if grads[0] is not None and outputs.requires_grad else ([], [])
    found = tensors_of(outputs)
    both = [(leaf, grad) for leaf, grad in zip(found, grads, strict=True) if grad is not None and leaf.requires_grad]
    return [leaf for leaf, _ in both], [grad for _, grad in both]


def _summed(
    call: Call,
    indices: Sequence[int],
    tensors: Sequence[Tensor],
    needed: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Gradients of parameters and inputs: each micro-batch's graph is built and used up before the next one's."""
    sums = Leaves(call, tensors, needed)
    pieces, pieces_of_grads = call.cut_inputs(sums.inputs), call.cut_gradients(grads, len(indices))
    with swapped(call.module, sums.parameters), call.random_kept(), torch.enable_grad():
        for index in indices:
            values = sums.of(pieces[index])
            outputs = call.second_pass(call.inputs_of(values, index), index)
            reached, given = with_gradients(outputs, pieces_of_grads[index])
            if reached:
                run_backward(reached, given)
            sums.add(values, call.slices[index])
            del outputs, reached, given, values
    return sums.gradients()


def _differentiable(
    call: Call,
    indices: Sequence[int],
    tensors: Sequence[Tensor],
    needed: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The same under `create_graph=True`: gradients that can be differentiated again, so all graphs stay."""
    inputs = tensors[len(call.parameter_ids) :]
    wanted = [tensor for tensor, is_needed in zip(tensors, needed, strict=True) if is_needed]
    total: list[Tensor | None] = [None] * len(wanted)
    pieces_of_grads = call.cut_gradients(grads, len(indices))
    for index in indices:
        with call.random_kept():
            outputs = call.second_pass(call.inputs_of(call.pieces(inputs, index), index), index)
        reached, given = with_gradients(outputs, pieces_of_grads[index])
        if reached:
            parts = torch.autograd.grad(reached, wanted, given, create_graph=True, allow_unused=True)
            total = [
                new if old is None else old if new is None else old + new for old, new in zip(total, parts, strict=True)
            ]
    summed = iter(total)
    return [next(summed) if is_needed else None for is_needed in needed]
