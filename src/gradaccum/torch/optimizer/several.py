"""Several inner optimizers as one: a window, a clip and a step for all of them. The window knows nothing of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class SeveralOptimizers:
    """An inner optimizer made of several ones, each of which has parameters of its own.

    Its state dict is `{"optimizers": [...]}`. A group belongs to one of them, so only they have `add_param_group`.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)
        owners: dict[Tensor, int] = {}
        for number, optimizer in enumerate(self.optimizers):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if owners.setdefault(parameter, number) != number:
                        raise ValueError(
                            f"A parameter of shape {tuple(parameter.shape)} is in optimizer {owners[parameter]} and in "
                            f"optimizer {number}, so each window would update it twice. Give it to one of them."
                        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all; they are the optimizers' own, the list is not."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:
        return {parameter: state for optimizer in self.optimizers for parameter, state in optimizer.state.items()}

    @property
    def defaults(self) -> dict[str, Any]:
        """Those that all of them have: schedulers ask which hyperparameters every group has."""
        first, *others = (optimizer.defaults for optimizer in self.optimizers)
        return {name: value for name, value in first.items() if all(name in other for other in others)}

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        raise ValueError(
            f"This optimizer wraps {len(self.optimizers)} optimizers, and a new group belongs to one of them. Add it "
            "there when `updated` is True: optimizer.inner[0].add_param_group(group)."
        )

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)

    def __repr__(self) -> str:
        return repr(self.optimizers)
