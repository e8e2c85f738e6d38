"""Gradients summed over micro-batches."""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.on_torch.private import pass_for_parameter
from gradaccum.torch.chunking.recompute import tensors_of

__all__ = [
    "GradientSums",
    "aliases",
    "backward_hooks_only_look",
    "backward_roots",
    "gradient_leaf",
    "hooks_on_activations_explained",
    "spare_hooks",
    "without_a_word_of_gradients",
]


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
        for leaf, is_needed in zip(self.parameters.values(), needed[:count], strict=True):
            leaf.requires_grad_(is_needed)
        self._shared = {
            place: tensor.detach().requires_grad_()
            for place, (tensor, dim, is_needed) in enumerate(zip(self.inputs, self._dims, self._needed, strict=True))
            if is_needed and dim is None
        }
        self._per_row = [place for place, needed in enumerate(self._needed) if needed and self._dims[place] is not None]
        self._whole: dict[int, Tensor] = {}

    def leaves_of(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """The tensors in a micro-batch's inputs, as leaves."""
        leaves = []
        for place, (value, dim, is_needed) in enumerate(zip(pieces, self._dims, self._needed, strict=True)):
            if is_needed:
                leaves.append(self._shared[place] if dim is None else value.detach().requires_grad_())
            else:  # it may have a graph of its own, for which somebody else has not asked
                leaves.append(value.detach() if value.requires_grad else value)
        return leaves

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


def backward_roots(outputs: Any, grads: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors in a micro-batch's outputs that have a gradient and pass it on, and their gradients."""
    if type(outputs) is Tensor:
        return ([outputs], [grads[0]]) if grads[0] is not None and outputs.requires_grad else ([], [])
    found = tensors_of(outputs)
    both = [(leaf, grad) for leaf, grad in zip(found, grads, strict=True) if grad is not None and leaf.requires_grad]
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


def aliases(tensors: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor]:
    """The same tensors, whose gradients can be asked for without calling the hooks of those that are needed."""
    return [_alias(tensor) if is_needed else tensor for tensor, is_needed in zip(tensors, needed, strict=True)]


def _alias(tensor: Tensor) -> Tensor:
    alias = tensor.view_as(tensor)
    if isinstance(tensor, nn.Parameter):  # it takes the place of one
        alias.__dict__.update(tensor.__dict__)
        pass_for_parameter(alias)
    return alias


def spare_hooks(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Keep hooks on parameters that got no gradient from being called with None, as torch does after a Function."""
    for parameter, gradient in zip(parameters, gradients):
        hooks = parameter._backward_hooks
        if gradient is None and hooks:
            for key, hook in hooks.items():
                hooks[key] = hook if isinstance(hook, _OnGradients) else _OnGradients(hook)


class _OnGradients:
    """A hook that is called with gradients alone."""

    def __init__(self, hook: Callable[[Tensor], Any]) -> None:
        self.hook = hook
        functools.update_wrapper(self, hook)  # still the user's, for who looks at its module

    def __call__(self, gradient: Tensor | None) -> Any:
        return None if gradient is None else self.hook(gradient)


_NO_GRADIENTS = ("ignore", re.compile("None of the inputs have requires_grad=True"), Warning, None, 0)


@contextlib.contextmanager
def without_a_word_of_gradients() -> Iterator[None]:
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
def hooks_on_activations_explained() -> Iterator[None]:
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


@contextlib.contextmanager
def backward_hooks_only_look(module: nn.Module) -> Iterator[None]:
    """Around passes for second derivatives: a module's full backward hook that returns a gradient is an error.

    Of a gradient that reaches the module's input, PyTorch gives such hooks what came along with one of its output. Of
    the large batch that is all of it; here second derivatives come by themselves, and pass them by.
    """
    changed = []
    for path, layer in module.named_modules():
        for key, hook in layer._backward_hooks.items():
            changed.append((layer._backward_hooks, key, hook))
            layer._backward_hooks[key] = _looking(hook, f"{path or 'the module'!r} ({type(layer).__name__})")
    try:
        yield
    finally:
        for hooks, key, hook in changed:
            hooks[key] = hook


def _looking(hook: Callable[..., Any], name: str) -> Callable[..., Any]:
    def looks(*args: Any) -> None:
        if hook(*args) is not None:
            raise NotImplementedError(
                f"A backward hook of {name} in a chunked module returns a gradient under create_graph=True, and second "
                "derivatives pass it by. Leave it out, or change gradients by a hook on a parameter or on an input."
            )

    return looks
