"""A micro-batch as a transaction: what it has changed by the time that memory ran out, and how to undo it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["PutAside", "State", "Transaction"]


class _Buffer(NamedTuple):
    owner: dict[str, Tensor | None]
    name: str
    tensor: Tensor
    version: int
    copy: Tensor | None

    @property
    def moved(self) -> bool:
        # PyTorch's normalisation kernels don't raise the version of the statistics they move.
        uncounted = self.name.startswith("running_")
        return self.owner.get(self.name) is not self.tensor or self.tensor._version != self.version or uncounted


class State(NamedTuple):
    """Random number generators and buffers as they were at some moment."""

    host: Tensor
    device: Tensor | None
    buffers: list[_Buffer]


class Transaction:
    """The random numbers, the buffers and the gradients that a micro-batch moves.

    Buffers that move, such as the statistics of a BatchNorm, are copied before each micro-batch; those that have been
    seen to stand still are not, however large they are. As to gradients: autograd runs each parameter's accumulation
    once per backward pass, and raises the version of `p.grad`; so a changed version means that all of this
    micro-batch's gradient has arrived there.

    Args:
        modules: Whose buffers to watch: the model, and a loss that has buffers of its own.
        parameters: Called for the parameters whose gradients to watch.
        device: Where the model is.
    """

    def __init__(
        self, modules: Iterable[nn.Module], parameters: Callable[[], list[Tensor]], device: torch.device
    ) -> None:
        self._modules = list(modules)
        self._parameters = parameters
        self._device = device
        self._still: set[tuple[int, str]] = set()
        self._mode: list[bool] = []
        self._versions: list[tuple[Tensor, Tensor | None, int]] = []
        self.state: State | None = None

    def begin(self) -> State:
        """Remember how everything is, before a micro-batch. Returns what `restore` takes."""
        mode = [module.training for module in self._modules]
        if mode != self._mode:  # other buffers may move from now on
            self._mode, self._still = mode, set()
        buffers = [
            _Buffer(owner, name, tensor, tensor._version, None if (id(owner), name) in self._still else tensor.clone())
            for owner, name, tensor in self._buffers()
        ]
        device = _generator(self._device).get_rng_state(self._device) if self._device.type != "cpu" else None
        self.state = State(torch.get_rng_state(), device, buffers)
        self._versions = [(p, p.grad, -1 if p.grad is None else p.grad._version) for p in self._parameters()]
        return self.state

    def commit(self) -> None:
        """The micro-batch is in. Learns which buffers stood still."""
        assert self.state is not None
        for buffer in self.state.buffers:
            place = id(buffer.owner), buffer.name
            if buffer.moved:
                self._still.discard(place)
            else:
                self._still.add(place)

    def arrived(self) -> list[Tensor]:
        """The parameters in whose gradient this micro-batch's is in already."""
        return [
            parameter
            for parameter, gradient, version in self._versions
            if parameter.grad is not gradient or (gradient is not None and gradient._version != version)
        ]

    def restore(self, state: State | None = None) -> None:
        """Random numbers and buffers as they were at `state`; None: at the last `begin`."""
        state = self.state if state is None else state
        assert state is not None
        torch.set_rng_state(state.host)
        if state.device is not None:
            _generator(self._device).set_rng_state(state.device, self._device)
        with torch.no_grad():
            for buffer in state.buffers:
                if buffer.copy is not None and buffer.moved:
                    buffer.owner[buffer.name] = buffer.tensor
                    buffer.tensor.copy_(buffer.copy)

    def _buffers(self) -> list[tuple[dict[str, Tensor | None], str, Tensor]]:
        return [
            (module._buffers, name, tensor)
            for root in self._modules
            for module in root.modules()
            for name, tensor in module._buffers.items()
            if tensor is not None
        ]


class PutAside:
    """Sums of gradients kept out of reach of the backward passes to come, whose gradients they hold already.

    What arrives meanwhile is dropped as it arrives, so that it takes no memory.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        self._sums = [(parameter, parameter.grad) for parameter in parameters]
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(_drop) for parameter in parameters if parameter.requires_grad
        ]
        for parameter in parameters:
            parameter.grad = None

    def take_back(self) -> None:
        """Put the sums back in place."""
        for hook in self._hooks:
            hook.remove()
        for parameter, gradient in self._sums:
            parameter.grad = gradient


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def _generator(device: torch.device) -> Any:
    return torch.get_device_module(device)
