"""Offloaded until backward wants it: activations in host memory or files, and the parameters of blocks."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from gradaccum.core.sizes import format_bytes
from gradaccum.on_torch.memory import is_out_of_memory
from gradaccum.torch.chunking.two_passes import version_of
from gradaccum.torch.layers.blocks import Block, called, intercepted

logger = logging.getLogger("gradaccum")

OffloadChoice = bool | str | os.PathLike[str]
"""Whether activations wait in host memory; or a folder, in whose files they wait."""

_streams: dict[torch.device, Any] = {}


def _copy_stream(device: torch.device) -> Any:
    """The stream of copies on a CUDA device, which waits for what the device computes now."""
    stream = _streams.get(device) or _streams.setdefault(device, torch.cuda.Stream(device))
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def _arrived(device: torch.device, tensors: Sequence[Tensor]) -> None:
    """What the device computes from now on waits for these copies, whose memory is its own then."""
    current = torch.cuda.current_stream(device)
    current.wait_stream(_streams[device])
    for tensor in tensors:
        tensor.record_stream(current)


class Waiting:
    """A tensor that stays where it is."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor.detach()
        self._version = version_of(tensor)

    @property
    def edited(self) -> bool:
        """Whether somebody has written to it since."""
        return self._tensor is not None and version_of(self._tensor) != self._version

    def prefetch(self) -> None:
        """It will be wanted soon."""

    def get(self) -> Tensor:
        assert self._tensor is not None
        return self._tensor


class _OnHost(Waiting):
    """In pinned host memory; copied both ways beside what the device computes."""

    def __init__(self, tensor: Tensor) -> None:
        self._device, self._tensor, self._there = tensor.device, None, list[Tensor]()
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        stream = _copy_stream(tensor.device)
        with torch.cuda.stream(stream):
            self._host.copy_(tensor.detach(), non_blocking=True)
        tensor.record_stream(stream)

    def prefetch(self) -> None:
        if not self._there:
            with torch.cuda.stream(_copy_stream(self._device)):
                self._there = [self._host.to(self._device, non_blocking=True)]

    def get(self) -> Tensor:
        self.prefetch()
        _arrived(self._device, self._there)
        return self._there.pop()


class _InFile(Waiting):
    """In a file, which is gone as soon as nobody waits for it any more."""

    def __init__(self, tensor: Tensor, folder: Path) -> None:
        self._device, self._tensor = tensor.device, None
        self._folder, self._nbytes = folder, tensor.nbytes
        with self._explained("written to"):
            handle, name = tempfile.mkstemp(".pt", "gradaccum-", folder)
            os.close(handle)
            self._path = Path(name)
            weakref.finalize(self, self._path.unlink, missing_ok=True)
            torch.save(tensor.detach().clone(), self._path)  # of a view only what it shows

    def get(self) -> Tensor:
        with self._explained("read from"):
            loaded: Tensor = torch.load(self._path, map_location=self._device, weights_only=True)
        return loaded

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:  # torch.save's own, where a disk is full
            if is_out_of_memory(error):
                raise
            there = self._folder.is_dir()
            free = f"{format_bytes(shutil.disk_usage(self._folder).free)} are free" if there else "it is gone"
            raise OSError(
                f"An activation of {format_bytes(self._nbytes)} could not be {what} the folder of "
                f"offload={str(self._folder)!r} ({free}): {error}. Give it a folder with more room, or offload=True."
            ) from error


class Store:
    """Keeps tensors until backward wants them, each once however many blocks are called with it."""

    def __init__(self, offload: OffloadChoice = False) -> None:
        if not isinstance(offload, (bool, str, os.PathLike)):
            raise TypeError(f"`offload` must be True, False or a folder. Received: offload={offload!r}.")
        self._on_host, self._kept = offload is True, WeakIdKeyDictionary()
        self._folder = None if isinstance(offload, bool) else Path(offload)
        if self._folder is not None and not self._folder.is_dir():
            raise ValueError(f"`offload` must be True, False or a folder that exists. Received: offload={offload!r}.")

    def keep(self, tensor: Tensor) -> Waiting:
        """The tensor, to be had again later."""
        reference = self._kept.get(tensor)
        waiting: Waiting | None = None if reference is None else reference()
        if waiting is None or waiting.edited:
            plain = tensor.layout is torch.strided and not hasattr(tensor, "to_local") and tensor.dim() > 0
            if plain and self._folder is not None:
                waiting = _InFile(tensor, self._folder)
            else:
                waiting = _OnHost(tensor) if plain and self._on_host and tensor.is_cuda else Waiting(tensor)
            self._kept[tensor] = weakref.ref(waiting)
        return waiting


class OffloadedBlocks:
    """Copies of one block's parameters and buffers on the device, for as long as the block computes there.

    Gradients add up in the copies while all micro-batches run backward, and come back once.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[Block]) -> None:
        self._blocks = [*blocks]
        inside = {id(module) for block in blocks for module in block.module.modules()}
        outside = [p for m in model.modules() if id(m) not in inside for p in m.parameters(recurse=False)]
        self.device = next((p.device for p in outside), torch.device("cpu"))
        """Where the blocks compute: where the parameters outside of them are."""
        self._on_cuda = self.device.type == "cuda"
        self._coming: tuple[int, dict[Tensor, Tensor]] | None = None
        for block in blocks:
            self._check(block, set(map(id, outside)))
        for parameter in [p for block in blocks for p in block.module.parameters()] if self._on_cuda else ():
            parameter.data = parameter.data.pin_memory()  # other memory is not copied while the device computes

    def _check(self, block: Block, outside: set[int]) -> None:
        for name, parameter in block.module.named_parameters():
            if parameter.device.type != "cpu":
                raise ValueError(
                    f"on='cpu' expects the blocks on the CPU. Received: {block.path}.{name} on "
                    f"{parameter.device}. Build the model on the CPU, and move the modules outside the blocks to the "
                    "device before the optimizer is built."
                )
            if id(parameter) in outside:
                raise ValueError(
                    f"{block.path}.{name} is a weight of a module outside the blocks, too, and with on='cpu' "
                    "it would have to be in two places. Leave one of them out."
                )
        for module in block.module.modules():
            if isinstance(module, nn.RNNBase):
                raise ValueError(
                    f"The block {block.path!r} has a {type(module).__name__}, which keeps references to its weights "
                    "that on='cpu' can't exchange. Leave it out of the blocks, or leave `on` out."
                )

    @property
    def proves(self) -> bool:
        """Whether some rows can go through the whole model at once, as a proof needs; warns where they can't."""
        if self.device.type != "cpu":
            logger.warning(
                "Whether micro-batches make the large batch's update is not proven here: the proof runs the whole "
                "model at once, and with on='cpu' the blocks aren't on %s at once. Prove it on the CPU.",
                self.device,
            )
        return self.device.type == "cpu"

    @contextlib.contextmanager
    def reachable(self) -> Iterator[None]:
        """Around an update: blocks can be called, in passes without a backward pass."""
        for block in self._blocks:
            for name, p in block.module.named_parameters():
                if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
                    raise ValueError(
                        f"{block.path}.{name} has a hook on its gradient, and with on='cpu' the gradient adds "
                        "up in a copy on the device. Leave out the hook, or `on`."
                    )
        modules = [block.module for block in self._blocks] if self.device.type != "cpu" else []
        with intercepted(modules, self._called):
            yield

    def _called(self, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.on_device(place):
            return called(self._blocks[place].module, args, kwargs)

    def prefetch(self, place: int) -> None:
        """The block at this place will come next: it is copied while the device computes."""
        if self._on_cuda and 0 <= place < len(self._blocks) and (self._coming is None or self._coming[0] != place):
            self._coming = place, self._copies(place)

    def forget(self) -> None:
        """No block comes any more."""
        self._coming = None

    def _copies(self, place: int) -> dict[Tensor, Tensor]:
        """The device's copy of each of its parameters and buffers."""
        module = self._blocks[place].module
        with torch.cuda.stream(_copy_stream(self.device)) if self._on_cuda else contextlib.nullcontext():
            return {
                tensor: tensor.detach().to(self.device, copy=True, non_blocking=True)
                for tensor in (*module.parameters(), *module.buffers())
            }

    @contextlib.contextmanager
    def on_device(self, place: int, following: int = -1) -> Iterator[None]:
        """The block is on the device meanwhile, and what it has moved comes back. `following` comes next."""
        self.prefetch(place)
        copies = self._copies(place) if self._coming is None else self._coming[1]
        self._coming = None
        if self._on_cuda:
            _arrived(self.device, [*copies.values()])
        copies = {tensor: _parameter_like(tensor, copy) for tensor, copy in copies.items()}
        self.prefetch(following)
        parts: list[Any] = [h for m in self._blocks[place].module.modules() for h in (m._parameters, m._buffers)]
        holders = [(part, name, t, copies[t]) for part in parts for name, t in part.items() if t is not None]
        versions = [copy._version for *_, copy in holders]
        for holder, name, _, copy in holders:
            holder[name] = copy
        try:
            yield
        finally:
            for (holder, name, tensor, copy), version in zip(holders, versions, strict=True):
                now, holder[name] = holder.get(name), tensor
                if not isinstance(tensor, nn.Parameter):
                    _come_home(holder, name, now, copy, moved=copy._version != version)
        for tensor, copy in copies.items():
            if isinstance(tensor, nn.Parameter) and copy.grad is not None:
                grad = copy.grad.to(tensor.device)
                tensor.grad = grad if tensor.grad is None else tensor.grad.add_(grad)


def _come_home(holder: Any, name: str, now: Tensor | None, copy: Tensor, *, moved: bool) -> None:
    """A buffer is what it has become on the device."""
    if now is not copy:
        holder[name] = now if now is None else now.to(holder[name].device)
    elif moved or name.startswith("running_"):  # BatchNorm's kernels don't raise its version
        holder[name].detach().copy_(copy)


def _parameter_like(tensor: Tensor, copy: Tensor) -> Tensor:
    """The copy of a parameter as one with a gradient of its own; that of a buffer as it is."""
    if not isinstance(tensor, nn.Parameter):
        return copy
    leaf = nn.Parameter(copy, requires_grad=tensor.requires_grad)
    leaf.__dict__.update(tensor.__dict__)
    if tensor.requires_grad and getattr(tensor, "grad_dtype", None) not in (None, tensor.dtype):
        leaf.grad_dtype = tensor.grad_dtype
    return leaf
