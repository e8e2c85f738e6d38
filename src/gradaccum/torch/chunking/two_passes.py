"""One call of a module on a large batch, in micro-batches that can be run again when backward asks for them.

The trained parameters and the tensors among the arguments are the inputs of one autograd function. Its forward pass
runs micro-batches without graphs, and remembers what each started from. Its backward pass starts each from there once
more, with a graph that begins at leaves in place of parameters and inputs: what arrives in the leaves is the gradient.
So each parameter gets its gradient once, and hooks on parameters, DistributedDataParallel's among them,
`torch.autograd.grad` and modules that are called several times see what they would see of the large batch.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
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
from gradaccum.on_torch.batch import BatchDims, children, leaves, map_leaves
from gradaccum.on_torch.private import pass_for_parameter, run_backward
from gradaccum.on_torch.random_state import Conditions, all_generators, is_generator, kept
from gradaccum.torch.batch_norm import BatchNormPolicy
from gradaccum.torch.chunking.lent_buffers import LentBuffers
from gradaccum.torch.module_state import ModuleContents

logger = logging.getLogger("gradaccum")


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
    unknown = set(dims) - set(signature.parameters) - set(inputs.kwargs)
    if unknown:
        raise ValueError(
            f"`batch_dims` names {sorted(unknown)}, which {type(module).__name__}.forward{signature} doesn't have."
        )
    names = [name for name, p in signature.parameters.items() if p.kind is not p.KEYWORD_ONLY]
    by_position = itertools.chain(names, itertools.repeat(""))
    return Inputs(
        tuple(dims.get(name, 0) for name, _ in zip(by_position, inputs.args)),
        {name: dims.get(name, 0) for name in inputs.kwargs},
    )


_PLACEHOLDER = torch.empty(0)
"""Stands for a tensor in a tree that autograd shall not find tensors in: it keeps and watches them itself."""


def is_flat(tree: Any) -> bool:
    """Whether these are the most frequent inputs, tensors by position, which take no walk."""
    return type(tree) is Inputs and not tree.kwargs and all([type(leaf) is Tensor for leaf in tree.args])


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in a tree, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if is_flat(tree):
        return [*tree.args]
    return [tensor for _, _, child in children(tree) or () for tensor in tensors_of(child)]


def without_tensors(tree: Any) -> Any:
    return with_tensors(tree, itertools.repeat(_PLACEHOLDER))


def with_tensors(tree: Any, tensors: Iterable[Any]) -> Any:
    """The tree with the next of these in place of each of its tensors, in order."""
    remaining = iter(tensors)
    if isinstance(tree, Tensor):
        return next(remaining)
    if is_flat(tree):
        return Inputs(tuple(itertools.islice(remaining, len(tree.args))), {})
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
            "torch.nn.utils.parametrize.cached() keeps weights from a first pass, which have no graph, for the second "
            "one. Don't use it around chunked modules, blocks of a BlockStep, and their backward pass."
        )


class Passes:
    """The passes of a module over micro-batches, each of which can run again, from where it started."""

    def __init__(
        self,
        module: nn.Module,
        policy: BatchNormPolicy,
        first: Inputs,
        sizes: Sequence[int],
        *,
        state: ModuleContents | None = None,
        others: Sequence[nn.Module] = (),
    ) -> None:
        self.module, self.policy, self.sizes = module, policy, sizes
        self.state = ModuleContents(module) if state is None else state
        self.name = type(module).__name__
        self._devices = accelerators([*tensors_of(first), *self.state.parameters])
        self._generators = [
            *all_generators(self._devices),
            *self.state.generators,
            *(leaf for _, leaf in leaves(first) if is_generator(leaf)),
        ]
        of_policy = [m for m in self.state.modules if isinstance(m, _BatchNorm) and m.training]
        self._excluded = {id(buffer) for layer in of_policy for buffer in layer.buffers(recurse=False)}
        self._owners = [*self.state.modules, *others]
        # Every micro-batch starts from the buffers as they are now, and they move once.
        self._buffers = LentBuffers(self._owners, self._excluded)
        self.trained = [parameter for parameter in self.state.parameters if parameter.requires_grad]
        self._moves = False
        """Whether first passes have moved buffers."""
        self._starts: list[Conditions] = []
        self._inputs: list[tuple[Any, list[int]]] = []
        """Of each micro-batch, what it is called with but for the tensors, and which tensors these are."""
        self.outputs: list[Any] = []
        """Of each micro-batch, but for the tensors."""
        self._compared: dict[int, list[Tensor]] | None = None
        """First outputs, where second ones are to be compared with them."""

    def run(
        self, micro_batches: Sequence[Inputs], keep: int = 0, *, differentiated: bool, compares: bool = False
    ) -> list[Any]:
        """The outputs of each; the last `keep` keep their activations. `compares`: second outputs with first ones."""
        recomputed = max(len(micro_batches) - keep, 0) if differentiated else 0
        self._compared = {} if compares and recomputed else None
        outputs = self._in_two_passes(micro_batches[:recomputed]) if recomputed else []
        outputs += [self._first_pass(n, inputs) for n, inputs in enumerate(micro_batches) if n >= recomputed]
        self._moves = self._buffers.move()
        if self._compared is not None:
            self._warn_of_new_parameters()
        return outputs

    def _warn_of_new_parameters(self) -> None:
        every = [parameter for module in self.state.modules for parameter in module.parameters(recurse=False)]
        trained = sum(parameter.requires_grad for parameter in every)
        if trained > self.state.trained_count:  # which ones they are may change, as FSDP gathers them
            logger.warning(
                "%s has made parameters in its forward pass, and this call gives them no gradient. Call the module "
                "once before it is chunked.",
                self.name,
            )

    def _in_two_passes(self, micro_batches: Sequence[Inputs]) -> list[Any]:
        found = [tensors_of(inputs) for inputs in micro_batches]
        tensors = {id(tensor): tensor for of_one in found for tensor in of_one}  # those that are shared, once
        numbers = {key: number for number, key in enumerate(tensors)}
        places = [[numbers[id(tensor)] for tensor in of_one] for of_one in found]
        self._inputs = [*zip(map(without_tensors, micro_batches), places)]
        flat = iter(_TwoPasses.apply(self, *self.trained, *tensors.values()))
        return [with_tensors(skeleton, flat) for skeleton in self.outputs]

    def _micro_batch(self, number: int, tensors: Sequence[Tensor]) -> Inputs:
        skeleton, places = self._inputs[number]
        return with_tensors(skeleton, [tensors[place] for place in places])

    def first_passes(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors in the outputs of all micro-batches, without activations."""
        start, found = Conditions(self._generators, self._devices), []
        for number in range(len(self._inputs)):
            outputs = self._first_pass(number, self._micro_batch(number, tensors))
            self._starts.append(start)
            start = start.advance()
            self.outputs.append(without_tensors(outputs))
            made = [tensor.detach() for tensor in tensors_of(outputs)]
            if self._compared is not None:
                self._compared[number] = made
            found += made
        return found

    def _first_pass(self, number: int, inputs: Inputs) -> Any:
        """The outputs of one micro-batch; graph and activations are kept as the grad mode says."""
        given = tensors_of(inputs)
        versions = [version_of(tensor) for tensor in given]
        with self.policy.micro_batch(), self._buffers.lent(self.sizes[number]), _hooks_on_activations_explained():
            outputs = self.module(*inputs.args, **inputs.kwargs)
        edited = [tensor for tensor, before in zip(given, versions) if version_of(tensor) != before]
        if edited:
            raise self.edited(inputs, edited[0])
        return outputs

    def edited(self, inputs: Inputs, tensor: Tensor) -> Exception:
        """The error for a pass that has edited this tensor."""
        path = next(path for path, leaf in leaves(inputs) if leaf is tensor)
        return ValueError(
            f"{self.name} edits its input {path.removeprefix('.')} in place, so it can't be run again on the same "
            "input. Leave out inplace=True in its first operation, or give it a clone."
        )

    def second_passes(
        self, saved: Sequence[Tensor], needed: Sequence[bool], grads: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """The gradients of the trained parameters and of the tensors in the inputs; `needed`: which are asked for."""
        many = torch.is_grad_enabled()
        if many:
            self._check_no_backward_hooks()
        own = [*map(_alias_or_leaf if many else gradient_leaf, saved, needed)]
        roots: list[Tensor] = []
        given: list[Tensor] = []
        remaining, tensors = iter(grads), own[len(self.trained) :]
        moved = {generator for start in self._starts for generator in start.random.states}
        check_nothing_cached()
        parameters = {id(parameter): leaf for parameter, leaf in zip(self.trained, own)}
        # Checkpoints inside run once more, from the buffers as they are by now.
        buffers = LentBuffers(self._owners if self._moves else (), self._excluded)
        with self.state.restored(parameters), kept(moved), self.policy.recomputation(), torch.enable_grad():
            for number, skeleton in enumerate(self.outputs):
                outputs = tensors_of(self._second_pass(number, tensors))
                if self._compared is not None:
                    self._compare(outputs, self._compared.pop(number, []))
                found = backward_roots(outputs, [next(remaining) for _ in tensors_of(skeleton)])
                del outputs
                if many:  # all graphs stay, as these gradients are to be differentiated
                    roots, given = [*roots, *found[0]], [*given, *found[1]]
                elif found[0]:
                    with buffers.lent(self.sizes[number]):
                        run_backward(*found)
            if many:
                return _differentiable(roots, own, needed, given)
        buffers.move()
        return [None if leaf.grad is None else leaf.grad.to(leaf.dtype) for leaf in own]

    def _second_pass(self, number: int, tensors: Sequence[Tensor]) -> Any:
        inputs = self._micro_batch(number, tensors)
        with self._starts[number].restored(), self._buffers.lent():
            return self.module(*inputs.args, **inputs.kwargs)

    def _compare(self, second: Sequence[Tensor], first: Sequence[Tensor]) -> None:
        """Raise a NotEquivalentError if a second pass has made something else than the first one."""
        for now, then in zip(second, first):
            error = relative_error(now.detach(), then)
            if error > rounding(str(then.dtype), then.device.type):
                raise NotEquivalentError(
                    f"{self.name} gives other outputs when backward runs it again on the same inputs (relative error "
                    f"{error:.3g}), so its gradients would be wrong. Possible causes: it checks whether gradients are "
                    "enabled, as they are in the second run only; it draws from a generator that is neither an "
                    "attribute of a module nor an input; it reads a global that changes; an input was refilled before "
                    "backward, through NumPy or `.data` (pass a copy)."
                )

    def _check_no_backward_hooks(self) -> None:
        for path, layer in self.module.named_modules():  # second derivatives don't pass through their hooks
            if layer._backward_hooks or layer._backward_pre_hooks:
                raise NotImplementedError(
                    f"{path or 'The module'!r} ({type(layer).__name__}) in a chunked module has a backward hook, which "
                    "second derivatives (create_graph=True) don't call. Remove it, or register hooks on parameters and "
                    "inputs."
                )


class _TwoPasses(torch.autograd.Function):
    """The first passes forward, the second ones backward."""

    @staticmethod
    def forward(ctx: Any, passes: Passes, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.passes = passes
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        with no_word_of_missing_gradients():
            outputs = passes.first_passes(tensors[len(passes.trained) :])
        # Autocast keeps half-precision copies of parameters for reuse. In some releases a copy made here, without
        # a graph, would hide its parameter from the loss.
        if torch.is_autocast_cache_enabled():
            torch.clear_autocast_cache()
        ctx.mark_non_differentiable(*(tensor for tensor in outputs if not is_floating(tensor)))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        passes, needed, saved = ctx.passes, ctx.needs_input_grad[1:], ctx.saved_tensors
        gradients: Sequence[Tensor | None] = [None] * len(needed)
        if any(grad is not None for grad in grads):
            gradients = passes.second_passes(saved, needed, grads)
        # After a Function, torch would call the hooks of parameters that got no gradient with None.
        for parameter, gradient in zip(passes.trained, gradients):
            hooks: Any = parameter._backward_hooks if gradient is None else None
            for key, hook in (hooks or {}).items():
                hooks[key] = hook if isinstance(hook, _OnGradients) else _OnGradients(hook)
        return (None, *gradients)


class _OnGradients:
    """A hook that is called with gradients alone."""

    def __init__(self, hook: Callable[[Tensor], Any]) -> None:
        self.hook = hook
        functools.update_wrapper(self, hook)  # still the user's, for who looks at its module

    def __call__(self, gradient: Tensor | None) -> Any:
        return None if gradient is None else self.hook(gradient)


def backward_roots(outputs: Any, grads: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors in a micro-batch's outputs that have a gradient and pass it on, and their gradients."""
    pairs = zip(tensors_of(outputs), grads, strict=True)
    both = [(leaf, grad.to(leaf.device)) for leaf, grad in pairs if grad is not None and leaf.requires_grad]
    return [leaf for leaf, _ in both], [grad for _, grad in both]


def gradient_leaf(tensor: Tensor, needed: bool = True) -> Tensor:
    """A leaf that shares the tensor's values and has a `.grad` of its own, if that is needed.

    What is summed there reaches no hook. Half-precision gradients of parameters are summed in float32.
    """
    if not isinstance(tensor, nn.Parameter):
        return tensor.detach().requires_grad_(needed)
    leaf = nn.Parameter(tensor.detach(), needed)
    leaf.__dict__.update(tensor.__dict__)
    if leaf.dtype in (torch.bfloat16, torch.float16):
        leaf.grad_dtype = torch.float32
    return leaf


def _alias_or_leaf(tensor: Tensor, needed: bool) -> Tensor:
    """The same tensor, whose gradient can be asked for without calling its hooks; a leaf, if none is asked for."""
    if not needed:
        return gradient_leaf(tensor, needed)
    alias = tensor.view_as(tensor)
    if isinstance(tensor, nn.Parameter):  # it takes the place of one
        alias.__dict__.update(tensor.__dict__)
        pass_for_parameter(alias)
    return alias


def _differentiable(
    roots: Sequence[Tensor], own: Sequence[Tensor], needed: Sequence[bool], given: Sequence[Tensor]
) -> list[Tensor | None]:
    wanted = [tensor for tensor, is_needed in zip(own, needed, strict=True) if is_needed]
    found = iter(torch.autograd.grad(roots, wanted, given, create_graph=True, allow_unused=True))
    return [next(found) if is_needed else None for is_needed in needed]


_NO_GRADIENTS = ("ignore", re.compile("None of the inputs have requires_grad=True"), Warning, None, 0)


@contextlib.contextmanager
def no_word_of_missing_gradients() -> Iterator[None]:
    """Reentrant checkpoints inside would warn of a first pass, which has no gradients on purpose."""
    # `warnings.catch_warnings` would make Python forget which warnings it has shown, and show them once more.
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
            f"{error}: a chunked module runs twice, at first without gradients. Register hooks on activations only if "
            "`output.requires_grad`; they are called for each micro-batch."
        ) from error
