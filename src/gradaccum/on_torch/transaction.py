"""A micro-batch as a transaction: what it has changed by the time that memory ran out, and how to undo it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["PutAside", "State", "Transaction"]


_Place = tuple[dict[str, Any], str]


class _Buffer(NamedTuple):
    owner: dict[str, Any]
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
        others: Called for what is to be watched like buffers and is none: where each is kept, a dict and a key.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        parameters: Callable[[], list[Tensor]],
        device: torch.device,
        others: Callable[[], list[_Place]] = list,
    ) -> None:
        self._modules = list(modules)
        self._find_parameters = parameters
        self._device = device
        self._find_others = others
        self._still: set[tuple[int, str]] = set()
        self._mode: list[bool] = []
        self._places: list[_Place] = []
        self._parameters: list[Tensor] = []
        self._gradients: list[Tensor | None] = []
        self._versions: list[int] = []
        self.state: State | None = None

    def open(self) -> State:
        """A window begins: look which parameters and buffers there are. Returns what `restore` takes."""
        modules = [module for root in self._modules for module in root.modules()]
        mode = [module.training for module in modules]
        if mode != self._mode:  # other buffers may move from now on
            self._mode, self._still = mode, set()
        self._places = [(module._buffers, name) for module in modules for name in module._buffers]
        self._places += self._find_others()
        self._parameters = self._find_parameters()
        return self.begin()

    def forget(self) -> None:
        """Look anew at what stands still."""
        self._still = set()

    def drew(self, state: State) -> bool:
        """Whether random numbers have been drawn since then from PyTorch's own generators."""
        now = _random_state(self._device)
        return any(
            one is not None and other is not None and not torch.equal(one, other)
            for one, other in zip(now, (state.host, state.device))
        )

    def begin(self) -> State:
        """Remember how everything is, before a micro-batch. Returns what `restore` takes."""
        buffers = []
        for owner, name in self._places:
            tensor = owner.get(name)
            if tensor is not None:
                copy = None if (id(owner), name) in self._still else tensor.clone()
                buffers.append(_Buffer(owner, name, tensor, tensor._version, copy))
        self.state = State(*_random_state(self._device), buffers)
        self._gradients = [p.grad for p in self._parameters]
        self._versions = [-1 if gradient is None else gradient._version for gradient in self._gradients]
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
        found = zip(self._parameters, self._gradients, self._versions, strict=True)
        return [
            parameter
            for parameter, gradient, version in found
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


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), None if device.type == "cpu" else _generator(device).get_rng_state(device)


def _generator(device: torch.device) -> Any:
    return torch.get_device_module(device)
