"""The load-balancing loss of a mixture of experts, over a whole batch and in micro-batches.

transformers' models add to the loss  c E sum_e F_e P_e,  where F_e is the part of the batch's tokens that expert e gets
and P_e its mean probability (Fedus et al., https://arxiv.org/abs/2101.03961, equations 4 to 6). F has no gradient.
Counted over the whole batch by forward passes alone, it makes the loss a mean over tokens t of  c E sum_e F_e p_te,
and means add up over micro-batches.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gradaccum.integrations.trainer import replaced

FUNCTION = "load_balancing_loss_func"
_PARAMETERS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


class Router:
    """Stands in for the function that a model's module calls by its global name."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.coefficient: float | None = None
        """What the trainer's loss multiplies the balancing loss by; None before the first batch, 0 if it has none."""
        self._fractions: Tensor | None = None
        self._loss: Tensor | None = None

    def count(self, passes: Iterator[Callable[[], Tensor]], reduce: Callable[[Tensor], Tensor]) -> None:
        """Count the fractions F of a batch.

        Args:
            passes: Forward passes of its micro-batches, each of which returns the trainer's loss.
            reduce: Adds up a tensor over the ranks.
        """
        counts: list[Tensor] = []

        def counted(logits: Any, experts: int, top_k: int, mask: Tensor | None = None) -> Tensor:
            chosen, _, tokens = _sums(logits, experts, top_k, mask)
            counts.append(torch.cat([chosen, tokens[None]]))
            return weight

        with replaced(self._module, **{FUNCTION: counted}):
            for run in passes:
                weight = torch.zeros((), requires_grad=self.coefficient is None)
                with torch.set_grad_enabled(self.coefficient is None):
                    loss = run()
                if self.coefficient is None:
                    (slope,) = torch.autograd.grad(loss, weight, allow_unused=True)
                    self.coefficient = 0.0 if slope is None else float(slope)
        total = reduce(torch.stack(counts).sum(0))
        self._fractions = total[:-1] / total[-1]

    @contextlib.contextmanager
    def balanced(self) -> Iterator[None]:
        """The model's forward pass leaves the balancing loss to `loss`, and adds nothing of it."""
        self._loss = None

        def kept(logits: Any, experts: int, top_k: int, mask: Tensor | None = None) -> Tensor:
            _, probabilities, tokens = _sums(logits, experts, top_k, mask)
            assert self._fractions is not None
            self._loss = (self._fractions * probabilities).sum() / tokens * experts
            return torch.zeros((), device=probabilities.device)

        with replaced(self._module, **{FUNCTION: kept}):
            yield

    @property
    def loss(self) -> Tensor:
        """The balancing loss of the last forward pass: a mean over its tokens, times the coefficient."""
        assert self._loss is not None
        assert self.coefficient is not None
        return self._loss * self.coefficient


def router_of(model: Any) -> Router | None:
    """The router of a model of transformers; None where its balancing loss is another one."""
    for module in model.modules():
        place = sys.modules.get(type(module).__module__)
        function = getattr(place, FUNCTION, None)
        if function is not None:
            return Router(place) if _is_known(function) else None
    return None


def tokens(inputs: Mapping[str, Any]) -> Tensor | int:
    """The tokens over which a batch's balancing loss is a mean."""
    mask = inputs.get("attention_mask")
    if mask is not None:
        return mask.sum()
    return inputs["input_ids"].numel() if "input_ids" in inputs else inputs["inputs_embeds"][..., 0].numel()


def _is_known(function: Any) -> bool:
    """Whether a function has these arguments, and gives what the sums here give."""
    if list(inspect.signature(function).parameters) != _PARAMETERS:
        return False
    generator = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(6, 4, generator=generator) for _ in range(2))
    for mask in (None, torch.tensor([[1, 1, 0], [1, 0, 0]])):
        chosen, probabilities, count = _sums(logits, 4, 2, mask)
        expected = (chosen / count * probabilities / count).sum() * 4
        if not torch.allclose(function(logits, 4, 2, mask), expected):
            return False
    return True


def _sums(logits: Any, experts: int, top_k: int, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Over all layers' tokens: how often each expert is chosen, its probabilities, and the number of tokens."""
    device = logits[0].device
    weights = torch.ones(len(logits[0])) if mask is None else mask.reshape(-1)
    weights = weights.to(device, torch.float32)
    chosen, probabilities = torch.zeros(experts, device=device), torch.zeros(experts, device=device)
    for layer in logits:
        routed = layer.to(device).softmax(-1)
        places = routed.topk(top_k, -1).indices
        chosen = chosen + torch.zeros_like(chosen).index_add_(0, places.flatten(), weights.repeat_interleave(top_k))
        probabilities = probabilities + (routed.float() * weights[:, None]).sum(0)
    return chosen, probabilities, weights.sum() * len(logits)
