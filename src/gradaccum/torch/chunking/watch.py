"""What a forward pass does besides returning its outputs, and what modules keep of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils.weak import TensorWeakRef

from gradaccum.core.rounding import rounding
from gradaccum.on_torch.adapter.arrays import relative_error
from gradaccum.on_torch.batch import leaves
from gradaccum.on_torch.random_state import is_generator
from gradaccum.torch.chunking.recompute import ModuleContents
from gradaccum.torch.chunking.trees import Inputs, is_floating

__all__ = [
    "Watch",
    "attributes_of",
    "generators_of",
    "leaves_besides",
    "noted",
    "proving",
    "same_values",
]

_running: list[nn.Module] = []


def proving() -> bool:
    """Whether a proof is running."""
    return bool(_running)


@contextlib.contextmanager
def noted(module: nn.Module) -> Iterator[None]:
    """Around the proof of a module."""
    _running.append(module)
    try:
        yield
    finally:
        _running.pop()


class Watch(TorchFunctionMode):
    """Notes, while a module runs inside, the outputs of its layers and every tensor that is made with a graph.

    Example:
        >>> import torch
        >>> model, held = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), []
        >>> _ = model[0].register_forward_hook(lambda layer, args, output: held.append(output))
        >>> with Watch(model, neutral=False) as watch:
        ...     outputs = model(torch.randn(3, 2))
        >>> del outputs
        >>> [path for _, path in watch.alive()]
        ['0']
    """

    def __init__(self, module: nn.Module, *, neutral: bool) -> None:
        super().__init__()
        self.module, self.neutral = module, neutral
        self.layers: dict[str, list[tuple[Tensor | None, Tensor]]] = {}
        """First input and output of the innermost layers, by path, of one call after the other."""
        self.sizes: dict[str, float] = {}
        """The largest number that a module with buffers takes or returns, by path."""
        self.functional: list[str] = []
        """Modules that call `torch.nn.functional.batch_norm` and are no BatchNorm."""
        self._made: list[tuple[TensorWeakRef, str]] = []
        self._running: list[str] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Watch:
        for path, layer in self.module.named_modules():
            self._stack.enter_context(layer.register_forward_pre_hook(self._begins(path), prepend=True))
            self._stack.enter_context(layer.register_forward_hook(self._ends(path), always_call=True))
            if self.neutral and isinstance(layer, nn.SyncBatchNorm) and layer.training:  # it calls kernels of its own
                self._stack.callback(setattr, layer, "training", True)
                layer.training = False
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def _begins(self, path: str) -> Any:
        def hook(layer: nn.Module, args: Any) -> None:
            self._running.append(path)

        return hook

    def _ends(self, path: str) -> Any:
        def hook(layer: nn.Module, args: Any, output: Any) -> None:
            while self._running and self._running.pop() != path:
                pass  # what has been left by an exception, such as those that end recomputations
            self._note(output, path)
            if layer._buffers:
                seen = [t.detach() for _, t in leaves((args, output)) if is_floating(t)]
                finite = [t[t.isfinite()] for t in seen]
                largest = max([t.abs().max().item() for t in finite if t.numel()] or [0.0])
                self.sizes[path] = max(self.sizes.get(path, 0.0), largest)
            if isinstance(output, Tensor) and output.dim() and not list(layer.children()):
                first = args[0].detach() if args and isinstance(args[0], Tensor) else None
                self.layers.setdefault(path, []).append((first, output.detach()))

        return hook

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        path = self._running[-1] if self._running else ""
        if func is F.batch_norm:
            given = dict(zip(("input", "running_mean", "running_var", "weight", "bias", "training"), args))
            given.update(kwargs)
            if given.get("training"):
                if not isinstance(self.module.get_submodule(path), _BatchNorm) and path not in self.functional:
                    self.functional.append(path)
                if self.neutral:
                    return _normalised_alone(**given)
        result = func(*args, **kwargs)
        self._note(result, path)
        return result

    def _note(self, result: Any, path: str) -> None:
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor) and value.grad_fn is not None:
                self._made.append((TensorWeakRef(value), path))

    def alive(self) -> list[tuple[Tensor, str]]:
        """The tensors with a graph that somebody holds, and the module that made each, in order."""
        found: dict[int, tuple[Tensor, str]] = {}
        for reference, path in self._made:
            tensor = reference()
            if tensor is not None:
                found.setdefault(id(tensor), (tensor, path))
        return list(found.values())


def _normalised_alone(input: Tensor, running_mean: Any = None, running_var: Any = None, **given: Any) -> Tensor:
    """Batch normalisation in eval mode; without running statistics, with mean 0 and variance 1."""
    channels = input.shape[1]
    mean = input.new_zeros(channels) if running_mean is None else running_mean
    variance = input.new_ones(channels) if running_var is None else running_var
    weight, bias, eps = given.get("weight"), given.get("bias"), given.get("eps", 1e-5)
    return F.batch_norm(input, mean, variance, weight, bias, False, 0.0, eps)


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """The tensors and numbers, and containers of such, that modules have as attributes of their own."""
    return {
        f"{path}.{name}" if path else name: value
        for path, layer in module.named_modules()
        for name, value in vars(layer).items()
        if name not in _OF_EVERY_MODULE and all(isinstance(v, (Tensor, int, float)) for _, v in leaves(value))
    }


def leaves_besides(outputs: list[Tensor], known: list[Tensor]) -> list[Tensor]:
    """The leaves of these tensors' graphs that are not known."""
    found = {id(tensor): tensor for tensor in known}
    waiting, seen = [tensor.grad_fn for tensor in outputs], set()
    outside = []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in found:
            outside.append(leaf)
        waiting += [following for following, _ in node.next_functions]
    return outside


def same_values(one: Any, other: Any) -> bool:
    """Whether two trees of tensors and numbers are the same but for rounding."""
    try:
        pairs = list(zip(leaves(one), leaves(other), strict=True))
    except ValueError:
        return False
    return all(
        relative_error(a.double(), b.double()) <= rounding(str(b.dtype), b.device.type)
        if isinstance(a, Tensor) and isinstance(b, Tensor)
        else type(a) is type(b) and not isinstance(a, Tensor) and a == b
        for (_, a), (_, b) in pairs
    )


def generators_of(module: nn.Module, inputs: Inputs) -> list[Any]:
    """Generators of the user's own that the module may draw from."""
    return [*ModuleContents(module).generators, *(leaf for _, leaf in leaves(inputs) if is_generator(leaf))]
