"""Parameters in turn: blocks that live in host memory, each of which visits the device while it computes."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.torch.layers.blocks import Block

__all__ = ["Visits"]

logger = logging.getLogger("gradaccum")

_streams: dict[torch.device, Any] = {}


class Visits:
    """Copies of one block's parameters and buffers on the device, for as long as the block computes there.

    Gradients add up in the copies while all micro-batches run backward, and come back once.

    Args:
        model: The model. What stands outside of the blocks is on the device.
        blocks: Its blocks, on the CPU.

    Raises:
        ValueError: The model is replicated; or a block is somewhere else, has weights in common with what stands
            outside, or keeps references to its weights that can't be exchanged, as nn.LSTM does.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> visits = Visits(model, [Block("1", model[1])])
        >>> with visits.lent(0):
        ...     model[1](torch.ones(2)).sum().backward()
        >>> model[1].bias.grad, dict(visits.count)
        (tensor([1., 1.]), {'1': 1})
    """

    def __init__(self, model: nn.Module, blocks: Sequence[Block]) -> None:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise ValueError(
                "blocks_on='cpu' is for one device, and DistributedDataParallel expects all parameters on one. "
                "Leave out one of them."
            )
        self._blocks = [*blocks]
        inside = {id(module) for block in blocks for module in block.module.modules()}
        outside = [p for m in model.modules() if id(m) not in inside for p in m.parameters(recurse=False)]
        self.device = next((p.device for p in outside), torch.device("cpu"))
        """Where the blocks compute: where the parameters outside of them are."""
        self.count: Counter[str] = Counter()
        """How often each block has come, by its path."""
        self._coming: dict[int, list[tuple[Tensor, Tensor]]] = {}
        common = set(map(id, outside))
        for block in blocks:
            for name, parameter in block.module.named_parameters():
                if parameter.device.type != "cpu":
                    raise ValueError(
                        f"blocks_on='cpu' expects the blocks on the CPU. Received: {block.path}.{name} on "
                        f"{parameter.device}. Build the model there, and move to the device what stands outside of the "
                        "blocks, before the optimizer is built."
                    )
                if id(parameter) in common:
                    raise ValueError(
                        f"{block.path}.{name} is a weight of what stands outside of the blocks, too, and with "
                        "blocks_on='cpu' it would have to be in two places. Leave one of them out."
                    )
            for module in block.module.modules():
                if isinstance(module, nn.RNNBase):
                    raise ValueError(
                        f"The block {block.path!r} has a {type(module).__name__}, which keeps references to its "
                        "weights that blocks_on='cpu' can't exchange. Leave it out of `blocks`, or `blocks_on` out."
                    )
            if self.device.type == "cuda":  # else they could not be copied beside what the device computes
                for p in block.module.parameters():
                    p.data = p.data.pin_memory()

    @property
    def proves(self) -> bool:
        """Whether some rows can go through the whole model at once, as a proof needs; says where they can't."""
        if self.device.type != "cpu":
            logger.warning(
                "Whether micro-batches make the large batch's update is not proven here: the proof runs the whole "
                "model at once, and with blocks_on='cpu' the blocks aren't on %s at once. Prove it on the CPU.",
                self.device,
            )
        return self.device.type == "cpu"

    def check(self) -> None:
        """An update begins.

        Raises:
            ValueError: A parameter of a block has hooks, which would see nothing.
        """
        for block in self._blocks:
            for name, p in block.module.named_parameters():
                if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
                    raise ValueError(
                        f"{block.path}.{name} has a hook on its gradient, and with blocks_on='cpu' the gradient adds "
                        "up in a copy on the device. Leave the hook out, or leave out `blocks_on`."
                    )

    def prefetch(self, place: int) -> None:
        """The block at this place will come soon: it is copied beside what the device computes."""
        if self.device.type == "cuda" and 0 <= place < len(self._blocks) and place not in self._coming:
            self._coming[place] = self._copies(place)

    def forget(self) -> None:
        """Nobody comes any more."""
        self._coming = {}

    def _copies(self, place: int) -> list[tuple[Tensor, Tensor]]:
        """What the block has, and copies on the device."""
        block = self._blocks[place]
        own = {id(t): t for t in (*block.module.parameters(), *block.module.buffers())}.values()
        self.count[block.path] += 1
        if self.device.type != "cuda":
            return [(tensor, tensor.detach().to(self.device, copy=True)) for tensor in own]
        stream = _streams.setdefault(self.device, torch.cuda.Stream(self.device))
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            return [(tensor, tensor.detach().to(self.device, copy=True, non_blocking=True)) for tensor in own]

    def _arrived(self, place: int) -> list[tuple[Tensor, Tensor]]:
        copies = self._coming.pop(place, None) or self._copies(place)
        if self.device.type == "cuda":
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(_streams[self.device])
            for _, copy in copies:
                copy.record_stream(current)
        return copies

    @contextlib.contextmanager
    def lent(self, place: int, *, following: int = -1, joined: bool = False) -> Iterator[None]:
        """The block is on the device meanwhile; then its gradients and its buffers come back.

        Args:
            place: The block's.
            following: The place of the block that comes next; -1: nobody knows.
            joined: Whether graphs lead through the copies, for a backward pass that comes later.
        """
        guests: dict[int, Tensor] = {}
        leaves: list[tuple[Tensor, Tensor]] = []
        for own, copy in self._arrived(place):
            if isinstance(own, nn.Parameter):
                if joined:
                    guests[id(own)] = own.to(self.device, copy=True) if own.requires_grad else copy
                    continue
                guests[id(own)] = leaf = nn.Parameter(copy, requires_grad=own.requires_grad)
                leaf.__dict__.update(own.__dict__)
                if own.requires_grad and getattr(own, "grad_dtype", None) not in (None, own.dtype):
                    leaf.grad_dtype = own.grad_dtype
                leaves.append((own, leaf))
            else:
                guests[id(own)] = copy
        self.prefetch(following)
        places = [
            (holder, name, tensor)
            for module in self._blocks[place].module.modules()
            for holder in (module._parameters, module._buffers)
            for name, tensor in holder.items()
            if tensor is not None and id(tensor) in guests
        ]
        holders: list[tuple[dict[str, Any], str, Tensor, Tensor, int]] = []
        for holder, name, tensor in places:
            guest = holder[name] = guests[id(tensor)]  # type: ignore[assignment]
            holders.append((holder, name, tensor, guest, guest._version))
        try:
            yield
        finally:
            for holder, name, tensor, guest, version in holders:
                now, holder[name] = holder.get(name), tensor  # type: ignore[assignment]
                if not isinstance(tensor, nn.Parameter):
                    self._bring_back(holder, name, tensor, guest, version, now)
        self._add(leaves)

    @torch.no_grad()
    def _bring_back(
        self, holder: dict[str, Any], name: str, own: Tensor, guest: Tensor, version: int, now: Tensor | None
    ) -> None:
        """A buffer that the block has moved."""
        if now is not guest:
            holder[name] = now if now is None else now.to(own.device)
        elif guest._version != version or name.startswith("running_"):  # kernels of BatchNorm don't raise versions
            own.copy_(guest)

    @torch.no_grad()
    def _add(self, leaves: Sequence[tuple[Tensor, Tensor]]) -> None:
        """The gradients of these copies come back."""
        for own, leaf in leaves:
            if leaf.grad is None:
                continue
            grad = leaf.grad.to(own.device)
            own.grad = grad if own.grad is None else own.grad.add_(grad)
