"""Parameters offloaded to host memory: one block at a time is copied to the device, and the next one meanwhile."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.torch.layers.blocks import Block
from gradaccum.torch.layers.interception import called, intercepted

__all__ = ["OffloadedBlocks"]

logger = logging.getLogger("gradaccum")

_streams: dict[torch.device, Any] = {}

_Copies = list[tuple[Tensor, Tensor]]
"""Parameters and buffers of a block, each with its copy on the device."""


class OffloadedBlocks:
    """Copies of one block's parameters and buffers on the device, for as long as the block computes there.

    Gradients add up in the copies while all micro-batches run backward, and come back once.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> offloaded = OffloadedBlocks(model, [Block("1", model[1])])
        >>> with offloaded.on_device(0):
        ...     model[1](torch.ones(2)).sum().backward()
        >>> model[1].bias.grad, dict(offloaded.count)
        (tensor([1., 1.]), {'1': 1})
    """

    def __init__(self, model: nn.Module, blocks: Sequence[Block]) -> None:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise ValueError(
                "Blocks(on='cpu') is for one device, and DistributedDataParallel expects all parameters on one. "
                "Leave out one of them."
            )
        self._blocks = [*blocks]
        inside = {id(module) for block in blocks for module in block.module.modules()}
        outside = [p for m in model.modules() if id(m) not in inside for p in m.parameters(recurse=False)]
        self.device = next((p.device for p in outside), torch.device("cpu"))
        """Where the blocks compute: where the parameters outside of them are."""
        self.count: Counter[str] = Counter()
        """How often each block has been copied, by its path."""
        self._coming: tuple[int, _Copies] | None = None
        for block in blocks:
            self._check(block, set(map(id, outside)))
        if self.device.type == "cuda":  # from other memory they could not be copied while the device computes
            for block in blocks:
                for p in block.module.parameters():
                    p.data = p.data.pin_memory()

    def _check(self, block: Block, outside: set[int]) -> None:
        for name, parameter in block.module.named_parameters():
            if parameter.device.type != "cpu":
                raise ValueError(
                    f"Blocks(on='cpu') expects the blocks on the CPU. Received: {block.path}.{name} on "
                    f"{parameter.device}. Build the model there, and move to the device what stands outside of the "
                    "blocks, before the optimizer is built."
                )
            if id(parameter) in outside:
                raise ValueError(
                    f"{block.path}.{name} is a weight of what stands outside of the blocks, too, and with "
                    "Blocks(on='cpu') it would have to be in two places. Leave one of them out."
                )
        for module in block.module.modules():
            if isinstance(module, nn.RNNBase):
                raise ValueError(
                    f"The block {block.path!r} has a {type(module).__name__}, which keeps references to its weights "
                    "that Blocks(on='cpu') can't exchange. Leave it out of the blocks, or leave `on` out."
                )

    @property
    def proves(self) -> bool:
        """Whether some rows can go through the whole model at once, as a proof needs; says where they can't."""
        if self.device.type != "cpu":
            logger.warning(
                "Whether micro-batches make the large batch's update is not proven here: the proof runs the whole "
                "model at once, and with Blocks(on='cpu') the blocks aren't on %s at once. Prove it on the CPU.",
                self.device,
            )
        return self.device.type == "cpu"

    @contextlib.contextmanager
    def reachable(self) -> Iterator[None]:
        """Around an update: blocks can be called, in passes of any kind."""
        for block in self._blocks:
            for name, p in block.module.named_parameters():
                if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
                    raise ValueError(
                        f"{block.path}.{name} has a hook on its gradient, and with Blocks(on='cpu') the gradient adds "
                        "up in a copy on the device. Leave out the hook, or `on`."
                    )
        with intercepted([block.module for block in self._blocks], self._called):
            yield

    def _called(self, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.on_device(place, joined=True):
            return called(self._blocks[place].module, args, kwargs)

    def prefetch(self, place: int) -> None:
        """The block at this place will come next: it is copied while the device computes."""
        known = self._coming is not None and self._coming[0] == place
        if self.device.type == "cuda" and not known and 0 <= place < len(self._blocks):
            self._coming = place, self._copies(place)

    def forget(self) -> None:
        """No block comes any more."""
        self._coming = None

    def _copies(self, place: int) -> _Copies:
        block = self._blocks[place]
        own = {id(t): t for t in (*block.module.parameters(), *block.module.buffers())}.values()
        self.count[block.path] += 1
        if self.device.type != "cuda":
            return [(tensor, tensor.detach().to(self.device, copy=True)) for tensor in own]
        stream = _streams.setdefault(self.device, torch.cuda.Stream(self.device))
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            return [(tensor, tensor.detach().to(self.device, copy=True, non_blocking=True)) for tensor in own]

    def _arrived(self, place: int) -> _Copies:
        coming, self._coming = self._coming, None
        copies = coming[1] if coming is not None and coming[0] == place else self._copies(place)
        if self.device.type == "cuda":
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(_streams[self.device])
            for _, copy in copies:
                copy.record_stream(current)
        return copies

    @contextlib.contextmanager
    def on_device(self, place: int, *, following: int = -1, joined: bool = False) -> Iterator[None]:
        """The block is on the device meanwhile; then its gradients and its buffers come back.

        The block at `following` comes next. `joined`: graphs lead through the copies, for a backward pass later.
        """
        copies: dict[int, Tensor] = {}
        leaves: _Copies = []
        for own, copy in self._arrived(place):
            if not isinstance(own, nn.Parameter):
                copies[id(own)] = copy
            elif joined:
                copies[id(own)] = own.to(self.device, copy=True) if own.requires_grad else copy
            else:
                copies[id(own)] = leaf = _leaf(own, copy)
                leaves.append((own, leaf))
        self.prefetch(following)
        holders: list[tuple[dict[str, Any], str, Tensor, Tensor, int]] = [
            (holder, name, tensor, copies[id(tensor)], copies[id(tensor)]._version)
            for module in self._blocks[place].module.modules()
            for holder in (module._parameters, module._buffers)
            for name, tensor in holder.items()
            if tensor is not None and id(tensor) in copies
        ]
        for holder, name, _, copy, _ in holders:
            holder[name] = copy
        try:
            yield
        finally:
            for holder, name, own, copy, version in holders:
                now, holder[name] = holder.get(name), own
                if not isinstance(own, nn.Parameter):
                    _bring_back(holder, name, own, copy, version, now)
        _add(leaves)


def _leaf(own: nn.Parameter, copy: Tensor) -> nn.Parameter:
    leaf = nn.Parameter(copy, requires_grad=own.requires_grad)
    leaf.__dict__.update(own.__dict__)
    if own.requires_grad and getattr(own, "grad_dtype", None) not in (None, own.dtype):
        leaf.grad_dtype = own.grad_dtype
    return leaf


@torch.no_grad()
def _bring_back(holder: dict[str, Any], name: str, own: Tensor, copy: Tensor, version: int, now: Tensor | None) -> None:
    """A buffer that the block may have moved."""
    if now is not copy:
        holder[name] = now if now is None else now.to(own.device)
    elif copy._version != version or name.startswith("running_"):  # kernels of BatchNorm don't raise versions
        own.copy_(copy)


@torch.no_grad()
def _add(leaves: _Copies) -> None:
    """The gradients of these copies come back."""
    for own, leaf in leaves:
        if leaf.grad is not None:
            grad = leaf.grad.to(own.device)
            own.grad = grad if own.grad is None else own.grad.add_(grad)
