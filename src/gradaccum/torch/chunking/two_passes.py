"""One call of a module on a large batch, in micro-batches that can be run again when backward asks for them.

The module's parameters are inputs of one autograd function, which returns each parameter's gradient once, summed over
micro-batches. So hooks on parameters, DistributedDataParallel's among them, `torch.autograd.grad` and modules that are
called several times see what they would see of the large batch.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradaccum.core.rounding import rounding
from gradaccum.errors import NotEquivalentError
from gradaccum.on_torch.adapter.arrays import relative_error
from gradaccum.on_torch.batch import BatchDims, children, concatenate, described, has_rows, leaves, map_leaves, take
from gradaccum.on_torch.private import pass_for_parameter, run_backward
from gradaccum.on_torch.random_state import RandomState, all_generators, is_generator, kept
from gradaccum.torch.batch_norm import BatchNormPolicy
from gradaccum.torch.buffers import LentBuffers, ModuleContents
from gradaccum.torch.padding import Packs


class Inputs(NamedTuple):
    """What a module is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def dims_by_name(dims: BatchDims, inputs: Inputs, module: nn.Module) -> BatchDims:
    """`batch_dims`, which users give for positional arguments or by name, as a prefix of the inputs."""
    if dims is None or isinstance(dims, int):
        return dims
    if not isinstance(dims, Mapping):
        return Inputs(tuple(dims), dict.fromkeys(inputs.kwargs, 0))
    signature = inspect.signature(module.forward)
    names = [name for name, p in signature.parameters.items() if p.kind is not p.KEYWORD_ONLY]
    unknown = set(dims) - set(signature.parameters) - set(inputs.kwargs)
    if unknown:
        raise ValueError(
            f"`batch_dims` names {sorted(unknown)}, which {type(module).__name__}.forward{signature} doesn't have."
        )
    return Inputs(
        tuple(dims.get(name, 0) for name in (names + [""] * len(inputs.args))[: len(inputs.args)]),
        {name: dims.get(name, 0) for name in inputs.kwargs},
    )


_PLACEHOLDER = torch.empty(0)
"""Stands for a tensor in a tree that autograd shall not find tensors in: it keeps and watches them itself."""


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in a tree, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    return [tensor for _, _, child in children(tree) or () for tensor in tensors_of(child)]


def without_tensors(tree: Any) -> Any:
    """The tree with an empty tensor in place of each tensor."""
    return map_leaves(lambda leaf: _PLACEHOLDER if isinstance(leaf, Tensor) else leaf, tree)


def with_tensors(tree: Any, tensors: Sequence[Tensor]) -> Any:
    """The tree with these in place of its tensors, in order."""
    if isinstance(tree, Tensor):
        return tensors[0]
    if type(tree) is Inputs and not tree.kwargs and all([type(leaf) is Tensor for leaf in tree.args]):
        return Inputs(tuple(tensors), {})  # the most frequent call, without the walk
    remaining = iter(tensors)
    return map_leaves(lambda leaf: next(remaining) if isinstance(leaf, Tensor) else leaf, tree)


def is_floating(leaf: Any) -> bool:
    """Whether this leaf may pass gradients."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def version_of(tensor: Tensor) -> int:
    """How often it has been edited in place; inference tensors don't count."""
    return -1 if tensor.is_inference() else tensor._version


def accelerators(tensors: Iterable[Any]) -> list[torch.device]:
    """The devices of these tensors, each once, without the CPU."""
    found = {tensor.device for tensor in tensors if isinstance(tensor, Tensor)}
    return sorted((device for device in found if device.type not in ("cpu", "meta")), key=str)


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """The tensors and numbers, and containers of such, that modules have as attributes of their own."""
    return {
        f"{path}.{name}" if path else name: value
        for path, layer in module.named_modules()
        for name, value in vars(layer).items()
        if name not in _OF_EVERY_MODULE and all(isinstance(v, (Tensor, int, float)) for _, v in leaves(value))
    }


def check_nothing_cached() -> None:
    """Raise a ValueError inside of `parametrize.cached()`: what a pass without a graph caches has none later on."""
    if getattr(nn.utils.parametrize, "_cache_enabled", 0):
        raise ValueError(
            "torch.nn.utils.parametrize.cached() keeps weights from a first pass, which has no graph, for the second "
            "one. Leave it out around what runs twice: chunked modules, `blocks`, and their backward pass."
        )


class Conditions:
    """The random state and the autocast settings that a forward pass starts from."""

    def __init__(self, generators: Iterable[Any], devices: Iterable[torch.device] = ()) -> None:
        self.random = RandomState(generators)
        types = sorted({"cpu", *(device.type for device in devices)})
        self.autocast = [
            (type_, torch.is_autocast_enabled(type_), torch.get_autocast_dtype(type_))
            for type_ in types
            if torch.amp.is_autocast_available(type_)
        ]
        self.autocast_cache = torch.is_autocast_cache_enabled()

    def advance(self) -> Conditions:
        """The forward pass has run: keep the states of the generators that it has moved, only. Returns those now."""
        following = copy.copy(self)
        following.random = RandomState(self.random.states)
        self.random = self.random.only(self.random.moved(following.random))
        return following

    def restored(self) -> contextlib.AbstractContextManager[Any]:
        """Set the generators to these states, and enter these autocast settings."""
        self.random.put_back()
        casts = [cast for cast in self.autocast if cast[1] or torch.is_autocast_enabled(cast[0])]
        if not casts:
            return contextlib.nullcontext()
        stack = contextlib.ExitStack()
        for type_, enabled, dtype in casts:
            stack.enter_context(torch.autocast(type_, dtype=dtype, enabled=enabled, cache_enabled=self.autocast_cache))
        return stack


class ColumnsError(ValueError):
    """Outputs for each token, where micro-batches have columns of their own."""


class Call:
    """One call of a chunked module: all it takes to run any of its micro-batches, once or twice.

    A call is a chain of segments. Forward, a segment runs on all micro-batches before the next one begins; backward,
    segments run again in reverse. Here it is one segment, the module; `ExactCall` has one between BatchNorm layers.
    """

    segment_count = 1

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
        of_tensors = [
            (path, leaf, dim) for path, leaf, dim in described(inputs, batch_dims) if isinstance(leaf, Tensor)
        ]
        for path, tensor, dim in of_tensors:
            if dim is not None and (tensor.is_nested or tensor.layout is not torch.strided):
                kind = "a nested tensor" if tensor.is_nested else f"of layout {tensor.layout}"
                raise ValueError(
                    f"{path.removeprefix('.')} is {kind}, which can't be sliced into rows. Pass a dense, padded "
                    "tensor; or None for it in `batch_dims`, where all micro-batches share it."
                )
        self.paths, self.dims = [path for path, _, _ in of_tensors], [dim for _, _, dim in of_tensors]
        self.skeleton = without_tensors(inputs)
        self.slices = [slice(end - size, end) for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
        self._skeletons = [self.skeleton] * len(sizes)
        others = [leaf for _, leaf in leaves(inputs) if not isinstance(leaf, Tensor)]
        if any(map(has_rows, others)):  # arrays
            ordered = inputs if packs is None else take(inputs, packs.order, batch_dims)
            self._skeletons = [without_tensors(take(ordered, rows, batch_dims)) for rows in self.slices]
        self.devices = accelerators([*(leaf for _, leaf, _ in of_tensors), *self.state.parameters])
        self.generators = [*all_generators(self.devices), *self.state.generators, *filter(is_generator, others)]
        """All that the module may draw random numbers from."""
        self.conditions: dict[Any, Conditions] = {}
        """What each first pass started from, by what it ran."""
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
        excluded = {  # which the BatchNorm policy takes care of
            id(buffer)
            for layer in self.module.modules()
            if isinstance(layer, _BatchNorm) and layer.training
            for buffer in layer.buffers(recurse=False)
        }
        # Every micro-batch starts from the buffers as they are now, and they move once.
        self.buffers = LentBuffers(self.state.modules, excluded)
        parts = [self.in_two_passes(range(recomputed), tensors)] if recomputed else []
        parts += [self._first_pass(tensors, index) for index in range(recomputed, len(self.slices))]
        outputs = parts[0] if len(parts) == 1 else concatenate(parts, self.out_dims)
        self.buffers.move()
        return outputs if self.packs is None else take(outputs, self.packs.back, self.out_dims)

    def in_two_passes(self, indices: Sequence[int], tensors: Sequence[Tensor]) -> Any:
        """The outputs of these micro-batches, whose activations backward recomputes."""
        self.trained = [parameter for parameter in self.state.parameters if parameter.requires_grad]
        flat = _TwoPasses.apply(self, tuple(indices), *self.trained, *tensors)
        return with_tensors(self.output_skeleton, flat)

    def pieces(self, tensors: Sequence[Any], dims: Sequence[int | None], index: int) -> list[Any]:
        """A micro-batch's rows of these tensors, which lie in these dimensions."""
        start, size = self.slices[index].start, self.sizes[index]
        return [
            tensor if tensor is None or dim is None else tensor.narrow(dim, start, size)
            for tensor, dim in zip(tensors, dims, strict=True)
        ]

    def _inputs_of(self, pieces: Sequence[Tensor], index: int) -> Inputs:
        inputs = with_tensors(self._skeletons[index], pieces)
        return inputs if self.packs is None else self.packs.trimmed(inputs, index)

    # First passes.

    def first_passes(self, indices: Sequence[int], tensors: Sequence[Tensor]) -> Any:
        """The outputs of these micro-batches, without activations."""
        here, outputs = Conditions(self.generators, self.devices), []
        for index in indices:
            outputs.append(self._first_pass(tensors, index))
            self.conditions[index], here = here, here.advance()
            self.note_outputs(outputs[-1], index)
        return concatenate(outputs, self.out_dims)

    def _first_pass(self, tensors: Sequence[Tensor], index: int) -> Any:
        """The outputs of one micro-batch; graph and activations are kept as the grad mode says."""
        inputs = self._inputs_of(self.pieces(tensors, self.dims, index), index)
        versions = [version_of(tensor) for tensor in tensors]
        with self.policy.micro_batch(), self.buffers.lent(self.sizes[index]), _hooks_on_activations_explained():
            outputs = self.module(*inputs.args, **inputs.kwargs)
        self.policy.commit()
        for path, tensor, version in zip(self.paths, tensors, versions, strict=True):
            if version_of(tensor) != version:
                raise ValueError(
                    f"{type(self.module).__name__} edits its input {path.removeprefix('.')} in place, so it can't be "
                    "run again on the same input. Its first operation may have inplace=True; or give it a clone."
                )
        return self.checked(outputs, index)

    def checked(self, outputs: Any, index: int) -> Any:
        """A micro-batch's outputs, computed. Raises a ValueError if they aren't one per row."""
        outputs = _computed(outputs)
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
        return outputs

    def note_outputs(self, outputs: Any, index: int) -> None:
        """Keep a micro-batch's outputs for its second pass, where these are to be compared."""
        if self.first_outputs is not None:
            self.first_outputs[index] = [tensor.detach() for tensor in tensors_of(outputs)]

    def stored_tensors(self) -> list[Tensor]:
        """What first passes have made for second ones, for autograd to keep."""
        return []

    # Second passes.

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
        pieces = [self.pieces(sums.inputs, self.dims, index) for index in indices]
        self.begin_backward(sums, stored)
        with self._recomputation(sums.parameters), torch.enable_grad():
            for segment in reversed(range(self.segment_count)):
                for index in indices:
                    values = sums.leaves_of(pieces[index])
                    self.backward_through(segment, index, values, self.pieces(grads, self.output_dims, index))
                    sums.add(values, self.slices[index])
                    del values
                self.end_segment(segment)
        return sums.gradients()

    @contextlib.contextmanager
    def _recomputation(self, replacements: Mapping[int, Tensor]) -> Iterator[None]:
        """Around second passes: the module is as it was in the first ones, and they leave no trace."""
        moved = {generator for conditions in self.conditions.values() for generator in conditions.random.states}
        check_nothing_cached()
        with self.state.restored(replacements), kept(moved):
            yield

    def _second_pass(self, pieces: Sequence[Tensor], index: int) -> Any:
        inputs = self._inputs_of(pieces, index)
        with self.conditions[index].restored(), self.policy.recomputation(), self.buffers.lent():
            return self.module(*inputs.args, **inputs.kwargs)

    def begin_backward(self, sums: GradientSums, stored: Sequence[Tensor]) -> None:
        """All gradients of the outputs are there."""

    def backward_through(
        self, segment: int, index: int, values: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> None:
        """Run a segment again on a micro-batch, with a graph from these leaves, and backward."""
        outputs = self.compared(self._second_pass(values, index), index)
        roots, given = backward_roots(outputs, grads)
        del outputs
        if roots:
            run_backward(roots, given)

    def compared(self, outputs: Any, index: int) -> Any:
        """A second pass's outputs. Raises a NotEquivalentError if they aren't those of the first one."""
        outputs = _computed(outputs)
        if self.first_outputs is not None:
            self.compare(tensors_of(outputs), self.first_outputs.pop(index, []))
        return outputs

    def compare(self, second: Sequence[Tensor], first: Sequence[Tensor]) -> None:
        """Raise a NotEquivalentError if a second pass has made something else than the first one."""
        for now, then in zip(second, first):
            error = relative_error(now.detach(), then)
            if error > rounding(str(then.dtype), then.device.type):
                raise NotEquivalentError(
                    f"{type(self.module).__name__} gives other outputs when backward runs it again on the same inputs "
                    f"(relative error {error:.3g}), so its gradients would be those of something else. Does it ask "
                    "whether gradients are enabled, which they are in the second run alone? Does it draw from a "
                    "generator that is neither an attribute of a module nor an input, or depend on a global that "
                    "moves? Was an input refilled before backward, through NumPy or `.data`? Pass a copy of that one."
                )

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
        # Of a gradient that reaches a module's input, its backward hooks get what came along with one of its output. Of
        # the large batch that is all of it; here second derivatives come by themselves, and pass the hooks by.
        for path, layer in self.module.named_modules():
            if layer._backward_hooks or layer._backward_pre_hooks:
                raise NotImplementedError(
                    f"{path or 'The module'!r} ({type(layer).__name__}) in a chunked module has a backward hook, which "
                    "second derivatives (create_graph=True) pass by. Take it off, or register hooks on parameters and "
                    "inputs."
                )
        # Under names of their own, so that hooks see a finished gradient, not that of each micro-batch.
        own = [_alias(tensor) if is_needed else tensor for tensor, is_needed in zip(tensors, needed, strict=True)]
        inputs = own[len(self.trained) :]
        wanted = [tensor for tensor, is_needed in zip(own, needed, strict=True) if is_needed]
        total: list[Tensor | None] = [None] * len(wanted)
        parameters = {id(p): alias for p, alias in zip(self.trained, own)}
        with self._recomputation(parameters):
            for index in indices:
                outputs = _computed(self._second_pass(self.pieces(inputs, self.dims, index), index))
                roots, given = backward_roots(outputs, self.pieces(grads, self.output_dims, index))
                if roots:
                    parts = torch.autograd.grad(roots, wanted, given, create_graph=True, allow_unused=True)
                    total = [added(one, other) for one, other in zip(total, parts, strict=True)]
        summed = iter(total)
        return [next(summed) if is_needed else None for is_needed in needed]


def _computed(outputs: Any) -> Any:
    """Outputs with tensors in place of what stands for them until a loss takes it, as the logits of a `head`."""
    if not any(_stands_for_tensor(leaf) for _, leaf in leaves(outputs)):
        return outputs
    return map_leaves(lambda leaf: torch.cat([leaf]) if _stands_for_tensor(leaf) else leaf, outputs)


def _stands_for_tensor(leaf: Any) -> bool:
    return hasattr(type(leaf), "__torch_function__") and not isinstance(leaf, Tensor)


class _TwoPasses(torch.autograd.Function):
    """The first passes forward, the second ones backward."""

    @staticmethod
    def forward(ctx: Any, call: Call, indices: tuple[int, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.indices = call, indices
        ctx.set_materialize_grads(False)
        inputs = tensors[len(call.trained) :]
        with _without_a_word_of_gradients():
            outputs = call.first_passes(indices, inputs)
        ctx.save_for_backward(*tensors, *call.stored_tensors())
        # Autocast keeps half-precision copies of parameters for reuse. In some releases a copy made here, without
        # a graph, would hide its parameter from the loss.
        if torch.is_autocast_cache_enabled():
            torch.clear_autocast_cache()
        call.output_skeleton = without_tensors(outputs)
        found = [(leaf, dim) for _, leaf, dim in described(outputs, call.out_dims) if isinstance(leaf, Tensor)]
        call.output_dims = [dim for _, dim in found]
        ctx.mark_non_differentiable(*(t for t, _ in found if not (t.is_floating_point() or t.is_complex())))
        return tuple([leaf for leaf, _ in found])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        call: Call = ctx.call
        needed, saved = ctx.needs_input_grad[2:], ctx.saved_tensors
        tensors, stored = saved[: len(needed)], saved[len(needed) :]
        gradients: list[Tensor | None] = [None] * len(needed)
        if any(grad is not None for grad in grads):
            gradients = call.second_passes(ctx.indices, tensors, stored, needed, grads)
        # After a Function, torch would call the hooks of parameters that got no gradient with None.
        for parameter, gradient in zip(call.trained, gradients):
            hooks = parameter._backward_hooks
            if gradient is None and hooks:
                for key, hook in hooks.items():
                    hooks[key] = hook if isinstance(hook, _OnGradients) else _OnGradients(hook)
        return (None, None, *gradients)


def added(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The sum of two gradients, either of which may be missing."""
    return other if one is None else one if other is None else one + other


class GradientSums:
    """What second passes sum gradients in: leaves in place of the parameters, and the inputs' gradients of all rows."""

    def __init__(
        self,
        trained: Sequence[Tensor],
        dims: Sequence[int | None],
        tensors: Sequence[Tensor],
        needed: Sequence[bool],
    ) -> None:
        count = len(trained)
        self.inputs, self._needed, self._dims = tensors[count:], needed[count:], dims
        self.parameters = {id(p): gradient_leaf(saved) for p, saved in zip(trained, tensors)}
        """The leaves, by `id` of the parameter."""
        for leaf, is_needed in zip(self.parameters.values(), needed):
            leaf.requires_grad_(is_needed)
        places = [place for place, is_needed in enumerate(self._needed) if is_needed]
        self._shared = {p: self.inputs[p].detach().requires_grad_() for p in places if dims[p] is None}
        self._per_row = {p: dim for p in places if (dim := dims[p]) is not None}
        self._whole: dict[int, Tensor] = {}

    def leaves_of(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """The tensors in a micro-batch's inputs, as leaves."""
        leaves = []
        for place, value in enumerate(pieces):
            if place in self._shared:
                leaves.append(self._shared[place])
            elif place in self._per_row:
                leaves.append(value.detach().requires_grad_())
            else:  # it may have a graph of its own, for which somebody else has not asked
                leaves.append(value.detach() if value.requires_grad else value)
        return leaves

    def add(self, values: Sequence[Tensor], rows: slice) -> None:
        """Backward has reached these leaves of a micro-batch: add their gradients to those of all rows."""
        for place, dim in self._per_row.items():
            gradient = values[place].grad
            if gradient is not None:
                if place not in self._whole:
                    self._whole[place] = torch.zeros_like(self.inputs[place])
                self._whole[place].narrow(dim, rows.start, rows.stop - rows.start).add_(gradient)

    def gradients(self) -> list[Tensor | None]:
        """Those of the parameters, then those of the inputs."""
        found = [None if leaf.grad is None else leaf.grad.to(leaf.dtype) for leaf in self.parameters.values()]
        for place in range(len(self.inputs)):
            found.append(self._shared[place].grad if place in self._shared else self._whole.get(place))
        return found


def backward_roots(outputs: Any, grads: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors in a micro-batch's outputs that have a gradient and pass it on, and their gradients."""
    pairs = zip(tensors_of(outputs), grads, strict=True)
    both = [(leaf, grad) for leaf, grad in pairs if grad is not None and leaf.requires_grad]
    return [leaf for leaf, _ in both], [grad for _, grad in both]


def gradient_leaf(parameter: Tensor) -> Tensor:
    """A leaf that shares the parameter's values and has a `.grad` of its own.

    What is summed there reaches no hook of the parameter. Half-precision gradients are summed in float32.
    """
    leaf = nn.Parameter(parameter.detach())
    leaf.__dict__.update(parameter.__dict__)
    if leaf.dtype in (torch.bfloat16, torch.float16):
        leaf.grad_dtype = torch.float32
    return leaf


def _alias(tensor: Tensor) -> Tensor:
    """The same tensor, whose gradient can be asked for without calling its hooks."""
    alias = tensor.view_as(tensor)
    if isinstance(tensor, nn.Parameter):  # it takes the place of one
        alias.__dict__.update(tensor.__dict__)
        pass_for_parameter(alias)
    return alias


class _OnGradients:
    """A hook that is called with gradients alone."""

    def __init__(self, hook: Callable[[Tensor], Any]) -> None:
        self.hook = hook
        functools.update_wrapper(self, hook)  # still the user's, for who looks at its module

    def __call__(self, gradient: Tensor | None) -> Any:
        return None if gradient is None else self.hook(gradient)


_NO_GRADIENTS = ("ignore", re.compile("None of the inputs have requires_grad=True"), Warning, None, 0)


@contextlib.contextmanager
def _without_a_word_of_gradients() -> Iterator[None]:
    """Reentrant checkpoints inside would say so of a first pass, which is without gradients on purpose.

    Not by `warnings.catch_warnings`, after which Python forgets what it has shown and shows it once more.
    """
    warnings.filters.insert(0, _NO_GRADIENTS)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            warnings.filters.remove(_NO_GRADIENTS)  # type: ignore[attr-defined]


@contextlib.contextmanager
def _hooks_on_activations_explained() -> Iterator[None]:
    """PyTorch's error about a hook on an activation without a graph, with the reason why it has none."""
    try:
        yield
    except RuntimeError as error:
        if torch.is_grad_enabled() or "register a hook on a tensor that doesn't require gradient" not in str(error):
            raise
        raise RuntimeError(
            f"{error}: a chunked module runs twice, at first without gradients. Register hooks on activations where "
            "`output.requires_grad` alone; they are called for each micro-batch."
        ) from error
