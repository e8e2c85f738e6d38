"""Gradients that the next backward pass overwrites, as those of CUDA graphs: none of them can become a sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradaccum.core.equivalence import Cause
from gradaccum.on_torch.adapter.arrays import sample
from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.state import same
from gradaccum.torch.loss import Objective
from gradaccum.torch.module_state import left_as_found


def refilled(
    objective: Objective, batch: Batch, parameters: Mapping[str, Tensor], generators: Sequence[Any]
) -> list[str]:
    """The parameters whose gradients a second backward pass overwrites, by two passes over half of the rows each."""
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    halves = torch.arange(batch.rows).tensor_split(2)
    with left_as_found(
        objective.modules, [*trained.values()], [objective.device], generators, objective.holders()
    ) as state, torch.enable_grad():  # fmt: skip
        _backward(objective, batch, halves[0])
        first = {name: parameter.grad for name, parameter in trained.items()}
        values = {n: sample(g.to_dense()).clone() for n, g in first.items() if g is not None}
        for parameter in trained.values():
            parameter.grad = None
        state.put_back()
        _backward(objective, batch, halves[1])
        return [n for n, value in values.items() if not same(sample(first[n].to_dense()), value)]  # type: ignore[union-attr]  # there is


def _backward(objective: Objective, batch: Batch, rows: Tensor) -> None:
    copies = batch.take(rows).map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf)
    objective.whole(copies).backward()


def refilled_cause(names: Sequence[str]) -> Cause:
    shown = ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
    return Cause(
        "gradient",
        names[0],
        f"The backward pass returns the same tensors each time as gradients of {shown}, and fills them again, so the "
        "next micro-batch overwrites the sum of those before it. torch.cuda.make_graphed_callables and CUDA graphs "
        "do that. Have each gradient be a tensor of its own: parameter.register_hook(torch.clone) on these parameters.",
    )
