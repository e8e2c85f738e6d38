"""Small problems that the torch tests share: a model, rows, and micro-batches of them."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.reference import ragged


class Operations(TorchDispatchMode):
    """The names of the operators that run inside, in order."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class Held:
    """How many bytes graphs hold, now and at most, of tensors other than these."""

    def __init__(self, *known: torch.Tensor):
        self.now = self.most = 0
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}

    def saved(self) -> torch.autograd.graph.saved_tensors_hooks:
        held = self

        class Saved:
            def __init__(self, tensor: torch.Tensor):
                self.tensor = tensor.detach()
                held.now += tensor.nbytes
                held.most = max(held.most, held.now)

            def __del__(self) -> None:
                held.now -= self.tensor.nbytes

        return torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: tensor if tensor.untyped_storage().data_ptr() in self.known else Saved(tensor),
            lambda saved: saved.tensor if isinstance(saved, Saved) else saved,
        )


class Does(nn.Module):
    """`run(self, ...)`, with these modules, parameters, buffers and attributes."""

    def __init__(self, run: Any, **parts: Any):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


class Empties(Does):
    """The same, where None is a buffer that isn't there yet."""

    def __init__(self, run: Any, **parts: Any):
        super().__init__(run, **{name: part for name, part in parts.items() if part is not None})
        for name in [name for name, part in parts.items() if part is None]:
            self.register_buffer(name, None)


MIXING: dict[str, Any] = {  # what looks across rows
    "centred": lambda h: h - h.mean(0),
    "no gradient of the others": lambda h: h - h.detach().mean(0),
    "a gradient across rows": lambda h: h + (h.mean(0) - h.detach().mean(0)),
    "softmax over rows": lambda h: h.softmax(0),
    "sorted": lambda h: h.sort(0).values,
    "summed up": lambda h: h.cumsum(0),
    "rolled": lambda h: h + h.roll(1, 0),
    "the first row": lambda h: h + h[0],
    "similarities": lambda h: h + (h @ h.T).softmax(1) @ h,
    "the largest": lambda h: h / h.abs().amax(),
    "the largest kept": lambda h: h * (h >= h.topk(2, dim=0).values[-1]),
    "normalised over rows": lambda h: F.normalize(h, dim=0),
    "the number of rows": lambda h: h / h.shape[0],
    "normalised by a function": lambda h: F.batch_norm(h, None, None, training=True),
}


def network(seed: int = 0, dtype: torch.dtype | None = None) -> nn.Sequential:
    """5 -> 7 -> 3; tanh, so that every gradient is of ordinary size."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype or torch.get_default_dtype())


def regression(rows: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 5, generator=generator), torch.randn(rows, 3, generator=generator)


def classes(rows: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 5, generator=generator), torch.randint(3, (rows,), generator=generator)


def split(data: tuple[torch.Tensor, ...], sizes: list[int]) -> list[tuple[torch.Tensor, ...]]:
    return [tuple(t[rows] for t in data) for rows in ragged(len(data[0]), sizes)]


def join(window: list[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.cat(parts) for parts in zip(*window))


def mse(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)


def hooked(model: nn.Module) -> int:
    """How many hooks there are on the gradients of its parameters."""
    parameters = list(model.parameters())
    before = [hook for p in parameters for hook in p._backward_hooks or ()]
    behind = [hook for p in parameters for hook in p._post_accumulate_grad_hooks or ()]  # as they have joined p.grad
    return len(before) + len(behind)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation, as it is written everywhere."""

    def __init__(self, parameters, rho=0.05, lr=0.1):
        super().__init__(parameters, {"rho": rho, "lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr=lr)

    def parameters(self):
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def first_step(self):
        norm = self.sharpness()
        for p in self.parameters():
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad * self.defaults["rho"] / norm)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p in self.parameters():
            p.data = self.state[p]["old"]
        self.base.step()

    @torch.no_grad()
    def step(self, closure=None):
        self.first_step()
        torch.enable_grad()(closure)()
        self.second_step()

    def _grad_norm(self):
        return torch.stack([p.grad.norm() for p in self.parameters()]).norm()

    def sharpness(self):
        return self._grad_norm()

    def describe(self):
        return f"rho={self.defaults['rho']}"


GENERATORS = {  # that users have
    "torch.Generator": lambda: torch.Generator().manual_seed(3),
    "numpy Generator": lambda: np.random.default_rng(3),
    "numpy Generator of another kind": lambda: np.random.Generator(np.random.MT19937(3)),
    "numpy RandomState": lambda: np.random.RandomState(3),
    "random.Random": lambda: random.Random(3),
}


def drawn(generator: Any, *shape: int) -> torch.Tensor:
    """Uniform numbers from any of these."""
    if isinstance(generator, torch.Generator):
        return torch.rand(shape, generator=generator)
    if isinstance(generator, random.Random):
        return torch.tensor([generator.random() for _ in range(math.prod(shape))]).view(shape)
    return torch.from_numpy(generator.uniform(size=shape))
