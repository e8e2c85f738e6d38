"""The experiment's PyTorch side."""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from examples.demo.data import Data
from examples.demo.guide import Epoch, Notify, Plan, Run, Setup
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradaccum.torch

__all__ = ["CountBytes", "train"]

NOTIFY_EVERY = 100
"""Micro-batches."""


def train(setup: Setup, data: Data, plan: Plan, initial: Sequence[np.ndarray], notify: Notify) -> Run:
    """One run, from the initial parameters on, in a process of its own."""
    # Layers this small gain nothing from a second thread, and on a busy machine the two wait for each other.
    torch.set_num_threads(1)
    dtype = getattr(torch, setup.dtype)
    x, test_x = (torch.tensor(part, dtype=dtype) / data.scale for part in (data.train_x, data.test_x))
    y, test_y = torch.tensor(data.train_y), torch.tensor(data.test_y)
    model: nn.Module = _network(initial, dtype)
    first = _first_window(setup, plan, model, x, y)

    optimizer = _optimizer(setup, plan, model)
    epochs, seconds = [], 0.0
    for _ in range(setup.epochs):
        start = time.perf_counter()
        train_loss = _epoch(plan, model, optimizer, x, y, notify)
        seconds += time.perf_counter() - start
        epochs.append(Epoch(train_loss, *_test(model, test_x, test_y)))
        notify(epochs[-1])
    parameters = [p.detach().numpy().T.copy() for p in model.parameters()]
    updates = setup.epochs * -(-len(x) // (plan.micro_batch_size * plan.steps))
    return Run(plan, epochs, seconds, updates, parameters, *first)


def _network(initial: Sequence[np.ndarray], dtype: torch.dtype) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in (weight.shape for weight in initial[::2]):
        layers += [nn.Linear(inputs, outputs, dtype=dtype), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    with torch.no_grad():
        for parameter, values in zip(model.parameters(), initial, strict=True):
            parameter.copy_(torch.from_numpy(values.T))
    return model


def _optimizer(setup: Setup, plan: Plan, model: nn.Module) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=setup.learning_rate)
    if plan.steps > 1 and not plan.by_hand:
        optimizer = gradaccum.torch.optim.Optimizer(optimizer, steps=plan.steps, model=model)
    return optimizer


def _epoch(plan: Plan, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, notify: Notify) -> float:
    """The training loop, the same for (a) and (b). Returns the mean loss over all rows."""
    total = torch.zeros((), dtype=x.dtype)
    loader = _slices(x, y, plan)
    for i, (inputs, labels) in enumerate(_batches(optimizer, loader), start=1):
        total += _micro_batch(plan, model, optimizer, inputs, labels, closes=i % plan.steps == 0 or i == len(loader))
        if i % NOTIFY_EVERY == 0:
            notify(NOTIFY_EVERY / len(loader))
    return float(total) / len(x)


def _micro_batch(plan: Plan, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, *, closes: bool) -> Tensor:
    """Forward, backward and `step()`; by hand, the mean is divided by the steps, and a window is closed by an `if`."""
    if not plan.by_hand:
        optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    (loss / plan.steps if plan.by_hand else loss).backward()
    if closes or not plan.by_hand:
        optimizer.step()
    if closes and plan.by_hand:
        optimizer.zero_grad()
    return loss.detach() * len(x)


def _batches(optimizer: Any, loader: Any) -> Any:
    """The loader; a wrapped optimizer's `batches` of it, which weighs each by its rows."""
    return optimizer.batches(loader) if hasattr(optimizer, "batches") else loader


def _slices(x: Tensor, y: Tensor, plan: Plan) -> list[tuple[Tensor, Tensor]]:
    """A loader: the rows in memory, sliced in their order."""
    return list(zip(x.split(plan.micro_batch_size), y.split(plan.micro_batch_size), strict=True))


@torch.no_grad()
def _test(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    outputs = model(x)
    return nn.functional.cross_entropy(outputs, y).item(), (outputs.argmax(1) == y).double().mean().item()


def _first_window(
    setup: Setup, plan: Plan, model: nn.Module, x: Tensor, y: Tensor
) -> tuple[list[np.ndarray] | None, int]:
    """Gradients and peak of the first window, on a copy of the model; no gradients by hand, which clears them.

    Memory is the bytes of the tensors alive, counted as they come and go. The process's own peak would not do: beside
    the interpreter, PyTorch and the data it moves by megabytes from run to run. Nor is this counted during the run
    itself: that would slow it down.
    """
    model = copy.deepcopy(model)
    optimizer = _optimizer(setup, plan, model)
    batches = _slices(x, y, plan)[: plan.steps]
    with CountBytes(model.parameters()) as count:
        for i, views in enumerate(_batches(optimizer, batches), start=1):
            inputs, labels = (view.clone() for view in views)  # a loader's batch has memory of its own
            _micro_batch(plan, model, optimizer, inputs, labels, closes=i == len(batches))
            del inputs, labels
    gradients = [parameter.grad.numpy().T for parameter in model.parameters() if parameter.grad is not None]
    return None if plan.by_hand else gradients, count.peak


class CountBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make, and of the given ones, until they are freed."""

    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        for tensor in tensors:
            self._add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.alive -= size
