"""Blocks that live in host memory, or in files, each of which visits the device while it computes."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradaccum.torch.layers.blocks import Block
from gradaccum.torch.layers.interception import called, intercepted
from gradaccum.torch.layers.updates.one_by_one import state_bytes_of
from gradaccum.torch.layers.visits.files import Files, in_file

__all__ = ["BlocksOn", "Visits"]

BlocksOn = Literal["cpu"] | str | os.PathLike[str] | None
"""Where blocks live: in host memory, or in memory-mapped files in a folder."""

logger = logging.getLogger("gradaccum")

_streams: dict[torch.device, Any] = {}


class Visits:
    """Copies of one block's parameters and buffers on the device, for as long as the block computes there.

    Gradients add up in the copies while all micro-batches run backward, and come back once.

    Args:
        model: The model. What stands outside of the blocks is on the device.
        blocks: Its blocks, on the CPU.
        where: Where they live: `"cpu"`, in host memory; or a folder, in whose files their parameters and the
            optimizer's state for them are from here on.

    Raises:
        TypeError, ValueError: `where` is neither; the model is replicated; or a block is somewhere else, has weights
            in common with what stands outside, or keeps references to its weights that can't be exchanged, as nn.LSTM
            does.
        OSError: The folder has no room for the blocks.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> visits = Visits(model, [Block("1", model[1])])
        >>> with visits.lent(0):
        ...     model[1](torch.ones(2)).sum().backward()
        >>> model[1].bias.grad, dict(visits.count)
        (tensor([1., 1.]), {'1': 1})
    """

    def __init__(self, model: nn.Module, blocks: Sequence[Block], where: Any = "cpu") -> None:
        if not isinstance(where, (str, os.PathLike)):
            raise TypeError(f"`blocks_on` must be 'cpu' or a folder. Received: blocks_on={where!r}.")
        self._option = option = f"blocks_on={str(where)!r}"
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise ValueError(
                f"{option} is for one device, and DistributedDataParallel expects all parameters on one. "
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
                        f"{option} expects the blocks on the CPU. Received: {block.path}.{name} on "
                        f"{parameter.device}. Build the model there, and move to the device what stands outside of the "
                        "blocks, before the optimizer is built."
                    )
                if id(parameter) in common:
                    raise ValueError(
                        f"{block.path}.{name} is a weight of what stands outside of the blocks, too, and with "
                        f"{option} it would have to be in two places. Leave one of them out."
                    )
            for module in block.module.modules():
                if isinstance(module, nn.RNNBase):
                    raise ValueError(
                        f"The block {block.path!r} has a {type(module).__name__}, which keeps references to its "
                        f"weights that {option} can't exchange. Leave it out of `blocks`, or `blocks_on` out."
                    )
        self._files = None if where == "cpu" else Files(where, "blocks_on")
        self._put(())
        if self._files is None and self.device.type == "cuda":  # else they could not be copied beside what is computed
            for block in blocks:
                for p in block.module.parameters():
                    p.data = p.data.pin_memory()

    @property
    def proves(self) -> bool:
        """Whether some rows can go through the whole model at once, as a proof needs; says where they can't."""
        if self.device.type != "cpu":
            logger.warning(
                "Whether micro-batches make the large batch's update is not proven here: the proof runs the whole "
                "model at once, and with %s the blocks aren't on %s at once. Prove it on the CPU.",
                self._option,
                self.device,
            )
        return self.device.type == "cpu"

    @contextlib.contextmanager
    def reachable(self, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
        """Around an update by these: blocks can be called, in passes of any kind."""
        self.check(optimizers)
        with intercepted([block.module for block in self._blocks], self._visiting):
            yield
        self.updated([p for o in optimizers for group in o.param_groups for p in group["params"]], optimizers)

    def _visiting(self, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.lent(place, joined=True):
            return called(self._blocks[place].module, args, kwargs)

    def check(self, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        """An update begins.

        Args:
            optimizers: Those that make it, whose state lives where the blocks do.

        Raises:
            ValueError: A parameter of a block has hooks, which would see nothing.
            OSError: The folder has no room for the blocks or for the state. Nothing has been updated.
        """
        for block in self._blocks:
            for name, p in block.module.named_parameters():
                if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
                    raise ValueError(
                        f"{block.path}.{name} has a hook on its gradient, and with {self._option} the gradient adds "
                        "up in a copy on the device. Leave the hook out, or leave out `blocks_on`."
                    )
        self._put(optimizers)

    def _put(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """What is elsewhere, in files: at first everything, later on what has been loaded."""
        if self._files is None:
            return
        own = {id(p): p for block in self._blocks for p in block.module.parameters()}
        for p in own.values():
            if not in_file(p):
                p.data = self._files.moved(p.data, "A parameter of a block")
        room = 0
        for optimizer in optimizers:
            self._put_state(optimizer, own)
            new = [
                [p for p in group["params"] if id(p) in own and p.requires_grad and p not in optimizer.state]
                for group in optimizer.param_groups
            ]
            if any(new):
                for group, each in zip(new, state_bytes_of(optimizer), strict=True):
                    room += sum(round(p.numel() * each * p.element_size() / 8) for p in group)
        self._files.reserve(room)

    def _put_state(self, optimizer: torch.optim.Optimizer, own: Collection[int]) -> None:
        assert self._files is not None
        for p in [p for group in optimizer.param_groups for p in group["params"] if id(p) in own]:
            state = optimizer.state.get(p, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() and value.device.type == "cpu" and not in_file(value):
                    state[key] = self._files.moved(value, "The optimizer's state")

    def updated(self, parameters: Iterable[Tensor], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """These have been updated: what state is new goes to where the blocks live."""
        if self._files is None:
            return
        own = {id(p) for p in parameters} & {id(p) for block in self._blocks for p in block.module.parameters()}
        try:
            for optimizer in optimizers:
                self._put_state(optimizer, own)
        except OSError as error:
            logger.warning("The update has been made, and some of its state stays in host memory. %s", error)

    def prefetch(self, place: int) -> None:
        """The block at this place will come soon: it is copied beside what the device computes."""
        if not 0 <= place < len(self._blocks) or place in self._coming:
            return
        if self._files is not None:
            self._files.read_ahead(list(self._blocks[place].module.parameters()))
        elif self.device.type == "cuda":
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
