"""What a micro-batch needs, found out without running it: fake tensors, of which every allocation is counted."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from gradaccum.on_torch.batch import Batch, has_rows
from gradaccum.on_torch.random_state import all_generators, kept, nothing_drawn
from gradaccum.on_torch.state import as_found
from gradaccum.torch.loss import Objective
from gradaccum.torch.module_state import gradients_kept

Found = TypeVar("Found")


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that come into being inside, and their peak; fake or real ones.

    Example:
        >>> with LiveBytes() as live:
        ...     x = torch.zeros(256)
        ...     y = (x + 1).sum()
        >>> live.bytes, live.peak
        (1028, 2052)
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = [t.untyped_storage() for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        given = set(map(id, before))
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                if id(storage) not in given and id(storage) not in self._known:
                    self._known[id(storage)] = storage.nbytes()
                    self.bytes += storage.nbytes()
                    self.peak = max(self.peak, self.bytes)
                    weakref.finalize(storage, self._free, id(storage))
        return result

    def _free(self, key: int) -> None:
        self.bytes -= self._known.pop(key, 0)


def micro_batch_peak(
    objective: Objective,
    batch: Batch,
    rows: int,
    passes: int = 2,
    gathered: Mapping[Tensor, torch.dtype] | None = None,
) -> int:
    """Peak bytes of a micro-batch beyond parameters, buffers and inputs: activations, gradients, the earlier sum."""

    def run(micro_batch: Batch) -> int:
        with LiveBytes() as live, torch.enable_grad():
            for _ in range(passes):
                loss, _ = objective.forward(micro_batch)
                loss.backward()
                del loss
        return live.peak

    return on_fakes(objective, batch, rows, run, gathered)


def on_fakes(
    objective: Objective,
    batch: Batch,
    rows: int,
    run: Callable[[Batch], Found],
    gathered: Mapping[Tensor, torch.dtype] | None = None,
) -> Found:
    """Run something on fake tensors, or, where a model asks for values (`.item()`, a mask of varying size), really."""
    meta = objective.device.type == "meta"
    micro_batch = batch.map(lambda leaf: leaf.to("meta") if meta and isinstance(leaf, Tensor) else leaf)
    micro_batch = micro_batch.take(torch.arange(rows, device="meta" if meta else None) % batch.rows)
    try:
        with (
            kept(all_generators()),
            _quiet(),
            nothing_drawn(),
            FakeTensorMode(allow_non_fake_inputs=True) as mode,
            _fake_modules(objective, mode, gathered or {}),
        ):
            return run(
                micro_batch.map(lambda leaf: mode.from_tensor(torch.as_tensor(leaf)) if has_rows(leaf) else leaf)
            )
    except Exception:  # values were asked for, or an operator has no fake
        if meta or gathered is not None:
            raise
        modules = _modules(objective)
        own = [p for module in modules for p in module.parameters(recurse=False)]
        with gradients_kept(own), as_found(modules, objective.device):
            return run(micro_batch)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """PyTorch logs a traceback where an operator refuses fake tensors; the real ones tell the reason."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


def optimizer_bytes(optimizer: torch.optim.Optimizer | None, parameters: Sequence[Tensor]) -> int:
    """The state that an optimizer keeps, in bytes; without one, Adam's: two numbers per parameter.

    An optimizer that has not made its state yet is tried on fake tensors.
    """
    adam = 2 * bytes_of(parameters)
    if optimizer is None:
        return adam
    wanted = set(map(id, parameters))
    if held := bytes_of(value for p, state in optimizer.state.items() if id(p) in wanted for value in state.values()):
        return held
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = [nn.Parameter(mode.from_tensor(p.detach())) for p in parameters]
            for fake in fakes:
                fake.grad = torch.empty_like(fake)
            tried = type(optimizer)(fakes, **optimizer.defaults)
            tried.step()
            return bytes_of(value for state in tried.state.values() for value in state.values())
    except Exception:  # an optimizer of another signature
        return adam


def bytes_of(tensors: Any) -> int:
    """Bytes of tensors; what is none counts nothing."""
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def _modules(objective: Objective) -> list[nn.Module]:
    return [module for root in objective.modules.values() for module in root.modules()]


@contextlib.contextmanager
def _fake_modules(objective: Objective, mode: FakeTensorMode, gathered: Mapping[Tensor, torch.dtype]) -> Iterator[None]:
    """Fake parameters and buffers in place of the modules' own, the same fake for the same tensor."""
    fakes: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in fakes:
            if tensor in gathered:
                new: Any = torch.empty(tensor.shape, dtype=gathered[tensor], device=tensor.device)
            else:
                new = mode.from_tensor(tensor.detach())
            is_parameter = isinstance(tensor, nn.Parameter)
            fakes[id(tensor)] = nn.Parameter(new, requires_grad=tensor.requires_grad) if is_parameter else new
        return fakes[id(tensor)]

    dicts: list[Any] = [names for module in _modules(objective) for names in (module._parameters, module._buffers)]
    kept = [dict(names) for names in dicts]
    try:
        for names in dicts:
            names.update({name: fake(tensor) for name, tensor in names.items() if tensor is not None})
        yield
    finally:
        for names, own in zip(dicts, kept):
            names.update(own)
